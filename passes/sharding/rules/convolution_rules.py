"""Convolutions and pools: by batch and channels, and by rows, from those of the input under their windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add, gt, sub

from onnx import TensorProto

from onnxplace.passes.sharding.rules.axis_rules import (
    AxisRule,
    Rule,
    by_letters,
    drop_bias_except_first,
    is_per_tensor,
    scale_attributes,
    signature_rule,
    split_same,
)
from onnxplace.passes.sharding.rules.layouts import Division, Layout, Rows
from onnxplace.passes.sharding.rules.node_views import Edit, LocalNode, NodeView

ROW_AXIS = 2
"""The first spatial axis, along which images and sequences are cut."""
# Operator -> input position of the kernel; pools have none.
_KERNEL_INPUTS = {"Conv": 1, "ConvInteger": 1, "ConvTranspose": 1, "QLinearConv": 3}
# Rows of its neighbours that a device may have on each side: so many convolutions of 3 rows need one exchange.
MAX_OVERLAP = 3
_POOLS = frozenset({"MaxPool", "AveragePool", "LpPool"})
FLOAT_TYPES = frozenset((TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16))
WINDOWED = frozenset(_KERNEL_INPUTS) | _POOLS


def _convolve(view: NodeView, signature: str) -> list[AxisRule]:
    """Return the rules by batch n and output channels o, or by whole groups with their input channels i."""
    groups = int(view.attribute("group", 1))
    if groups == 1:
        return by_letters(view, signature, "no")
    edit = scale_attributes(view, ("group",), 1)
    whole_groups = by_letters(view, signature.replace("i", "o"), "o", units=groups, edit=edit)
    return [*by_letters(view, signature, "n"), *whole_groups]


def convolution(view: NodeView) -> list[AxisRule]:
    """Conv: by batch, output channels or whole groups, and the input channels of each group.

    A gradient of weights is a Conv whose input channels are the samples of a batch.
    """
    fused, drop_bias = {0: int(view.attribute("group", 1))}, drop_bias_except_first(2)
    sums = by_letters(view, "ni*,oi*->no*", "i", fused=fused, edit=drop_bias) if view.shape(1)[1] > 1 else []
    return [*_convolve(view, "ni*,oi*,o->no*"), *sums]


def transposed_convolution(view: NodeView) -> list[AxisRule]:
    """ConvTranspose, whose weights are [input channels, output channels / group, ...]."""
    sums = by_letters(view, "ni*,io*->no*", "i", edit=drop_bias_except_first(2))
    return [*_convolve(view, "ni*,io*,o->no*"), *(sums if int(view.attribute("group", 1)) == 1 else [])]


def fused_convolution(view: NodeView) -> list[AxisRule]:
    """FusedConv: a Conv with a tensor added to its result, and an activation; so never a summand."""
    return _convolve(view, "ni*,oi*,o,no*->no*")


def integer_convolution(view: NodeView) -> list[AxisRule]:
    """ConvInteger: by batch and output channels, with their zero points, and by exact sums over input channels."""
    if not is_per_tensor(view, 2):
        return []
    sums = by_letters(view, "ni*,oi*->no*", "i") if int(view.attribute("group", 1)) == 1 else []
    return [*_convolve(view, "ni*,oi*,,o->no*"), *sums]


def quantised_convolution(view: NodeView) -> list[AxisRule]:
    """QLinearConv: by batch and output channels, with the scales of the channels."""
    if view.attribute("channels_last", 0) or not all(is_per_tensor(view, p) for p in (1, 2, 6, 7)):
        return []
    return _convolve(view, "ni*,,,oi*,o,o,,,o->no*")


def deformable_convolution(view: NodeView) -> list[AxisRule]:
    """DeformConv: by batch; with one group also by output channels."""
    return by_letters(view, "n*,o*,n*,o,n*->no*", "no" if int(view.attribute("group", 1)) == 1 else "n")


# Pools treat each channel of each sample by itself.
pool = signature_rule("nc*->nc*", "nc")


def average_pool(view: NodeView) -> list[AxisRule]:
    """AveragePool: also by the axes that one window covers, such as rows, whose means are then weighted."""
    kernel, is_padded = view.attribute("kernel_shape", ()), any(view.attribute("pads", ()))
    rules = [*pool(view)]
    for index, (size, reach) in enumerate(zip(view.shape(0)[2:], kernel)):

        def set_kernel(local: LocalNode, index: int = index) -> None:
            part = local.inputs[0]
            assert part is not None
            local.set_attribute("kernel_shape", [*kernel[:index], part[2 + index], *kernel[index + 1 :]])

        is_plain = not is_padded and view.attribute("auto_pad", "NOTSET") in ("NOTSET", "VALID")
        if is_plain and size == reach > 1 and not any(step > 1 for step in view.attribute("dilations", ())):
            rules.append(AxisRule({0: 2 + index}, {}, "mean", edit=set_kernel))
    return rules


def max_pool(view: NodeView) -> list[AxisRule]:
    """MaxPool; its indices count from the start of the whole input, so it then stays whole."""
    return [*pool(view)] if len(view.present_outputs()) == 1 else []


def quantised_pool(view: NodeView) -> list[AxisRule]:
    """QLinearAveragePool and QLinearGlobalAveragePool: by batch and channels."""
    return by_letters(view, "n*c->n*c" if view.attribute("channels_last", 0) else "nc*->nc*", "nc")


def global_average(view: NodeView) -> list[AxisRule]:
    """GlobalAveragePool: also by rows, whose means are then weighted."""
    spatial = [AxisRule({0: axis}, {}, "mean") for axis in range(2, view.rank()) if view.shape(0)[axis] > 1]
    return [*pool(view), *spatial]


def grid_sample(view: NodeView) -> list[AxisRule]:
    """GridSample: by batch, channels, and the positions of the result."""
    spatial = "xyz"[: view.rank(1) - 2]
    return by_letters(view, f"nc*,n{spatial}-->nc{spatial}", f"nc{spatial}")


def local_response(view: NodeView) -> list[AxisRule]:
    """LRN sums over neighbouring channels: every other axis."""
    return split_same(view, (axis for axis in range(view.rank()) if axis != 1))


CONVOLUTIONS: dict[tuple[str, str], Rule] = {
    ("", "Conv"): convolution,
    ("", "ConvTranspose"): transposed_convolution,
    ("", "ConvInteger"): integer_convolution,
    ("", "QLinearConv"): quantised_convolution,
    ("", "DeformConv"): deformable_convolution,
    ("com.microsoft", "FusedConv"): fused_convolution,
    ("com.microsoft", "QLinearConv"): quantised_convolution,
    ("com.microsoft", "QLinearAveragePool"): quantised_pool,
    ("com.microsoft", "QLinearGlobalAveragePool"): quantised_pool,
    ("", "MaxPool"): max_pool,
    ("", "AveragePool"): average_pool,
    **{("", op): pool for op in ["LpPool", "GlobalMaxPool", "GlobalLpPool"]},
    ("", "GlobalAveragePool"): global_average,
    ("", "RoiAlign"): signature_rule("-c--,r-,r->rc--", "rc"),  # regions, with the index of the image of each
    ("", "GridSample"): grid_sample,
    ("", "LRN"): local_response,
}


# --- by rows ---


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

    def window(self, low: int, high: int) -> Rows:
        """Return the rows of the input, with those of the padding, under the windows of rows of the result."""
        return low * self.strides[0] - self.before[0], (high - 1) * self.strides[0] - self.before[0] + self.row_reach

    def reached(self, view: NodeView, result: Sequence[Rows]) -> list[Rows]:
        """Return the rows of the input that rows of the result are computed from."""
        size, stride = view.shape(0)[ROW_AXIS], self.strides[0]
        if view.op == "ConvTranspose":
            # Input row i adds to rows i * stride to i * stride + reach - 1 of the result with its paddings. Rows that
            # add to the paddings alone belong to the first and the last device.
            spans = [(low + self.before[0], high + self.before[0]) for low, high in result]
            rows = [(-(-(low - self.row_reach + 1) // stride), (high - 1) // stride + 1) for low, high in spans]
            rows = [(0 if index == 0 else low, high) for index, (low, high) in enumerate(rows)]
            rows[-1] = (rows[-1][0], size)
        else:
            rows = [self.window(low, high) for low, high in result]
        return [(max(low, 0), min(high, size)) for low, high in rows]


def list_windows(view: NodeView, division: Division) -> Iterator[tuple[Layout, Layout, Edit]]:
    """Yield layouts by rows of the first input and the result that go together, and the edit of paddings.

    Parts of the input overlap by as many rows as the windows reach over, and further: then parts of the result overlap
    too, and the next operators need no exchange. Rows of the result whose windows reach beyond the part are cut off, or
    kept, as invalid ones, so that there are as many as in the input: a residual connection adds them to those of the
    input, and cutting off rows costs more than computing them.

    Nothing for operators whose parts cannot be computed from windows, such as those with indices as results.
    """
    geometry = _read_geometry(view)
    if geometry is None:
        return
    size, result_size = view.shape(0)[ROW_AXIS], view.result()[ROW_AXIS]
    sources, results = (list_overlaps(division, rows) for rows in (size, result_size))
    may_be_invalid = bool(view.element_types) and set(view.element_types) <= FLOAT_TYPES
    exact = [result for result in results if not result.valid]
    for source in sources:
        have, valid = division.held(source, size), division.valid(source, size)
        kept = [(-(-low // geometry.strides[0]), -(-high // geometry.strides[0])) for low, high in have]
        count = 0
        for widest in exact:
            rows = division.held(widest, result_size)
            edit = _find_edit(view, geometry, have, rows)
            if edit is None or (count and not _contain(rows, kept)):
                continue
            # Of the results with these rows, the one with the most valid ones.
            fitting = [
                result
                for result in results
                if division.held(result, result_size) == rows
                and _contain(valid, geometry.reached(view, division.valid(result, result_size)))
            ]
            if fitting and (may_be_invalid or not fitting[-1].valid):
                yield source, fitting[-1], edit
            count += 1
            if _contain(rows, kept):
                break
    # What whole values give may overlap further.
    for result in exact:
        rows = division.held(result, result_size)
        needed = geometry.reached(view, rows)
        if any(_contain(division.held(source, size), needed) for source in sources if not source.valid):
            continue
        starts = [*(low for low, _ in needed[1:]), size]
        needed = [(low, max(high, start)) for (low, high), start in zip(needed, starts)]
        if all(low < high for low, high in needed) and (edit := _find_edit(view, geometry, needed, rows)) is not None:
            yield division.hold(ROW_AXIS, size, needed), result, edit


def list_overlaps(division: Division, size: int) -> list[Layout]:
    """Return layouts by rows with more and more rows on each device, each with fewer to more valid ones."""
    even = division.split(ROW_AXIS, size)
    if even is None:
        return []
    bands = [
        [(max(low - more, 0), min(high + more, size)) for low, high in division.held(even, size)]
        for more in range(MAX_OVERLAP + 1)
    ]
    layouts = []
    for more, rows in enumerate(bands):
        if all(own == (0, size) for own in rows):
            break
        layouts += [Layout(ROW_AXIS, rows=tuple(rows), valid=tuple(valid)) for valid in bands[:more]]
        layouts.append(division.hold(ROW_AXIS, size, rows))
    return layouts


def _contain(have: Sequence[Rows], want: Sequence[Rows]) -> bool:
    return all(low <= first and end <= high for (low, high), (first, end) in zip(have, want))


def _find_edit(view: NodeView, geometry: _Geometry, source: Sequence[Rows], result: Sequence[Rows]) -> Edit | None:
    """Return the edit with which devices compute rows of the result from rows of the input; None if there is none."""
    if view.op == "ConvTranspose":
        return _find_transposed_edit(view, geometry, source, result)
    size, pads = view.shape(0)[ROW_AXIS], []
    # Averages count paddings, except that by which windows are rounded up: these stay rounded up.
    is_rounded = bool(
        view.op == "AveragePool" and view.attribute("ceil_mode", 0) and view.attribute("count_include_pad", 0)
    )
    for (start, end), (low, high) in zip(source, result):
        first, last = geometry.window(low, high)
        # Rows before the first window would have to be cut off; behind the last one, fewer than a stride are no matter.
        if start < first or end - last >= geometry.strides[0] or min(last, end) <= start:
            return None
        if is_rounded and end not in (last, size):
            return None  # one more or one less of the windows would be rounded up
        pads.append((start - first, max(last - end, 0)))
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


def _find_transposed_edit(
    view: NodeView, geometry: _Geometry, source: Sequence[Rows], result: Sequence[Rows]
) -> Edit | None:
    """Return the edit of a ConvTranspose, which cuts off what its rows of the input add to other rows."""
    stride, before = geometry.strides[0], geometry.before[0]
    pads, extra = [], []
    for (start, end), (low, high) in zip(source, result):
        surplus = (end - 1) * stride + geometry.row_reach - high - before
        pads.append((low + before - start * stride, max(surplus, 0)))
        extra.append(max(-surplus, 0))
    # Rows without any window can only be added at the end, and fewer than a stride.
    if any(pair[0] < 0 for pair in pads) or any(rows >= stride for rows in extra):
        return None
    others = list(view.attribute("output_padding") or [0] * len(geometry.kernel))

    def edit(local: LocalNode) -> None:
        head, tail = pads[local.device]
        local.set_attribute("auto_pad", None)
        local.set_attribute("pads", [head, *geometry.before[1:], tail, *geometry.after[1:]])
        local.set_attribute("output_padding", [extra[local.device], *others[1:]])

    return edit


def _read_geometry(view: NodeView) -> _Geometry | None:
    """Return the geometry of a convolution or pool; None if parts cannot be computed from windows."""
    source, result = view.shape(0), view.result()
    spatial = len(source) - 2
    kernel = view.attribute("kernel_shape")
    if not kernel and view.op in _KERNEL_INPUTS:
        kernel = view.shape(_KERNEL_INPUTS[view.op])[2:]
    if not kernel or spatial < 1 or _is_irregular(view):
        return None
    has_fixed_result = view.attribute("output_shape") or view.attribute("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    if view.op == "ConvTranspose" and has_fixed_result:
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
