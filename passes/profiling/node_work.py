"""The work of a node: floating-point operations, and bytes read and written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from onnx import NodeProto

Shapes = Mapping[str, Sequence[int]]

# These view a tensor under another shape, or describe it: no bytes move.
_NO_TRAFFIC = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape", "Size", "Constant", "Optional"}
# These read as many bytes of their largest input as they write.
_SELECTIONS = {"Gather", "GatherElements", "GatherND", "Slice", "EmbedLayerNormalization"}
# The position of a convolution's weights among its inputs.
_CONVOLUTION_WEIGHTS = {"Conv": 1, "FusedConv": 1, "ConvInteger": 1, "QLinearConv": 3}
_PRODUCTS = {"MatMul", "FusedMatMul", "MatMulInteger", "QLinearMatMul", "DynamicQuantizeMatMul", "MatMulNBits"}
_RECURRENT_LAYERS = {"LSTM", "GRU", "RNN"}
_ATTENTIONS = {"Attention", "MultiHeadAttention", "GroupQueryAttention"}
# Operations per element of the output, by definition; an exponential or a division counts as 8.
_OPERATIONS_PER_OUTPUT = {
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
_POOLS = {"MaxPool", "AveragePool", "LpPool"}
_REDUCTION_PREFIXES = ("Reduce", "Global", "ArgM", "CumSum")
_SORTS = {"TopK", "Unique", "NonMaxSuppression"}


def count_moved_bytes(node: NodeProto, reads: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Return the bytes that a node reads and writes.

    An unknown size counts as zero.
    """
    if node.op_type in _NO_TRAFFIC:
        return 0
    written = sum(sizes.get(name, 0) for name in node.output)
    if node.op_type in _SELECTIONS:
        largest = max((sizes.get(name, 0) for name in reads), default=0)
        others = sum(sizes.get(name, 0) for name in reads) - largest
        return written + min(written, largest) + others
    return written + sum(sizes.get(name, 0) for name in reads)


def count_operations(node: NodeProto, shapes: Shapes) -> float:
    """Return the floating-point operations of a node.

    Exact for products, convolutions and recurrent layers. Other operators have a fixed number per element, unknown
    ones 1. Zero where no shape is known.
    """
    outputs = float(math.prod(shapes.get(node.output[0], ()))) if node.output else 0.0
    kind = node.op_type
    multiplications = _count_dense(node, shapes, outputs)
    if multiplications is not None:
        return multiplications
    if kind in _POOLS:
        return outputs * math.prod(_ints_attribute(node, "kernel_shape"))
    inputs = float(math.prod(shapes.get(node.input[0], ()))) if node.input else 0.0
    if kind.startswith(_REDUCTION_PREFIXES):
        return inputs
    if kind in _SORTS:
        return inputs * max(math.log2(max(inputs, 2)), 1)
    return outputs * _OPERATIONS_PER_OUTPUT.get(kind, 1)


def _count_dense(node: NodeProto, shapes: Shapes, outputs: float) -> float | None:
    """Return the operations of products and convolutions, None for others."""
    kind, input_shapes = node.op_type, [shapes.get(name) for name in node.input]
    first = input_shapes[0] if input_shapes else None
    if kind in _PRODUCTS and first is not None:
        transposed = bool(_int_attribute(node, "transA", 0)) and len(first) > 1
        return 2.0 * outputs * (first or (1,))[-2 if transposed else -1]
    if kind == "Gemm" and first is not None and len(first) == 2:
        return 2.0 * outputs * first[0 if _int_attribute(node, "transA", 0) else 1]
    weights = (
        input_shapes[_CONVOLUTION_WEIGHTS[kind]]
        if kind in _CONVOLUTION_WEIGHTS and len(input_shapes) > _CONVOLUTION_WEIGHTS[kind]
        else None
    )
    if weights is not None:
        return 2.0 * outputs * math.prod(weights[1:])
    second, third = (input_shapes[index] if len(input_shapes) > index else None for index in (1, 2))
    if kind == "ConvTranspose" and first is not None and second is not None:
        return 2.0 * math.prod(first) * math.prod(second[1:])  # each element of the input meets each weight
    if kind in _RECURRENT_LAYERS and first is not None and second is not None and third is not None:
        return 2.0 * math.prod(first[:2]) * (math.prod(second) + math.prod(third))
    if kind in _ATTENTIONS and first is not None:
        return _count_attention(node, first, second, outputs)
    if kind == "Einsum":
        return _count_einsum(node, input_shapes)
    return None


def _count_attention(
    node: NodeProto, query: Sequence[int], second: Sequence[int] | None, outputs: float
) -> float | None:
    """Return the operations of attention, with the projections in it."""
    if len(query) < 3 or second is None:
        return None
    projected = 0.0
    keys = query[-2]
    if node.domain == "com.microsoft" and node.op_type == "Attention":  # its second input holds weights [D, 3 H]
        projected = 2.0 * math.prod(query[:-1]) * math.prod(second)
    elif len(second) >= 3:
        keys = second[-2]
    return projected + 4.0 * outputs * keys


def _count_einsum(node: NodeProto, input_shapes: Sequence[Sequence[int] | None]) -> float | None:
    """Return twice the product of all index sizes, if known.

    An ellipsis hides some of them.
    """
    equation = next((a.s.decode(errors="replace") for a in node.attribute if a.name == "equation"), "").replace(" ", "")
    terms = equation.partition("->")[0].split(",")
    if "." in equation or len(terms) != len(input_shapes):
        return None
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, input_shapes):
        if shape is None or len(shape) != len(term):
            return None
        sizes.update(zip(term, shape))
    return 2.0 * math.prod(sizes.values())


def _int_attribute(node: NodeProto, name: str, default: int) -> int:
    return next((a.i for a in node.attribute if a.name == name), default)


def _ints_attribute(node: NodeProto, name: str) -> list[int]:
    attribute = next((a for a in node.attribute if a.name == name), None)
    return [] if attribute is None else list(attribute.ints)
