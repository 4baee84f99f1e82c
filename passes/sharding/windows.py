"""Convolutions and pools by rows: each device computes some rows of the result, from those under their windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add, gt, sub

from onnx import TensorProto

from onnxplace.passes.sharding.layouts import Division, Layout, Rows
from onnxplace.passes.sharding.node_views import Edit, LocalNode, NodeView

ROW_AXIS = 2
"""The first spatial axis, along which images and sequences are cut."""
# Operator -> input position of the kernel; pools have none.
_KERNEL_INPUTS = {"Conv": 1, "ConvInteger": 1, "ConvTranspose": 1, "QLinearConv": 3}
_POOLS = frozenset({"MaxPool", "AveragePool", "LpPool"})
FLOAT_TYPES = frozenset((TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16))
WINDOWED = frozenset(_KERNEL_INPUTS) | _POOLS


@dataclass(frozen=True)
class _Geometry:
    """Kernel, strides, dilations and paddings, each per spatial axis."""

    kernel: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    before: Sequence[int]
    after: Sequence[int]

    @property
    def row_reach(self) -> int:
        """Return how many rows a window covers."""
        return (self.kernel[0] - 1) * self.dilations[0] + 1


def find_window(view: NodeView, result: Layout, division: Division) -> tuple[list[Rows], Edit] | None:
    """Return the rows of the first input that each device reads for its rows of the result, and the edit of paddings.

    All rows of the input are in one of them: those between windows, or behind the last one, are given to the device
    before. They are fewer than a stride, and make no further window. None for operators whose parts cannot be computed
    from windows: with indices as results, or averages that count the padding of rounded-up windows.
    """
    geometry = _read_geometry(view)
    if geometry is None:
        return None
    if view.op == "ConvTranspose":
        return _find_transposed_window(view, geometry, result, division)
    size, result_size = view.shape(0)[ROW_AXIS], view.result()[ROW_AXIS]
    stride = geometry.strides[0]
    rows: list[Rows] = []
    pads = []
    for device in range(division.count):
        low, high = division.ranges(result, result_size, device)[0]
        # Row r of the result reads the rows from r * stride - padding on, as many as a window covers.
        first = low * stride - geometry.before[0]
        last = (high - 1) * stride - geometry.before[0] + geometry.row_reach
        # Windows that lie in the padding alone have no rows: such a device would get nothing.
        if min(last, size) <= max(first, 0):
            return None
        rows.append((max(first, 0), min(last, size)))
        pads.append((max(-first, 0), max(last - size, 0)))
    edit = _set_paddings(view, geometry, pads)
    if edit is None:
        return None
    starts = [*(low for low, _ in rows[1:]), size]
    return [(low, max(high, start)) for (low, high), start in zip(rows, starts)], edit


def find_padded_result(view: NodeView, source: Layout, division: Division) -> tuple[Layout, Edit] | None:
    """Return the rows of the result if each device pads the rows that it has as if there were no others.

    Rows whose windows reach beyond are wrong, but next to others with as many rows nothing has to be cut off: a
    residual connection adds what it has. None unless all rows of the result are right on some device.
    """
    geometry = _read_geometry(view)
    floats = view.element_types and set(view.element_types) <= FLOAT_TYPES  # wrong integers could divide by zero
    if geometry is None or view.op == "ConvTranspose" or not floats:
        return None
    size, result_size = view.shape(0)[ROW_AXIS], view.result()[ROW_AXIS]
    stride, before, reach = geometry.strides[0], geometry.before[0], geometry.row_reach
    if -(-size // stride) != result_size or before >= reach:
        return None
    rows, valid, pads = [], [], []
    for (low, high), (first, end) in zip(division.held(source, size), division.valid(source, size)):
        start, stop = -(-low // stride), -(-high // stride)
        head, tail = low - start * stride + before, (stop - 1) * stride - before + reach - high
        begin = -(-(first + before) // stride) if first else 0
        finish = (end - reach + before) // stride + 1 if end < size else result_size
        if head < 0 or max(begin, start) >= min(finish, stop):
            return None
        rows.append((start, stop))
        valid.append((max(begin, start), min(finish, stop)))
        pads.append((head, max(tail, 0)))
    edit = _set_paddings(view, geometry, pads)
    if edit is None or any(have[1] < more[0] for have, more in pairwise(valid)):
        return None
    if rows == valid:
        return division.hold(ROW_AXIS, result_size, rows), edit
    return Layout(ROW_AXIS, rows=tuple(rows), valid=tuple(valid)), edit


def _set_paddings(view: NodeView, geometry: _Geometry, pads: Sequence[tuple[int, int]]) -> Edit | None:
    """Return the edit that gives each device its paddings of rows; None if ONNX Runtime does not take them."""
    paddings = [_part_paddings(view, geometry, rows) for rows in pads]
    # ONNX Runtime refuses pools with paddings as wide as their kernels.
    if view.op in _POOLS and any(
        width >= geometry.kernel[index % len(geometry.kernel)]
        for widths in paddings
        for index, width in enumerate(widths)
    ):
        return None

    def edit(local: LocalNode) -> None:
        local.set_attribute("auto_pad", None)
        local.set_attribute("ceil_mode", None)
        local.set_attribute("pads", paddings[local.device])

    return edit


def _part_paddings(view: NodeView, geometry: _Geometry, row_pads: tuple[int, int]) -> list[int]:
    """Return the paddings of a part: all before, then all after."""
    before, after = list(geometry.before), list(geometry.after)
    before[0], after[0] = row_pads
    for axis in range(1, len(before)):
        # Rounded-up windows of the other axes become padding, which keeps the size of the result.
        reached = (view.result()[ROW_AXIS + axis] - 1) * geometry.strides[axis] - before[axis]
        reached += (geometry.kernel[axis] - 1) * geometry.dilations[axis] + 1
        after[axis] = max(after[axis], reached - view.shape(0)[ROW_AXIS + axis])
    return [*before, *after]


def _find_transposed_window(
    view: NodeView, geometry: _Geometry, result: Layout, division: Division
) -> tuple[list[Rows], Edit] | None:
    """Return the rows of a ConvTranspose: those whose windows reach the rows of the result.

    Input row i adds to rows i * stride to i * stride + reach - 1 of the result with its paddings.
    """
    spatial = len(geometry.kernel)
    if view.attribute("output_shape") or view.attribute("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None
    size, result_size = view.shape(0)[ROW_AXIS], view.result()[ROW_AXIS]
    stride, reach, before = geometry.strides[0], geometry.row_reach, geometry.before[0]
    rows: list[Rows] = []
    pads, extra = [], []
    for device in range(division.count):
        low, high = (row + before for row in division.ranges(result, result_size, device)[0])
        first, last = max(-(-(low - reach + 1) // stride), 0), min((high - 1) // stride, size - 1)
        if first > last:
            return None
        # Rows that reach the paddings alone belong to the first and the last device.
        first, last = first if device else 0, last if device + 1 < division.count else size - 1
        rows.append((first, last + 1))
        surplus = last * stride + reach - high
        pads.append((low - first * stride, max(surplus, 0)))
        extra.append(max(-surplus, 0))
    # Rows without any window can only be added at the end, and fewer than a stride.
    if any(pair[0] < 0 for pair in pads) or any(rows >= stride for rows in extra):
        return None
    others = list(view.attribute("output_padding") or [0] * spatial)

    def edit(local: LocalNode) -> None:
        head, tail = pads[local.device]
        local.set_attribute("auto_pad", None)
        local.set_attribute("pads", [head, *geometry.before[1:], tail, *geometry.after[1:]])
        local.set_attribute("output_padding", [extra[local.device], *others[1:]])

    return rows, edit


def _read_geometry(view: NodeView) -> _Geometry | None:
    """Return the geometry of a convolution or pool; None if parts cannot be computed from windows."""
    source, result = view.shape(0), view.result()
    spatial = len(source) - 2
    kernel = view.attribute("kernel_shape")
    if not kernel and view.op in _KERNEL_INPUTS:
        kernel = view.shape(_KERNEL_INPUTS[view.op])[2:]
    if not kernel or spatial < 1 or _is_irregular(view):
        return None
    strides, dilations = (view.attribute(name) or [1] * spatial for name in ("strides", "dilations"))
    # How far windows reach beyond the input if the first of them begins with it.
    reaches = [
        (result[2 + i] - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1 - source[2 + i] for i in range(spatial)
    ]
    pads = _resolve_pads(view, reaches)
    if pads is None:
        return None
    return _Geometry(list(kernel), strides, dilations, pads[:spatial], pads[spatial:])


def _is_irregular(view: NodeView) -> bool:
    """Return whether a result is not made of windows alone, or of others than the attributes say."""
    # With a mode of padding, ONNX Runtime leaves dilations of pools out of the sizes that it computes.
    ignores_dilations = view.op in _POOLS and view.attribute("auto_pad", "NOTSET") != "NOTSET"
    # The padding of rounded-up windows is not counted, other padding is.
    counts_pads = view.op == "AveragePool" and view.attribute("ceil_mode", 0)
    return bool(
        len(view.present_outputs()) > 1
        or view.attribute("storage_order", 0)
        or view.attribute("channels_last", 0)
        or (ignores_dilations and max(view.attribute("dilations") or [1]) > 1)
        or (counts_pads and view.attribute("count_include_pad", 0))
    )


def _resolve_pads(view: NodeView, reaches: Sequence[int]) -> list[int] | None:
    """Return the paddings before, then after each axis; None where windows are not as these say."""
    pads, mode = list(view.attribute("pads") or [0] * (2 * len(reaches))), view.attribute("auto_pad", "NOTSET")
    if mode == "VALID":
        pads = [0] * len(pads)
    elif mode in ("SAME_UPPER", "SAME_LOWER"):
        if min(reaches) < 0:
            return None  # strides beyond the kernels: ONNX Runtime then starts some windows later
        begin = [total // 2 if mode == "SAME_UPPER" else total - total // 2 for total in reaches]
        pads = [*begin, *map(sub, reaches, begin)]
    may_reach_further = view.op == "ConvTranspose" or view.attribute("ceil_mode", 0)
    padded = map(add, pads[: len(reaches)], pads[len(reaches) :])
    if not may_reach_further and any(map(gt, reaches, padded)):
        return None  # a kernel larger than the input, which ONNX Runtime may compute in some way
    return pads
