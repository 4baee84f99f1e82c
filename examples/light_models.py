"""The nine image networks inside the onnx wheel, with random weights in place of their constant ones.

The wheel's `light_*.onnx` files hold each weight as a ConstantOfShape node, that is as one repeated
number, so that every output of such a network is the same. Here each weight becomes an initializer of
seeded random values, scaled by what reads it, and the result is a genuine network.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections import Counter, defaultdict
from enum import Enum
from pathlib import Path

import numpy as np
import onnx
import onnx.backend.test
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from _builder import IR_VERSION, PRODUCER_NAME

LIGHT_FILES = {
    "inception-v1": "light_inception_v1.onnx",
    "inception-v2": "light_inception_v2.onnx",
    "resnet50": "light_resnet50.onnx",
    "densenet121": "light_densenet121.onnx",
    "squeezenet": "light_squeezenet.onnx",
    "shufflenet": "light_shufflenet.onnx",
    "vgg19": "light_vgg19.onnx",
    "alexnet": "light_bvlc_alexnet.onnx",
    "zfnet512": "light_zfnet512.onnx",
}

# Some of the files were exported by Caffe2 from GPU 0 and say so in each name, which would mislead a
# reader of a placement.
DEVICE_PREFIX = "gpu_0/"

RESHAPING = {"Unsqueeze", "Reshape"}  # a weight may pass through one of these on its way to its reader
CLASSES = 1000
SMALL = 0.1  # deviation of factors from 1 and of offsets from 0
LINEAR_SCALE = 0.5  # keeps a chain of residual blocks from growing, as He scaling counts on a ReLU
CLASSIFIER_SCALE = 0.3  # keeps the softmax after the last layer from picking one class alone


class Role(Enum):
    """What a weight is for, which decides how its random values are drawn."""

    KERNEL = "convolution kernel or matrix, outputs first"
    CLASSIFIER = "the last kernel, which makes the logits"
    FACTOR = "factor near 1"
    LINEAR_FACTOR = "factor of a value that no ReLU halves afterwards"
    OFFSET = "offset near 0"
    VARIANCE = "positive variance near 1"


def light_model(name: str, seed: int = 0) -> onnx.ModelProto:
    """Image network `name` of the onnx wheel: float32 [1, 3, 224, 224] to 1000 classes.

    The weights are scaled for pixels with mean 0 and deviation 1.
    """
    folder = Path(onnx.backend.test.__file__).parent / "data" / "light"
    model = onnx.load(folder / LIGHT_FILES[name])
    graph = model.graph
    _strip_device_prefix(graph)
    _replace_weights(graph, np.random.default_rng(seed))
    _drop_unused(graph)
    _name_nodes(graph)
    model.ir_version = IR_VERSION
    model.producer_name = PRODUCER_NAME
    return model


def _strip_device_prefix(graph: onnx.GraphProto) -> None:
    """Take the exporter's device prefix off every value's name."""
    for node in graph.node:
        node.input[:] = [value.removeprefix(DEVICE_PREFIX) for value in node.input]
        node.output[:] = [value.removeprefix(DEVICE_PREFIX) for value in node.output]
    for tensor in graph.initializer:
        tensor.name = tensor.name.removeprefix(DEVICE_PREFIX)
    for value in (*graph.input, *graph.output):
        value.name = value.name.removeprefix(DEVICE_PREFIX)


def _replace_weights(graph: onnx.GraphProto, random: np.random.Generator) -> None:
    """Turn each weight, a ConstantOfShape node or a float initializer, into random values."""
    readers = Readers(graph)
    shapes = _weight_shapes(graph)
    kept_nodes = [node for node in graph.node if node.output[0] not in shapes]
    kept_initializers = [tensor for tensor in graph.initializer if tensor.name not in shapes]
    del graph.node[:]
    graph.node.extend(kept_nodes)
    del graph.initializer[:]
    graph.initializer.extend(kept_initializers)
    for name, shape in shapes.items():
        role = readers.role(name)
        if role is not None:
            graph.initializer.append(numpy_helper.from_array(_random_values(role, shape, random), name))


def _weight_shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    """Shape of each weight by name, in the order in which the file lists them."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    for node in graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in stored:
            shapes[node.output[0]] = tuple(int(size) for size in numpy_helper.to_array(stored[node.input[0]]))
    return shapes


class Readers:
    """The nodes that read each value of a graph, to tell a weight's role from."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        """Index the graph's nodes by the values they read."""
        self._readers: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
        for node in graph.node:
            for position, value in enumerate(node.input):
                self._readers[value].append((node, position))
        self._classifier = [node for node in graph.node if node.op_type in {"Conv", "Gemm"}][-1]

    def role(self, weight: str) -> Role | None:
        """Role of the named weight by its first reader; None where nothing reads it."""
        for node, position in self._readers[weight]:
            if node.op_type in RESHAPING:
                return self.role(node.output[0])
            return self._role_of_input(node, position)
        return None

    def _role_of_input(self, node: onnx.NodeProto, position: int) -> Role:
        """Role of the weight at one input of the node that computes with it."""
        match node.op_type, position:
            case (("Conv" | "Gemm"), 1):
                return Role.CLASSIFIER if node is self._classifier else Role.KERNEL
            case "BatchNormalization", 1:
                return Role.LINEAR_FACTOR if self._is_linear(node) else Role.FACTOR
            case "BatchNormalization", 4:
                return Role.VARIANCE
            case "Mul", _:
                return Role.FACTOR
            case (("Conv" | "Gemm" | "BatchNormalization" | "Add"), _):
                return Role.OFFSET
            case _:
                raise ValueError(f"no rule for a weight at input {position} of {node.op_type} {node.name!r}")

    def _is_linear(self, node: onnx.NodeProto) -> bool:
        """Whether the node's result goes straight into a residual addition or a convolution."""
        return any(reader.op_type in {"Sum", "Conv"} for reader, _ in self._readers[node.output[0]])


def _random_values(role: Role, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float32]:
    """Random float32 values for one weight; kernels are He-scaled by their fan-in."""
    values = random.standard_normal(shape, dtype=np.float32)
    match role:
        case Role.KERNEL:
            values *= math.sqrt(2 / math.prod(shape[1:]))
        case Role.CLASSIFIER:
            # One file keeps this matrix as [1, 1, classes, inputs], so that shape[1:] would not do.
            values *= CLASSIFIER_SCALE * math.sqrt(2 * CLASSES / math.prod(shape))
        case Role.FACTOR:
            values = 1 + SMALL * values
        case Role.LINEAR_FACTOR:
            values = LINEAR_SCALE * (1 + SMALL * values)
        case Role.OFFSET:
            values *= SMALL
        case Role.VARIANCE:
            values = np.exp(SMALL * values)
    return values


def _drop_unused(graph: onnx.GraphProto) -> None:
    """Drop initializers that nothing reads, and weights from the list of graph inputs."""
    read = {value for node in graph.node for value in node.input}
    initializers = [tensor for tensor in graph.initializer if tensor.name in read]
    stored = {tensor.name for tensor in initializers}
    inputs = [value for value in graph.input if value.name in read - stored]
    del graph.initializer[:]
    graph.initializer.extend(initializers)
    del graph.input[:]
    graph.input.extend(inputs)


def _name_nodes(graph: onnx.GraphProto) -> None:
    """Name each node after the layer whose weight it, or the nearest node before it, reads."""
    layers = {
        tensor.name: re.sub(r"_(w|b|s|scale|bias)_0$", "", tensor.name)
        for tensor in graph.initializer
        if tensor.data_type == TensorProto.FLOAT
    }
    weights = set(layers)
    order: dict[str, int] = {}
    uses: Counter[str] = Counter()
    for node in graph.node:
        own = [layers[value] for value in node.input if value in weights]
        layer = own[0] if own else _joint_layer([layers[v] for v in node.input if v in layers], order)
        order.setdefault(layer, len(order))
        layers.update(dict.fromkeys(node.output, layer))
        name = f"{layer}/{_snake_case(node.op_type)}"
        uses[name] += 1
        node.name = name if uses[name] == 1 else f"{name}_{uses[name]}"


def _joint_layer(layers: list[str], order: dict[str, int]) -> str:
    """Layer of a node that joins values of several: what their names share, or else the latest one."""
    if not layers:
        return "input"
    return posixpath.commonpath(layers) or max(layers, key=order.__getitem__)


def _snake_case(operator: str) -> str:
    """Operator name in lower case with underscores: MaxPool becomes max_pool."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", operator).lower()
