"""What ONNX Runtime fuses: nodes that a cut must keep together, their kernels, and fusions that must not happen."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, TypeProto

from onnxplace.graph.op_graph import Ints, find_root
from onnxplace.model.model import Model
from onnxplace.model.nested_graphs import has_subgraphs
from onnxplace.model.tensors import read_tensor_bytes
from onnxplace.utils.groups import group_pairs

# ------------------------------------------------------------------------------------------- nodes that belong together


QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
# Domains that define these two operators.
_DOMAINS = ("", "ai.onnx", "com.microsoft")


def join_quantised_units(model: Model, unit: Ints) -> Ints:
    """Return units, joined where an operator computes between DequantizeLinear and QuantizeLinear nodes.

    ONNX Runtime makes one kernel of `DequantizeLinear -> operator -> QuantizeLinear` if one segment has all of it.
    An operator's unit is itself, the dequantisers of its inputs and the quantisers of its outputs. The model may be
    cut between the quantiser of one unit and the dequantiser of the next.

    Args:
        model: The model.
        unit: The unit of each node.

    Returns:
        The unit of each node, numbered from 0 without gaps.
    """
    producer = {name: index for index, node in enumerate(model.nodes) for name in node.output if name}
    parent = list(range(int(unit.max(initial=-1)) + 1))

    for index, node in enumerate(model.nodes):
        for name in node.input:
            source = producer.get(name)
            if source is not None and _share_unit(model.nodes[source], node):
                first, second = sorted((find_root(parent, int(unit[source])), find_root(parent, int(unit[index]))))
                parent[second] = first
    joined = np.array([find_root(parent, int(item)) for item in unit], dtype=np.int64)
    return np.unique(joined, return_inverse=True)[1].astype(np.int32)


def _share_unit(producer: NodeProto, reader: NodeProto) -> bool:
    """Return whether producer and reader are of one quantised unit."""
    if is_quantization_node(reader, DEQUANTIZE):
        return False
    return is_quantization_node(producer, DEQUANTIZE) or (
        is_quantization_node(reader, QUANTIZE) and not is_quantization_node(producer, QUANTIZE)
    )


def is_quantization_node(node: NodeProto, op_type: str) -> bool:
    """Return whether a node is of type `op_type`.

    The type is `QUANTIZE` or `DEQUANTIZE`, in any domain that defines it.
    """
    return node.op_type == op_type and node.domain in _DOMAINS


# Nodes that ONNX Runtime removes in front of a QuantizeLinear, which clips as they do.
_CLIPPING = ("Relu", "Clip")
# Operators that run on integers between quantisers, by ONNX Runtime's qdq_selector_action_transformer.cc -> how many of
# their inputs have to be dequantised: a third one is a bias, which may stay in float, and a shape is no value.
_QUANTISED_INPUTS = {
    **dict.fromkeys(("MatMul", "Gemm", "Conv", "Add", "Mul", "Concat"), 2),
    **dict.fromkeys(("MaxPool", "AveragePool", "GlobalAveragePool", "Resize", "Softmax", "Sigmoid", "LeakyRelu"), 1),
    **dict.fromkeys(
        ("Gather", "Slice", "Expand", "Tile", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze"), 1
    ),
}


def list_quantised_kernels(model: Model, integers: Collection[str]) -> list[tuple[NodeProto, tuple[str, ...]] | None]:
    """Return for each node the kernel that runs in its place, and the names that this reads.

    A provider makes one kernel of an operator, the dequantisers of its inputs and the quantiser of its result, which
    reads and writes integers. None stands for the nodes in such a kernel: the quantiser, clipping in front of it, and
    dequantisers that nothing else reads.

    Args:
        model: The model.
        integers: Names of the values from whose types a kernel can be made.
    """
    # -1: the caller
    readers = model.readers | {item.name: [-1, *model.readers.get(item.name, ())] for item in model.outputs}
    sources = {node.output[0]: node.input[0] for node in model.nodes if is_quantization_node(node, DEQUANTIZE)}
    kernels: dict[int, tuple[NodeProto, tuple[str, ...]] | None] = {}
    for index, node in enumerate(model.nodes):
        count = _QUANTISED_INPUTS.get(node.op_type, 0)
        path = _find_quantiser(model, readers, node.output[0]) if count else []
        if path and all(sources.get(name) in integers for name in node.input[:count]):
            kernel = deepcopy(node)
            kernel.input[:] = [sources.get(name, name) for name in node.input]
            kernel.output[:] = model.nodes[path[-1]].output
            kernels[index] = kernel, tuple(dict.fromkeys(filter(None, kernel.input)))
            kernels |= dict.fromkeys(path)
    for index, node in enumerate(model.nodes):
        if is_quantization_node(node, DEQUANTIZE) and kernels.keys() >= set(readers.get(node.output[0], (-1,))):
            kernels[index] = None
    return [kernels.get(index, as_it_stands) for index, as_it_stands in enumerate(zip(model.nodes, model.reads))]


def _find_quantiser(model: Model, readers: Mapping[str, Sequence[int]], name: str) -> list[int]:
    """Return the nodes from a value to its quantiser, if nothing else reads on the way; else none."""
    path: list[int] = []
    while len(following := readers.get(name, ())) == 1 and following[0] >= 0:
        path.append(following[0])
        node = model.nodes[following[0]]
        if is_quantization_node(node, QUANTIZE):
            return path
        name = node.output[0] if node.op_type in _CLIPPING else ""
    return []


@dataclass(frozen=True)
class HostValue:
    """A value in host memory, whatever its device.

    Its producer and readers belong together.
    """

    name: str
    kind: str
    """`sequence`, `optional`, `map`, `string`."""
    nodes: Ints
    """Indices of its producer and readers, ascending."""


def find_host_values(model: Model) -> Iterator[HostValue]:
    """Yield the values that a GPU cannot hold.

    These are sequences, optionals, maps, and tensors of strings.
    """
    kinds = {name: kind for name, proto in model.types.items() if (kind := classify_host_value(proto))}
    used = enumerate((*reads, *node.output) for node, reads in zip(model.nodes, model.reads)) if kinds else ()
    users = group_pairs((name, index) for index, names in used for name in names if name in kinds)
    for name, nodes in users.items():
        yield HostValue(name, kinds[name], np.array(nodes, dtype=np.int32))


def classify_host_value(kind: TypeProto) -> str:
    """Return the kind of a type that a GPU cannot hold.

    Returns "" for other types.
    """
    which: str = kind.WhichOneof("value") or ""
    if which == "tensor_type":
        return "string" if kind.tensor_type.elem_type == TensorProto.STRING else ""
    return which.removesuffix("_type") if which in ("sequence_type", "optional_type", "map_type") else ""


def list_uncompilable(model: Model) -> list[bool]:
    """Return, per node, whether it has a value that providers which compile segments may misread.

    These are the values that a GPU cannot hold, and those of unknown rank. OpenVINO ends the process with texts, or
    loses their results, and takes an input of unknown rank for a number.
    """
    unclear = {
        name
        for name, kind in model.types.items()
        if classify_host_value(kind) or (kind.HasField("tensor_type") and not kind.tensor_type.HasField("shape"))
    }
    return [not unclear.isdisjoint((*reads, *node.output)) for node, reads in zip(model.nodes, model.reads)]


# ------------------------------------------------------------------------------------------------------------ precision


# ONNX Runtime merges equal constants of up to this many elements; the result has the readers of all of them.
MAX_MERGED_ELEMENTS = 8
_SCALE_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)
_PRODUCTS = ("MatMul", "Gemm")
# Nodes that ONNX Runtime may remove; the nodes before and after them then become neighbours.
_REMOVABLE = ("Identity", "Cast")


def find_scales_to_protect(model: Model, segments: Sequence[Ints]) -> list[frozenset[str]]:
    """Return the scales that must not be constants in each segment.

    Args:
        model: The model.
        segments: Indices of each segment's nodes; every node is in one segment.
    """
    protected: list[set[str]] = [set() for _ in segments]
    # Nodes that dequantise a constant by a constant scale.
    weights = [
        index
        for index, node in enumerate(model.nodes)
        if is_quantization_node(node, DEQUANTIZE) and all(name in model.constants for name in node.input[:2])
    ]
    if weights:
        segment_of = np.zeros(len(model.nodes), dtype=np.int32)
        for number, nodes in enumerate(segments):
            segment_of[nodes] = number
        context = _FusionContext(model)
        for index in weights:
            preventing = {int(segment_of[node]) for node in context.iterate_preventing(index)}
            if preventing and segment_of[index] not in preventing:
                protected[segment_of[index]].add(model.nodes[index].input[1])
    return [frozenset(names) for names in protected]


class _FusionContext:
    """The nodes that decide whether ONNX Runtime fuses a dequantised weight."""

    def __init__(self, model: Model) -> None:
        self._nodes = model.nodes
        self._producer = {name: index for index, node in enumerate(model.nodes) for name in node.output if name}
        folded = set(_iterate_folded_nodes(model))
        kept = ((index, reads) for index, reads in enumerate(model.reads) if index not in folded)
        self._readers = group_pairs((name, index) for index, reads in kept for name in reads)
        self._merged = _group_equal_constants(model)

    def iterate_preventing(self, index: int) -> Iterator[int]:
        """Yield the nodes that prevent the fusion of this DequantizeLinear."""
        node = self._nodes[index]
        products = list(self._iterate_products(node.output[0]))
        if not products:
            return
        yield from products[1:]
        for name in (node.input[0], *self._merged.get(node.input[1], (node.input[1],))):
            yield from (reader for reader in self._readers.get(name, ()) if reader != index)
        for product in products:
            yield from self._iterate_quantisers(product)

    def _iterate_products(self, weight: str) -> Iterator[int]:
        """Yield the products with this value as their second factor."""
        for reader, name in self._iterate_readers(weight, _REMOVABLE):
            node = self._nodes[reader]
            if node.op_type in _PRODUCTS and node.input[1] == name:
                yield reader

    def _iterate_quantisers(self, product: int) -> Iterator[int]:
        """Yield the quantisation nodes next to a product.

        These are the dequantiser of its first factor, and the quantisers of its result.
        """
        node = self._nodes[product]
        producer = self._producer.get(node.input[0])
        if producer is not None and is_quantization_node(self._nodes[producer], DEQUANTIZE):
            yield producer
        for reader, _ in self._iterate_readers(node.output[0], _CLIPPING):
            if is_quantization_node(self._nodes[reader], QUANTIZE):
                yield reader

    def _iterate_readers(self, value: str, transparent: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Yield the readers of a value, with the name that each reads.

        Readers behind `transparent` nodes are included.
        """
        names = [value]
        for name in names:
            for reader in self._readers.get(name, ()):
                yield reader, name
                if self._nodes[reader].op_type in transparent and self._nodes[reader].input[0] == name:
                    names.append(self._nodes[reader].output[0])


def _iterate_folded_nodes(model: Model) -> Iterator[int]:
    """Yield the nodes that ONNX Runtime folds when it opens the model.

    They do not count as readers.
    """
    constant: set[str] = set()
    for index, (node, reads) in enumerate(zip(model.nodes, model.reads)):
        is_never_folded = (
            is_quantization_node(node, QUANTIZE) or is_quantization_node(node, DEQUANTIZE) or has_subgraphs(node)
        )
        if not is_never_folded and reads and all(name in constant or name in model.constants for name in reads):
            constant.update(filter(None, node.output))
            yield index


def _group_equal_constants(model: Model) -> dict[str, tuple[str, ...]]:
    """Return the equal constants that ONNX Runtime merges with each small one."""
    equal: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, tensor in model.constants.items():
        if math.prod(tensor.dims) <= MAX_MERGED_ELEMENTS and tensor.data_type in _SCALE_TYPES:
            data = b"".join(read_tensor_bytes(tensor, model.folder))
            equal[tensor.data_type, tuple(tensor.dims), data].append(name)
    return {name: tuple(names) for names in equal.values() for name in names}
