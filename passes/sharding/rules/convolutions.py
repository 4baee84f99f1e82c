"""Rules of convolutions and pools by batch and channels; rows are in `windows`."""

from __future__ import annotations

from onnxplace.passes.sharding.node_views import LocalNode, NodeView
from onnxplace.passes.sharding.rules.axis_rules import AxisRule, Rule, split_same


def _drop_bias_except_first(local: LocalNode) -> None:
    if local.device > 0:
        local.drop_input(2)


def _bias(view: NodeView) -> dict[int, int]:
    return {2: 0} if view.has(2) else {}


def convolution(view: NodeView) -> list[AxisRule]:
    """Conv: by batch, output channels and input channels; grouped ones by whole groups."""
    groups = int(view.attribute("group", 1))
    batch = AxisRule({0: 0}, {0: 0})
    if groups == 1:
        return [
            batch,
            AxisRule({1: 0, **_bias(view)}, {0: 1}),
            AxisRule({0: 1, 1: 1}, {}, "sum", edit=_drop_bias_except_first),
        ]

    def scale_groups(local: LocalNode) -> None:
        local.set_attribute("group", groups * local.out_shape()[1] // view.result()[1])

    return [batch, AxisRule({0: 1, 1: 0, **_bias(view)}, {0: 1}, units=groups, edit=scale_groups)]


def transposed_convolution(view: NodeView) -> list[AxisRule]:
    """ConvTranspose, whose weights are [input channels, output channels / group, ...]."""
    batch = AxisRule({0: 0}, {0: 0})
    if int(view.attribute("group", 1)) != 1:
        return [batch]
    return [
        batch,
        AxisRule({1: 1, **_bias(view)}, {0: 1}),
        AxisRule({0: 1, 1: 0}, {}, "sum", edit=_drop_bias_except_first),
    ]


def integer_convolution(view: NodeView) -> list[AxisRule]:
    """ConvInteger with zero points per tensor: by batch and output channels."""
    rules = [AxisRule({0: 0}, {0: 0})]
    if int(view.attribute("group", 1)) == 1 and not (view.has(3) and max(view.shape(3), default=1) > 1):
        rules.append(AxisRule({1: 0}, {0: 1}))
    return rules


def quantised_convolution(view: NodeView) -> list[AxisRule]:
    """QLinearConv: by batch and output channels, with the scales of the channels."""
    rules = [AxisRule({0: 0}, {0: 0})]
    if int(view.attribute("group", 1)) != 1:
        return rules
    per_channel = {p: 0 for p in (4, 5) if view.has(p) and view.rank(p) == 1 and view.shape(p)[0] > 1}
    bias = {8: 0} if view.has(8) else {}
    return [*rules, AxisRule({3: 0, **per_channel, **bias}, {0: 1})]


def pool(view: NodeView) -> list[AxisRule]:
    """Pools treat each channel of each sample by itself."""
    return split_same(view, (0, 1))


def max_pool(view: NodeView) -> list[AxisRule]:
    """MaxPool; its indices count from the start of the whole input, so it then stays whole."""
    return pool(view) if len(view.present_outputs()) == 1 else []


def global_average(view: NodeView) -> list[AxisRule]:
    """GlobalAveragePool: also by rows, whose means are then weighted."""
    spatial = [AxisRule({0: axis}, {}, "mean") for axis in range(2, view.rank()) if view.shape(0)[axis] > 1]
    return [*pool(view), *spatial]


CONVOLUTIONS: dict[tuple[str, str], Rule] = {
    ("", "Conv"): convolution,
    ("", "ConvTranspose"): transposed_convolution,
    ("", "ConvInteger"): integer_convolution,
    ("", "QLinearConv"): quantised_convolution,
    ("", "MaxPool"): max_pool,
    ("", "AveragePool"): pool,
    ("", "LpPool"): pool,
    ("", "GlobalAveragePool"): global_average,
    ("", "GlobalMaxPool"): pool,
    ("", "GlobalLpPool"): pool,
}
