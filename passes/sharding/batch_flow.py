"""How a batch flows through a model: which axis of each value holds the requests, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from onnxplace.model import Model, iterate_subgraphs
from onnxplace.passes.sharding.batch_rows import (
    MOVES_ROWS,
    Cut,
    Positions,
    RowFlow,
    Rows,
    Tuples,
    counts_rows,
    join_indices,
    move_rows,
    pick_entries,
)
from onnxplace.passes.sharding.layouts import Division, Layout
from onnxplace.passes.sharding.node_views import NodeView, split_words
from onnxplace.passes.sharding.reshapes import RESHAPES, equal_parts, reshape_layout
from onnxplace.passes.sharding.rules.axis_rules import AxisRule
from onnxplace.passes.sharding.space import is_unrepeatable
from onnxplace.passes.sharding.strategies import list_axis_rules
from onnxplace.passes.sharding.tensor_facts import TensorFacts

# Cuts at multiples of a fraction that no size of the batch divides, so that layouts keep the batch as their blocks.
_DIVISION = Division((1.0, 2.0))
# Inputs that hold shapes, which may follow the size of the batch.
_SHAPE_INPUTS = {"Reshape": 1, "Expand": 1, "Resize": 3}
# The edits of these operators only adapt shapes, which follow the batch by themselves.
_FOLLOWING_SHAPES = frozenset(("Expand", "Resize", "Upsample"))
# Operators that compute sizes from sizes without branches or rounding, so that two samples show what they compute. The
# first group takes sizes at its first input only; the others are indices or axes.
_MOVES_SIZES = frozenset(
    split_words("Cast Flatten Gather Identity ReduceProd ReduceSum Reshape Slice Split Squeeze Transpose Unsqueeze")
)
_COMBINES_SIZES = frozenset(("Add", "Concat", "Mul"))
_ROUNDS_SIZES = frozenset(("Ceil", "Floor"))
# Operators that fill a shape with values that are the same for all requests.
_FILLS = {"ConstantOfShape": 0, "Expand": 1, "Tile": 1}


class _Other(Enum):
    SAME = "the same for all requests"
    SIZES = "computed from the size of the batch"


SAME: Final = _Other.SAME
SIZES: Final = _Other.SIZES
Flow = Cut | RowFlow | _Other


@dataclass(frozen=True)
class Sample:
    """Shapes and small values of a model at one size of the batch."""

    batch: int
    facts: TensorFacts
    values: Mapping[str, NDArray[Any]]
    """Values that are constant, or follow from shapes."""


class Refusal(Exception):  # noqa: N818 - an answer, not an error
    """Requests cannot be joined."""

    def __init__(self, reason: str, node: str = "", *, is_unknown: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node
        self.is_unknown = is_unknown
        """Whether only shapes are missing."""


class BatchFlow:
    """The flow of a batch, from two samples that differ in its size alone."""

    def __init__(self, model: Model, first: Sample, second: Sample) -> None:
        self._model = model
        self._samples = (first, second)
        self._flows: dict[str, Flow] = {}

    def find_output_axes(self, inputs: Mapping[str, Cut]) -> dict[str, int]:
        """Return the axis of each output that holds the batch; others are the same for all requests.

        Raises Refusal, naming the node, if requests cannot be joined.
        """
        self._flows = dict(inputs)
        producers = {}
        for index, node in enumerate(self._model.nodes):
            flows = self._follow(index, node)
            names = [name for name in node.output if name]
            self._flows.update(zip(names, flows, strict=True))
            producers.update(dict.fromkeys(names, node.name))
        axes = {}
        for output in self._model.outputs:
            value = self._model.sources.get(output.name, output.name)
            flow = self._flow(value)
            if isinstance(flow, Cut) and flow.outer == 1:
                axes[output.name] = flow.axis
            elif isinstance(flow, Positions):
                raise Refusal(f"{flow.op} computes with positions in the batch", flow.node)
            elif flow is not SAME:
                where = producers.get(value, "")
                raise Refusal(f"the requests in output {output.name!r} do not follow one another", where)
        if not axes:
            raise Refusal("no output has this dimension")
        return axes

    def _flow(self, name: str) -> Flow:
        return self._flows.get(name, SAME)

    def _follow(self, index: int, node: NodeProto) -> Sequence[Flow]:
        """Return the flow of each output of a node; raises Refusal."""
        flows = {self._flow(name) for name in self._model.reads[index]}
        count = sum(map(bool, node.output))
        if is_unrepeatable(node):
            reason = "is random" if node.domain in ("", "ai.onnx", "com.microsoft") else "is not a standard operator"
            raise Refusal(f"{node.op_type} {reason}", node.name)
        if flows <= {SAME}:
            return (SAME,) * count
        if any(True for _ in iterate_subgraphs(node)):
            raise Refusal(f"{node.op_type} has subgraphs that read values of the batch", node.name)
        if node.op_type in ("Shape", "Size") and node.domain in ("", "ai.onnx"):
            return self._compare_values(node)
        if any(isinstance(flow, RowFlow) for flow in flows):
            return self._follow_rows(index, node)
        if all(not isinstance(flow, Cut) for flow in flows):
            return self._follow_sizes(index, node)
        for position, name in enumerate(node.input):
            if name and self._flow(name) is SIZES and _SHAPE_INPUTS.get(node.op_type) != position:
                raise Refusal(f"{node.op_type} computes with the size of the batch", node.name)
        views = [self._view(index, sample) for sample in self._samples]
        first, second = (
            self._apply_rules(view, sample, self._list_cuts(view)) for view, sample in zip(views, self._samples)
        )
        if first is None or first != second:
            cut = next(flow for flow in map(self._flow, node.input) if isinstance(flow, Cut))
            reason = f"{node.op_type} combines the entries along axis {cut.axis}, or has no rule for them"
            raise Refusal(reason, node.name)
        if not _grow_only_along(views, first):
            raise Refusal(f"{node.op_type} gives other axes the size of the batch", node.name)
        return first

    def _view(self, index: int, sample: Sample) -> NodeView:
        """Return a node as rules see it; sizes of a Resize count as constants."""
        node = self._model.nodes[index]
        view = sample.facts.view(index)
        if view is None:
            raise Refusal(f"the shapes of {node.op_type} are not known", node.name, is_unknown=True)
        if node.op_type == "Resize" and len(node.input) > 3 and node.input[3] in sample.values:
            return replace(view, constants={**view.constants, 3: sample.values[node.input[3]]})
        return view

    # -- values of the batch ------------------------------------------------------------------------------------

    def _list_cuts(self, view: NodeView) -> dict[int, Cut]:
        """Return the cuts of the inputs by position."""
        return {
            position: flow
            for position, name in enumerate(view.node.input)
            if name and isinstance(flow := self._flow(name), Cut)
        }

    def _apply_rules(self, view: NodeView, sample: Sample, cuts: Mapping[int, Cut]) -> Sequence[Cut] | None:
        """Return the cuts of the outputs, None if no rule has these cuts of the inputs."""
        results: Sequence[Cut] | None = None
        if view.node.domain in ("", "ai.onnx"):
            if view.op in RESHAPES:
                results = _reshape(view, cuts, sample.batch)
            elif view.op in ("Concat", "Split"):
                results = _along_own_axis(view, cuts)
        if results is None:
            matching = (_match(view, rule, cuts, sample.batch) for rule in list_axis_rules(view))
            results = next((found for found in matching if found is not None), None)
        if results is None:
            return None
        shapes = [view.result(position) for position in view.present_outputs()]
        fits = all(_holds_batch(shape, cut, sample.batch) for shape, cut in zip(shapes, results, strict=True))
        return results if fits else None

    def _follow_rows(self, index: int, node: NodeProto) -> Sequence[Flow]:
        """Return the flow of each output of a node that reads row numbers."""
        before = next((flow for name in node.input if isinstance(flow := self._flow(name), Positions)), None)
        if before is None and node.domain in ("", "ai.onnx"):
            views = [self._view(index, sample) for sample in self._samples]
            first, second = (self._apply_row_rules(view, sample) for view, sample in zip(views, self._samples))
            if first is not None and first == second and _grow_only_along(views, [first]):
                return [first]
        # Their shapes may still be asked for: exporters broadcast indices to find their common shape.
        return [before or Positions(node.op_type, node.name)] * sum(map(bool, node.output))

    def _apply_row_rules(self, view: NodeView, sample: Sample) -> Cut | Rows | Tuples | None:
        """Return the flow of the only output, None if it depends on row numbers otherwise."""
        flows = {position: self._flow(name) for position, name in enumerate(view.node.input) if name}
        others = {position: flow for position, flow in flows.items() if flow is not SAME and position > 0}
        if view.op in MOVES_ROWS:
            allowed = {_SHAPE_INPUTS[view.op]: SIZES} if view.op in _SHAPE_INPUTS else {}
            rows = flows[0]
            if not isinstance(rows, Rows) or not others.items() <= allowed.items():
                return None
            cuts = self._apply_rules(view, sample, {0: Cut(rows.axis)})
            return move_rows(view, cuts, sample.batch)
        if view.op == "Concat":
            return join_indices(view, flows, sample.batch)
        return pick_entries(view, flows, sample.batch)

    # -- values that are computed from sizes ------------------------------------------------------------------------

    def _follow_sizes(self, index: int, node: NodeProto) -> Sequence[Flow]:
        """Return the flow of each output of a node that reads sizes, and nothing else of the batch."""
        refusal = Refusal(f"{node.op_type} computes with the size of the batch", node.name)
        if node.domain not in ("", "ai.onnx"):
            raise refusal
        positions = {position for position, name in enumerate(node.input) if name and self._flow(name) is SIZES}
        if _FILLS.get(node.op_type) in positions and len(positions) == 1:
            return self._fill(index, node)
        if node.op_type == "Range" and self._counts_rows(node):
            return (Rows(0),)
        exact = True
        if node.op_type in _MOVES_SIZES:
            exact = positions == {0}
        elif node.op_type in _ROUNDS_SIZES or node.op_type == "Div":
            exact = self._is_exact(node)
        elif node.op_type == "Where":
            exact = 0 not in positions
        elif node.op_type == "Equal":
            exact = self._never_equal(node)
        elif node.op_type == "Max":
            exact = self._is_broadcast(node)
        elif node.op_type not in _COMBINES_SIZES:
            exact = False
        if not exact:
            raise refusal
        return self._compare_values(node)

    def _values(self, name: str) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Return a value at both sizes of the batch, None if it is not known."""
        arrays = [sample.values[name] for sample in self._samples if name in sample.values]
        return (arrays[0], arrays[1]) if len(arrays) == len(self._samples) else None

    def _compare_values(self, node: NodeProto) -> Sequence[Flow]:
        """Return whether each output of a node depends on the size of the batch; raises Refusal if that is unknown.

        Sizes grow with the batch: other values could meet any bound at some size.
        """
        flows: list[Flow] = []
        for name in filter(None, node.output):
            pair = self._values(name)
            if pair is None or pair[0].shape != pair[1].shape:
                raise Refusal(f"{node.op_type} computes with the size of the batch", node.name, is_unknown=pair is None)
            small, large = pair
            differs = small != large
            if not (small[differs] > 0).all() or not (large[differs] > small[differs]).all():
                raise Refusal(f"{node.op_type} computes with the size of the batch", node.name)
            flows.append(SIZES if differs.any() else SAME)
        return flows

    def _is_exact(self, node: NodeProto) -> bool:
        """Return whether a division or rounding leaves no rest at either size."""
        if node.op_type in _ROUNDS_SIZES:
            before, after = self._values(node.input[0]), self._values(node.output[0])
            return before is not None and after is not None and all(map(np.array_equal, before, after))
        pairs = [pair for name in (*node.input, *node.output) if (pair := self._values(name)) is not None]
        return len(pairs) == 3 and all(np.array_equal(a, b * c) for a, b, c in zip(*pairs))

    def _never_equal(self, node: NodeProto) -> bool:
        """Return whether an Equal compares sizes with numbers that no size is, such as the -1 of a target shape."""
        left, right = self._values(node.input[0]), self._values(node.input[1])
        if left is None or right is None:
            return False
        try:
            sides = [np.broadcast_arrays(left[0], left[1], right[0], right[1])]
        except ValueError:
            return False
        a, b, c, d = sides[0]
        left_grows, right_grows = a != b, c != d
        return bool((~left_grows | (c <= 0)).all() and (~right_grows | (a <= 0)).all())

    def _counts_rows(self, node: NodeProto) -> bool:
        """Return whether a Range counts the rows of the batch."""
        pairs = [pair for name in node.input if (pair := self._values(name)) is not None]
        return all(
            counts_rows([pair[index] for pair in pairs], sample.batch) for index, sample in enumerate(self._samples)
        )

    def _is_broadcast(self, node: NodeProto) -> bool:
        """Return whether a Max takes the common shape of broadcast tensors: each size is the same in all, or 1."""
        pairs = [self._values(name) for name in node.input if name]
        for index in range(len(self._samples)):
            arrays = [pair[index] for pair in pairs if pair is not None]
            if len(arrays) != len(pairs) or any(array.shape != arrays[0].shape for array in arrays):
                return False
            largest = np.maximum.reduce(arrays)
            if not all(((array == largest) | (array == 1)).all() for array in arrays):
                return False
        return True

    def _fill(self, index: int, node: NodeProto) -> Sequence[Flow]:
        """Return the flow of a tensor that is filled with the same values for all requests."""
        views = [self._view(index, sample) for sample in self._samples]
        first, second = (view.result() for view in views)
        grown = [axis for axis, pair in enumerate(zip(first, second)) if pair[0] != pair[1]]
        if len(first) == len(second) and len(grown) == 1:
            (axis,) = grown
            sizes = [(shape[axis], sample.batch) for shape, sample in zip((first, second), self._samples)]
            ratios = {size // batch for size, batch in sizes if size % batch == 0}
            if len(ratios) == 1 and all(size % batch == 0 for size, batch in sizes):
                return (Cut(axis),)
        raise Refusal(f"{node.op_type} computes with the size of the batch", node.name)


def _grow_only_along(views: Sequence[NodeView], flows: Sequence[Cut | Rows | Tuples]) -> bool:
    """Return whether the results at two sizes of the batch differ in the axis of the batch alone."""
    first, second = views
    for position, flow in zip(first.present_outputs(), flows, strict=True):
        shapes = first.result(position), second.result(position)
        if len(shapes[0]) != len(shapes[1]):
            return False
        if any(pair[0] != pair[1] for axis, pair in enumerate(zip(*shapes)) if axis != flow.axis):
            return False
    return True


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
