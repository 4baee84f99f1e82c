"""Keep ONNX Runtime from choosing a less precise kernel in a segment than in the whole model.

ONNX Runtime makes `DequantizeLinear(weight) -> MatMul` one `MatMulNBits`, which rounds the activations to eight bits
unless told otherwise (session option `session.qdq_matmulnbits_accuracy_level`, by default 4). It leaves both nodes
alone where the weight or its scale has another reader, where the product is quantised, or where its other input is
dequantised. If that other node is in another segment, nothing keeps ONNX Runtime from fusing them: cut, the model
would be computed otherwise, and less precisely.

There the scale of the weight becomes an input of the segment that has a default value, which nobody has to feed. ONNX
Runtime fuses constants only, so it runs the two nodes as they are, as in the whole model. (Observed with ONNX Runtime
1.28 to 1.31. The accuracy level of the session is no way out: it holds for all products of the segment, also for
those that are fused in the whole model.)
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
from onnxplace.model.nested_graphs import subgraphs
from onnxplace.model.tensors import tensor_bytes

# ONNX Runtime makes equal constants of up to this many elements one, which then has the readers of all of them.
MAX_MERGED_ELEMENTS = 8
_SCALE_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)
_PRODUCTS = ("MatMul", "Gemm")
# Nodes that ONNX Runtime may remove, so that those before and after them become neighbours.
_REMOVABLE = ("Identity", "Cast")
# Nodes that a QuantizeLinear after them makes superfluous.
_CLIPPING = ("Relu", "Clip")


def find_scales_to_protect(model: Model, segments: Sequence[Ints]) -> list[frozenset[str]]:
    """Return, for each segment, the scales that must not be constants there.

    `segments` holds the positions of each segment's nodes; each node is in one of them.
    """
    held: list[set[str]] = [set() for _ in segments]
    weights = [index for index in range(len(model.nodes)) if _dequantises_weight(model, index)]
    if weights:
        segment_of = np.zeros(len(model.nodes), dtype=np.int32)
        for number, nodes in enumerate(segments):
            segment_of[nodes] = number
        surroundings = _Surroundings(model)
        for index in weights:
            preventing = {int(segment_of[node]) for node in surroundings.preventing(index)}
            if preventing and segment_of[index] not in preventing:
                held[segment_of[index]].add(model.nodes[index].input[1])
    return [frozenset(names) for names in held]


def _dequantises_weight(model: Model, index: int) -> bool:
    """Return whether a node dequantises a constant by a constant scale."""
    node = model.nodes[index]
    return is_quantization_node(node, DEQUANTIZE) and all(_is_constant(model, name) for name in node.input[:2])


def _is_constant(model: Model, name: str) -> bool:
    return name in model.initializers and not model.overridable(name)


class _Surroundings:
    """What ONNX Runtime looks at around a dequantised weight before it makes it part of a fused product."""

    def __init__(self, model: Model) -> None:
        self._nodes = model.nodes
        self._producer = {name: index for index, node in enumerate(model.nodes) for name in node.output if name}
        self._readers: dict[str, list[int]] = defaultdict(list)
        folded = set(_folded(model))
        for index, reads in enumerate(model.reads):
            for name in reads if index not in folded else ():
                self._readers[name].append(index)
        self._merged = _merged_constants(model)

    def preventing(self, index: int) -> Iterator[int]:
        """Yield the nodes that keep this DequantizeLinear from being fused with a product that reads it."""
        node = self._nodes[index]
        products = list(self._products(node.output[0]))
        if not products:
            return
        yield from products[1:]
        for name in (node.input[0], *self._merged.get(node.input[1], (node.input[1],))):
            yield from (reader for reader in self._readers[name] if reader != index)
        for product in products:
            yield from self._quantisers(product)

    def _products(self, weight: str) -> Iterator[int]:
        """Yield the products whose second factor is this value."""
        for reader, name in self._after(weight, _REMOVABLE):
            node = self._nodes[reader]
            if node.op_type in _PRODUCTS and node.input[1] == name:
                yield reader

    def _quantisers(self, product: int) -> Iterator[int]:
        """Yield the dequantiser of a product's first factor, and the quantisers of its result."""
        node = self._nodes[product]
        maker = self._producer.get(node.input[0])
        if maker is not None and is_quantization_node(self._nodes[maker], DEQUANTIZE):
            yield maker
        for reader, _ in self._after(node.output[0], _CLIPPING):
            if is_quantization_node(self._nodes[reader], QUANTIZE):
                yield reader

    def _after(self, value: str, passing: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Yield the readers of a value, also those behind nodes of the types `passing`, each with the name it reads."""
        names = [value]
        for name in names:
            for reader in self._readers[name]:
                yield reader, name
                if self._nodes[reader].op_type in passing and self._nodes[reader].input[0] == name:
                    names.append(self._nodes[reader].output[0])


def _folded(model: Model) -> Iterator[int]:
    """Yield the nodes that ONNX Runtime computes once, when it opens the model: they do not count as readers."""
    constant: set[str] = set()
    for index, (node, reads) in enumerate(zip(model.nodes, model.reads)):
        kept = (
            is_quantization_node(node, QUANTIZE)
            or is_quantization_node(node, DEQUANTIZE)
            or any(True for _ in subgraphs(node))
        )
        if not kept and reads and all(name in constant or _is_constant(model, name) for name in reads):
            constant.update(filter(None, node.output))
            yield index


def _merged_constants(model: Model) -> dict[str, tuple[str, ...]]:
    """Return, for each small constant, the names of all that ONNX Runtime makes one with it, itself included."""
    equal: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, tensor in model.initializers.items():
        small = math.prod(tensor.dims) <= MAX_MERGED_ELEMENTS
        if small and tensor.data_type in _SCALE_TYPES and _is_constant(model, name):
            data = b"".join(tensor_bytes(tensor, model.folder))
            equal[tensor.data_type, tuple(tensor.dims), data].append(name)
    return {name: tuple(names) for names in equal.values() for name in names}
