"""Sums, means, extremes, orders."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from onnxplace.torch.operators.table import translates
from onnxplace.torch.values import Argument, Context, Operand, UntranslatableError, as_dimension, normalize_axis


def reduce_axes(
    context: Context, operator: str, value: Argument, rank: int, axes: int | Sequence[int] | None, keep: bool
) -> str:
    """Reduce axes, or all of them if there are none, with an operator of ONNX."""
    listed = [axes] if isinstance(axes, int) else list(axes or [])
    if rank == 0:
        return context.emit("Identity", value)
    normalized = [normalize_axis(axis, rank) for axis in listed] or list(range(rank))
    return context.emit(operator, value, context.integers(normalized), keepdims=int(keep))


@translates("sum.dim_IntList", "sum.default")
def _sum(context: Context, value: Operand, axes: Argument = None, keep: bool = False, **_: object) -> str:
    source = context.cast(value, context.result.dtype)
    return reduce_axes(context, "ReduceSum", source, value.rank, axes, keep)


@translates("mean.dim", "mean.default")
def _mean(context: Context, value: Operand, axes: Argument = None, keep: bool = False, **_: object) -> str:
    source = context.cast(value, context.result.dtype)
    return reduce_axes(context, "ReduceMean", source, value.rank, axes, keep)


@translates("amax.default", "max.default")
def _amax(context: Context, value: Operand, axes: Argument = None, keep: bool = False) -> str:
    return reduce_axes(context, "ReduceMax", value, value.rank, axes, keep)


@translates("amin.default", "min.default")
def _amin(context: Context, value: Operand, axes: Argument = None, keep: bool = False) -> str:
    return reduce_axes(context, "ReduceMin", value, value.rank, axes, keep)


@translates("prod.dim_int", "prod.default")
def _prod(context: Context, value: Operand, axes: Argument = None, keep: bool = False, **_: object) -> str:
    source = context.cast(value, context.result.dtype)
    return reduce_axes(context, "ReduceProd", source, value.rank, axes, keep)


def reduce_truth(context: Context, operator: str, value: Operand, axes: Argument, keep: bool) -> str:
    """Reduce truth values as numbers 0 and 1."""
    numbers = context.cast(Operand(context.cast(value, torch.bool), torch.bool, value.shape), torch.int32)
    return context.cast(reduce_axes(context, operator, numbers, value.rank, axes, keep), torch.bool)


@translates("any.default", "any.dim", "any.dims")
def _any(context: Context, value: Operand, axes: Argument = None, keep: bool = False) -> str:
    return reduce_truth(context, "ReduceMax", value, axes, keep)


@translates("all.default", "all.dim", "all.dims")
def _all(context: Context, value: Operand, axes: Argument = None, keep: bool = False) -> str:
    return reduce_truth(context, "ReduceMin", value, axes, keep)


def find_extreme(context: Context, operator: str, value: Operand, axis: int | None, keep: bool) -> str:
    """Return the positions of the largest or smallest elements; of equal ones the first."""
    if axis is None:
        flat = context.emit("Reshape", value, context.integers([-1]))
        return context.emit(operator, flat, axis=0, keepdims=0)
    return context.emit(operator, value, axis=normalize_axis(axis, value.rank), keepdims=int(keep))


@translates("argmax.default")
def _argmax(context: Context, value: Operand, axis: int | None = None, keep: bool = False) -> str:
    return find_extreme(context, "ArgMax", value, axis, keep)


@translates("argmin.default")
def _argmin(context: Context, value: Operand, axis: int | None = None, keep: bool = False) -> str:
    return find_extreme(context, "ArgMin", value, axis, keep)


@translates("max.dim")
def _max_dim(context: Context, value: Operand, axis: int, keep: bool = False) -> list[str]:
    return [_amax(context, value, axis, keep), find_extreme(context, "ArgMax", value, axis, keep)]


@translates("min.dim")
def _min_dim(context: Context, value: Operand, axis: int, keep: bool = False) -> list[str]:
    return [_amin(context, value, axis, keep), find_extreme(context, "ArgMin", value, axis, keep)]


def compute_variance(
    context: Context, value: Operand, axes: Argument, correction: Argument, keep: bool
) -> tuple[str, str]:
    """Return the variance, in the two passes that do not cancel, and the mean."""
    mean = reduce_axes(context, "ReduceMean", value, value.rank, axes, True)
    centered = context.emit("Sub", value, mean)
    square = context.emit("Mul", centered, centered)
    correction = 1 if correction is None else correction
    listed = [axes] if isinstance(axes, int) else list(axes or range(value.rank))
    sizes = [as_dimension(value.shape[axis]) for axis in listed]
    variance = reduce_axes(context, "ReduceMean", square, value.rank, axes, keep)
    if correction:
        count = context.number(math.prod(size for size in sizes if isinstance(size, int)), torch.int64)
        for size in sizes:
            count = count if isinstance(size, int) else context.emit("Mul", count, context.size(size))
        number = context.cast(count, value.dtype)
        rest = context.emit("Sub", number, context.number(correction, value.dtype))
        variance = context.emit("Mul", variance, context.emit("Div", number, rest))
    return variance, mean if keep else reduce_axes(context, "ReduceMean", value, value.rank, axes, False)


@translates("var_mean.correction")
def _var_mean(
    context: Context, value: Operand, axes: Argument = None, *, correction: Argument = None, keepdim: bool = False
) -> list[str]:
    return list(compute_variance(context, value, axes, correction, keepdim))


@translates("var.correction")
def _var(
    context: Context, value: Operand, axes: Argument = None, *, correction: Argument = None, keepdim: bool = False
) -> str:
    return compute_variance(context, value, axes, correction, keepdim)[0]


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
