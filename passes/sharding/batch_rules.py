"""Where an operator puts the requests of its inputs, by the rules of sharding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplace.passes.sharding.batch_rows import Cut
from onnxplace.passes.sharding.layouts import Division, Layout
from onnxplace.passes.sharding.node_strategies import RESHAPES, equal_parts, list_axis_rules, reshape_layout
from onnxplace.passes.sharding.node_views import NodeView
from onnxplace.passes.sharding.rules.axis_rules import AxisRule

# Cuts at multiples of a fraction that no size of the batch divides, so that layouts keep the batch as their blocks.
_DIVISION = Division((1.0, 2.0))
# The edits of these operators only adapt shapes, which follow the batch by themselves.
_FOLLOWING_SHAPES = frozenset(("Expand", "Resize", "Upsample"))
# Larger tensors hold no axes, paddings or bounds.
_MAX_CONSTANT_ELEMENTS = 64
# The end of a Slice that takes an axis whole at any size.
_TO_THE_END = 2**63 - 1


def read_sizes(view: NodeView, same: Mapping[int, NDArray[Any]], sizes: Mapping[int, NDArray[Any]]) -> NodeView:
    """Return what rules see of a node whose inputs follow from shapes.

    Args:
        view: The node.
        same: Inputs with the same values at any size of the batch.
        sizes: Inputs that are computed from the size of the batch. Sizes of a Resize count as constants, as axes that
            keep their size are compared with it. So do ends of a Slice, if all of them take an axis whole.
    """
    constants = {
        position: array
        for position, array in same.items()
        if array.dtype.kind in "iu" and array.size <= _MAX_CONSTANT_ELEMENTS
    }
    if view.op == "Resize" and 3 in sizes:
        constants[3] = sizes[3]
    constants.update(view.constants)
    if view.op == "Slice" and 2 in sizes:
        axes = constants[3].reshape(-1).tolist() if 3 in constants else list(range(sizes[2].size))
        ends = sizes[2].reshape(-1)
        if all(end in (view.shape(0)[axis], _TO_THE_END) for axis, end in zip(axes, ends.tolist())):
            constants[2] = np.full_like(ends, _TO_THE_END)
    return replace(view, constants=constants)


def apply_rules(view: NodeView, cuts: Mapping[int, Cut], batch: int) -> Sequence[Cut] | None:
    """Return the cuts of the outputs, None if no rule has these cuts of the inputs."""
    results: Sequence[Cut] | None = None
    if view.node.domain in ("", "ai.onnx"):
        if view.op in RESHAPES:
            results = _reshape(view, cuts, batch)
        elif view.op in ("Concat", "Split"):
            results = _along_own_axis(view, cuts)
    if results is None:
        matching = (_match(view, rule, cuts, batch) for rule in list_axis_rules(view))
        results = next((found for found in matching if found is not None), None)
    if results is None:
        return None
    shapes = [view.result(position) for position in view.present_outputs()]
    fits = all(_holds_batch(shape, cut, batch) for shape, cut in zip(shapes, results, strict=True))
    return results if fits else None


def _holds_batch(shape: Sequence[int], cut: Cut, batch: int) -> bool:
    """Return whether an axis has an equal, positive number of entries for each request in a batch."""
    return shape[cut.axis] > 0 and shape[cut.axis] % (cut.outer * batch) == 0


def _reshape(view: NodeView, cuts: Mapping[int, Cut], batch: int) -> Sequence[Cut] | None:
    """Return the cut of a reshaped tensor.

    A Squeeze without axes would remove the axis of a single request.
    """
    if set(cuts) != {0} or (view.op == "Squeeze" and view.attribute("axes") is None and not view.has(1)):
        return None
    layout = reshape_layout(view.shape(0), view.result(), Layout(cuts[0].axis, cuts[0].outer, batch), _DIVISION)
    return None if layout is None or layout.blocks != batch else [Cut(layout.axis, layout.outer)]


def _along_own_axis(view: NodeView, cuts: Mapping[int, Cut]) -> Sequence[Cut] | None:
    """Return the cuts behind a Concat of batches along their axis, or a Split of such a tensor into equal parts."""
    equal = equal_parts(view)
    if equal is None:
        return None
    axis, parts = equal
    if view.op == "Concat":
        return [Cut(axis, parts)] if len(cuts) == parts and set(cuts.values()) == {Cut(axis)} else None
    outer = cuts[0].outer if set(cuts) == {0} and cuts[0].axis == axis else 1
    if outer % parts or view.has(1) or view.attribute("split") is not None:
        return None
    return [Cut(axis, outer // parts)] * len(view.present_outputs())


def _match(view: NodeView, rule: AxisRule, cuts: Mapping[int, Cut], batch: int) -> Sequence[Cut] | None:
    """Return the cuts of the outputs by a rule, None if it does not have exactly these cuts of the inputs."""
    if rule.effect != "map" or (rule.edit is not None and view.op not in _FOLLOWING_SHAPES):
        return None
    axes = {position: axis for position, axis in rule.inputs.items() if view.has(position)}
    if {position: cut.axis for position, cut in cuts.items()} != axes:
        return None
    outers = {cut.outer / rule.fused.get(position, 1) for position, cut in cuts.items()}
    if len(outers) != 1 or not (outer := outers.pop()).is_integer():
        return None
    if rule.units and (outer != 1 or rule.units % batch):
        return None
    present = view.present_outputs()
    if any(position not in rule.outputs for position in present):
        return None
    return [Cut(rule.outputs[position], int(outer)) for position in present]
