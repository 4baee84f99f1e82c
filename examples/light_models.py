"""The nine image networks of the onnx wheel, with random weights.

The `light_*.onnx` files of the wheel hold each weight as a ConstantOfShape node, one repeated number, so that all
outputs of such a network are equal. Here each weight becomes an initializer with seeded random values. The operator
that reads it determines their scale.
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

# Caffe2 exported some of the files from GPU 0. Its prefix of all names would mislead readers of a placement.
DEVICE_PREFIX = "gpu_0/"

RESHAPING = {"Unsqueeze", "Reshape"}  # a weight may pass through one of these before its reader
CLASSES = 1000
SMALL_DEVIATION = 0.1  # deviation of factors from 1 and of offsets from 0
LINEAR_SCALE = 0.5  # compensates He scaling, which assumes a ReLU: a chain of residual blocks would grow
CLASSIFIER_SCALE = 0.3  # avoids a softmax that selects a single class


class Role(Enum):
    """The use of a weight, which determines its random values."""

    KERNEL = "convolution kernel or matrix, outputs first"
    CLASSIFIER = "the last kernel, whose outputs are the logits"
    FACTOR = "factor near 1"
    LINEAR_FACTOR = "factor of a value that no ReLU halves afterwards"
    OFFSET = "offset near 0"
    VARIANCE = "positive variance near 1"


def light_model(name: str, seed: int = 0) -> onnx.ModelProto:
    """Load image network `name`: float32 [1, 3, 224, 224] to 1000 classes.

    The weights are scaled for pixels with mean 0 and deviation 1.
    """
    return draw_weights(load_light_file(name), seed)


def load_light_file(name: str) -> onnx.ModelProto:
    """Load image network `name` as the onnx wheel has it, with nodes in place of its weights."""
    return onnx.load(Path(onnx.backend.test.__file__).parent / "data" / "light" / LIGHT_FILES[name])


def draw_weights(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """Give a model that `load_light_file` returned its weights and the names of its nodes; returns the same model."""
    graph = model.graph
    _strip_device_prefix(graph)
    _replace_weights(graph, np.random.default_rng(seed))
    _drop_unused(graph)
    _name_nodes(graph)
    model.ir_version = IR_VERSION
    model.producer_name = PRODUCER_NAME
    return model


def _strip_device_prefix(graph: onnx.GraphProto) -> None:
    """Remove the device prefix of the exporter from all names."""
    for node in graph.node:
        node.input[:] = [value.removeprefix(DEVICE_PREFIX) for value in node.input]
        node.output[:] = [value.removeprefix(DEVICE_PREFIX) for value in node.output]
    for tensor in graph.initializer:
        tensor.name = tensor.name.removeprefix(DEVICE_PREFIX)
    for value in (*graph.input, *graph.output):
        value.name = value.name.removeprefix(DEVICE_PREFIX)


def _replace_weights(graph: onnx.GraphProto, random: np.random.Generator) -> None:
    """Replace each weight, a ConstantOfShape node or a float initializer, by random values."""
    readers = Readers(graph)
    shapes = _list_weight_shapes(graph)
    kept_nodes = [node for node in graph.node if node.output[0] not in shapes]
    kept_initializers = [tensor for tensor in graph.initializer if tensor.name not in shapes]
    del graph.node[:]
    graph.node.extend(kept_nodes)
    del graph.initializer[:]
    graph.initializer.extend(kept_initializers)
    for name, shape in shapes.items():
        role = readers.find_role(name)
        if role is not None:
            graph.initializer.append(numpy_helper.from_array(_draw_values(role, shape, random), name))


def _list_weight_shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    """Return the shapes of weights by name, in the order of the file."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    for node in graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in stored:
            shapes[node.output[0]] = tuple(int(size) for size in numpy_helper.to_array(stored[node.input[0]]))
    return shapes


class Readers:
    """The nodes that read each value of a graph, which determine roles."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        """Index the nodes of a graph by the values that they read."""
        self._readers: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
        for node in graph.node:
            for position, value in enumerate(node.input):
                self._readers[value].append((node, position))
        self._classifier = [node for node in graph.node if node.op_type in {"Conv", "Gemm"}][-1]

    def find_role(self, weight: str) -> Role | None:
        """Return the role of a weight by its first reader; None without a reader."""
        for node, position in self._readers[weight]:
            if node.op_type in RESHAPING:
                return self.find_role(node.output[0])
            return self._find_role_of_input(node, position)
        return None

    def _find_role_of_input(self, node: onnx.NodeProto, position: int) -> Role:
        """Return the role of a weight at one input of a node."""
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
        """Return whether a residual addition or a convolution reads the output of a node."""
        return any(reader.op_type in {"Sum", "Conv"} for reader, _ in self._readers[node.output[0]])


def _draw_values(role: Role, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float32]:
    """Draw float32 values for one weight; He scaling for kernels."""
    values = random.standard_normal(shape, dtype=np.float32)
    match role:
        case Role.KERNEL:
            values *= math.sqrt(2 / math.prod(shape[1:]))
        case Role.CLASSIFIER:
            # One file stores this matrix as [1, 1, classes, inputs], so shape[1:] is not the fan-in.
            values *= CLASSIFIER_SCALE * math.sqrt(2 * CLASSES / math.prod(shape))
        case Role.FACTOR:
            values = 1 + SMALL_DEVIATION * values
        case Role.LINEAR_FACTOR:
            values = LINEAR_SCALE * (1 + SMALL_DEVIATION * values)
        case Role.OFFSET:
            values *= SMALL_DEVIATION
        case Role.VARIANCE:
            values = np.exp(SMALL_DEVIATION * values)
    return values


def _drop_unused(graph: onnx.GraphProto) -> None:
    """Drop initializers without readers, and weights among the graph inputs."""
    read = {value for node in graph.node for value in node.input}
    initializers = [tensor for tensor in graph.initializer if tensor.name in read]
    stored = {tensor.name for tensor in initializers}
    inputs = [value for value in graph.input if value.name in read - stored]
    del graph.initializer[:]
    graph.initializer.extend(initializers)
    del graph.input[:]
    graph.input.extend(inputs)


def _name_nodes(graph: onnx.GraphProto) -> None:
    """Name each node after its layer.

    That is the layer of the weight that it reads, or that the nearest earlier node reads.
    """
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
        layer = own[0] if own else _join_layers([layers[v] for v in node.input if v in layers], order)
        order.setdefault(layer, len(order))
        layers.update(dict.fromkeys(node.output, layer))
        name = f"{layer}/{_to_snake_case(node.op_type)}"
        uses[name] += 1
        node.name = name if uses[name] == 1 else f"{name}_{uses[name]}"


def _join_layers(layers: list[str], order: dict[str, int]) -> str:
    """Return the layer of a node that reads several: their common prefix, else the latest."""
    if not layers:
        return "input"
    return posixpath.commonpath(layers) or max(layers, key=order.__getitem__)


def _to_snake_case(operator: str) -> str:
    """Convert an operator name: MaxPool becomes max_pool."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", operator).lower()
