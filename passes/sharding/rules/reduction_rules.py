"""Rules of operators that work along axes: normalisations, softmax, reductions, and Fourier transforms."""

from __future__ import annotations

from onnxplace.passes.sharding.rules.axis_rules import (
    AxisRule,
    Effect,
    Rule,
    aligned_axes,
    all_but_axis,
    by_letters,
    other_axes,
    scale_attributes,
    signature_rule,
    split_same,
)
from onnxplace.passes.sharding.rules.node_views import NodeView


def batch_normalization(view: NodeView) -> list[AxisRule]:
    """BatchNormalization in inference: every axis; channels with their statistics."""
    if len(view.present_outputs()) > 1 or view.attribute("training_mode", 0):
        return []
    # Before opset 9, statistics could be per element.
    if view.rank() < 2 or any(view.rank(position) != 1 for position in range(1, 5)):
        return []
    return [*split_same(view, other_axes(view, 1)), *by_letters(view, "-c*,c,c,c,c->-c*", "c")]


def group_normalization(view: NodeView) -> list[AxisRule]:
    """GroupNormalization: by batch and whole groups; scales are per group before opset 21, then per channel."""
    groups = int(view.attribute("num_groups", 0))
    edit = scale_attributes(view, ("num_groups",), 1)
    channels = by_letters(view, "nc*,c,c->nc*", "c", units=groups, edit=edit)
    return [*by_letters(view, "n*->n*", "n"), *channels]


def trailing_normalization(view: NodeView) -> list[AxisRule]:
    """LayerNormalization and its relatives: the axes before the normalised ones.

    Scale and bias may be broadcast over those axes, so only vectors of the normalised axes are taken.
    """
    first = view.axis(-1)
    normalised = view.rank() - first
    if any(view.has(position) and view.rank(position) > normalised for position in (1, 2)):
        return []
    if any(len(view.result(position)) != view.rank() for position in view.present_outputs()):
        return []
    return split_same(view, range(first))


def skip_normalization(view: NodeView) -> list[AxisRule]:
    """SkipLayerNormalization and its relatives: all axes but the last, of input and skip, which may be broadcast.

    ONNX Runtime takes any skip whose elements are as many as those of the last axes, and repeats it.
    """
    outputs, rank = view.present_outputs(), view.rank()
    first = next((axis for axis, size in enumerate(view.shape(1)) if size > 1), 0) + rank - view.rank(1)
    if any(view.result(position) != view.shape(0) for position in outputs):
        return []
    if view.shape(1)[first - rank :] != view.shape(0)[first:]:
        return []
    return [AxisRule(aligned_axes(view, axis, (0, 1)), dict.fromkeys(outputs, axis)) for axis in range(view.rank() - 1)]


def softmax(view: NodeView) -> list[AxisRule]:
    """Softmax and its relatives: before opset 13, they work on all axes from `axis` on."""
    if (view.attribute("opset", 1) if view.op == "QLinearSoftmax" else view.opset) < 13:
        return split_same(view, range(view.axis(1)))
    return split_same(view, other_axes(view, view.axis(-1)))


def arg_extreme(view: NodeView) -> list[AxisRule]:
    """ArgMax and ArgMin: every axis but their own, which may vanish."""
    axis = view.axis(0)
    if view.attribute("keepdims", 1):
        return split_same(view, other_axes(view, axis))
    return [AxisRule({0: other}, {0: other - (other > axis)}) for other in other_axes(view, axis)]


def cumulative(view: NodeView) -> list[AxisRule]:
    """CumSum and CumProd along a constant axis: every other axis."""
    return split_same(view, other_axes(view, int(view.constants[1].reshape(-1)[0])))


def _reduced_axes(view: NodeView) -> set[int]:
    """Return the axes that a reduction reduces; raises LookupError if they are computed."""
    axes = view.attribute("axes")
    if axes is None and view.has(1):
        axes = view.constants[1].reshape(-1).tolist()
    if axes is None or not len(axes):
        return set() if view.attribute("noop_with_empty_axes", 0) else set(range(view.rank()))
    return {int(axis) % view.rank() for axis in axes}


def _reduction(effect: Effect | None) -> Rule:
    """Return the rule of a reduction; `effect` is that of a split reduced axis, None if it stays whole."""

    def rule(view: NodeView) -> list[AxisRule]:
        reduced, keeps_axes, rules, position = _reduced_axes(view), view.attribute("keepdims", 1), [], 0
        for axis in range(view.rank()):
            if axis not in reduced:
                rules.append(AxisRule({0: axis}, {0: position}))
            elif effect:
                rules.append(AxisRule({0: axis}, {}, effect))
            position += 1 if keeps_axes or axis not in reduced else 0
        return rules

    return rule


def fourier_transform(view: NodeView) -> list[AxisRule]:
    """DFT: every axis but its own and that of real and imaginary parts; since opset 20, an input names its own."""
    axis = view.attribute("axis", 1) if view.opset < 20 else -2
    if view.has(2):
        axis = int(view.constants[2].reshape(-1)[0])
    return split_same(view, other_axes(view, axis, -1))


REDUCTIONS: dict[tuple[str, str], Rule] = {
    ("", "BatchNormalization"): batch_normalization,
    ("", "InstanceNormalization"): signature_rule("nc*,c,c->nc*", "nc"),
    ("", "GroupNormalization"): group_normalization,
    ("", "LpNormalization"): all_but_axis(-1),
    ("", "LayerNormalization"): trailing_normalization,
    ("", "RMSNormalization"): trailing_normalization,
    ("", "SimplifiedLayerNormalization"): trailing_normalization,
    ("com.microsoft", "SkipLayerNormalization"): skip_normalization,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): skip_normalization,
    ("com.microsoft", "EmbedLayerNormalization"): signature_rule("b*,b*,,,,,,b*,b*->b*,b*,b*", "b"),
    ("com.microsoft", "QEmbedLayerNormalization"): signature_rule("b*,b*,,,,,,b*->b*,b*,b*", "b"),
    ("com.microsoft", "QLinearSoftmax"): softmax,
    **{("", op): softmax for op in ["Softmax", "LogSoftmax", "Hardmax"]},
    ("", "TopK"): all_but_axis(-1),
    ("", "ArgMax"): arg_extreme,
    ("", "ArgMin"): arg_extreme,
    ("", "CumSum"): cumulative,
    ("", "CumProd"): cumulative,
    ("", "DFT"): fourier_transform,
    ("", "STFT"): signature_rule("b--,,,->b---", "b"),
    **{("", op): _reduction("sum") for op in ["ReduceSum", "ReduceSumSquare", "ReduceL1"]},
    ("", "ReduceMean"): _reduction("mean"),
    **{("", op): _reduction(None) for op in ["ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2", "ReduceLogSum"]},
    ("", "ReduceLogSumExp"): _reduction(None),
}
