"""Rules of convolutions and pools by batch and channels; rows are in `windows`."""

from __future__ import annotations

from onnxplace.passes.sharding.rules.axis_rules import (
    AxisRule,
    Rule,
    by_letters,
    signature_rule,
    split_same,
)
from onnxplace.passes.sharding.rules.node_views import LocalNode, NodeView
from onnxplace.passes.sharding.rules.product_rules import drop_bias_except_first, is_per_tensor


def _convolve(view: NodeView, signature: str) -> list[AxisRule]:
    """Return the rules by batch n and output channels o, or by whole groups with their input channels i."""
    groups = int(view.attribute("group", 1))
    if groups == 1:
        return by_letters(view, signature, "no")

    def scale_groups(local: LocalNode) -> None:
        local.set_attribute("group", groups * local.out_shape()[1] // view.result()[1])

    whole_groups = by_letters(view, signature.replace("i", "o"), "o", units=groups, edit=scale_groups)
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
    ("", "LpPool"): pool,
    ("", "GlobalAveragePool"): global_average,
    ("", "GlobalMaxPool"): pool,
    ("", "GlobalLpPool"): pool,
    ("", "RoiAlign"): signature_rule("-c--,r-,r->rc--", "rc"),  # regions, with the index of the image of each
    ("", "GridSample"): grid_sample,
    ("", "LRN"): local_response,
}
