"""ATen operators that move elements: shapes, slices, joins, and positions that are data."""

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
    as_dimension,
    is_static,
    normalize_axis,
    same_shape,
    translates,
    translates_each,
)

# ------------------------------------------------------------------------------------------------ shapes, slices, joins


# Ends of slices that reach to the end are this number in torch.
MAX_INT64 = 2**63 - 1


@translates("view.default", "_unsafe_view.default", "reshape.default", "view_copy.default", "_reshape_alias.default")
def _view(context: Context, value: Operand, shape: Sequence[Argument], *_: object) -> Operand | str:
    if same_shape(value.shape, context.result.shape):
        return value
    return context.reshape(value, context.result.shape)


@translates("permute.default")
def permute(context: Context, value: Operand, order: Sequence[int]) -> Operand:
    """Return a permutation; permutations of permutations are one, and none at all where nothing moves."""
    order = tuple(normalize_axis(axis, value.rank) for axis in order)
    source = value
    if value.permuted is not None:
        source, first = value.permuted
        order = tuple(first[axis] for axis in order)
    if order == tuple(range(len(order))):
        return source
    name = context.emit("Transpose", source, perm=list(order))
    return Operand(name, source.dtype, tuple(source.shape[axis] for axis in order), permuted=(source, order))


@translates("t.default")
def _t(context: Context, value: Operand) -> Operand:
    return value if value.rank < 2 else permute(context, value, (1, 0))


@translates("transpose.int")
def _transpose(context: Context, value: Operand, first: int, second: int) -> Operand:
    order = list(range(value.rank))
    if value.rank:
        first, second = normalize_axis(first, value.rank), normalize_axis(second, value.rank)
        order[first], order[second] = second, first
    return permute(context, value, order)


@translates("expand.default")
def _expand(context: Context, value: Operand, shape: Sequence[Argument], **_: object) -> Operand | str:
    if same_shape(value.shape, context.result.shape):
        return value
    shape = context.result.shape
    lead = len(shape) - value.rank
    # In ONNX, a size of 1 keeps the input's size.
    kept = [index >= lead and same_shape([size], [value.shape[index - lead]]) for index, size in enumerate(shape)]
    target = context.shape([1 if keeps else size for keeps, size in zip(kept, shape)])
    name = context.emit("Expand", value, target)
    return Operand(name, value.dtype, tuple(shape), expanded=value.expanded or value)


@translates("unsqueeze.default")
def _unsqueeze(context: Context, value: Operand, axis: int) -> str:
    return context.emit("Unsqueeze", value, context.integers([normalize_axis(axis, value.rank + 1)]))


@translates("squeeze.dims", "squeeze.dim", "squeeze.default")
def _squeeze(context: Context, value: Operand, axes: int | Sequence[int] | None = None) -> Operand | str:
    chosen = range(value.rank) if axes is None else [axes] if isinstance(axes, int) else axes
    normalized = [normalize_axis(axis, value.rank) for axis in chosen]
    ones = sorted(axis for axis in set(normalized) if value.rank and as_dimension(value.shape[axis]) == 1)
    return context.emit("Squeeze", value, context.integers(ones)) if ones else value


@translates("cat.default")
def _cat(context: Context, values: Sequence[Operand], axis: int = 0) -> str:
    # Vectors without elements may stand among tensors of any rank.
    parts = [value for value in values if value.shape != (0,)] or list(values[:1])
    names = [context.cast(value, context.result.dtype) for value in parts]
    if len(names) == 1:
        return context.emit("Identity", names[0])
    return context.emit("Concat", *names, axis=normalize_axis(axis, parts[0].rank))


@translates("stack.default")
def _stack(context: Context, values: Sequence[Operand], axis: int = 0) -> str:
    axis = normalize_axis(axis, values[0].rank + 1)
    names = [context.emit("Unsqueeze", value, context.integers([axis])) for value in values]
    return context.emit("Concat", *names, axis=axis)


def is_whole(value: Operand, axis: int, start: Argument, end: Argument, step: Argument) -> bool:
    """Return whether a slice is the whole axis."""
    size = as_dimension(value.shape[axis])
    reaches = end is None or as_dimension(end) == MAX_INT64 or same_shape([end], [size])
    if isinstance(size, int) and isinstance(end, int) and end >= size:
        reaches = True
    return start in (None, 0) and reaches and step == 1


@translates("slice.Tensor")
def _slice(
    context: Context, value: Operand, axis: int = 0, start: Argument = None, end: Argument = None, step: Argument = 1
) -> Operand | str:
    axis = normalize_axis(axis, value.rank)
    if is_whole(value, axis, start, end, step):
        return value
    first, last = context.shape([start or 0]), context.shape([MAX_INT64 if end is None else end])
    return context.emit("Slice", value, first, last, context.integers([axis]), context.integers([step]))


@translates("select.int")
def _select(context: Context, value: Operand, axis: int, index: Argument) -> str:
    return context.emit("Gather", value, context.number(index, torch.int64), axis=normalize_axis(axis, value.rank))


@translates("split_with_sizes.default", "split.Tensor", "split_with_sizes_copy.default")
def _split(context: Context, value: Operand, sizes: Argument, axis: int = 0) -> list[str]:
    axis = normalize_axis(axis, value.rank)
    lengths = [result.shape[axis] for result in context.result]
    if not is_static(lengths):
        raise UntranslatableError("parts of the batch whose sizes depend on it; try dynamic_batch=False")
    return context.add("Split", [value, context.integers([int(n) for n in lengths])], len(lengths), axis=axis)


@translates("unbind.int")
def _unbind(context: Context, value: Operand, axis: int = 0) -> list[str]:
    axis = normalize_axis(axis, value.rank)
    positions = range(len(context.result))
    return [context.emit("Gather", value, context.number(index, torch.int64), axis=axis) for index in positions]


@translates("slice_scatter.default")
def _slice_scatter(
    context: Context,
    value: Operand,
    source: Operand,
    axis: int = 0,
    start: Argument = None,
    end: Argument = None,
    step: Argument = 1,
) -> Operand | str:
    axis = normalize_axis(axis, value.rank)
    if is_whole(value, axis, start, end, step):
        return source
    if step != 1:
        return scatter_positions(context, value, source, axis, start, end, step)
    size, begin = value.shape[axis], 0 if start is None else start
    if not is_static([size, begin, source.shape[axis]]):
        raise UntranslatableError("a slice of the batch whose bounds depend on it; try dynamic_batch=False")
    begin = max(begin + size, 0) if begin < 0 else min(begin, size)
    last = begin + source.shape[axis]
    pieces = [context.cast(source, value.dtype)]
    if begin > 0:
        pieces.insert(0, slice_static(context, value, axis, 0, begin))
    if last < size:
        pieces.append(slice_static(context, value, axis, last, size))
    return context.emit("Concat", *pieces, axis=axis)


def slice_static(context: Context, value: Operand, axis: int, start: int, end: int) -> str:
    """Return a slice with known bounds."""
    bounds = [context.integers([number]) for number in (start, end, axis)]
    return context.emit("Slice", value, *bounds)


def scatter_positions(
    context: Context, value: Operand, source: Operand, axis: int, start: Argument, end: Argument, step: int
) -> str:
    """Write a slice with steps, by the positions of its elements."""
    if not is_static([value.shape[axis]]):
        raise UntranslatableError("a slice of the batch with steps; try dynamic_batch=False")
    positions = torch.arange(value.shape[axis])[slice(start, None if end == MAX_INT64 else end, step)]
    shape = [1] * value.rank
    shape[axis] = -1
    column = context.builder.constant(positions.reshape(shape).numpy())
    indices = context.emit("Expand", column, context.shape(source.shape))
    return context.emit("ScatterElements", value, indices, context.cast(source, value.dtype), axis=axis)


@translates("select_scatter.default")
def _select_scatter(context: Context, value: Operand, source: Operand, axis: int, index: int) -> Operand | str:
    axis = normalize_axis(axis, value.rank)
    shape = (*source.shape[:axis], 1, *source.shape[axis:])
    row = context.emit("Unsqueeze", context.cast(source, value.dtype), context.integers([axis]))
    operand = Operand(row, value.dtype, shape)
    return _slice_scatter(context, value, operand, axis, index, index + 1 or None)


@translates("constant_pad_nd.default")
def _constant_pad(context: Context, value: Operand, padding: Sequence[Argument], number: float = 0) -> str:
    before, after = [0] * value.rank, [0] * value.rank
    for index in range(len(padding) // 2):
        axis = value.rank - 1 - index
        before[axis], after[axis] = padding[2 * index], padding[2 * index + 1]
    return context.emit("Pad", value, context.shape([*before, *after]), context.number(number, value.dtype))


@translates("flip.default")
def _flip(context: Context, value: Operand, axes: Sequence[int]) -> str:
    axes = [normalize_axis(axis, value.rank) for axis in axes]
    ends = context.integers([-MAX_INT64] * len(axes))
    starts, steps = context.integers([-1] * len(axes)), context.integers([-1] * len(axes))
    return context.emit("Slice", value, starts, ends, context.integers(axes), steps)


@translates("repeat.default")
def _repeat(context: Context, value: Operand, repeats: Sequence[Argument]) -> str:
    added = len(repeats) - value.rank
    shaped = context.reshape(value, [*[1] * added, *value.shape]) if added else context.read(value)
    return context.emit("Tile", shaped, context.shape(repeats))


@translates_each({"tril.default": 0, "triu.default": 1})
def _triangle(context: Context, upper: int, value: Operand, diagonal: int = 0) -> str:
    return context.emit("Trilu", value, context.number(diagonal, torch.int64), upper=upper)


@translates("diagonal.default")
def _diagonal(context: Context, value: Operand, offset: int = 0, first: int = 0, second: int = 1) -> str:
    first, second = normalize_axis(first, value.rank), normalize_axis(second, value.rank)
    rest = [axis for axis in range(value.rank) if axis not in (first, second)]
    moved = context.emit("Transpose", value, perm=[first, second, *rest])
    length = context.result.shape[-1]
    if not is_static([length]):
        return _diagonal_of_batch(context, value, moved, offset, rest, length)
    rows = torch.arange(int(length)) + max(-offset, 0)
    indices = torch.stack([rows, torch.arange(int(length)) + max(offset, 0)], dim=-1)
    picked = context.emit("GatherND", moved, context.builder.constant(indices.numpy()))
    return context.emit("Transpose", picked, perm=[*range(1, len(rest) + 1), 0])


def _diagonal_of_batch(
    context: Context, value: Operand, moved: str, offset: int, rest: Sequence[int], length: Argument
) -> str:
    zero, one = context.number(0, torch.int64), context.number(1, torch.int64)
    steps = context.emit("Range", zero, context.size(as_dimension(length)), one)
    columns = [context.emit("Add", steps, context.number(max(sign * offset, 0), torch.int64)) for sign in (-1, 1)]
    vectors = [context.emit("Unsqueeze", column, context.integers([1])) for column in columns]
    picked = context.emit("GatherND", moved, context.emit("Concat", *vectors, axis=1))
    return context.emit("Transpose", picked, perm=[*range(1, len(rest) + 1), 0])


@translates("unfold.default")
def _unfold(context: Context, value: Operand, axis: int, size: int, step: int) -> str:
    """Return windows along an axis, whose elements become the last axis."""
    axis = normalize_axis(axis, value.rank)
    length = value.shape[axis]
    if not is_static([length]):
        raise UntranslatableError("windows along the batch; try dynamic_batch=False")
    starts = torch.arange(0, int(length) - size + 1, step)
    indices = starts[:, None] + torch.arange(size)
    windows = context.emit("Gather", value, context.builder.constant(indices.numpy()), axis=axis)
    order = [index for index in range(value.rank + 1) if index != axis + 1]
    return context.emit("Transpose", windows, perm=[*order, axis + 1])


@translates("diagonal_scatter.default")
def _diagonal_scatter(
    context: Context, value: Operand, source: Operand, offset: int = 0, first: int = 0, second: int = 1
) -> str:
    """Write a diagonal: its positions, chosen by a mask, take the source repeated along the second axis."""
    first, second = normalize_axis(first, value.rank), normalize_axis(second, value.rank)
    rows, columns = value.shape[first], value.shape[second]
    if not is_static([rows, columns]):
        raise UntranslatableError("a diagonal over the batch; try dynamic_batch=False")
    mask = torch.zeros(int(rows), int(columns))
    mask.diagonal(offset).fill_(1)
    rest = [axis for axis in range(value.rank) if axis not in (first, second)]
    order = [*rest, first, second]
    # The k-th element of the diagonal is in row k, or k - offset: the source, padded, as a column.
    before = max(-offset, 0)
    after = int(rows) - before - int(source.shape[-1])
    pads = context.integers([*[0] * len(rest), before, *[0] * len(rest), after])
    column = context.emit("Pad", context.cast(source, value.dtype), pads, context.number(0, value.dtype))
    spread = context.emit("Unsqueeze", column, context.integers([-1]))
    moved = context.emit("Transpose", value, perm=order)
    written = context.emit("Where", mask.bool().numpy(), spread, moved)
    return context.emit("Transpose", written, perm=[order.index(axis) for axis in range(value.rank)])


# ---------------------------------------------------------------------------------------------- positions that are data


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


@translates_each({"index_select.default": "Gather", "gather.default": "GatherElements"})
def _gather(context: Context, operator: str, value: Operand, axis: int, indices: Operand, **_: object) -> str:
    return context.emit(operator, value, context.cast(indices, torch.int64), axis=normalize_axis(axis, value.rank))


@translates_each({"scatter.src": None, "scatter.value": None, "scatter_add.default": "add"})
def _scatter(
    context: Context, reduction: str | None, value: Operand, axis: int, indices: Operand, source: Argument
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


@translates("index_put.default", "_unsafe_index_put.default")
def put(
    context: Context, value: Operand, indices: Sequence[Operand | None], source: Operand, accumulate: bool = False
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


@translates("_embedding_bag.default", "_embedding_bag_forward_only.default")
def _embedding_bag(context: Context, *_: object) -> str:
    raise UntranslatableError("use nn.Embedding and sum() or mean() in its place")
