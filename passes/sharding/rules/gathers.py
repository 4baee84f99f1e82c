"""Rules of operators that read or write at computed indices: gathers, scatters and one-hot vectors."""

from __future__ import annotations

from onnxplace.passes.sharding.node_views import LocalNode, NodeView
from onnxplace.passes.sharding.rules.axis_rules import AxisRule, Rule, other_axes, split_same


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


GATHERS: dict[tuple[str, str], Rule] = {
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
