"""Operators that work element by element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from onnxplace.torch.operators.table import TRANSLATIONS, translates
from onnxplace.torch.values import Argument, Context, Operand, same_shape

UNARY = {
    "abs": "Abs", "acos": "Acos", "acosh": "Acosh", "asin": "Asin", "asinh": "Asinh", "atan": "Atan", "atanh": "Atanh",
    "ceil": "Ceil", "cos": "Cos", "cosh": "Cosh", "erf": "Erf", "exp": "Exp", "floor": "Floor", "isinf": "IsInf",
    "isnan": "IsNaN", "log": "Log", "neg": "Neg", "reciprocal": "Reciprocal", "relu": "Relu", "round": "Round",
    "sigmoid": "Sigmoid", "sign": "Sign", "sin": "Sin", "sinh": "Sinh", "sqrt": "Sqrt", "tan": "Tan", "tanh": "Tanh",
}  # fmt: skip
COMPARISONS = {"eq": "Equal", "ge": "GreaterOrEqual", "gt": "Greater", "le": "LessOrEqual", "lt": "Less"}
LOGICAL = {"logical_and": "And", "logical_or": "Or", "logical_xor": "Xor"}
BITWISE = {"bitwise_and": "And", "bitwise_or": "Or", "bitwise_xor": "Xor"}


def compute_unary(context: Context, operator: str, value: Operand) -> str:
    """Apply an operator of ONNX; whole numbers become floats where torch makes them floats."""
    dtype = value.dtype if context.result.dtype == torch.bool else context.result.dtype
    return context.emit(operator, context.cast(value, dtype))


def compute_binary(context: Context, operator: str, left: Argument, right: Argument) -> str:
    """Apply an operator of ONNX to operands or numbers, in the type of the result."""
    dtype = context.result.dtype
    left, right = shrink(context, [left, right])
    return context.emit(operator, context.as_type(left, dtype), context.as_type(right, dtype))


def shrink(context: Context, operands: Sequence[Argument]) -> list[Argument]:
    """Return the operands without repeated elements, as far as another operand has the shape of the result."""
    full = [isinstance(item, Operand) and same_shape(item.shape, context.result.shape) for item in operands]
    reduced = list(operands)
    for index, item in enumerate(operands):
        if isinstance(item, Operand) and item.expanded is not None and any(full[:index] + full[index + 1 :]):
            reduced[index], full[index] = item.expanded, False
    return reduced


def find_common_type(left: Argument, right: Argument) -> torch.dtype:
    """Return the type in which torch compares two operands or numbers."""
    samples: list[Any] = [
        torch.empty((1,) * value.rank, dtype=value.dtype) if isinstance(value, Operand) else value
        for value in (left, right)
        if isinstance(value, (Operand, int, float, bool))
    ]
    # A number from sizes does not change the type.
    common: torch.dtype = torch.result_type(*samples) if len(samples) == 2 else samples[0].dtype
    return common


def compare(context: Context, operator: str, left: Argument, right: Argument) -> str:
    """Compare two operands or numbers."""
    dtype = find_common_type(left, right)
    left, right = shrink(context, [left, right])
    if dtype == torch.bool and operator != "Equal":
        dtype = torch.int32
    return context.emit(operator, context.as_type(left, dtype), context.as_type(right, dtype))


def add_scaled(context: Context, operator: str, left: Argument, right: Argument, alpha: Argument) -> str:
    """Compute left + alpha * right, or left - alpha * right."""
    if context.result.dtype == torch.bool:
        return compute_binary(context, "Or", left, right)
    left, right = shrink(context, [left, right])
    if alpha != 1:
        dtype = context.result.dtype
        right = context.emit("Mul", context.as_type(right, dtype), context.number(alpha, dtype))
    else:
        right = context.as_type(right, context.result.dtype)
    return context.emit(operator, context.as_type(left, context.result.dtype), right)


def enter_plain_operators() -> None:
    """Enter the operators that differ in their name only."""
    for name, operator in UNARY.items():
        TRANSLATIONS[f"aten.{name}.default"] = lambda c, x, operator=operator: compute_unary(c, operator, x)
    for table in (LOGICAL, BITWISE):
        for name, operator in table.items():
            TRANSLATIONS[f"aten.{name}.default"] = lambda c, a, b, operator=operator: logical(c, operator, a, b)
            TRANSLATIONS[f"aten.{name}.Tensor"] = TRANSLATIONS[f"aten.{name}.default"]
    for name, operator in COMPARISONS.items():
        for overload in ("Tensor", "Scalar"):
            TRANSLATIONS[f"aten.{name}.{overload}"] = lambda c, a, b, operator=operator: compare(c, operator, a, b)


def logical(context: Context, operator: str, left: Argument, right: Argument) -> str:
    """Combine truth values; other types only have bitwise operators, which few devices have."""
    if context.result.dtype != torch.bool:
        return compute_binary(context, f"Bitwise{operator}", left, right)
    return context.emit(operator, context.as_type(left, torch.bool), context.as_type(right, torch.bool))


enter_plain_operators()


@translates("add.Tensor", "add.Scalar")
def _add(context: Context, left: Argument, right: Argument, alpha: Argument = 1) -> str:
    return add_scaled(context, "Add", left, right, alpha)


@translates("sub.Tensor", "sub.Scalar")
def _sub(context: Context, left: Argument, right: Argument, alpha: Argument = 1) -> str:
    return add_scaled(context, "Sub", left, right, alpha)


@translates("rsub.Tensor", "rsub.Scalar")
def _rsub(context: Context, left: Argument, right: Argument, alpha: Argument = 1) -> str:
    return add_scaled(context, "Sub", right, left, alpha) if alpha == 1 else _rsub_scaled(context, left, right, alpha)


def _rsub_scaled(context: Context, left: Argument, right: Argument, alpha: Argument) -> str:
    dtype = context.result.dtype
    scaled = context.emit("Mul", context.as_type(left, dtype), context.number(alpha, dtype))
    return context.emit("Sub", context.as_type(right, dtype), scaled)


@translates("mul.Tensor", "mul.Scalar")
def _mul(context: Context, left: Argument, right: Argument) -> str:
    return compute_binary(context, "And" if context.result.dtype == torch.bool else "Mul", left, right)


@translates("div.Tensor", "div.Scalar")
def _div(context: Context, left: Argument, right: Argument) -> str:
    return compute_binary(context, "Div", left, right)


@translates("div.Tensor_mode", "div.Scalar_mode")
def _div_rounded(context: Context, left: Argument, right: Argument, rounding_mode: str | None = None) -> str:
    if rounding_mode is None:
        return _div(context, left, right)
    if context.result.dtype.is_floating_point:
        quotient = compute_binary(context, "Div", left, right)
        if rounding_mode == "floor":
            return context.emit("Floor", quotient)
        return context.emit("Mul", context.emit("Sign", quotient), context.emit("Floor", context.emit("Abs", quotient)))
    quotient = compute_binary(context, "Div", left, right)
    if rounding_mode == "trunc":
        return quotient
    dtype = context.result.dtype
    # ONNX rounds to zero; where the remainder is not zero and signs differ, the floor is one less.
    dividend, divisor = context.as_type(left, dtype), context.as_type(right, dtype)
    remainder = context.emit("Sub", dividend, context.emit("Mul", quotient, divisor))
    zero = context.number(0, dtype)
    differs = context.emit("Less", context.emit("Mul", remainder, divisor), zero)
    return context.emit("Sub", quotient, context.cast(differs, dtype))


@translates("floor_divide.default", "floor_divide.Scalar")
def _floor_divide(context: Context, left: Argument, right: Argument) -> str:
    return _div_rounded(context, left, right, "floor")


@translates("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def _remainder(context: Context, left: Argument, right: Argument) -> str:
    dtype = context.result.dtype
    dividend, divisor = context.as_type(left, dtype), context.as_type(right, dtype)
    if not dtype.is_floating_point:
        return context.emit("Mod", dividend, divisor)
    quotient = context.emit("Floor", context.emit("Div", dividend, divisor))
    return context.emit("Sub", dividend, context.emit("Mul", quotient, divisor))


@translates("fmod.Tensor", "fmod.Scalar")
def _fmod(context: Context, left: Argument, right: Argument) -> str:
    dtype = context.result.dtype
    return context.emit("Mod", context.as_type(left, dtype), context.as_type(right, dtype), fmod=1)


@translates("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def _pow(context: Context, base: Argument, exponent: Argument) -> str:
    dtype = context.result.dtype
    if isinstance(exponent, (int, float)) and not isinstance(exponent, bool) and isinstance(base, Operand):
        value = context.cast(base, dtype)
        if exponent == 2:
            return context.emit("Mul", value, value)
        if exponent == 3:
            return context.emit("Mul", context.emit("Mul", value, value), value)
        if exponent == 1:
            return context.emit("Identity", value)
        if exponent in (0.5, -0.5):
            root = context.emit("Sqrt", value)
            return root if exponent > 0 else context.emit("Reciprocal", root)
        if exponent == -1:
            return context.emit("Reciprocal", value)
    return compute_binary(context, "Pow", base, exponent)


@translates("ne.Tensor", "ne.Scalar")
def _ne(context: Context, left: Argument, right: Argument) -> str:
    return context.emit("Not", compare(context, "Equal", left, right))


@translates("logical_not.default")
def _logical_not(context: Context, value: Operand) -> str:
    return context.emit("Not", context.cast(value, torch.bool))


@translates("bitwise_not.default")
def _bitwise_not(context: Context, value: Operand) -> str:
    return context.emit("Not" if value.dtype == torch.bool else "BitwiseNot", value)


@translates("maximum.default")
def _maximum(context: Context, left: Operand, right: Operand) -> str:
    return compute_binary(context, "Or" if context.result.dtype == torch.bool else "Max", left, right)


@translates("minimum.default")
def _minimum(context: Context, left: Operand, right: Operand) -> str:
    return compute_binary(context, "And" if context.result.dtype == torch.bool else "Min", left, right)


@translates("clamp.default", "clamp.Tensor")
def _clamp(context: Context, value: Operand, lower: Argument = None, upper: Argument = None) -> str:
    dtype = context.result.dtype
    result = context.cast(value, dtype)
    if lower is not None:
        result = context.emit("Max", result, context.as_type(lower, dtype))
    return result if upper is None else context.emit("Min", result, context.as_type(upper, dtype))


@translates("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(context: Context, condition: Operand, left: Argument, right: Argument) -> str:
    dtype = context.result.dtype
    left, right, condition = shrink(context, [left, right, condition])
    chosen = context.cast(condition, torch.bool)
    return context.emit("Where", chosen, context.as_type(left, dtype), context.as_type(right, dtype))


@translates("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(context: Context, value: Operand, mask: Operand, number: Argument) -> str:
    return _where(context, mask, number, value)


@translates("rsqrt.default")
def _rsqrt(context: Context, value: Operand) -> str:
    return context.emit("Reciprocal", compute_unary(context, "Sqrt", value))


@translates("log2.default")
def _log2(context: Context, value: Operand) -> str:
    return context.emit("Mul", compute_unary(context, "Log", value), context.number(1 / math.log(2), torch.float32))


@translates("log10.default")
def _log10(context: Context, value: Operand) -> str:
    return context.emit("Mul", compute_unary(context, "Log", value), context.number(1 / math.log(10), torch.float32))


@translates("log1p.default")
def _log1p(context: Context, value: Operand) -> str:
    """Compute log(1 + x) as x * log(u) / (u - 1) with u = 1 + x, exact for small x (Kahan)."""
    dtype = context.result.dtype
    x, one = context.cast(value, dtype), context.number(1, dtype)
    shifted = context.emit("Add", x, one)
    difference = context.emit("Sub", shifted, one)
    is_tiny = context.emit("Equal", difference, context.number(0, dtype))
    divisor = context.emit("Where", is_tiny, one, difference)
    scaled = context.emit("Mul", x, context.emit("Div", context.emit("Log", shifted), divisor))
    # Infinity over infinity would be no number.
    infinite = context.emit("Equal", x, context.number(math.inf, dtype))
    return context.emit("Where", context.emit("Or", is_tiny, infinite), x, scaled)


@translates("expm1.default")
def _expm1(context: Context, value: Operand) -> str:
    """Compute e^x - 1 as tanh(x / 2) * (e^x + 1), exact for small x; e^x - 1 for large x."""
    dtype = context.result.dtype
    x, one = context.cast(value, dtype), context.number(1, dtype)
    power = context.emit("Exp", x)
    half = context.emit("Tanh", context.emit("Mul", x, context.number(0.5, dtype)))
    small = context.emit("Mul", half, context.emit("Add", power, one))
    return context.emit("Where", context.emit("Less", x, one), small, context.emit("Sub", power, one))


@translates("trunc.default")
def _trunc(context: Context, value: Operand) -> str:
    size = context.emit("Floor", context.emit("Abs", value))
    return context.emit("Mul", context.emit("Sign", value), size)


@translates("_to_copy.default", "prims.convert_element_type.default")
def _to_copy(context: Context, value: Operand, **_: object) -> Operand | str:
    return value if value.dtype == context.result.dtype else context.cast(value, context.result.dtype)


@translates(
    "alias.default", "clone.default", "detach.default", "lift_fresh_copy.default", "lift_fresh.default",
    "contiguous.default", "copy.default",
)  # fmt: skip
def _same(context: Context, value: Operand, source: Operand | None = None, **_: object) -> Operand | str:
    if source is None:
        return value
    copied = context.cast(source, value.dtype)
    if same_shape(source.shape, value.shape):
        return (
            Operand(copied, value.dtype, value.shape) if source.constant is None else context.emit("Identity", copied)
        )
    return context.emit("Expand", copied, context.shape(value.shape))


@translates("gelu.default")
def _gelu(context: Context, value: Operand, approximate: str = "none") -> str:
    return context.emit("Gelu", value, approximate=approximate)


@translates("erfc.default")
def _erfc(context: Context, value: Operand) -> str:
    return context.emit("Sub", context.number(1, context.result.dtype), context.emit("Erf", value))


@translates("atan2.default")
def _atan2(context: Context, left: Operand, right: Operand) -> str:
    """Compute the angle from the quotient; to the left of the vertical axis, half a turn is added or removed."""
    dtype = context.result.dtype
    zero = context.number(0, dtype)
    y, x = context.cast(left, dtype), context.cast(right, dtype)
    turn = context.emit("Where", context.emit("Less", y, zero), *(context.number(s * math.pi, dtype) for s in (-1, 1)))
    angle = context.emit("Atan", context.emit("Div", y, x))
    turned = context.emit("Where", context.emit("Less", x, zero), context.emit("Add", angle, turn), angle)
    # At the origin, where the quotient is no number, torch gives zero.
    both = context.emit("And", context.emit("Equal", x, zero), context.emit("Equal", y, zero))
    return context.emit("Where", both, zero, turned)
