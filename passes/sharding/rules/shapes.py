"""Rules of operators that move elements: transpose, slice, gather, pad, expand and others.

Reshape, Squeeze, Unsqueeze, Flatten, and Split and Concat along their own axis are in `reshapes`.
"""

from __future__ import annotations

from onnxplace.passes.sharding.node_views import LocalNode, NodeView
from onnxplace.passes.sharding.rules.axis_rules import AxisRule, Rule, aligned_axes, other_axes, split_same


def transpose(view: NodeView) -> list[AxisRule]:
    """Transpose."""
    order = view.attribute("perm") or list(range(view.rank()))[::-1]
    return [AxisRule({0: source}, {0: axis}) for axis, source in enumerate(order) if view.shape(0)[source] > 1]


def slice_(view: NodeView) -> list[AxisRule]:
    """Slice: the axes that it does not cut, known by constant axes."""
    if view.opset < 10:
        axes = view.attribute("axes") or range(len(view.attribute("starts", ())))
    elif view.has(3):
        if 3 not in view.constants:
            return []
        axes = view.constants[3].reshape(-1).tolist()
    else:
        axes = range(view.shape(1)[0])
    return split_same(view, other_axes(view, *axes))


def pad(view: NodeView) -> list[AxisRule]:
    """Pad with constant widths: the axes that it leaves alone."""
    if view.opset < 11:
        widths, axes = list(view.attribute("pads", ())), list(range(view.rank()))
    else:
        if 1 not in view.constants or (view.has(3) and 3 not in view.constants):
            return []
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
    result = view.result()

    def set_target(local: LocalNode) -> None:
        layout = local.layouts[0]
        assert layout is not None
        local.override_entry(1, len(result) - view.shape(1)[0], layout.axis, local.out_shape()[layout.axis])

    rules = []
    for axis, size in enumerate(result):
        position = axis - (len(result) - view.shape(1)[0])
        if size <= 1:
            continue
        inputs = aligned_axes(view, axis, (0,))
        # An axis that the target does not name keeps the size of the part by itself.
        rules.append(AxisRule(inputs, {0: axis}, edit=set_target if position >= 0 else None))
    return rules


def gather(view: NodeView) -> list[AxisRule]:
    """Gather: the other axes of the data, and the axes of the indices."""
    axis, index_rank = view.axis(0), view.rank(1)
    rules = [
        AxisRule({0: other}, {0: other if other < axis else other + index_rank - 1})
        for other in other_axes(view, axis)
        if view.shape(0)[other] > 1
    ]
    rules += [AxisRule({1: own}, {0: axis + own}) for own in range(index_rank) if view.shape(1)[own] > 1]
    return rules


def gather_elements(view: NodeView) -> list[AxisRule]:
    """GatherElements: other axes, where data and indices have the same size."""
    axes = [axis for axis in other_axes(view, view.axis(0)) if view.shape(0)[axis] == view.shape(1)[axis]]
    return split_same(view, axes, inputs=(0, 1))


def resize(view: NodeView) -> list[AxisRule]:
    """Resize by constant scales or sizes: batch and channels, where they keep their size.

    Sizes name the whole of these axes, so they are set to those of the part.
    """
    if view.attribute("axes") is not None or view.attribute("coordinate_transformation_mode") == "tf_crop_and_resize":
        return []
    if view.opset < 11 or view.rank() < 3:
        return []
    sizes = view.has(3) and view.shape(3) != (0,)
    if sizes and 3 not in view.constants:
        return []

    def set_sizes(local: LocalNode) -> None:
        layout = local.layouts[0]
        assert layout is not None
        local.override_entry(3, 0, layout.axis, local.out_shape()[layout.axis])

    axes = [axis for axis in (0, 1) if view.shape(0)[axis] == view.result()[axis]]
    return split_same(view, axes, edit=set_sizes if sizes else None)


def batch_only(view: NodeView) -> list[AxisRule]:
    """DepthToSpace and SpaceToDepth: by batch."""
    return split_same(view, (0,))


def triangle(view: NodeView) -> list[AxisRule]:
    """Trilu: every axis before the matrices."""
    return split_same(view, range(view.rank() - 2))


def split_others(view: NodeView) -> list[AxisRule]:
    """Split: every axis but its own."""
    return split_same(view, other_axes(view, view.axis(0)))


def concat_others(view: NodeView) -> list[AxisRule]:
    """Concat: every axis but its own."""
    return split_same(view, other_axes(view, view.axis(0)), inputs=range(len(view.inputs)))


SHAPES: dict[tuple[str, str], Rule] = {
    ("", "Transpose"): transpose,
    ("", "Slice"): slice_,
    ("", "Pad"): pad,
    ("", "Tile"): tile,
    ("", "Expand"): expand,
    ("", "Gather"): gather,
    ("", "GatherElements"): gather_elements,
    ("", "Resize"): resize,
    ("", "DepthToSpace"): batch_only,
    ("", "SpaceToDepth"): batch_only,
    ("", "Trilu"): triangle,
    ("", "Split"): split_others,
    ("", "Concat"): concat_others,
}
