"""Rules of operators that work on each element, and of quantisers."""

from __future__ import annotations

from onnxplace.passes.sharding.node_views import NodeView, split_words
from onnxplace.passes.sharding.rules.axis_rules import AxisRule, Rule, elementwise

_UNARY = split_words(
    """
    Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast Ceil Celu Clip Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid
    HardSwish Identity IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin
    Sinh Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu
"""
)
_BROADCASTING = split_words(
    """
    Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min
    Mod Mul Or PRelu Pow Sub Sum Where Xor
"""
)
_MICROSOFT = ["FastGelu", "QuickGelu", "Gelu", "BiasGelu", "BiasAdd"]


def dropout(view: NodeView) -> list[AxisRule]:
    """Dropout in inference, where it returns its input: without a training mode."""
    return [] if view.has(2) else elementwise(view)


def cast_like(view: NodeView) -> list[AxisRule]:
    """The second input gives only a type: it is replicated."""
    return [
        AxisRule({0: axis}, dict.fromkeys(view.present_outputs(), axis))
        for axis, size in enumerate(view.result())
        if size > 1
    ]


def quantise(view: NodeView) -> list[AxisRule]:
    """QuantizeLinear and DequantizeLinear with a scale per tensor or per axis; blocks of scales stay whole."""
    if view.attribute("block_size", 0):
        return []
    axis_of_scales = view.axis(1) if view.rank() else 0
    rules = []
    for axis, size in enumerate(view.shape(0)):
        if size <= 1:
            continue
        inputs = {0: axis}
        for position in (1, 2):
            if view.has(position) and view.rank(position) == 1 and view.shape(position)[0] > 1:
                if axis == axis_of_scales:
                    inputs[position] = 0
            elif view.has(position) and view.rank(position) > 1:
                return []
        rules.append(AxisRule(inputs, {0: axis}))
    return rules


POINTWISE: dict[tuple[str, str], Rule] = {
    **{("", op): elementwise for op in (*_UNARY, *_BROADCASTING)},
    **{("com.microsoft", op): elementwise for op in _MICROSOFT},
    ("", "Dropout"): dropout,
    ("", "CastLike"): cast_like,
    ("", "QuantizeLinear"): quantise,
    ("", "DequantizeLinear"): quantise,
}
