"""Axis rules: which axes of a node's inputs and outputs are split together.

A rule is a function from a `NodeView` to `AxisRule`s. It raises LookupError for inputs that it needs and that are
omitted; the node then stays whole. Rules never guess: what they do not list is not split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from onnxplace.passes.sharding.node_views import Edit, NodeView

Effect = Literal["map", "sum", "mean"]


@dataclass(frozen=True)
class AxisRule:
    """Axes that are split together, all at the same fractions; inputs that are not named are replicated."""

    inputs: Mapping[int, int]
    """Input position -> axis."""
    outputs: Mapping[int, int]
    """Output position -> axis; outputs that are not named are partial, or all outputs are named."""
    effect: Effect = "map"
    """`map`: outputs are split. `sum`: they are summands. `mean`: they are means of the parts, to be weighted."""
    units: int = 0
    """Number of indivisible units along the axes, such as heads; 0 for any cut."""
    fused: Mapping[int, int] = field(default_factory=dict)
    """Input position -> number of equal tensors that lie one after the other along its axis, such as q, k and v."""
    edit: Edit | None = None
    """Adapts a device's copy of the node."""


Rule = Callable[[NodeView], Iterable[AxisRule]]


def split_same(
    view: NodeView,
    axes: Iterable[int],
    inputs: Iterable[int] = (0,),
    outputs: Iterable[int] | None = None,
    units: int = 0,
    edit: Edit | None = None,
) -> list[AxisRule]:
    """Return a rule per axis, which is the same in all these inputs and outputs; axes of size 1 have none."""
    positions = view.present_outputs() if outputs is None else list(outputs)
    named = [position for position in inputs if view.has(position)]
    return [
        AxisRule(dict.fromkeys(named, axis), dict.fromkeys(positions, axis), units=units, edit=edit)
        for axis in axes
        if view.shape(named[0])[axis] > 1
    ]


def other_axes(view: NodeView, *excluded: int) -> list[int]:
    """Return the axes of the first input except some."""
    rank = view.rank()
    return [axis for axis in range(rank) if axis not in {item % rank for item in excluded}]


def aligned_axes(view: NodeView, axis: int, positions: Iterable[int]) -> dict[int, int]:
    """Return the axis of each input that numpy's broadcasting aligns with an axis of output 0.

    Inputs that are broadcast along it are left out: they are replicated.
    """
    result = view.result()
    aligned = {}
    for position in positions:
        if view.has(position):
            shape = view.shape(position)
            own = axis - (len(result) - len(shape))
            if own >= 0 and shape[own] == result[axis]:
                aligned[position] = own
    return aligned


def elementwise(view: NodeView) -> list[AxisRule]:
    """Rule of operators that compute each element of the broadcast inputs by itself."""
    positions, outputs = range(len(view.inputs)), view.present_outputs()
    return [
        AxisRule(aligned_axes(view, axis, positions), dict.fromkeys(outputs, axis))
        for axis, size in enumerate(view.result())
        if size > 1
    ]
