"""Softmax and normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from onnxplace.torch.operators.table import translates
from onnxplace.torch.values import Argument, Context, Operand, as_dimension, normalize_axis


@translates("_softmax.default", "softmax.int")
def _softmax(context: Context, value: Operand, axis: int, *_: object) -> str:
    return context.emit("Softmax", context.cast(value, context.result.dtype), axis=normalize_axis(axis, value.rank))


@translates("_log_softmax.default", "log_softmax.int")
def _log_softmax(context: Context, value: Operand, axis: int, *_: object) -> str:
    return context.emit("LogSoftmax", context.cast(value, context.result.dtype), axis=normalize_axis(axis, value.rank))


@translates("native_layer_norm.default")
def _layer_norm(
    context: Context,
    value: Operand,
    normalized_shape: Sequence[int],
    weight: Operand | None,
    bias: Operand | None,
    epsilon: float,
) -> list[str]:
    scale = context.builder.constant(torch.ones(list(normalized_shape)).numpy()) if weight is None else weight
    inputs = [value, context.cast(scale, value.dtype) if weight is None else scale, *([] if bias is None else [bias])]
    return context.add("LayerNormalization", inputs, 3, axis=-len(normalized_shape), epsilon=float(epsilon))


def reduce_mean(context: Context, value: Argument, axes: Sequence[int]) -> str:
    """Return the mean over axes, which stay with size one."""
    return context.emit("ReduceMean", value, context.integers(axes), keepdims=1)


def normalize(
    context: Context, value: Operand, mean: str, inverse: str, weight: Operand | None, bias: Operand | None
) -> str:
    """Return (value - mean) * inverse * weight + bias along the channels, axis 1."""
    # Small numbers first: the whole value is multiplied once.
    scale = apply_affine(context, inverse, value.rank, weight, None)
    result = context.emit("Mul", context.emit("Sub", value, mean), scale)
    return apply_affine(context, result, value.rank, None, bias)


def apply_affine(context: Context, value: str, rank: int, weight: Operand | None, bias: Operand | None) -> str:
    """Return value * weight + bias along the channels, axis 1."""
    column = context.integers([1, -1, *[1] * (rank - 2)])
    for operator, factor in (("Mul", weight), ("Add", bias)):
        if factor is not None:
            value = context.emit(operator, value, context.emit("Reshape", factor, column))
    return value


def compute_statistics(context: Context, value: Operand, epsilon: float) -> tuple[str, str, str]:
    """Return mean, variance and the inverse of the deviation of each channel, in a shape that broadcasts."""
    axes = [0, *range(2, value.rank)]
    mean = reduce_mean(context, value, axes)
    centered = context.emit("Sub", value, mean)
    variance = reduce_mean(context, context.emit("Mul", centered, centered), axes)
    return mean, variance, invert_deviation(context, variance, epsilon)


def invert_deviation(context: Context, variance: str, epsilon: float) -> str:
    """Return 1 / sqrt(variance + epsilon)."""
    shifted = context.emit("Add", variance, context.number(epsilon, torch.float32))
    return context.emit("Reciprocal", context.emit("Sqrt", shifted))


@translates("_native_batch_norm_legit_functional.default")
def _batch_norm(
    context: Context,
    value: Operand,
    weight: Operand | None,
    bias: Operand | None,
    running_mean: Operand,
    running_variance: Operand,
    training: bool,
    momentum: float,
    epsilon: float,
) -> list[Argument]:
    flat = context.integers([-1])
    if not training:
        results = _normalize_with_running(context, value, weight, bias, running_mean, running_variance, epsilon)
        return [*results, running_mean, running_variance]
    mean, variance, inverse = compute_statistics(context, value, epsilon)
    result = normalize(context, value, mean, inverse, weight, bias)
    mean, variance, inverse = (context.emit("Reshape", name, flat) for name in (mean, variance, inverse))
    # Running variances are unbiased: n / (n - 1) times the variance that normalises.
    count = count_samples(context, value)
    one = context.number(1.0, torch.float32)
    unbiased = context.emit("Mul", variance, context.emit("Div", count, context.emit("Sub", count, one)))
    updated = [
        update_running(context, *pair, momentum) for pair in ((running_mean, mean), (running_variance, unbiased))
    ]
    return [result, mean, inverse, *updated]


def count_samples(context: Context, value: Operand) -> str:
    """Return over how many elements each channel's statistics are, as float32."""
    sizes = [as_dimension(size) for index, size in enumerate(value.shape) if index != 1]
    number = math.prod(size for size in sizes if isinstance(size, int))
    if all(isinstance(size, int) for size in sizes):
        return context.number(float(number), torch.float32)
    count = context.number(number, torch.int64)
    for size in sizes:
        count = count if isinstance(size, int) else context.emit("Mul", count, context.size(size))
    return context.cast(count, torch.float32)


def update_running(context: Context, running: Operand, current: str, momentum: float) -> str:
    """Return the running statistic after one more batch."""
    old = context.emit("Mul", running, context.number(1 - momentum, torch.float32))
    return context.emit("Add", old, context.emit("Mul", current, context.number(momentum, torch.float32)))


def _normalize_with_running(
    context: Context,
    value: Operand,
    weight: Operand | None,
    bias: Operand | None,
    running_mean: Operand,
    running_variance: Operand,
    epsilon: float,
) -> list[str]:
    column = context.integers([1, -1, *[1] * (value.rank - 2)])
    mean = context.emit("Reshape", running_mean, column)
    inverse = context.emit("Reshape", invert_deviation(context, context.read(running_variance), epsilon), column)
    result = normalize(context, value, mean, inverse, weight, bias)
    empty = context.builder.constant(torch.zeros(0).numpy())
    return [result, empty, empty]


@translates("_native_batch_norm_legit_no_training.default")
def _batch_norm_evaluation(
    context: Context,
    value: Operand,
    weight: Operand | None,
    bias: Operand | None,
    running_mean: Operand,
    running_variance: Operand,
    momentum: float,
    epsilon: float,
) -> list[str]:
    return _normalize_with_running(context, value, weight, bias, running_mean, running_variance, epsilon)


@translates("_native_batch_norm_legit.no_stats")
def _batch_norm_without_statistics(
    context: Context,
    value: Operand,
    weight: Operand | None,
    bias: Operand | None,
    training: bool,
    momentum: float,
    epsilon: float,
) -> list[str]:
    mean, _, inverse = compute_statistics(context, value, epsilon)
    flat = context.integers([-1])
    result = normalize(context, value, mean, inverse, weight, bias)
    return [result, context.emit("Reshape", mean, flat), context.emit("Reshape", inverse, flat)]


@translates("native_group_norm.default")
def _group_norm(
    context: Context,
    value: Operand,
    weight: Operand | None,
    bias: Operand | None,
    samples: Argument,
    channels: int,
    size: Argument,
    groups: int,
    epsilon: float,
) -> list[str]:
    grouped = context.emit("Reshape", value, context.integers([0, groups, -1]))
    mean = reduce_mean(context, grouped, [2])
    centered = context.emit("Sub", grouped, mean)
    inverse = invert_deviation(context, reduce_mean(context, context.emit("Mul", centered, centered), [2]), epsilon)
    result = context.reshape(context.emit("Mul", centered, inverse), value.shape)
    result = apply_affine(context, result, value.rank, weight, bias)
    last = context.integers([2])
    return [result, context.emit("Squeeze", mean, last), context.emit("Squeeze", inverse, last)]
