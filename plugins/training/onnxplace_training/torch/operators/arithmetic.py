"""ATen operators that compute elements: one by one, from numbers, and over axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onnxplace_training.torch.translation import (
    Argument,
    Context,
    Operand,
    normalize_axis,
    same_shape,
    translates,
    translates_each,
)

# --------------------------------------------------------------------------------------------------- element by element


UNARY = {
    "abs": "Abs", "acos": "Acos", "acosh": "Acosh", "asin": "Asin", "asinh": "Asinh", "atan": "Atan", "atanh": "Atanh",
    "ceil": "Ceil", "cos": "Cos", "cosh": "Cosh", "erf": "Erf", "exp": "Exp", "floor": "Floor", "isinf": "IsInf",
    "isnan": "IsNaN", "log": "Log", "neg": "Neg", "reciprocal": "Reciprocal", "relu": "Relu", "round": "Round",
    "sigmoid": "Sigmoid", "sign": "Sign", "sin": "Sin", "sinh": "Sinh", "sqrt": "Sqrt", "tan": "Tan", "tanh": "Tanh",
}  # fmt: skip
COMPARISONS = {"eq": "Equal", "ge": "GreaterOrEqual", "gt": "Greater", "le": "LessOrEqual", "lt": "Less"}
LOGICAL = {"and": "And", "or": "Or", "xor": "Xor"}
# The operator, and that of truth values.
BINARY = {
    "mul.Tensor": ("Mul", "And"), "mul.Scalar": ("Mul", "And"), "div.Tensor": ("Div", "Div"),
    "div.Scalar": ("Div", "Div"), "div.Tensor_mode": ("Div", "Div"), "div.Scalar_mode": ("Div", "Div"),
    "remainder.Tensor": ("Mod", "Mod"), "remainder.Scalar": ("Mod", "Mod"), "remainder.Scalar_Tensor": ("Mod", "Mod"),
    "maximum.default": ("Max", "Or"), "minimum.default": ("Min", "And"), "pow.Tensor_Scalar": ("Pow", "Pow"),
    "pow.Tensor_Tensor": ("Pow", "Pow"), "pow.Scalar": ("Pow", "Pow"),
}  # fmt: skip


@translates_each({f"{name}.default": operator for name, operator in UNARY.items()})
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


@translates_each({f"{name}.{kind}": COMPARISONS[name] for name in COMPARISONS for kind in ("Tensor", "Scalar")})
def compare(context: Context, operator: str, left: Argument, right: Argument) -> str:
    """Compare two operands or numbers."""
    dtype = find_common_type(left, right)
    left, right = shrink(context, [left, right])
    if dtype == torch.bool and operator != "Equal":
        dtype = torch.int32
    return context.emit(operator, context.as_type(left, dtype), context.as_type(right, dtype))


@translates_each({"add.Tensor": "Add", "add.Scalar": "Add", "sub.Tensor": "Sub", "sub.Scalar": "Sub"})
def add_scaled(context: Context, operator: str, left: Argument, right: Argument, alpha: Argument = 1) -> str:
    """Compute left + alpha * right, or left - alpha * right."""
    dtype = context.result.dtype
    if dtype == torch.bool:
        return compute_binary(context, "Or", left, right)
    left, right = shrink(context, [left, right])
    right = context.as_type(right, dtype)
    if alpha != 1:
        right = context.emit("Mul", right, context.number(alpha, dtype))
    return context.emit(operator, context.as_type(left, dtype), right)


@translates_each(
    {
        f"{kind}_{name}.{overload}": LOGICAL[name]
        for kind in ("logical", "bitwise")
        for name in LOGICAL
        for overload in ("default", "Tensor")
    }
)
def logical(context: Context, operator: str, left: Argument, right: Argument) -> str:
    """Combine truth values; other types only have bitwise operators, which few devices have."""
    if context.result.dtype != torch.bool:
        return compute_binary(context, f"Bitwise{operator}", left, right)
    return context.emit(operator, context.as_type(left, torch.bool), context.as_type(right, torch.bool))


@translates_each(BINARY)
def _binary(
    context: Context, operators: tuple[str, str], left: Argument, right: Argument, rounding_mode: str | None = None
) -> str:
    # Quotients that are rounded are of whole numbers, and rounded to zero, as in ONNX; `decompositions` has the others.
    return compute_binary(context, operators[context.result.dtype == torch.bool], left, right)


@translates("fmod.Tensor", "fmod.Scalar")
def _fmod(context: Context, left: Argument, right: Argument) -> str:
    dtype = context.result.dtype
    return context.emit("Mod", context.as_type(left, dtype), context.as_type(right, dtype), fmod=1)


@translates("logical_not.default")
def _logical_not(context: Context, value: Operand) -> str:
    return context.emit("Not", context.cast(value, torch.bool))


@translates("bitwise_not.default")
def _bitwise_not(context: Context, value: Operand) -> str:
    return context.emit("Not" if value.dtype == torch.bool else "BitwiseNot", value)


@translates("clamp.default", "clamp.Tensor")
def _clamp(context: Context, value: Operand, lower: Argument = None, upper: Argument = None) -> str:
    dtype = context.result.dtype
    result = context.cast(value, dtype)
    if lower is not None:
        result = context.emit("Max", result, context.as_type(lower, dtype))
    return result if upper is None else context.emit("Min", result, context.as_type(upper, dtype))


@translates("where.self")
def _where(context: Context, condition: Operand, left: Argument, right: Argument) -> str:
    dtype = context.result.dtype
    left, right, condition = shrink(context, [left, right, condition])
    chosen = context.cast(condition, torch.bool)
    return context.emit("Where", chosen, context.as_type(left, dtype), context.as_type(right, dtype))


@translates("_to_copy.default")
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
        return copied if source.constant is None else context.emit("Identity", copied)
    return context.emit("Expand", copied, context.shape(value.shape))


@translates("gelu.default")
def _gelu(context: Context, value: Operand, approximate: str = "none") -> str:
    return context.emit("Gelu", value, approximate=approximate)


# ------------------------------------------------------------------------------------------------- tensors from numbers


def make_uniform(context: Context, number: Argument) -> Operand:
    """Return a tensor of equal elements, in the shape and type of the result."""
    dtype, shape = context.result.dtype, tuple(context.result.shape)
    scalar = Operand(context.number(number, dtype), dtype, ())
    return Operand(context.fill(shape, number, dtype), dtype, shape, expanded=scalar)


@translates("full.default", "full_like.default")
def _full(context: Context, _: object, number: Argument, *__: object, **___: object) -> Operand:
    return make_uniform(context, number)


@translates("empty.memory_format", "empty_permuted.default", "empty_strided.default", "new_empty_strided.default")
def _empty(context: Context, *_: object, **__: object) -> Operand:
    """Memory that is not set yet: torch promises no contents, and here it is zero."""
    return make_uniform(context, 0)


@translates("scalar_tensor.default")
def _scalar_tensor(context: Context, number: Argument, **_: object) -> str:
    return context.number(number, context.result.dtype)


@translates("arange.start_step")
def _arange(context: Context, start: Argument, end: Argument, step: Argument = 1, **_: object) -> str:
    return context.emit("Range", *(context.number(number, context.result.dtype) for number in (start, end, step)))


# ---------------------------------------------------------------------------------------- sums, means, extremes, orders


def reduce_axes(
    context: Context, operator: str, value: Argument, rank: int, axes: int | Sequence[int] | None, keep: bool
) -> str:
    """Reduce axes, or all of them if there are none, with an operator of ONNX."""
    listed = [axes] if isinstance(axes, int) else list(axes or [])
    if rank == 0:
        return context.emit("Identity", value)
    normalized = [normalize_axis(axis, rank) for axis in listed] or list(range(rank))
    return context.emit(operator, value, context.integers(normalized), keepdims=int(keep))


@translates_each({
    "sum.dim_IntList": "ReduceSum", "mean.dim": "ReduceMean", "mean.default": "ReduceMean",
    "prod.dim_int": "ReduceProd", "prod.default": "ReduceProd", "amax.default": "ReduceMax", "max.default": "ReduceMax",
    "amin.default": "ReduceMin", "min.default": "ReduceMin",
})  # fmt: skip
def _reduce(
    context: Context, operator: str, value: Operand, axes: Argument = None, keep: bool = False, **_: object
) -> str:
    return reduce_axes(context, operator, context.cast(value, context.result.dtype), value.rank, axes, keep)


@translates_each({"argmax.default": "ArgMax", "argmin.default": "ArgMin"})
def find_extreme(context: Context, operator: str, value: Operand, axis: int | None = None, keep: bool = False) -> str:
    """Return the positions of the largest or smallest elements; of equal ones the first."""
    if axis is None:
        flat = context.emit("Reshape", value, context.integers([-1]))
        return context.emit(operator, flat, axis=0, keepdims=0)
    return context.emit(operator, value, axis=normalize_axis(axis, value.rank), keepdims=int(keep))


@translates("cumsum.default")
def _cumsum(context: Context, value: Operand, axis: int, **_: object) -> str:
    axis_name = context.number(normalize_axis(axis, value.rank), torch.int64)
    return context.emit("CumSum", context.cast(value, context.result.dtype), axis_name)


@translates("topk.default")
def _topk(
    context: Context, value: Operand, count: Argument, axis: int = -1, largest: bool = True, is_sorted: bool = True
) -> list[str]:
    inputs = [value, context.shape([count])]
    axis = normalize_axis(axis, value.rank)
    return context.add("TopK", inputs, 2, axis=axis, largest=int(largest), sorted=int(is_sorted))
