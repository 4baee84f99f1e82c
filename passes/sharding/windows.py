"""Convolutions and pools by rows: each device computes some rows of the result, and reads a window with halos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxplace.passes.sharding.layouts import Division, Layout
from onnxplace.passes.sharding.node_views import Edit, LocalNode, NodeView

ROW_AXIS = 2
"""The first spatial axis, along which images and sequences are cut."""
WINDOWED = frozenset({"Conv", "MaxPool", "AveragePool", "LpPool"})


@dataclass(frozen=True)
class Window:
    """The rows of an input that each device reads, in the numbering of the whole input."""

    input: int
    """Position of the input."""
    rows: tuple[tuple[int, int], ...]
    """[low, high) per device."""


@dataclass(frozen=True)
class _Geometry:
    """Kernel, strides, dilations and paddings, each per spatial axis."""

    kernel: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    before: Sequence[int]
    after: Sequence[int]


def find_window(view: NodeView, result: Layout, division: Division) -> tuple[Window, Edit] | None:
    """Return the rows that each device reads for its rows of the result, and the edit of paddings.

    None for operators whose parts cannot be computed from windows: with indices as results, or averages over rounded-up
    windows.
    """
    geometry = _read_geometry(view)
    if geometry is None:
        return None
    size, result_size = view.shape(0)[ROW_AXIS], view.result()[ROW_AXIS]
    stride, reach = geometry.strides[0], (geometry.kernel[0] - 1) * geometry.dilations[0] + 1
    rows, pads = [], []
    for device in range(division.count):
        low, high = division.ranges(result, result_size, device)[0]
        first = low * stride - geometry.before[0]
        last = (high - 1) * stride - geometry.before[0] + reach
        # Windows that lie in the padding alone have no rows: such a device would get nothing.
        if min(last, size) <= max(first, 0):
            return None
        rows.append((max(first, 0), min(last, size)))
        pads.append((max(-first, 0), max(last - size, 0)))

    def edit(local: LocalNode) -> None:
        before, after = list(geometry.before), list(geometry.after)
        before[0], after[0] = pads[local.device]
        for axis in range(1, len(before)):
            # Rounded-up windows of the other axes become padding, which keeps the size of the result.
            reached = (view.result()[ROW_AXIS + axis] - 1) * geometry.strides[axis] - before[axis]
            reached += (geometry.kernel[axis] - 1) * geometry.dilations[axis] + 1
            after[axis] = max(after[axis], reached - view.shape(0)[ROW_AXIS + axis])
        local.set_attribute("auto_pad", None)
        local.set_attribute("ceil_mode", None)
        local.set_attribute("pads", [*before, *after])

    return Window(0, tuple(rows)), edit


def _read_geometry(view: NodeView) -> _Geometry | None:
    """Return the geometry of a convolution or pool; None if parts cannot be computed from windows."""
    source, result = view.shape(0), view.result()
    spatial = len(source) - 2
    if len(view.present_outputs()) > 1 or view.attribute("storage_order", 0):
        return None
    kernel = view.attribute("kernel_shape") or (list(view.shape(1)[2:]) if view.op == "Conv" else None)
    if kernel is None or spatial < 1:
        return None
    strides = view.attribute("strides") or [1] * spatial
    dilations = view.attribute("dilations") or [1] * spatial
    pads, mode = list(view.attribute("pads") or [0] * (2 * spatial)), view.attribute("auto_pad", "NOTSET")
    if mode == "VALID":
        pads = [0] * (2 * spatial)
    elif mode in ("SAME_UPPER", "SAME_LOWER"):
        totals = [
            max((result[2 + i] - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1 - source[2 + i], 0)
            for i in range(spatial)
        ]
        begin = [total // 2 if mode == "SAME_UPPER" else total - total // 2 for total in totals]
        pads = [*begin, *(total - low for total, low in zip(totals, begin))]
    if view.op in ("AveragePool", "LpPool") and (view.attribute("ceil_mode", 0) or view.attribute("count_include_pad")):
        # Averages count padding, and rounded-up windows, in ways that moved paddings would change.
        return None
    return _Geometry(kernel, strides, dilations, pads[:spatial], pads[spatial:])
