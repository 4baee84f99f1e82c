"""Reshapes, and splits and concatenations along the cut axis: where a cut is behind them depends on all shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnxplace.passes.sharding.rules.layouts import Division, Layout
from onnxplace.passes.sharding.rules.node_views import Edit, LocalNode, NodeView, Shape

RESHAPES = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})


def reshape_layout(source: Shape, result: Shape, layout: Layout, division: Division) -> Layout | None:
    """Return the layout of the reshaped tensor, None if its parts are not cut along one axis.

    >>> division = Division((1.0, 1.0))
    >>> reshape_layout((8, 12), (8, 3, 4), Layout(1, 3, 2), division)
    Layout(axis=2, outer=1, blocks=2, rows=(), valid=())
    >>> reshape_layout((8, 3, 4), (8, 12), Layout(2, 1, 2), division)
    Layout(axis=1, outer=3, blocks=2, rows=(), valid=())
    """
    group = _find_group(source, result, layout.axis)
    if group is None:
        return None
    first_source, first_result, end_result = group
    # In row-major order, the tensor has this many rows that are cut alike.
    outer = source[layout.axis] // -layout.outer if layout.is_in_runs else layout.outer
    rows = math.prod(source[first_source : layout.axis]) * outer
    before = 1
    for axis in range(first_result, end_result):
        if result[axis] > 1 and before <= rows < before * result[axis] and rows % before == 0:
            outer = rows // before
            if result[axis] % outer or (result[axis] // outer) % layout.blocks:
                return None
            return division.split(axis, result[axis], outer, layout.blocks)
        before *= result[axis]
    return None


def _find_group(source: Shape, result: Shape, axis: int) -> tuple[int, int, int] | None:
    """Return the smallest group of axes with equal products that holds an axis.

    As (first source axis, first result axis, result axis after the last).
    """
    i = j = 0
    while i < len(source) or j < len(result):
        first_source, first_result = i, j
        left = source[i] if i < len(source) else 1
        right = result[j] if j < len(result) else 1
        i, j = i + (i < len(source)), j + (j < len(result))
        while left != right:
            if left < right:
                if i >= len(source):
                    return None
                left *= source[i]
                i += 1
            else:
                if j >= len(result):
                    return None
                right *= result[j]
                j += 1
        if first_source <= axis < i:
            return first_source, first_result, j
    return None


def set_reshape_target(source: Layout) -> Edit:
    """Return the edit of a Reshape whose input has this layout."""

    def edit(local: LocalNode) -> None:
        layout = local.layouts[0]
        assert layout is not None
        view = local.view
        if 1 not in view.constants:
            if not layout.is_in_runs:
                local.override_entry(1, 0, layout.axis, local.out_shape()[layout.axis])
            return
        target = view.constants[1].reshape(-1).tolist()
        if not layout.is_in_runs:
            target[layout.axis] = local.out_shape()[layout.axis]
        copied = source.axis
        # A zero copies the size of the input, which is now that of the part.
        if copied != layout.axis and copied < len(target) and target[copied] == 0:
            target[copied] = view.result()[copied]
        local.set_input(1, local.make_ints(target))

    return edit


def can_reshape_parts(
    view: NodeView, source: Layout, result: Layout, division: Division, fixed: Sequence[bool] = ()
) -> bool:
    """Return whether the node itself reshapes parts correctly; `fixed`: which axes of its result have a fixed size.

    A Squeeze without axes would also remove a part's axis of size 1. A computed target may have a zero, which copies
    the size of the part instead of the whole. An axis in runs has no size that could be written: the node computes it.
    """
    if view.op == "Squeeze":
        named = view.attribute("axes") is not None or view.has(1)
        size = view.shape(0)[source.axis]
        return named or (
            not source.is_in_runs
            and all(division.local_size(source, size, device) > 1 for device in range(division.count))
        )
    if view.op != "Reshape":
        return True
    if view.attribute("allowzero", 0) and 0 in view.shape(0):
        return False
    if result.is_in_runs and view.target_entry(result.axis) not in (-1, 0 if source.axis == result.axis else -1):
        return False
    copied, shape = source.axis, view.result()
    is_computed = view.has(1) and 1 not in view.constants
    may_copy = is_computed and copied != result.axis and copied < len(shape)
    if may_copy and fixed and not source.is_in_runs:
        may_copy = fixed[copied]  # a copy of a fixed size is fixed
    return not (may_copy and shape[copied] == view.shape(0)[copied])


def equal_parts(view: NodeView) -> tuple[int, int] | None:
    """Return (axis, parts) of a Split or Concat into or of equal parts, None for others."""
    one = view.shape(0) if view.op == "Split" else view.result()
    many: Sequence[Shape | None] = view.outputs if view.op == "Split" else view.inputs
    axis = view.axis(0, len(one))
    if any(shape is None for shape in many) or len(many) < 2:
        return None
    sizes = {shape[axis] for shape in many if shape is not None}
    return (axis, len(many)) if len(sizes) == 1 else None


def set_split_sizes(local: LocalNode) -> None:
    """Set the sizes that a Split cuts its part into."""
    axis = local.view.axis(0)
    sizes = [shape[axis] for shape in local.outputs if shape is not None]
    local.set_attribute("num_outputs", None)
    local.set_attribute("split", sizes if local.view.opset < 13 else None)
    if local.view.opset >= 13:
        local.set_input(1, local.make_ints(sizes))
