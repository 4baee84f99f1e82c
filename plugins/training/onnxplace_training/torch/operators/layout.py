"""ATen operators that move elements: shapes, slices, joins, and positions that are data."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onnxplace_training.torch.translation import (
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


@translates("view.default", "reshape.default", "view_copy.default")
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


@translates("squeeze.dims")
def _squeeze(context: Context, value: Operand, axes: Sequence[int]) -> Operand | str:
    normalized = {normalize_axis(axis, value.rank) for axis in axes}
    ones = sorted(axis for axis in normalized if value.rank and as_dimension(value.shape[axis]) == 1)
    return context.emit("Squeeze", value, context.integers(ones)) if ones else value


@translates("cat.default")
def _cat(context: Context, values: Sequence[Operand], axis: int = 0) -> str:
    # Vectors without elements may stand among tensors of any rank.
    parts = [value for value in values if value.shape != (0,)] or list(values[:1])
    names = [context.cast(value, context.result.dtype) for value in parts]
    if len(names) == 1:
        return context.emit("Identity", names[0])
    return context.emit("Concat", *names, axis=normalize_axis(axis, parts[0].rank))


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


@translates("split_with_sizes.default")
def _split(context: Context, value: Operand, sizes: Argument, axis: int = 0) -> list[str]:
    axis = normalize_axis(axis, value.rank)
    lengths = [result.shape[axis] for result in context.result]
    if not is_static(lengths):
        raise UntranslatableError("parts of the batch whose sizes depend on it; try dynamic_batch=False")
    return context.add("Split", [value, context.integers([int(n) for n in lengths])], len(lengths), axis=axis)


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


# ---------------------------------------------------------------------------------------------- positions that are data


@translates("embedding.default")
def _embedding(context: Context, weight: Operand, indices: Operand, *_: object) -> str:
    return context.emit("Gather", weight, context.cast(indices, torch.int64), axis=0)


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


@translates("index.Tensor")
def _index(context: Context, value: Operand, indices: Sequence[Operand | None]) -> str:
    """Pick along one axis; `decompositions` makes one of several, and leaves masks."""
    ((axis, index),) = ((axis, index) for axis, index in enumerate(indices) if index is not None)
    return context.emit("Gather", value, context.cast(index, torch.int64), axis=axis)
