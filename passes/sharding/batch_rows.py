"""Numbers of the rows in a batch: `Range` over the batch, by which exporters pick from each row.

`x[arange(batch), index]` takes an entry of each request, and a mask of torch is read at `mask[row, column]`. Row
numbers depend on the other requests of a batch, but what they pick from a batch does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxplace.passes.sharding.node_views import NodeView


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
class Tuples:
    """Index tuples along the last axis: the first number of each is its own index along the axis of the batch."""

    axis: int


@dataclass(frozen=True)
class Positions:
    """Computed from row numbers: only the shape of such a value may be used."""

    op: str
    node: str


RowFlow = Rows | Tuples | Positions
# Operators that move entries, by the same rules as batches.
MOVES_ROWS = frozenset(("Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))
_INTEGERS = (TensorProto.INT32, TensorProto.INT64)


def counts_rows(arguments: Sequence[NDArray[np.generic]], batch: int) -> bool:
    """Return whether a Range counts the rows of a batch: from 0 in steps of 1 to its size."""
    return len(arguments) == 3 and [float(array.reshape(-1)[0]) for array in arguments] == [0, batch, 1]


def move_rows(view: NodeView, cuts: Sequence[Cut] | None, batch: int) -> Rows | None:
    """Return the row numbers behind an operator, given where it moves a batch; None if it alters them."""
    if cuts is None or len(cuts) != 1 or (view.op == "Cast" and view.attribute("to") not in _INTEGERS):
        return None
    (cut,) = cuts
    return Rows(cut.axis) if cut.outer == 1 and view.result()[cut.axis] == batch else None


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
    if not isinstance(data, Cut) or data.outer != 1 or view.shape(0)[data.axis] != batch:
        return None
    if view.op == "Gather":
        axis = view.axis(0)
        return Cut(axis + indices.axis) if isinstance(indices, Rows) and data.axis == axis else None
    if view.op != "GatherND" or data.axis != 0 or view.attribute("batch_dims", 0) != 0:
        return None
    if isinstance(indices, Tuples):
        return Cut(indices.axis)
    last = view.rank(1) - 1
    is_single = isinstance(indices, Rows) and indices.axis < last and view.shape(1)[last] == 1
    return Cut(indices.axis) if is_single and isinstance(indices, Rows) else None
