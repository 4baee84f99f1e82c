"""How an operator passes a batch on: by the rules of sharding, and by what it does with numbers of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto

from onnxplace.passes.sharding.rules.axis_rules import AxisRule
from onnxplace.passes.sharding.rules.layouts import Division, Layout
from onnxplace.passes.sharding.rules.node_views import NodeView, Shape
from onnxplace.passes.sharding.rules.reshape_rules import RESHAPES, equal_parts, reshape_layout
from onnxplace.passes.sharding.rules.rule_table import list_axis_rules

# Numbers of the rows in a batch: `Range` over the batch, by which exporters pick from each row.
#
# `x[arange(batch), index]` takes an entry of each request, and a mask of torch is read at `mask[row, column]`: by index
# pairs, or at `row * width + column` of the flattened mask. Row numbers depend on the other requests of a batch, but
# what they pick from a batch does not.


class Cut(NamedTuple):
    """The axis of a value along which requests follow one another, in each of `outer` rows.

    A value [3 * batch, 4] with one row per request in each of three tensors is Cut(0, 3).
    """

    axis: int
    outer: int = 1


@dataclass(frozen=True)
class Rows:
    """Each entry is its own index along an axis that has one entry per row of the batch."""

    axis: int


@dataclass(frozen=True)
class Spans:
    """Numbers computed from those of rows: an entry of row r is from `r * stride + low` to `r * stride + high`.

    With `low` at least 0 and `high` below `stride`, they count the entries of a flattened batch, each in its own row.
    """

    axis: int
    stride: int
    low: int
    high: int


@dataclass(frozen=True)
class Tuples:
    """Index tuples along the last axis: the first number of each is its own index along the axis of the batch."""

    axis: int


@dataclass(frozen=True)
class Positions:
    """Computed from row numbers: only the shape of such a value may be used."""

    op: str
    node: str


RowFlow = Rows | Spans | Tuples | Positions
# Operators that move entries, by the same rules as batches.
MOVES_ROWS = frozenset(("Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))
# Operators that compute the places of a row's entries in a flattened batch.
SHIFTS_ROWS = frozenset(("Add", "Mul"))
_INTEGERS = (TensorProto.INT32, TensorProto.INT64)


def find_bounds(
    name: str, values: Mapping[str, NDArray[Any]], shapes: Mapping[str, Shape], producers: Mapping[str, NodeProto]
) -> tuple[int, int] | None:
    """Return the least and the largest entry of an integer tensor, None if they are not known.

    Args:
        name: Name of the tensor.
        values: Small tensors that are known.
        shapes: Shapes of all tensors: what ArgMax returns is inside its axis.
        producers: The node of each computed tensor; a Range of known limits may have any size.
    """
    while name not in values:
        node = producers.get(name)
        if node is None or node.domain not in ("", "ai.onnx"):
            return None
        if node.op_type == "Range":
            return _find_range_bounds([values.get(argument) for argument in node.input])
        if node.op_type in ("ArgMax", "ArgMin"):
            shape = shapes.get(node.input[0])
            size = shape[_read_attribute(node, "axis")] if shape else 0
            return (0, size - 1) if size else None
        if node.op_type not in MOVES_ROWS or (node.op_type == "Cast" and _read_attribute(node, "to") not in _INTEGERS):
            return None
        name = node.input[0]
    array = values[name]
    return (int(array.min()), int(array.max())) if array.dtype.kind in "iu" and array.size else None


def _find_range_bounds(arguments: Sequence[NDArray[Any] | None]) -> tuple[int, int] | None:
    """Return the bounds of a Range that counts upwards and has entries."""
    known = [int(array.reshape(-1)[0]) for array in arguments if array is not None and array.dtype.kind in "iu"]
    if len(known) != 3 or known[2] < 1 or known[1] <= known[0]:
        return None
    # The last entry is the start plus as many whole steps as fit before the limit.
    start, limit, step = known
    return start, start + (limit - 1 - start) // step * step


def _read_attribute(node: NodeProto, name: str) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), 0)


def move_rows(view: NodeView, rows: Rows | Spans, cuts: Sequence[Cut] | None, batch: int) -> Rows | Spans | None:
    """Return the row numbers behind an operator, given where it moves a batch; None if it alters them."""
    if cuts is None or len(cuts) != 1 or (view.op == "Cast" and view.attribute("to") not in _INTEGERS):
        return None
    (cut,) = cuts
    return replace(rows, axis=cut.axis) if cut.outer == 1 and view.result()[cut.axis] == batch else None


def shift_rows(op: str, rows: Rows | Spans | None, bounds: tuple[int, int] | None) -> Spans | None:
    """Return the numbers behind an Add or Mul of row numbers and a tensor within bounds; None if nothing is known."""
    if rows is None or bounds is None:
        return None
    spans = rows if isinstance(rows, Spans) else Spans(rows.axis, 1, 0, 0)
    least, most = bounds
    if op == "Add":
        return replace(spans, low=spans.low + least, high=spans.high + most)
    # Only a factor that is the same everywhere keeps rows apart.
    if least != most or most < 1:
        return None
    return Spans(spans.axis, spans.stride * most, spans.low * most, spans.high * most)


def join_indices(view: NodeView, flows: Mapping[int, object], batch: int) -> Tuples | None:
    """Return the index tuples of a Concat of row numbers and other indices of the same rows; None if it is another."""
    rows, last = flows.get(0), len(view.result()) - 1
    if not isinstance(rows, Rows) or view.axis(0, last + 1) != last or view.shape(0)[last] != 1 or rows.axis == last:
        return None
    axis = rows.axis
    others = [position for position in range(1, len(view.inputs)) if view.has(position)]
    fits = all(flows.get(position) == Cut(axis) and view.shape(position)[axis] == batch for position in others)
    return Tuples(axis) if fits else None


def pick_entries(view: NodeView, flows: Mapping[int, object], batch: int) -> Cut | None:
    """Return the batch that a GatherND or Gather picks from each row of a batch; None if it picks others."""
    data, indices = flows.get(0), flows.get(1)
    if not isinstance(data, Cut) or data.outer != 1:
        return None
    size = view.shape(0)[data.axis]
    if view.op == "Gather":
        axis = view.axis(0)
        is_own = isinstance(indices, Rows) and size == batch
        if isinstance(indices, Spans):
            is_own = indices.stride * batch == size and indices.low >= 0 and indices.high < indices.stride
        return Cut(axis + indices.axis) if isinstance(indices, Rows | Spans) and is_own and data.axis == axis else None
    if view.op != "GatherND" or data.axis != 0 or size != batch or view.attribute("batch_dims", 0) != 0:
        return None
    if isinstance(indices, Tuples):
        return Cut(indices.axis)
    last = view.rank(1) - 1
    is_single = isinstance(indices, Rows) and indices.axis < last and view.shape(1)[last] == 1
    return Cut(indices.axis) if is_single and isinstance(indices, Rows) else None


# Where an operator puts the requests of its inputs, by the rules of sharding.

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
    # Joined requests would be quantised by the range of all of them.
    if rule.effect != "map" or rule.shares_range or (rule.edit is not None and view.op not in _FOLLOWING_SHAPES):
        return None
    axes = {position: axis for position, axis in rule.inputs.items() if view.has(position)}
    if {position: cut.axis for position, cut in cuts.items()} != axes:
        return None
    # Fused inputs, such as query, key and value in one, have their requests in several rows: all inputs must agree.
    outers = {cut.outer / rule.fused.get(position, 1) for position, cut in cuts.items()}
    if len(outers) != 1 or not (outer := outers.pop()).is_integer():
        return None
    if rule.units and (outer != 1 or rule.units % batch):
        return None
    present = view.present_outputs()
    if any(position not in rule.outputs for position in present):
        return None
    return [Cut(rule.outputs[position], int(outer)) for position in present]
