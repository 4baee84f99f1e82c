"""Keep ONNX Runtime from choosing less precise kernels in segments.

ONNX Runtime fuses `DequantizeLinear(weight) -> MatMul` into one `MatMulNBits`. That kernel rounds the activations to
eight bits (session option `session.qdq_matmulnbits_accuracy_level`, by default 4). ONNX Runtime does not fuse the nodes
if the weight or its scale has another reader, if the product is quantised, or if its other input is dequantised. If
that other node is in another segment, nothing prevents the fusion: a cut model would be less precise.

In these cases, the scale of the weight becomes an input of the segment with a default value, which need not be fed.
ONNX Runtime fuses constants only, so it runs the two nodes unfused, as in the whole model. (Observed with ONNX Runtime
1.28 to 1.31. The accuracy level of the session does not help: it holds for all products of the segment, also for those
that are fused in the whole model.)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from onnx import TensorProto

from onnxplace.graph import Ints
from onnxplace.model.host_values import DEQUANTIZE, QUANTIZE, is_quantization_node
from onnxplace.model.model import Model
from onnxplace.model.nested_graphs import iterate_subgraphs
from onnxplace.model.tensors import read_tensor_bytes

# ONNX Runtime merges equal constants of up to this many elements; the result has the readers of all of them.
MAX_MERGED_ELEMENTS = 8
_SCALE_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)
_PRODUCTS = ("MatMul", "Gemm")
# Nodes that ONNX Runtime may remove; the nodes before and after them then become neighbours.
_REMOVABLE = ("Identity", "Cast")
# Nodes that ONNX Runtime removes in front of a QuantizeLinear, which clips as they do.
_CLIPPING = ("Relu", "Clip")


def find_scales_to_protect(model: Model, segments: Sequence[Ints]) -> list[frozenset[str]]:
    """Return the scales that must not be constants in each segment.

    Args:
        model: The model.
        segments: Indices of each segment's nodes; every node is in one segment.
    """
    protected: list[set[str]] = [set() for _ in segments]
    weights = [index for index in range(len(model.nodes)) if _dequantises_weight(model, index)]
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


def _dequantises_weight(model: Model, index: int) -> bool:
    """Return whether a node dequantises a constant by a constant scale."""
    node = model.nodes[index]
    return is_quantization_node(node, DEQUANTIZE) and all(_is_constant(model, name) for name in node.input[:2])


def _is_constant(model: Model, name: str) -> bool:
    return name in model.initializers and not model.overridable(name)


class _FusionContext:
    """The nodes that decide whether ONNX Runtime fuses a dequantised weight."""

    def __init__(self, model: Model) -> None:
        self._nodes = model.nodes
        self._producer = {name: index for index, node in enumerate(model.nodes) for name in node.output if name}
        self._readers: dict[str, list[int]] = defaultdict(list)
        folded = set(_iterate_folded_nodes(model))
        for index, reads in enumerate(model.reads):
            for name in reads if index not in folded else ():
                self._readers[name].append(index)
        self._merged = _group_equal_constants(model)

    def iterate_preventing(self, index: int) -> Iterator[int]:
        """Yield the nodes that prevent the fusion of this DequantizeLinear."""
        node = self._nodes[index]
        products = list(self._iterate_products(node.output[0]))
        if not products:
            return
        yield from products[1:]
        for name in (node.input[0], *self._merged.get(node.input[1], (node.input[1],))):
            yield from (reader for reader in self._readers[name] if reader != index)
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
            for reader in self._readers[name]:
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
            is_quantization_node(node, QUANTIZE)
            or is_quantization_node(node, DEQUANTIZE)
            or any(True for _ in iterate_subgraphs(node))
        )
        if not is_never_folded and reads and all(name in constant or _is_constant(model, name) for name in reads):
            constant.update(filter(None, node.output))
            yield index


def _group_equal_constants(model: Model) -> dict[str, tuple[str, ...]]:
    """Return the equal constants that ONNX Runtime merges with each small one."""
    equal: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, tensor in model.initializers.items():
        small = math.prod(tensor.dims) <= MAX_MERGED_ELEMENTS
        if small and tensor.data_type in _SCALE_TYPES and _is_constant(model, name):
            data = b"".join(read_tensor_bytes(tensor, model.folder))
            equal[tensor.data_type, tuple(tensor.dims), data].append(name)
    return {name: tuple(names) for names in equal.values() for name in names}
