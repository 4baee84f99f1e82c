"""Operators that make tensors from numbers."""

from __future__ import annotations

from typing import Any

import torch

from onnxplace.torch.operators.table import translates
from onnxplace.torch.values import Argument, Context, Operand


def make_uniform(context: Context, number: Argument) -> Operand:
    """Return a tensor of equal elements, in the shape and type of the result."""
    dtype, shape = context.result.dtype, tuple(context.result.shape)
    scalar = Operand(context.number(number, dtype), dtype, ())
    return Operand(context.fill(shape, number, dtype), dtype, shape, expanded=scalar)


@translates("full.default", "full_like.default", "new_full.default")
def _full(context: Context, _: object, number: Argument, *__: object, **___: object) -> Operand:
    return make_uniform(context, number)


# Memory that is not set yet: torch promises no contents, and here it is zero.
@translates(
    "zeros.default", "zeros_like.default", "new_zeros.default", "empty.memory_format", "empty_like.default",
    "new_empty.default", "empty_strided.default", "new_empty_strided.default", "empty_permuted.default",
)  # fmt: skip
def _zeros(context: Context, *_: object, **__: object) -> Operand:
    return make_uniform(context, 0)


@translates("ones.default", "ones_like.default", "new_ones.default")
def _ones(context: Context, *_: object, **__: object) -> Operand:
    return make_uniform(context, 1)


@translates("scalar_tensor.default")
def _scalar_tensor(context: Context, number: Argument, **_: object) -> str:
    return context.number(number, context.result.dtype)


@translates("fill.Scalar", "fill.Tensor")
def _fill(context: Context, value: Operand, number: Argument) -> Any:
    if isinstance(number, Operand):
        return context.emit("Expand", context.cast(number, value.dtype), context.shape(value.shape))
    return make_uniform(context, number)


@translates("arange.start_step")
def _arange(context: Context, start: Argument, end: Argument, step: Argument = 1, **_: object) -> str:
    dtype = context.result.dtype
    return context.emit("Range", *(context.number(number, dtype) for number in (start, end, step)))


@translates("arange.default")
def _arange_to(context: Context, end: Argument, **_: object) -> str:
    return _arange(context, 0, end, 1)


@translates("arange.start")
def _arange_from(context: Context, start: Argument, end: Argument, **_: object) -> str:
    return _arange(context, start, end, 1)


@translates("eye.default")
def _eye(context: Context, rows: Argument, **_: object) -> str:
    steps = context.emit("Range", *(context.number(number, torch.int64) for number in (0, rows, 1)))
    column = context.emit("Unsqueeze", steps, context.integers([1]))
    return context.cast(context.emit("Equal", steps, column), context.result.dtype)
