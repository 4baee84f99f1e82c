"""Convolutions and pools by rows: each device computes some rows of the result, and reads a window with halos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, gt, sub

from onnxplace.passes.sharding.layouts import Division, Layout
from onnxplace.passes.sharding.node_views import Edit, LocalNode, NodeView

ROW_AXIS = 2
"""The first spatial axis, along which images and sequences are cut."""
# Operator -> input position of the kernel; pools have none.
_KERNEL_INPUTS = {"Conv": 1, "ConvInteger": 1, "ConvTranspose": 1, "QLinearConv": 3}
_POOLS = frozenset({"MaxPool", "AveragePool", "LpPool"})
WINDOWED = frozenset(_KERNEL_INPUTS) | _POOLS


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

    @property
    def row_reach(self) -> int:
        """Return how many rows a window covers."""
        return (self.kernel[0] - 1) * self.dilations[0] + 1


def find_window(view: NodeView, result: Layout, division: Division) -> tuple[Window, Edit] | None:
    """Return the rows that each device reads for its rows of the result, and the edit of paddings.

    None for operators whose parts cannot be computed from windows, such as those with indices as results.
    """
    geometry = _read_geometry(view)
    if geometry is None:
        return None
    if view.op == "ConvTranspose":
        return _find_transposed_window(view, geometry, result, division)
    size, result_size = view.shape(0)[ROW_AXIS], view.result()[ROW_AXIS]
    stride = geometry.strides[0]
    rows, pads = [], []
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
    # Averages count paddings, except that by which windows are rounded up: these stay rounded up.
    is_rounded = bool(
        view.op == "AveragePool" and view.attribute("ceil_mode", 0) and view.attribute("count_include_pad", 0)
    )
    if is_rounded:
        paddings = [
            [head, *geometry.before[1:], min(tail, geometry.after[0]), *geometry.after[1:]] for head, tail in pads
        ]
    else:
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
        local.set_attribute("ceil_mode", int(is_rounded) or None)
        local.set_attribute("pads", paddings[local.device])

    return Window(0, tuple(rows)), edit


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
) -> tuple[Window, Edit] | None:
    """Return the rows of a ConvTranspose: those whose windows reach the rows of the result.

    Input row i adds to rows i * stride to i * stride + reach - 1 of the result with its paddings.
    """
    spatial = len(geometry.kernel)
    if view.attribute("output_shape") or view.attribute("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None
    size, result_size = view.shape(0)[ROW_AXIS], view.result()[ROW_AXIS]
    stride, reach, before = geometry.strides[0], geometry.row_reach, geometry.before[0]
    rows, pads, extra = [], [], []
    for device in range(division.count):
        low, high = (row + before for row in division.ranges(result, result_size, device)[0])
        first, last = max(-(-(low - reach + 1) // stride), 0), min((high - 1) // stride, size - 1)
        if first > last:
            return None
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

    return Window(0, tuple(rows)), edit


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
    return bool(
        len(view.present_outputs()) > 1
        or view.attribute("storage_order", 0)
        or view.attribute("channels_last", 0)
        or (ignores_dilations and max(view.attribute("dilations") or [1]) > 1)
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
