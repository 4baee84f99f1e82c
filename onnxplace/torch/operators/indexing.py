"""Reading and writing at positions that are data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from onnxplace.torch.operators.table import translates
from onnxplace.torch.values import (
    Argument,
    Context,
    Operand,
    UntranslatableError,
    as_dimension,
    is_static,
    normalize_axis,
    same_shape,
)


@translates("embedding.default")
def _embedding(context: Context, weight: Operand, indices: Operand, *_: object) -> str:
    return context.emit("Gather", weight, context.cast(indices, torch.int64), axis=0)


@translates("embedding_dense_backward.default")
def _embedding_backward(
    context: Context, gradient: Operand, indices: Operand, count: int, padding: int, scale_by_frequency: bool
) -> str:
    if scale_by_frequency:
        raise UntranslatableError("embeddings with scale_grad_by_freq")
    width = gradient.shape[-1]
    rows = context.emit("Reshape", context.cast(indices, torch.int64), context.integers([-1, 1]))
    updates = context.reshape(gradient, [-1, width])
    if padding >= 0:
        # The row of the padding index gets no gradient.
        used = context.emit("Not", context.emit("Equal", rows, context.number(padding, torch.int64)))
        updates = context.emit("Where", used, updates, context.number(0, gradient.dtype))
    zeros = context.fill([count, width], 0, gradient.dtype)
    return context.reshape(add_rows(context, zeros, rows, updates, width), [count, width])


def add_rows(context: Context, target: str, rows: str, updates: str, width: Argument) -> str:
    """Add updates [count, width] to the rows [count, 1] of a target; the result may be flat.

    `ScatterND` with a sum would be shorter. In ONNX Runtime on several threads, it loses updates of equal rows
    (measured with 1.32). `ScatterElements` does not, and is twice as fast in one dimension as in two.
    """
    if not is_static([width]):
        positions = context.emit("Expand", rows, context.emit("Shape", updates))
        return context.emit("ScatterElements", target, positions, updates, axis=0, reduction="add")
    columns = context.builder.constant(torch.arange(int(width)).numpy())
    starts = context.emit("Mul", rows, context.number(int(width), torch.int64))
    flat = context.integers([-1])
    parts = [context.emit("Reshape", name, flat) for name in (target, context.emit("Add", starts, columns), updates)]
    return context.emit("ScatterElements", *parts, axis=0, reduction="add")


@translates("index_select.default")
def _index_select(context: Context, value: Operand, axis: int, indices: Operand) -> str:
    return context.emit("Gather", value, context.cast(indices, torch.int64), axis=normalize_axis(axis, value.rank))


@translates("gather.default")
def _gather(context: Context, value: Operand, axis: int, indices: Operand, **_: object) -> str:
    return context.emit(
        "GatherElements", value, context.cast(indices, torch.int64), axis=normalize_axis(axis, value.rank)
    )


def scatter(
    context: Context, value: Operand, axis: int, indices: Operand, source: Argument, reduction: str | None
) -> str:
    """Write elements at positions along an axis."""
    if isinstance(source, Operand):
        updates = context.cast(source, value.dtype)
        if not same_shape(source.shape, indices.shape):
            # torch reads only the part of the source that has positions.
            ends = context.shape(indices.shape)
            starts = context.integers([0] * source.rank)
            updates = context.emit("Slice", updates, starts, ends, context.integers(range(source.rank)))
    else:
        updates = context.emit("Expand", context.number(source, value.dtype), context.shape(indices.shape))
    axis = normalize_axis(axis, value.rank)
    positions = context.cast(indices, torch.int64)
    return context.emit("ScatterElements", value, positions, updates, axis=axis, reduction=reduction)


@translates("scatter.src", "scatter.value")
def _scatter(context: Context, value: Operand, axis: int, indices: Operand, source: Argument) -> str:
    return scatter(context, value, axis, indices, source, None)


@translates("scatter_add.default")
def _scatter_add(context: Context, value: Operand, axis: int, indices: Operand, source: Argument) -> str:
    return scatter(context, value, axis, indices, source, "add")


@translates("index_add.default")
def _index_add(
    context: Context, value: Operand, axis: int, indices: Operand, source: Operand, *, alpha: float = 1
) -> str:
    listed: list[Operand | None] = [None] * normalize_axis(axis, value.rank) + [indices]
    if alpha != 1:
        scaled = context.emit("Mul", source, context.number(alpha, source.dtype))
        source = Operand(scaled, source.dtype, source.shape)
    return put(context, value, listed, source, accumulate=True)


def list_axes(indices: Sequence[Operand | None]) -> list[int]:
    """Return the axes that have an index; raises `UntranslatableError` for masks."""
    if any(index is not None and index.dtype == torch.bool for index in indices):
        raise UntranslatableError("indexing with a mask, whose result has a size that depends on data; use where()")
    return [axis for axis, index in enumerate(indices) if index is not None]


def broadcast_indices(
    context: Context, indices: Sequence[Operand], sizes: Sequence[Argument]
) -> tuple[str, list[Argument]]:
    """Return the indices as tuples, [*broadcast, count], and the shape to which they broadcast; none is negative."""
    rank = max(index.rank for index in indices)
    shape: list[Argument] = [1] * rank
    for index in indices:
        for axis, size in enumerate(index.shape, rank - index.rank):
            shape[axis] = size if as_dimension(shape[axis]) == 1 else shape[axis]
    target = context.shape(shape)
    columns = []
    for index in indices:
        positions = context.cast(index, torch.int64)
        if not same_shape(index.shape, shape):
            positions = context.emit("Expand", positions, target)
        columns.append(context.emit("Unsqueeze", positions, context.integers([-1])))
    return (columns[0] if len(columns) == 1 else context.emit("Concat", *columns, axis=-1)), shape


def find_place(axes: Sequence[int]) -> int:
    """Return the axis of the result where indexed axes go, by the rules of numpy."""
    return axes[0] if list(axes) == list(range(axes[0], axes[0] + len(axes))) else 0


@translates("index.Tensor", "_unsafe_index.Tensor")
def _index(context: Context, value: Operand, indices: Sequence[Operand | None]) -> str:
    axes = list_axes(indices)
    present: list[Any] = [indices[axis] for axis in axes]
    if len(axes) == 1:
        return context.emit("Gather", value, context.cast(present[0], torch.int64), axis=axes[0])
    rest = [axis for axis in range(value.rank) if axis not in axes]
    moved = context.emit("Transpose", value, perm=[*axes, *rest]) if axes != list(range(len(axes))) else value
    tuples, shape = broadcast_indices(context, present, value.shape)
    picked = context.emit("GatherND", moved, tuples)
    place = find_place(axes)
    if place == 0:
        return picked
    count = len(shape)
    order = [*range(count, count + place), *range(count), *range(count + place, count + len(rest))]
    return context.emit("Transpose", picked, perm=order)


def are_distinct(indices: Sequence[Operand]) -> bool:
    """Return whether one constant index has no position twice, so that no updates meet."""
    if len(indices) != 1 or indices[0].constant is None or bool((indices[0].constant < 0).any()):
        return False
    return bool(indices[0].constant.unique().numel() == indices[0].constant.numel())


def add_at(context: Context, value: Operand, axes: Sequence[int], parts: tuple[str, str, str]) -> str:
    """Add updates at index tuples of a target whose indexed axes are the first."""
    target, tuples, updates = parts
    sizes = [value.shape[axis] for axis in axes]
    rest = [value.shape[axis] for axis in range(value.rank) if axis not in axes]
    limits = context.shape(sizes)
    # Whole numbers modulo the size are not negative.
    wrapped = context.emit("Mod", tuples, limits)
    if not is_static(sizes[1:]):
        raise UntranslatableError("sums at positions in several axes of unknown size; try dynamic_batch=False")
    steps = [math.prod(int(size) for size in sizes[index + 1 :]) for index in range(len(sizes))]
    scaled = context.emit("Mul", wrapped, context.integers(steps))
    row = context.emit("ReduceSum", scaled, context.integers([-1]), keepdims=1)
    rows = context.emit("Reshape", row, context.integers([-1, 1]))
    if is_static(rest):
        width = math.prod(int(size) for size in rest)
        matrix = context.emit("Reshape", updates, context.integers([-1, width]))
        added = add_rows(context, target, rows, matrix, width)
    else:
        if not is_static(sizes):
            raise UntranslatableError("sums at positions in the batch; try dynamic_batch=False")
        table = context.emit("Reshape", target, context.integers([math.prod(map(int, sizes)), -1]))
        counted = context.emit("Shape", rows, start=0, end=1)
        matrix = context.emit("Reshape", updates, context.emit("Concat", counted, context.integers([-1]), axis=0))
        unknown = next(size for size in rest if not is_static([size]))
        added = add_rows(context, table, rows, matrix, unknown)
    return context.emit("Reshape", added, context.emit("Shape", target))


def put(
    context: Context, value: Operand, indices: Sequence[Operand | None], source: Operand, *, accumulate: bool
) -> str:
    """Write values at indices, or add them there."""
    axes = list_axes(indices)
    present: list[Any] = [indices[axis] for axis in axes]
    rest = [axis for axis in range(value.rank) if axis not in axes]
    order = [*axes, *rest]
    is_moved = order != list(range(value.rank))
    target = context.emit("Transpose", value, perm=order) if is_moved else context.read(value)
    tuples, shape = broadcast_indices(context, present, value.shape)
    place, count = find_place(axes), len(shape)
    sizes = [value.shape[axis] for axis in rest]
    wanted = [*sizes[:place], *shape, *sizes[place:]]
    updates = context.cast(source, value.dtype)
    if not same_shape(source.shape, wanted):
        updates = context.emit("Expand", updates, context.shape(wanted))
    if place:
        lead = [*range(place, place + count), *range(place), *range(place + count, len(wanted))]
        updates = context.emit("Transpose", updates, perm=lead)
    if accumulate and not are_distinct(present):
        written = add_at(context, value, axes, (target, tuples, updates))
    else:
        written = context.emit("ScatterND", target, tuples, updates, reduction="add" if accumulate else None)
    if not is_moved:
        return written
    return context.emit("Transpose", written, perm=[order.index(axis) for axis in range(value.rank)])


@translates("index_put.default", "_unsafe_index_put.default")
def _index_put(
    context: Context, value: Operand, indices: Sequence[Operand | None], source: Operand, accumulate: bool = False
) -> str:
    return put(context, value, indices, source, accumulate=accumulate)


@translates("_embedding_bag.default", "_embedding_bag_forward_only.default")
def _embedding_bag(context: Context, *_: object) -> str:
    raise UntranslatableError("use nn.Embedding and sum() or mean() in its place")
