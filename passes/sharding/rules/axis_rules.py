"""Axis rules: which axes of a node's inputs and outputs are split together.

A rule is a function from a `NodeView` to `AxisRule`s. It raises LookupError for inputs that it needs and that are
omitted; the node then stays whole. Rules never guess: what they do not list is not split.

Most rules follow from a signature, which names axes by letters, as einsum does: `ni*,oi*,o->no*` is a convolution. Axes
with the same letter are split together; a letter that the result lacks is summed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from onnxplace.passes.sharding.rules.node_views import Edit, LocalNode, NodeView, Shape

Effect = Literal["map", "sum", "mean"]


@dataclass(frozen=True)
class AxisRule:
    """Axes that are split together, all at the same fractions; inputs that are not named are replicated.

    Axes of size 1 may be named: `Division.split` refuses them.
    """

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
    shares_range: bool = False
    """Parts of the first input are quantised by the range of the whole; outputs that are not named are its scale and
    zero point, which all devices have."""
    shared: Mapping[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """("in" or "out", position) -> axis and units, of tensors with fewer units than devices: each is on several.
    Omitted tensors may be named."""


Rule = Callable[[NodeView], Iterable[AxisRule]]


def by_letters(
    view: NodeView,
    signature: str,
    letters: str,
    *,
    units: int = 0,
    fused: Mapping[int, int] = MappingProxyType({}),
    edit: Edit | None = None,
) -> list[AxisRule]:
    """Return a rule per letter of a signature, all with the same units, fused tensors and edit.

    A signature has a term per input and per output. `*` stands for any number of axes without a letter, `-` for one.
    A shape shorter than its term is aligned with the end of it. Axes of size 1 are broadcast: they are left out.

    >>> from onnx import helper
    >>> view = NodeView(helper.make_node("Gemm", list("abc"), ["d"]), ((4, 6), (6, 8), (8,)), ((4, 8),), 18)
    >>> [(rule.inputs, rule.outputs, rule.effect) for rule in by_letters(view, "rk,kc,rc->rc", "ck")]
    [({1: 1, 2: 0}, {0: 1}, 'map'), ({0: 1, 1: 0}, {}, 'sum')]
    """
    inputs, outputs = (side.split(",") for side in signature.split("->"))
    rules = []
    for letter in letters:
        axes, result_axes = _find_letter(letter, inputs, view.inputs), _find_letter(letter, outputs, view.outputs)
        effect: Effect = "map" if any(letter in term for term in outputs) else "sum"
        if axes:
            rules.append(AxisRule(axes, result_axes, effect, units, fused, edit))
    return rules


def _find_letter(letter: str, terms: Sequence[str], shapes: Sequence[Shape | None]) -> dict[int, int]:
    """Return, per position, the axis that a letter stands for."""
    axes = {}
    for position, (term, shape) in enumerate(zip(terms, shapes)):
        index = term.find(letter)
        if shape is None or index < 0:
            continue
        axis = index if "*" in term[index:] else index - len(term) + len(shape)
        if axis >= 0 and shape[axis] != 1:
            axes[position] = axis
    return axes


def signature_rule(signature: str, letters: str) -> Rule:
    """Return the rule of an operator of which only the signature counts."""
    return lambda view: by_letters(view, signature, letters)


def split_same(
    view: NodeView, axes: Iterable[int], inputs: Iterable[int] = (0,), edit: Edit | None = None
) -> list[AxisRule]:
    """Return a rule per axis, which is the same in all these inputs and in all outputs."""
    named, outputs = [position for position in inputs if view.has(position)], view.present_outputs()
    return [AxisRule(dict.fromkeys(named, axis), dict.fromkeys(outputs, axis), edit=edit) for axis in axes]


def all_but_axis(default: int, name: str = "axis") -> Rule:
    """Return the rule of an operator that works along one axis, given by an attribute: every other axis."""
    return lambda view: split_same(view, other_axes(view, int(view.attribute(name, default))))


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
        for axis in range(len(view.result()))
    ]


def is_per_tensor(view: NodeView, position: int) -> bool:
    """Return whether a scale or zero point is omitted, or a single number."""
    return not view.has(position) or max(view.shape(position), default=1) <= 1


def drop_bias_except_first(position: int) -> Edit:
    """Return the edit by which only the first device adds a bias to its summand."""

    def edit(local: LocalNode) -> None:
        if local.device > 0:
            local.drop_input(position)

    return edit


def scale_attributes(view: NodeView, names: Iterable[str], axis: int) -> Edit:
    """Return the edit that multiplies attributes, such as a number of heads, by a device's share of a result's axis."""

    def edit(local: LocalNode) -> None:
        part, whole = local.out_shape()[axis], view.result()[axis]
        for name in names:
            value = view.attribute(name)
            if isinstance(value, list):
                local.set_attribute(name, [item * part // whole for item in value])
            elif value:
                # Several devices may have the same head.
                local.set_attribute(name, max(value * part // whole, 1))

    return edit
