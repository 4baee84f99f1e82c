"""Rules of convolutions and pools by batch and channels; rows are in `windows`."""

from __future__ import annotations

from collections.abc import Iterable

from onnxplace.passes.sharding.node_views import Edit, NodeView
from onnxplace.passes.sharding.rules.axis_rules import AxisRule, Rule, other_axes, split_same
from onnxplace.passes.sharding.rules.product_rules import drop_bias_except_first, is_per_tensor


def _per_channel(view: NodeView, positions: Iterable[int]) -> dict[int, int]:
    """Return which of these inputs hold a number per channel, each with its only axis."""
    return {p: 0 for p in positions if not is_per_tensor(view, p)}


def _whole_groups(view: NodeView, groups: int) -> Edit | None:
    """Return the edit that sets the number of groups of a part."""
    if groups == 1:
        return None
    return lambda local: local.set_attribute("group", groups * local.out_shape()[1] // view.result()[1])


def _channel_rule(view: NodeView, weights: int, more: dict[int, int], weight_axis: int = 0) -> AxisRule:
    """Return the rule by output channels, or by whole groups with their input channels."""
    groups = int(view.attribute("group", 1))
    if groups == 1:
        return AxisRule({weights: weight_axis, **more}, {0: 1})
    return AxisRule({0: 1, weights: 0, **more}, {0: 1}, units=groups, edit=_whole_groups(view, groups))


def _bias(view: NodeView, position: int = 2) -> dict[int, int]:
    return {position: 0} if view.has(position) else {}


def convolution(view: NodeView) -> list[AxisRule]:
    """Conv: by batch, output channels or whole groups, and the input channels of each group.

    A gradient of weights is a Conv whose input channels are the samples of a batch.
    """
    groups = int(view.attribute("group", 1))
    rules = [AxisRule({0: 0}, {0: 0}), _channel_rule(view, 1, _bias(view))]
    if view.shape(1)[1] > 1:
        rules.append(AxisRule({0: 1, 1: 1}, {}, "sum", fused={0: groups}, edit=drop_bias_except_first(2)))
    return rules


def transposed_convolution(view: NodeView) -> list[AxisRule]:
    """ConvTranspose, whose weights are [input channels, output channels / group, ...]."""
    rules = [AxisRule({0: 0}, {0: 0}), _channel_rule(view, 1, _bias(view), weight_axis=1)]
    if int(view.attribute("group", 1)) == 1:
        rules.append(AxisRule({0: 1, 1: 0}, {}, "sum", edit=drop_bias_except_first(2)))
    return rules


def fused_convolution(view: NodeView) -> list[AxisRule]:
    """FusedConv: a Conv with a tensor added to its result, and an activation; so never a summand."""
    added = {3: 1} if view.has(3) else {}
    return [
        AxisRule({0: 0, **dict.fromkeys(added, 0)}, {0: 0}),
        _channel_rule(view, 1, {**_bias(view), **added}),
    ]


def integer_convolution(view: NodeView) -> list[AxisRule]:
    """ConvInteger: by batch and output channels, with their zero points, and by exact sums over input channels."""
    if not is_per_tensor(view, 2):
        return []
    rules = [AxisRule({0: 0}, {0: 0}), _channel_rule(view, 1, _per_channel(view, (3,)))]
    if int(view.attribute("group", 1)) == 1:
        rules.append(AxisRule({0: 1, 1: 1}, {}, "sum"))
    return rules


def quantised_convolution(view: NodeView) -> list[AxisRule]:
    """QLinearConv: by batch and output channels, with the scales of the channels."""
    if view.attribute("channels_last", 0) or not all(is_per_tensor(view, p) for p in (1, 2, 6, 7)):
        return []
    return [
        AxisRule({0: 0}, {0: 0}),
        _channel_rule(view, 3, {**_per_channel(view, (4, 5)), **_bias(view, 8)}),
    ]


def deformable_convolution(view: NodeView) -> list[AxisRule]:
    """DeformConv: by batch; with one group also by output channels."""
    batch = AxisRule({position: 0 for position in (0, 2, 4) if view.has(position)}, {0: 0})
    if int(view.attribute("group", 1)) != 1:
        return [batch]
    return [batch, AxisRule({1: 0, **_bias(view, 3)}, {0: 1})]


def pool(view: NodeView) -> list[AxisRule]:
    """Pools treat each channel of each sample by itself."""
    return split_same(view, (0, 1))


def max_pool(view: NodeView) -> list[AxisRule]:
    """MaxPool; its indices count from the start of the whole input, so it then stays whole."""
    return pool(view) if len(view.present_outputs()) == 1 else []


def quantised_pool(view: NodeView) -> list[AxisRule]:
    """QLinearAveragePool and QLinearGlobalAveragePool: by batch and channels."""
    channels = view.rank() - 1 if view.attribute("channels_last", 0) else 1
    return split_same(view, (0, channels))


def global_average(view: NodeView) -> list[AxisRule]:
    """GlobalAveragePool: also by rows, whose means are then weighted."""
    spatial = [AxisRule({0: axis}, {}, "mean") for axis in range(2, view.rank()) if view.shape(0)[axis] > 1]
    return [*pool(view), *spatial]


def roi_align(view: NodeView) -> list[AxisRule]:
    """RoiAlign: by regions, with the index of the image of each, and by channels."""
    return [AxisRule({1: 0, 2: 0}, {0: 0}), AxisRule({0: 1}, {0: 1})]


def grid_sample(view: NodeView) -> list[AxisRule]:
    """GridSample: by batch, channels, and the positions of the result."""
    positions = [AxisRule({1: axis}, {0: axis + 1}) for axis in range(1, view.rank(1) - 1)]
    return [AxisRule({0: 0, 1: 0}, {0: 0}), AxisRule({0: 1}, {0: 1}), *positions]


def local_response(view: NodeView) -> list[AxisRule]:
    """LRN sums over neighbouring channels: every other axis."""
    return split_same(view, other_axes(view, 1))


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
    ("", "AveragePool"): pool,
    ("", "LpPool"): pool,
    ("", "GlobalAveragePool"): global_average,
    ("", "GlobalMaxPool"): pool,
    ("", "GlobalLpPool"): pool,
    ("", "RoiAlign"): roi_align,
    ("", "GridSample"): grid_sample,
    ("", "LRN"): local_response,
}
