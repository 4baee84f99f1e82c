"""ATen operators that compute elements: one by one, from numbers, and over axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from onnxplace.torch.translation import (
    Argument,
    Context,
    Operand,
    UntranslatableError,
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
BINARY = {"mul": ("Mul", "And"), "div": ("Div", "Div"), "maximum": ("Max", "Or"), "minimum": ("Min", "And")}


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
    if context.result.dtype == torch.bool:
        return compute_binary(context, "Or", left, right)
    left, right = shrink(context, [left, right])
    if alpha != 1:
        dtype = context.result.dtype
        right = context.emit("Mul", context.as_type(right, dtype), context.number(alpha, dtype))
    else:
        right = context.as_type(right, context.result.dtype)
    return context.emit(operator, context.as_type(left, context.result.dtype), right)


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


@translates("rsub.Tensor", "rsub.Scalar")
def _rsub(context: Context, left: Argument, right: Argument, alpha: Argument = 1) -> str:
    return add_scaled(context, "Sub", right, left, alpha)


@translates_each({f"{name}.{kind}": BINARY[name] for name in BINARY for kind in ("default", "Tensor", "Scalar")})
def _binary(context: Context, operators: tuple[str, str], left: Argument, right: Argument) -> str:
    return compute_binary(context, operators[context.result.dtype == torch.bool], left, right)


@translates("div.Tensor_mode", "div.Scalar_mode")
def _div_rounded(context: Context, left: Argument, right: Argument, rounding_mode: str | None = None) -> str:
    quotient = compute_binary(context, "Div", left, right)
    if rounding_mode is None:
        return quotient
    if context.result.dtype.is_floating_point:
        if rounding_mode == "floor":
            return context.emit("Floor", quotient)
        return context.emit("Mul", context.emit("Sign", quotient), context.emit("Floor", context.emit("Abs", quotient)))
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


@translates_each({"log2.default": 2, "log10.default": 10})
def _log_to_base(context: Context, base: int, value: Operand) -> str:
    return context.emit("Mul", compute_unary(context, "Log", value), context.number(1 / math.log(base), torch.float32))


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


# ------------------------------------------------------------------------------------------------- tensors from numbers


def make_uniform(context: Context, number: Argument) -> Operand:
    """Return a tensor of equal elements, in the shape and type of the result."""
    dtype, shape = context.result.dtype, tuple(context.result.shape)
    scalar = Operand(context.number(number, dtype), dtype, ())
    return Operand(context.fill(shape, number, dtype), dtype, shape, expanded=scalar)


@translates("full.default", "full_like.default", "new_full.default")
def _full(context: Context, _: object, number: Argument, *__: object, **___: object) -> Operand:
    return make_uniform(context, number)


# Memory that is not set yet: torch promises no contents, and here it is zero.
ZEROS = (
    "zeros.default", "zeros_like.default", "new_zeros.default", "empty.memory_format", "empty_like.default",
    "new_empty.default", "empty_strided.default", "new_empty_strided.default", "empty_permuted.default",
)  # fmt: skip
ONES = ("ones.default", "ones_like.default", "new_ones.default")


@translates_each({**dict.fromkeys(ZEROS, 0), **dict.fromkeys(ONES, 1)})
def _constant(context: Context, number: int, *_: object, **__: object) -> Operand:
    return make_uniform(context, number)


@translates("scalar_tensor.default")
def _scalar_tensor(context: Context, number: Argument, **_: object) -> str:
    return context.number(number, context.result.dtype)


@translates("fill.Scalar", "fill.Tensor")
def _fill(context: Context, value: Operand, number: Argument) -> Any:
    if isinstance(number, Operand):
        return context.emit("Expand", context.cast(number, value.dtype), context.shape(value.shape))
    return make_uniform(context, number)


@translates("arange.default", "arange.start", "arange.start_step")
def _arange(context: Context, *bounds: Argument, **_: object) -> str:
    start, end, step = ((0, *bounds, 1), (*bounds, 1), bounds)[len(bounds) - 1]
    dtype = context.result.dtype
    return context.emit("Range", *(context.number(number, dtype) for number in (start, end, step)))


@translates("eye.default")
def _eye(context: Context, rows: Argument, **_: object) -> str:
    steps = context.emit("Range", *(context.number(number, torch.int64) for number in (0, rows, 1)))
    column = context.emit("Unsqueeze", steps, context.integers([1]))
    return context.cast(context.emit("Equal", steps, column), context.result.dtype)


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
    "sum.dim_IntList": "ReduceSum", "sum.default": "ReduceSum", "mean.dim": "ReduceMean", "mean.default": "ReduceMean",
    "prod.dim_int": "ReduceProd", "prod.default": "ReduceProd", "amax.default": "ReduceMax", "max.default": "ReduceMax",
    "amin.default": "ReduceMin", "min.default": "ReduceMin",
})  # fmt: skip
def _reduce(
    context: Context, operator: str, value: Operand, axes: Argument = None, keep: bool = False, **_: object
) -> str:
    return reduce_axes(context, operator, context.cast(value, context.result.dtype), value.rank, axes, keep)


@translates_each(
    {
        f"{name}.{overload}": operator
        for name, operator in (("any", "ReduceMax"), ("all", "ReduceMin"))
        for overload in ("default", "dim", "dims")
    }
)
def _reduce_truth(context: Context, operator: str, value: Operand, axes: Argument = None, keep: bool = False) -> str:
    """Reduce truth values as numbers 0 and 1."""
    numbers = context.cast(Operand(context.cast(value, torch.bool), torch.bool, value.shape), torch.int32)
    return context.cast(reduce_axes(context, operator, numbers, value.rank, axes, keep), torch.bool)


@translates_each({"argmax.default": "ArgMax", "argmin.default": "ArgMin"})
def find_extreme(context: Context, operator: str, value: Operand, axis: int | None = None, keep: bool = False) -> str:
    """Return the positions of the largest or smallest elements; of equal ones the first."""
    if axis is None:
        flat = context.emit("Reshape", value, context.integers([-1]))
        return context.emit(operator, flat, axis=0, keepdims=0)
    return context.emit(operator, value, axis=normalize_axis(axis, value.rank), keepdims=int(keep))


@translates_each({"max.dim": "Max", "min.dim": "Min"})
def _extreme_with_position(context: Context, which: str, value: Operand, axis: int, keep: bool = False) -> list[str]:
    extreme = reduce_axes(context, f"Reduce{which}", value, value.rank, axis, keep)
    return [extreme, find_extreme(context, f"Arg{which}", value, axis, keep)]


@translates("var_mean.correction")
def _var_mean(
    context: Context, value: Operand, axes: Argument = None, *, correction: Argument = None, keepdim: bool = False
) -> list[str]:
    """Return the variance, in the two passes that do not cancel, and the mean."""
    mean = reduce_axes(context, "ReduceMean", value, value.rank, axes, True)
    centered = context.emit("Sub", value, mean)
    square = context.emit("Mul", centered, centered)
    correction = 1 if correction is None else correction
    listed = [axes] if isinstance(axes, int) else list(axes or range(value.rank))
    variance = reduce_axes(context, "ReduceMean", square, value.rank, axes, keepdim)
    if correction:
        number = context.cast(context.product([value.shape[axis] for axis in listed]), value.dtype)
        rest = context.emit("Sub", number, context.number(correction, value.dtype))
        variance = context.emit("Mul", variance, context.emit("Div", number, rest))
    return [variance, mean if keepdim else reduce_axes(context, "ReduceMean", value, value.rank, axes, False)]


@translates("var.correction")
def _var(context: Context, value: Operand, axes: Argument = None, **options: Any) -> str:
    return _var_mean(context, value, axes, **options)[0]


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


@translates("sort.default", "sort.stable")
def _sort(
    context: Context,
    value: Operand,
    axis: int = -1,
    descending: bool = False,
    *,
    stable: bool | None = None,
    dim: int | None = None,
) -> list[str]:
    axis = normalize_axis(axis if dim is None else dim, value.rank)
    inputs = [value, context.shape([value.shape[axis]])]
    return context.add("TopK", inputs, 2, axis=axis, largest=int(descending), sorted=1)


@translates("linalg_vector_norm.default", "norm.ScalarOpt_dim", "norm.Scalar")
def _vector_norm(
    context: Context, value: Operand, order: Argument = 2, axes: Argument = None, keep: bool = False, **_: object
) -> str:
    operators = {1: "ReduceL1", 2: "ReduceL2"}
    if order not in operators:
        raise UntranslatableError(f"norms of order {order}; 1 and 2 are translated")
    return reduce_axes(context, operators[order], value, value.rank, axes, keep)
