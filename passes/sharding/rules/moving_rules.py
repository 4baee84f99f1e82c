"""Rules of operators that move elements: transpose, slice, pad, expand and others, and those that use indices.

Reshape, Squeeze, Unsqueeze, Flatten, and Split and Concat along their own axis are in `node_strategies`.
"""

from __future__ import annotations

from onnxplace.passes.sharding.rules.axis_rules import (
    AxisRule,
    Rule,
    aligned_axes,
    all_but_axis,
    by_letters,
    other_axes,
    split_same,
)
from onnxplace.passes.sharding.rules.node_views import LocalNode, NodeView

# Exporters end slices that take an axis whole at the largest integer of 32 or 64 bits.
_TO_THE_END = 2**31 - 1


def transpose(view: NodeView) -> list[AxisRule]:
    """Transpose."""
    order = view.attribute("perm") or list(range(view.rank()))[::-1]
    return [AxisRule({0: source}, {0: axis}) for axis, source in enumerate(order) if view.shape(0)[source] > 1]


def slice_(view: NodeView) -> list[AxisRule]:
    """Slice: the axes that it does not cut, known by constant axes, and those that it takes whole at any size."""
    if view.opset < 10:
        starts, ends = view.attribute("starts", ()), view.attribute("ends", ())
        axes, steps = view.attribute("axes") or range(len(starts)), [1] * len(starts)
    elif view.has(3) and 3 not in view.constants:
        return []
    else:
        starts, ends = _read_vector(view, 1), _read_vector(view, 2)
        axes = _read_vector(view, 3) or range(view.shape(1)[0])
        steps = _read_vector(view, 4) if view.has(4) else [1] * len(axes)
    # An axis whose bounds are not constant may be cut.
    bounds = zip(axes, starts, ends, steps)
    whole = {axis for axis, start, end, step in bounds if (start, step) == (0, 1) and end >= _TO_THE_END}
    return split_same(view, other_axes(view, *(axis for axis in axes if axis not in whole)))


def _read_vector(view: NodeView, position: int) -> list[int]:
    """Return a constant input; nothing for another or an omitted one."""
    return view.constants[position].reshape(-1).tolist() if position in view.constants else []


def pad(view: NodeView) -> list[AxisRule]:
    """Pad with constant widths: the axes that it leaves alone."""
    if view.opset < 11:
        widths, axes = list(view.attribute("pads", ())), list(range(view.rank()))
    else:
        widths = view.constants[1].reshape(-1).tolist()
        axes = view.constants[3].reshape(-1).tolist() if view.has(3) else list(range(view.rank()))
    padded = {
        axis % view.rank() for index, axis in enumerate(axes) if widths[index] != 0 or widths[index + len(axes)] != 0
    }
    return split_same(view, other_axes(view, *padded))


def tile(view: NodeView) -> list[AxisRule]:
    """Tile with constant counts: the axes that it repeats once."""
    if 1 not in view.constants or view.opset < 6:
        return []
    counts = view.constants[1].reshape(-1).tolist()
    return split_same(view, [axis for axis in range(view.rank()) if counts[axis] == 1])


def expand(view: NodeView) -> list[AxisRule]:
    """Expand: the target shape has the size of the part."""
    rank = len(view.result())
    first_named = rank - view.shape(1)[0]

    def set_target(local: LocalNode) -> None:
        layout = local.layouts[0]
        assert layout is not None
        local.override_entry(1, first_named, layout.axis, local.out_shape()[layout.axis])

    # An axis that the target does not name keeps the size of the part by itself.
    edits = [set_target if axis >= first_named else None for axis in range(rank)]
    return [AxisRule(aligned_axes(view, axis, (0,)), {0: axis}, edit=edit) for axis, edit in enumerate(edits)]


def resize(view: NodeView) -> list[AxisRule]:
    """Resize and Upsample: the axes that keep their size because their scale is exactly 1.

    Sizes name the whole of these axes, so they are set to those of the part. In modes other than `nearest`, ONNX
    Runtime also interpolates along axes that keep their size, with weights 1 and 0: an infinite neighbour then makes
    NaN. Behind two axes that keep their size, it treats each matrix or volume by itself.
    """
    if view.attribute("coordinate_transformation_mode") == "tf_crop_and_resize":
        return []
    rules = _resize_to_sizes(view) if view.has(3) and view.shape(3) != (0,) else _resize_by_scales(view)
    if view.attribute("mode", "nearest") == "nearest":
        return rules
    is_apart = view.rank() > 3 and view.shape(0)[:2] == view.result()[:2]
    return [rule for rule in rules if is_apart and rule.inputs[0] < 2]


def _resize_by_scales(view: NodeView) -> list[AxisRule]:
    scales = view.attribute("scales")
    if scales is None:
        position = 1 if view.op == "Upsample" or view.opset < 11 else 2
        scales = view.constants[position].reshape(-1).tolist()
    named = _resized_axes(view, len(scales))
    resized = {axis for axis, scale in zip(named, scales) if scale != 1.0}
    return split_same(view, other_axes(view, *resized))


def _resize_to_sizes(view: NodeView) -> list[AxisRule]:
    if 3 not in view.constants:
        return []
    named = _resized_axes(view, view.shape(3)[0])
    # With another policy, the sizes only limit a scale that all these axes share.
    is_exact = view.attribute("keep_aspect_ratio_policy", "stretch") == "stretch"
    rules = []
    for axis in range(view.rank()):
        if axis in named and not (is_exact and view.shape(0)[axis] == view.result()[axis]):
            continue

        def set_sizes(local: LocalNode, axis: int = axis) -> None:
            local.override_entry(3, 0, named.index(axis), local.out_shape()[axis])

        rules += split_same(view, (axis,), edit=set_sizes if axis in named else None)
    return rules


def _resized_axes(view: NodeView, count: int) -> list[int]:
    """Return the axes that scales or sizes are for, from 0."""
    axes = view.attribute("axes")
    return [axis % view.rank() for axis in (range(count) if axes is None else axes)]


def depth_to_space(view: NodeView) -> list[AxisRule]:
    """DepthToSpace: by batch, rows and columns; in mode CRD also by channels, whose depths follow each other."""
    letters = "nhwc" if view.attribute("mode", "DCR") == "CRD" else "nhw"
    sizes = {"h": view.shape(0)[2], "w": view.shape(0)[3], "c": view.result()[1]}
    return [rule for x in letters for rule in by_letters(view, "nchw->nchw", x, units=sizes.get(x, 0))]


def space_to_depth(view: NodeView) -> list[AxisRule]:
    """SpaceToDepth: by batch, and by rows and columns of blocks."""
    sizes = {"h": view.result()[2], "w": view.result()[3]}
    return [rule for x in "nhw" for rule in by_letters(view, "n-hw->n-hw", x, units=sizes.get(x, 0))]


def matrices(view: NodeView) -> list[AxisRule]:
    """Det and Trilu: every axis before the matrices."""
    return split_same(view, range(view.rank() - 2))


def reverse_sequence(view: NodeView) -> list[AxisRule]:
    """ReverseSequence: every axis but that of time; the batch with its lengths."""
    batch, time = int(view.attribute("batch_axis", 1)) % view.rank(), int(view.attribute("time_axis", 0))
    return [AxisRule({0: axis, 1: 0} if axis == batch else {0: axis}, {0: axis}) for axis in other_axes(view, time)]


def concat_others(view: NodeView) -> list[AxisRule]:
    """Concat: every axis but its own."""
    return split_same(view, other_axes(view, view.axis(0)), inputs=range(len(view.inputs)))


def quantised_concat(view: NodeView) -> list[AxisRule]:
    """QLinearConcat, whose inputs follow the scale and zero point of the result, each with its own: other axes."""
    parts, axis = range(2, len(view.inputs), 3), view.axis(0, len(view.result()))
    others = [other for other in range(len(view.result())) if other != axis]
    return [AxisRule(dict.fromkeys(parts, other), {0: other}) for other in others]


def gather(view: NodeView) -> list[AxisRule]:
    """Gather: the other axes of the data, and the axes of the indices."""
    axis, index_rank = view.axis(0), view.rank(1)
    rules = [
        AxisRule({0: other}, {0: other if other < axis else other + index_rank - 1}) for other in other_axes(view, axis)
    ]
    return [*rules, *(AxisRule({1: own}, {0: axis + own}) for own in range(index_rank))]


def gather_elements(view: NodeView) -> list[AxisRule]:
    """GatherElements: its own axis of the indices, and other axes where data and indices have the same size."""
    own = view.axis(0)
    axes = [axis for axis in other_axes(view, own) if view.shape(0)[axis] == view.shape(1)[axis]]
    return [*split_same(view, axes, inputs=(0, 1)), AxisRule({1: own}, {0: own})]


def gather_nd(view: NodeView) -> list[AxisRule]:
    """GatherND: the batch axes of both, the other axes of the indices, and those of the gathered slices."""
    batch, index_rank = int(view.attribute("batch_dims", 0)), view.rank(1)
    first_kept = batch + view.shape(1)[-1]
    rules = [AxisRule({0: axis, 1: axis}, {0: axis}) for axis in range(batch)]
    rules += [AxisRule({1: axis}, {0: axis}) for axis in range(batch, index_rank - 1)]
    rules += [AxisRule({0: axis}, {0: index_rank - 1 + axis - first_kept}) for axis in range(first_kept, view.rank())]
    return rules


def _add_to_zeros_except_first(local: LocalNode) -> None:
    """Let only the first device add its updates to the data."""
    if local.device > 0:
        local.set_input(0, local.make_zeros(local.proto.input[0]))


def scatter_elements(view: NodeView) -> list[AxisRule]:
    """ScatterElements: other axes, where data, indices and updates have the same size; its own where it adds up."""
    own = view.axis(0)
    axes = [axis for axis in other_axes(view, own) if view.shape(0)[axis] == view.shape(1)[axis]]
    rules = split_same(view, axes, inputs=(0, 1, 2))
    if view.attribute("reduction", "none") == "add" and view.shape(1)[own] > 1:
        rules.append(AxisRule({1: own, 2: own}, {}, "sum", edit=_add_to_zeros_except_first))
    return rules


def scatter_nd(view: NodeView) -> list[AxisRule]:
    """ScatterND: the axes of the written slices, and those of the indices where it adds up."""
    index_rank, named = view.rank(1), view.shape(1)[-1]
    rules = [AxisRule({0: axis, 2: index_rank - 1 + axis - named}, {0: axis}) for axis in range(named, view.rank())]
    if view.attribute("reduction", "none") == "add":
        axes = [axis for axis in range(index_rank - 1) if view.shape(1)[axis] > 1]
        rules += [AxisRule({1: axis, 2: axis}, {}, "sum", edit=_add_to_zeros_except_first) for axis in axes]
    return rules


def tensor_scatter(view: NodeView) -> list[AxisRule]:
    """TensorScatter: every axis but that of the written positions; the batch with its indices."""
    written = view.axis(-2)
    return [
        AxisRule({0: axis, 1: axis, **({2: 0} if axis == 0 and view.has(2) else {})}, {0: axis})
        for axis in other_axes(view, written)
    ]


def one_hot(view: NodeView) -> list[AxisRule]:
    """OneHot: the axes of the indices."""
    new_axis = view.axis(-1, len(view.result()))
    return [AxisRule({0: axis}, {0: axis + (axis >= new_axis)}) for axis in range(view.rank())]


def block_quantised_gather(view: NodeView) -> list[AxisRule]:
    """GatherBlockQuantized: the axes of the indices."""
    axis = int(view.attribute("gather_axis", 0)) % view.rank()
    return [AxisRule({1: own}, {0: axis + own}) for own in range(view.rank(1)) if view.shape(1)[own] > 1]


MOVES: dict[tuple[str, str], Rule] = {
    ("", "Transpose"): transpose,
    ("", "Slice"): slice_,
    ("", "Pad"): pad,
    ("", "Tile"): tile,
    ("", "Expand"): expand,
    ("", "Resize"): resize,
    ("", "Upsample"): resize,
    ("", "DepthToSpace"): depth_to_space,
    ("", "SpaceToDepth"): space_to_depth,
    ("", "Det"): matrices,
    ("", "Trilu"): matrices,
    ("com.microsoft", "Trilu"): matrices,
    ("", "ReverseSequence"): reverse_sequence,
    ("", "Split"): all_but_axis(0),
    ("", "Concat"): concat_others,
    ("com.microsoft", "QLinearConcat"): quantised_concat,
    ("", "Gather"): gather,
    ("", "GatherElements"): gather_elements,
    ("", "GatherND"): gather_nd,
    ("com.microsoft", "GatherND"): gather_nd,
    ("", "ScatterElements"): scatter_elements,
    ("", "Scatter"): scatter_elements,
    ("", "ScatterND"): scatter_nd,
    ("", "TensorScatter"): tensor_scatter,
    ("", "OneHot"): one_hot,
    ("com.microsoft", "GatherBlockQuantized"): block_quantised_gather,
}
