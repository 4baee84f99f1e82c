"""Prove that requests can be joined along a dimension: the result of all is the results of each, one after the other.

The rules of sharding say which axes of inputs and results are cut together without communication. A model allows
batching if every input with the dimension is cut along it, each node passes the cut on by such a rule, and the results
end cut. Unlike a sharded model, this one cannot be edited: targets of Reshape, Expand and others have to follow the
size of the batch by themselves. So shapes are inferred at two sizes of the batch, and at two sizes of all other
symbolic dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, numpy_helper

from onnxplace.bundle.manifest import BatchingRecord
from onnxplace.errors import OnnxplaceError
from onnxplace.feeds.dimensions import complete_dimensions, dimension_keys, symbols_of_dimension
from onnxplace.model.model import Model, declaration_of
from onnxplace.model.nested_graphs import has_subgraphs
from onnxplace.passes.batching.batch_propagation_rules import (
    MOVES_ROWS,
    SHIFTS_ROWS,
    Cut,
    Positions,
    RowFlow,
    Rows,
    Spans,
    Tuples,
    apply_rules,
    find_bounds,
    join_indices,
    move_rows,
    pick_entries,
    read_sizes,
    shift_rows,
)
from onnxplace.passes.sharding.rules.node_views import NodeView, split_words
from onnxplace.passes.sharding.space.known_shapes import infer_shapes_and_values
from onnxplace.passes.sharding.space.strategy_space import is_unrepeatable
from onnxplace.passes.sharding.space.tensor_facts import TensorFacts, read_constants

# How a batch flows through a model: which axis of each value holds the requests, one after the other.

# Inputs that hold shapes, which may follow the size of the batch.
_SHAPE_INPUTS = {"Reshape": 1, "Expand": 1, "Resize": 3, "Slice": 2}
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


def _refuse_sizes(node: NodeProto, *, is_unknown: bool = False) -> Refusal:
    return Refusal(f"{node.op_type} computes with the size of the batch", node.name, is_unknown=is_unknown)


class BatchFlow:
    """The flow of a batch, from two samples that differ in its size alone."""

    def __init__(self, model: Model, first: Sample, second: Sample) -> None:
        self._model = model
        self._samples = (first, second)
        self._flows: dict[str, Flow] = {}
        self._producers = {name: node for node in model.nodes for name in node.output if name}

    def find_output_axes(self, inputs: Mapping[str, Cut]) -> dict[str, int]:
        """Return the axis of each output that holds the batch; others are the same for all requests.

        Raises Refusal, naming the node, if requests cannot be joined.
        """
        # One pass in topological order. Each value is the same for all requests, is computed from the size of the
        # batch, or holds the requests along an axis, or numbers of their rows. What fits none of these ends the proof.
        self._flows = dict(inputs)
        for index, node in enumerate(self._model.nodes):
            flows = self._follow(index, node)
            self._flows.update(zip(filter(None, node.output), flows, strict=True))
        axes = {}
        for output in self._model.outputs:
            value = self._model.sources.get(output.name, output.name)
            flow = self._flow(value)
            if isinstance(flow, Cut) and flow.outer == 1:
                axes[output.name] = flow.axis
            elif isinstance(flow, Positions):
                raise Refusal(f"{flow.op} computes with positions in the batch", flow.node)
            elif flow is not SAME:
                where = self._producers[value].name if value in self._producers else ""
                raise Refusal(f"the requests in output {output.name!r} do not follow one another", where)
        if not axes:
            raise Refusal("no output has this dimension")
        return axes

    def _flow(self, name: str) -> Flow:
        return self._flows.get(name, SAME)

    def _follow(self, index: int, node: NodeProto) -> Sequence[Flow]:
        """Return the flow of each output of a node; raises Refusal."""
        flows = {self._flow(name) for name in self._model.reads[index]}
        if is_unrepeatable(node):
            reason = "is random" if node.domain in ("", "ai.onnx", "com.microsoft") else "is not a standard operator"
            raise Refusal(f"{node.op_type} {reason}", node.name)
        if flows <= {SAME}:
            return (SAME,) * sum(map(bool, node.output))
        if has_subgraphs(node):
            raise Refusal(f"{node.op_type} has subgraphs that read values of the batch", node.name)
        if node.op_type in ("Shape", "Size") and node.domain in ("", "ai.onnx"):
            return self._compare_values(node)
        if any(isinstance(flow, RowFlow) for flow in flows):
            return self._follow_rows(index, node)
        if any(isinstance(flow, Cut) for flow in flows):
            return self._follow_cuts(index, node)
        return self._follow_sizes(index, node)

    def _follow_cuts(self, index: int, node: NodeProto) -> Sequence[Flow]:
        """Return the flow of each output of a node that reads values of the batch: cuts of them, too."""
        views = [self._view(index, sample) for sample in self._samples]
        self._require_shape_sizes(node, views)
        first, second = (
            apply_rules(view, self._list_cuts(view), sample.batch) for view, sample in zip(views, self._samples)
        )
        # The same answer at two sizes: a cut that only fits one of them by chance is no proof.
        if first is None or first != second:
            cut = next(flow for flow in map(self._flow, node.input) if isinstance(flow, Cut))
            reason = f"{node.op_type} combines the entries along axis {cut.axis}, or has no rule for them"
            raise Refusal(reason, node.name)
        if not _grow_only_along(views, first):
            raise Refusal(f"{node.op_type} gives other axes the size of the batch", node.name)
        return first

    def _view(self, index: int, sample: Sample) -> NodeView:
        """Return a node as rules see it, with what it reads of shapes."""
        node = self._model.nodes[index]
        view = sample.facts.view(index)
        if view is None:
            raise Refusal(f"the shapes of {node.op_type} are not known", node.name, is_unknown=True)
        known = {
            flow: {
                position: sample.values[name]
                for position, name in enumerate(node.input)
                if name in sample.values and self._flow(name) is flow
            }
            for flow in (SAME, SIZES)
        }
        return read_sizes(view, known[SAME], known[SIZES])

    # -- values of the batch ------------------------------------------------------------------------------------

    def _list_cuts(self, view: NodeView) -> dict[int, Cut]:
        """Return the cuts of the inputs by position."""
        return {
            position: flow
            for position, name in enumerate(view.node.input)
            if name and isinstance(flow := self._flow(name), Cut)
        }

    def _follow_rows(self, index: int, node: NodeProto) -> Sequence[Flow]:
        """Return the flow of each output of a node that reads row numbers."""
        before = next((flow for name in node.input if isinstance(flow := self._flow(name), Positions)), None)
        if before is None and node.domain in ("", "ai.onnx"):
            views = [self._view(index, sample) for sample in self._samples]
            first, second = (self._apply_row_rules(view, sample) for view, sample in zip(views, self._samples))
            if isinstance(first, Cut | Rows | Spans | Tuples) and first == second and _grow_only_along(views, [first]):
                return [first]
        # Their shapes may still be asked for: exporters broadcast indices to find their common shape.
        return [before or Positions(node.op_type, node.name)] * sum(map(bool, node.output))

    def _apply_row_rules(self, view: NodeView, sample: Sample) -> Cut | Rows | Spans | Tuples | None:
        """Return the flow of the only output, None if it depends on row numbers otherwise."""
        flows = {position: self._flow(name) for position, name in enumerate(view.node.input) if name}
        if view.op == "Concat":
            return join_indices(view, flows, sample.batch)
        numbers = [(position, flow) for position, flow in flows.items() if isinstance(flow, Rows | Spans)]
        if len(numbers) != 1 or view.op not in (*MOVES_ROWS, *SHIFTS_ROWS, "GreaterOrEqual"):
            return pick_entries(view, flows, sample.batch)
        ((position, rows),) = numbers
        return self._compute_with_rows(view, sample, flows, position, rows)

    def _compute_with_rows(
        self, view: NodeView, sample: Sample, flows: Mapping[int, Flow], position: int, rows: Rows | Spans
    ) -> Cut | Rows | Spans | None:
        """Return the flow of the output of a node that moves, shifts or compares the row numbers at a position."""
        cuts = self._list_cuts(view)
        others = {place: flow for place, flow in flows.items() if place != position and flow is not SAME}
        allowed = cuts if view.op == "Add" else {_SHAPE_INPUTS.get(view.op, -1): SIZES}
        if not others.items() <= allowed.items():
            return None
        results = apply_rules(view, {**cuts, position: Cut(rows.axis)}, sample.batch)
        moved = move_rows(view, rows, results, sample.batch)
        if view.op in MOVES_ROWS or moved is None:
            return moved if position == 0 else None
        return self._compare_rows(view, sample, position, moved)

    def _compare_rows(self, view: NodeView, sample: Sample, position: int, moved: Rows | Spans) -> Cut | Spans | None:
        """Return the flow of row numbers that are shifted by, or compared with, the other input."""
        bounds = find_bounds(view.node.input[1 - position], sample.values, sample.facts.shapes, self._producers)
        if view.op in SHIFTS_ROWS:
            return shift_rows(view.op, moved, bounds)
        # No row has a number below 0: torch checks that indices of a mask are inside.
        is_true = position == 0 and isinstance(moved, Rows) and bounds is not None and bounds[1] <= 0
        return Cut(moved.axis) if is_true else None

    # -- values that are computed from sizes ------------------------------------------------------------------------

    def _follow_sizes(self, index: int, node: NodeProto) -> Sequence[Flow]:
        """Return the flow of each output of a node that reads sizes, and nothing else of the batch."""
        if node.domain not in ("", "ai.onnx"):
            raise _refuse_sizes(node)
        positions = self._find_positions(node, SIZES)
        if _FILLS.get(node.op_type) in positions and len(positions) == 1:
            return self._fill(index, node)
        if node.op_type == "Range" and self._counts_rows(node):
            return (Rows(0),)
        if not self._computes_exactly(node, positions):
            raise _refuse_sizes(node)
        return self._compare_values(node)

    def _computes_exactly(self, node: NodeProto, positions: set[int]) -> bool:
        """Return whether sizes that a node makes of those at some positions are right at any size of the batch."""
        if node.op_type in _MOVES_SIZES:
            return positions == {0}
        if node.op_type in _ROUNDS_SIZES or node.op_type == "Div":
            return self._is_exact(node)
        if node.op_type == "Where":
            return 0 not in positions
        if node.op_type == "Equal":
            return self._never_equal(node)
        if node.op_type == "Max":
            return self._is_broadcast(node)
        return node.op_type in _COMBINES_SIZES

    def _require_shape_sizes(self, node: NodeProto, views: Sequence[NodeView]) -> None:
        """Raise Refusal unless a node reads sizes as the shape of its result, or not at all."""
        sizes = self._find_positions(node, SIZES)
        if not sizes <= {_SHAPE_INPUTS.get(node.op_type)}:
            raise _refuse_sizes(node)
        if sizes and node.op_type == "Slice" and any(2 not in view.constants for view in views):
            # Such an end may be behind the axis at the sizes of the samples, and inside it at others.
            raise Refusal("Slice ends at the size of the batch", node.name)

    def _find_positions(self, node: NodeProto, kind: Flow) -> set[int]:
        """Return the positions of the inputs with this flow."""
        return {position for position, name in enumerate(node.input) if name and self._flow(name) is kind}

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
                raise _refuse_sizes(node, is_unknown=pair is None)
            small, large = pair
            differs = small != large
            if not (small[differs] > 0).all() or not (large[differs] > small[differs]).all():
                raise _refuse_sizes(node)
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
            a, b, c, d = np.broadcast_arrays(*left, *right)
        except ValueError:
            return False
        left_grows, right_grows = a != b, c != d
        return bool((~left_grows | (c <= 0)).all() and (~right_grows | (a <= 0)).all())

    def _counts_rows(self, node: NodeProto) -> bool:
        """Return whether a Range counts the rows of the batch: from 0 in steps of 1 to its size."""
        pairs = [pair for name in node.input if (pair := self._values(name)) is not None]
        bounds = [[float(array.reshape(-1)[0]) for array in arrays] for arrays in zip(*pairs)]
        return bounds == [[0, sample.batch, 1] for sample in self._samples]

    def _is_broadcast(self, node: NodeProto) -> bool:
        """Return whether a Max takes the common shape of broadcast tensors: each size is the same in all, or 1."""
        pairs = [self._values(name) for name in node.input if name]
        if any(pair is None for pair in pairs):
            return False
        for arrays in zip(*filter(None, pairs)):
            if any(array.shape != arrays[0].shape for array in arrays):
                return False
            # Broadcasting: each size is the largest one or 1.
            largest = np.maximum.reduce(arrays)
            if not all(((array == largest) | (array == 1)).all() for array in arrays):
                return False
        return True

    def _fill(self, index: int, node: NodeProto) -> Sequence[Flow]:
        """Return the flow of a tensor that is filled with the same values for all requests."""
        views = [self._view(index, sample) for sample in self._samples]
        first, second = (view.result() for view in views)
        # Exactly one axis grows, by the same factor of the batch at both sizes: it holds the requests.
        grown = [axis for axis, pair in enumerate(zip(first, second)) if pair[0] != pair[1]]
        if len(first) == len(second) and len(grown) == 1:
            (axis,) = grown
            ratios = {divmod(shape[axis], sample.batch) for shape, sample in zip((first, second), self._samples)}
            if len(ratios) == 1 and ratios.pop()[1] == 0:
                return (Cut(axis),)
        raise _refuse_sizes(node)


def _grow_only_along(views: Sequence[NodeView], flows: Sequence[Cut | Rows | Spans | Tuples]) -> bool:
    """Return whether the results at two sizes of the batch differ in the axis of the batch alone."""
    first, second = views
    for position, flow in zip(first.present_outputs(), flows, strict=True):
        shapes = first.result(position), second.result(position)
        if len(shapes[0]) != len(shapes[1]):
            return False
        if any(pair[0] != pair[1] for axis, pair in enumerate(zip(*shapes)) if axis != flow.axis):
            return False
    return True


# Two sizes of the batch: a prime and an even number, both unlikely elsewhere.
_BATCH_SIZES = (13, 22)
# How sizes of the other dimensions are drawn: (a + b * i) * size + c + d * i for dimension i. The second ones keep
# divisors. The model is sure to run at its own sizes, but these may be 1, which is broadcast.
_OTHER_SIZES = ((3, 0, 2, 2), (2, 1, 0, 0), (1, 0, 0, 0))
# The proof has to succeed at so many of them.
_MIN_OTHER_SIZES = 2
# A model with many symbolic dimensions is not tried along all of them.
_MAX_CANDIDATES = 4


def find_batch_axes(model: Model) -> BatchingRecord:
    """Return the first symbolic dimension of the inputs along which requests can be joined, or the reason against it.

    Takes time linear in the number of nodes, for up to 4 dimensions. Raises nothing.
    """
    if model.states:
        return BatchingRecord(reason="the model carries states from call to call")
    declared = [declaration_of(value, model) for value in model.inputs]
    if unranked := [item.name for item in declared if item.shape is None and item.dtype.startswith("tensor(")]:
        return BatchingRecord(reason=f"the model does not declare the shape of input {unranked[0]!r}")
    refusals = []
    for dimension in _list_candidates(model)[:_MAX_CANDIDATES]:
        node = ""
        try:
            return _prove(model, dimension)
        except Refusal as refusal:
            reason, node = refusal.reason, refusal.node
        except OnnxplaceError as problem:
            reason = f"it has no shapes: {problem.message}"
        except Exception as problem:  # noqa: BLE001 - a model that cannot be analysed is still compiled
            reason = f"it cannot be analysed: {type(problem).__name__}: {problem}"
        refusals.append(BatchingRecord(reason=f"along dimension {dimension!r}, {reason}", node=node))
    if not refusals:
        return BatchingRecord(reason="no input has a symbolic dimension")
    return next((refusal for refusal in refusals if refusal.node), refusals[0])


def _input_keys(model: Model) -> dict[str, list[str]]:
    """Return the symbolic dimension of each axis by input; an empty text for a known size."""
    declared = [declaration_of(value, model) for value in model.inputs]
    return {item.name: [key if size is None else "" for key, size in dimension_keys(item)] for item in declared}


def _list_candidates(model: Model) -> list[str]:
    """Return the symbolic dimensions: first those of first axes."""
    keys = _input_keys(model).values()
    ordered = [*(axes[0] for axes in keys if axes), *(key for axes in keys for key in axes)]
    return [key for key in dict.fromkeys(ordered) if key and symbols_of_dimension(key) == [key]]


def _prove(model: Model, dimension: str) -> BatchingRecord:
    """Return the axes of a dimension; raises Refusal, or OnnxplaceError where there are no shapes."""
    axes = _find_input_axes(model, dimension)
    others = {
        key: size
        for key, size in sorted(model.dimensions.items())
        if key != dimension and symbols_of_dimension(key) == [key]
    }
    proven, unknown = [], None
    for sizes in _draw_other_sizes(others):
        samples = [_infer_sample(model, {**sizes, dimension: size}, size) for size in _BATCH_SIZES]
        try:
            proven.append(BatchFlow(model, samples[0], samples[1]).find_output_axes(axes))
        except Refusal as refusal:
            if not refusal.is_unknown:
                raise
            unknown = refusal  # these sizes may be impossible
        if len(proven) == _MIN_OTHER_SIZES:
            break
    if unknown is not None and len(proven) < min(_MIN_OTHER_SIZES, 1 + len(others)):
        raise unknown
    if any(outputs != proven[0] for outputs in proven):
        raise Refusal("the axes of the outputs depend on the sizes of other dimensions")
    inputs = {name: cut.axis for name, cut in axes.items()}
    return BatchingRecord(dimension=dimension, inputs=inputs, outputs=proven[0])


def _find_input_axes(model: Model, dimension: str) -> dict[str, Cut]:
    axes = {}
    for name, keys in _input_keys(model).items():
        if any(key and key != dimension and dimension in symbols_of_dimension(key) for key in keys):
            raise Refusal(f"input {name!r} has an axis whose size is computed from it")
        if keys.count(dimension) > 1:
            raise Refusal(f"input {name!r} has several axes of this size")
        if dimension in keys:
            if model.overridable(name):
                raise Refusal(f"input {name!r} has a default value of a fixed size")
            axes[name] = Cut(keys.index(dimension))
    return axes


def _draw_other_sizes(bound: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield sizes of the other dimensions."""
    if not bound:
        yield {}
        return
    for factor, factor_step, offset, offset_step in _OTHER_SIZES:
        yield {
            name: (factor + factor_step * index) * size + offset + offset_step * index
            for index, (name, size) in enumerate(bound.items())
        }


def _infer_sample(model: Model, sizes: Mapping[str, int], batch: int) -> Sample:
    """Return the shapes, and the values that follow from them, at some sizes of the symbolic dimensions."""
    dimensions = complete_dimensions(model.dimensions, sizes)
    # Samples of values would be of the wrong size, so they are left out.
    other = replace(model, dimensions=MappingProxyType(dict(dimensions)), samples=MappingProxyType({}))
    shapes, tensors = infer_shapes_and_values(other)
    shapes |= {name: tuple(tensor.dims) for name, tensor in model.constants.items()}
    for node in model.nodes:
        # Inference leaves the mask out, which most models do not read.
        if node.op_type == "Dropout" and node.domain in ("", "ai.onnx") and node.input[0] in shapes:
            shapes.update((name, shapes[node.input[0]]) for name in node.output if name)
    values = {name: numpy_helper.to_array(tensor) for name, tensor in tensors.items()}
    return Sample(batch, TensorFacts(other, shapes, {}, {}, read_constants(other)), values)
