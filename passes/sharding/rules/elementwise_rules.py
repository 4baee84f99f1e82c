"""Rules of operators that work on each element, and of quantisers."""

from __future__ import annotations

from onnxplace.passes.sharding.rules.axis_rules import AxisRule, Rule, elementwise, split_same
from onnxplace.passes.sharding.rules.node_views import NodeView, split_words

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
_MICROSOFT = split_words(
    "FastGelu QuickGelu Gelu BiasGelu QLinearAdd QLinearMul QLinearSigmoid QLinearLeakyRelu QLinearWhere"
)


def broadcasting(view: NodeView) -> list[AxisRule]:
    """Rule of operators with several inputs; before opset 7, their attributes could align axes in other ways."""
    return [] if view.attribute("broadcast", 0) else elementwise(view)


def dropout(view: NodeView) -> list[AxisRule]:
    """Dropout in inference, where it returns its input: without a training mode."""
    return [] if view.has(2) else elementwise(view)


def cast_like(view: NodeView) -> list[AxisRule]:
    """The second input gives only a type: it is replicated."""
    return split_same(view, range(view.rank()))


def quantise(view: NodeView) -> list[AxisRule]:
    """QuantizeLinear and DequantizeLinear, with a scale per tensor, per index of an axis, or per block of indices."""
    scales = [position for position in (1, 2) if view.has(position)]
    shape, axis_of_scales = view.shape(0), view.axis(1) if view.rank() else 0
    if view.attribute("block_size", 0):
        return [
            AxisRule(
                {0: axis, **dict.fromkeys(scales, axis)},
                {0: axis},
                units=view.shape(1)[axis] if axis == axis_of_scales else 0,
            )
            for axis in range(len(shape))
        ]
    if any(view.rank(position) > 1 for position in scales):
        return []
    per_index = {position: 0 for position in scales if view.rank(position) == 1 and view.shape(position)[0] > 1}
    return [
        AxisRule({0: axis, **(per_index if axis == axis_of_scales else {})}, {0: axis}) for axis in range(len(shape))
    ]


def dynamic_quantise(view: NodeView) -> list[AxisRule]:
    """DynamicQuantizeLinear: every axis, where devices tell each other the range of their parts."""
    return [AxisRule({0: axis}, {0: axis}, shares_range=True) for axis, size in enumerate(view.shape(0)) if size > 1]


ELEMENTWISE: dict[tuple[str, str], Rule] = {
    **{("", op): elementwise for op in _UNARY},
    **{("", op): broadcasting for op in _BROADCASTING},
    **{("com.microsoft", op): elementwise for op in _MICROSOFT},
    ("", "Dropout"): dropout,
    ("", "CastLike"): cast_like,
    ("", "DynamicQuantizeLinear"): dynamic_quantise,
    **{(domain, op): quantise for domain in ("", "com.microsoft") for op in ("QuantizeLinear", "DequantizeLinear")},
}
