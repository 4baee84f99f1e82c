"""How much work a node is: floating-point operations, and bytes that pass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from onnx import NodeProto

Shapes = Mapping[str, Sequence[int]]

# Look at what is there under another shape, or tell of it: nothing passes.
_VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape", "Size", "Constant", "Optional"}
# Read as much as they write, however much there is.
_PICKING = {"Gather", "GatherElements", "GatherND", "Slice", "EmbedLayerNormalization"}
# Position of the weights of a convolution among its inputs, and of the first factor and of weights of a product.
_CONVOLVING = {"Conv": 1, "FusedConv": 1, "ConvInteger": 1, "QLinearConv": 3}
_MULTIPLYING = {"MatMul", "FusedMatMul", "MatMulInteger", "QLinearMatMul", "DynamicQuantizeMatMul", "MatMulNBits"}
_RECURRENT = {"LSTM", "GRU", "RNN"}
_ATTENDING = {"Attention", "MultiHeadAttention", "GroupQueryAttention"}
# Operations per element that they make: as their definitions have it, an exponential or a division counted as 8.
_PER_OUTPUT = {
    **dict.fromkeys(("Exp", "Log", "Div", "Sqrt", "Reciprocal", "Pow", "Sin", "Cos"), 8),
    **dict.fromkeys(("Sigmoid", "Tanh", "Erf", "Softplus", "Elu", "Selu", "Celu", "HardSwish", "Mish", "Swish"), 16),
    **dict.fromkeys(("Gelu", "FastGelu", "BiasGelu", "QuickGelu", "BiasSplitGelu"), 20),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), 20),
    **dict.fromkeys(
        ("LayerNormalization", "SkipLayerNormalization", "SimplifiedLayerNormalization", "GroupNormalization"), 10
    ),
    **dict.fromkeys(("RMSNormalization", "SkipSimplifiedLayerNormalization", "InstanceNormalization"), 10),
    **dict.fromkeys(("BatchNormalization", "LRN", "RotaryEmbedding"), 4),
}
_POOLING = {"MaxPool", "AveragePool", "LpPool"}
_PER_INPUT = ("Reduce", "Global", "ArgM", "CumSum")
_SORTING = {"TopK", "Unique", "NonMaxSuppression"}


def bytes_moved(node: NodeProto, reads: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Return the bytes that a node reads and writes; an unknown size counts as nothing."""
    if node.op_type in _VIEWS:
        return 0
    made = sum(sizes.get(name, 0) for name in node.output)
    if node.op_type in _PICKING:
        largest = max((sizes.get(name, 0) for name in reads), default=0)
        others = sum(sizes.get(name, 0) for name in reads) - largest
        return made + min(made, largest) + others
    return made + sum(sizes.get(name, 0) for name in reads)


def operations(node: NodeProto, shapes: Shapes) -> float:
    """Return the floating-point operations of a node.

    Exact for products, convolutions and recurrent layers; for others, so many per element; one per element for those
    that are not known. Zero where no shape is known.
    """
    made = float(math.prod(shapes.get(node.output[0], ()))) if node.output else 0.0
    kind = node.op_type
    counted = _dense(node, shapes, made)
    if counted is not None:
        return counted
    if kind in _POOLING:
        return made * math.prod(_ints(node, "kernel_shape"))
    read = float(math.prod(shapes.get(node.input[0], ()))) if node.input else 0.0
    if kind.startswith(_PER_INPUT):
        return read
    if kind in _SORTING:
        return read * max(math.log2(max(read, 2)), 1)
    return made * _PER_OUTPUT.get(kind, 1)


def _dense(node: NodeProto, shapes: Shapes, made: float) -> float | None:
    """Return the operations of what multiplies and adds; None for other nodes, and where a shape is unknown."""
    kind, known = node.op_type, [shapes.get(name) for name in node.input]
    first = known[0] if known else None
    if kind in _MULTIPLYING and first is not None:
        transposed = bool(_int(node, "transA", 0)) and len(first) > 1
        return 2.0 * made * (first or (1,))[-2 if transposed else -1]
    if kind == "Gemm" and first is not None and len(first) == 2:
        return 2.0 * made * first[0 if _int(node, "transA", 0) else 1]
    weights = known[_CONVOLVING[kind]] if kind in _CONVOLVING and len(known) > _CONVOLVING[kind] else None
    if weights is not None:
        return 2.0 * made * math.prod(weights[1:])
    second, third = (known[index] if len(known) > index else None for index in (1, 2))
    if kind == "ConvTranspose" and first is not None and second is not None:
        return 2.0 * math.prod(first) * math.prod(second[1:])  # each element of the input meets each weight
    if kind in _RECURRENT and first is not None and second is not None and third is not None:
        return 2.0 * math.prod(first[:2]) * (math.prod(second) + math.prod(third))
    if kind in _ATTENDING and first is not None:
        return _attention(node, first, second, made)
    if kind == "Einsum":
        return _einsum(node, known)
    return None


def _attention(node: NodeProto, query: Sequence[int], second: Sequence[int] | None, made: float) -> float | None:
    """Return the operations of scores and of sums weighted by them; of projections too, where they are in it."""
    if len(query) < 3 or second is None:
        return None
    projected = 0.0
    keys = query[-2]
    if node.domain == "com.microsoft" and node.op_type == "Attention":  # its second input holds weights [D, 3 H]
        projected = 2.0 * math.prod(query[:-1]) * math.prod(second)
    elif len(second) >= 3:
        keys = second[-2]
    return projected + 4.0 * made * keys


def _einsum(node: NodeProto, known: Sequence[Sequence[int] | None]) -> float | None:
    """Return twice the product of the sizes of all indices; None where an ellipsis hides some."""
    equation = next((a.s.decode(errors="replace") for a in node.attribute if a.name == "equation"), "").replace(" ", "")
    terms = equation.partition("->")[0].split(",")
    if "." in equation or len(terms) != len(known):
        return None
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, known):
        if shape is None or len(shape) != len(term):
            return None
        sizes.update(zip(term, shape))
    return 2.0 * math.prod(sizes.values())


def _int(node: NodeProto, name: str, default: int) -> int:
    return next((a.i for a in node.attribute if a.name == name), default)


def _ints(node: NodeProto, name: str) -> list[int]:
    found = next((a for a in node.attribute if a.name == name), None)
    return [] if found is None else list(found.ints)
