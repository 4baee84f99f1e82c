"""Strategies: the ways to compute a node on the devices of a group, from the rules of its operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto

from onnxplace.passes.sharding.rules.axis_rules import AxisRule
from onnxplace.passes.sharding.rules.convolution_rules import FLOAT_TYPES, ROW_AXIS, WINDOWED, list_windows
from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Division, Layout, Rows
from onnxplace.passes.sharding.rules.node_views import Edit, LocalNode, NodeView, Shape, split_words
from onnxplace.passes.sharding.rules.reshape_rules import (
    RESHAPES,
    can_reshape_parts,
    equal_parts,
    reshape_layout,
    set_reshape_target,
    set_split_sizes,
)
from onnxplace.passes.sharding.rules.rule_table import list_axis_rules
from onnxplace.passes.sharding.space.tensor_facts import TensorFacts

Layouts = tuple[Layout | None, ...]
Cut = tuple[int, int, tuple[Rows, ...], tuple[Rows, ...]]
"""All of a split layout but its axis."""
Cuts = frozenset[Cut]
# By side ("in", "out"), position and axis; and by side and position, for each axis, whether it may be cut.
CutsByAxis = Mapping[tuple[str, int, int], Cuts]
FreeAxes = Mapping[tuple[str, int], tuple[bool, ...]]
_AxisSizes = dict[tuple[str, int], tuple[int, int, int]]
# By side ("in", "out") and position: the axis that is cut, its size, and how many tensors are fused in it.

# Operators that are linear in their first input alone, and in all inputs together.
_LINEAR_IN_FIRST = frozenset(
    split_words(
        """
    Identity Neg Reshape Transpose Squeeze Unsqueeze Flatten Slice Gather Expand ReduceSum ReduceMean
    GlobalAveragePool DepthToSpace SpaceToDepth Trilu Split
"""
    )
)
_LINEAR_TOGETHER = frozenset(("Add", "Sub", "Sum", "Concat"))
# These add up integers exactly, modulo their range. ONNX Runtime's other sums of integers, such as ReduceSum and those
# within Einsum, are computed in floating point, and saturate.
_EXACT_SUMS = frozenset(("MatMul", "MatMulInteger", "ConvInteger", "ScatterElements", "ScatterND"))
_EXACT_TYPES = FLOAT_TYPES | {TensorProto.INT32, TensorProto.INT64}

# The first opset in which ONNX Runtime can add summands, and make them of a whole value (Add, Where).
_MIN_SUM_OPSET = 9


@dataclass(frozen=True)
class NodeStrategy:
    """One way to compute a node on the devices of a group."""

    inputs: Layouts
    outputs: Layouts
    edit: Edit | None = None
    """Adapts each device's copy of the node."""
    weighs_means: bool = False
    """Outputs are means of the parts, and are weighted by their sizes."""
    only_first: int = -1
    """Position of a replicated summand that only the first device adds; the others pass the other one on."""
    overrides_shape: bool = False
    """A Shape of a part, whose split axis is replaced by the size of the whole."""
    shares_range: bool = False
    """Parts of the first input are quantised by the range of the whole."""
    subgraphs: tuple[SubgraphSplit, ...] = field(default=(), compare=False)
    """How the subgraphs of a node are split; its inputs are then also what these capture."""

    @property
    def layouts(self) -> Layouts:
        """Return the layouts of the inputs, then those of the outputs."""
        return *self.inputs, *self.outputs

    @property
    def is_split(self) -> bool:
        """Return whether the devices share the work."""
        return any(layout is not None and layout.is_split for layout in self.layouts)

    @property
    def is_whole(self) -> bool:
        """Return whether each device computes the node on whole inputs."""
        return all(layout in (None, REPLICATED) for layout in self.layouts)

    @property
    def overlaps(self) -> bool:
        """Return whether parts of a value overlap."""
        return any(layout is not None and layout.rows for layout in self.layouts)


@dataclass(frozen=True)
class StrategySpace:
    """All strategies of each node of a model."""

    facts: TensorFacts
    division: Division
    views: tuple[NodeView | None, ...]
    strategies: tuple[Sequence[NodeStrategy], ...]
    """Per node; the first one computes the node whole on every device. Equal nodes share one sequence."""
    kinds: tuple[int, ...]
    """Per node; nodes of one kind have equal views."""
    single: frozenset[int] = frozenset()
    """Nodes that run once, on the first device."""

    def list_split(self, index: int, strategy: NodeStrategy) -> list[tuple[str, Layout]]:
        """Return the values that a strategy of a node splits, with their layouts."""
        names = (*self.facts.model.operands[index], *self.facts.model.nodes[index].output)
        return [(name, lay) for name, lay in zip(names, strategy.layouts) if name and lay is not None and lay.is_split]


@dataclass(frozen=True)
class SubgraphSplit:
    """A subgraph as a model, with a strategy for each of its nodes."""

    graph: GraphProto
    space: StrategySpace
    strategies: tuple[NodeStrategy, ...]
    inputs: Mapping[str, Layout]
    """Layout of each input and captured value."""
    outputs: tuple[Layout, ...]


def local_shapes(
    division: Division, view: NodeView, strategy: NodeStrategy, device: int
) -> tuple[tuple[Shape | None, ...], tuple[Shape | None, ...]]:
    """Return the shapes of a device's parts of inputs and outputs."""

    def parts(shapes: Sequence[Shape | None], layouts: Sequence[Layout | None]) -> list[Shape | None]:
        return [
            shape if shape is None or layout is None else division.local_shape(layout, shape, device)
            for shape, layout in zip(shapes, layouts)
        ]

    return tuple(parts(view.inputs, strategy.inputs)), tuple(parts(view.outputs, strategy.outputs))


def make_local_node(
    division: Division, view: NodeView, strategy: NodeStrategy, device: int, proto: NodeProto, **add: Callable[..., str]
) -> LocalNode:
    """Return a device's copy of a node for an edit; `add` holds what adds other nodes (`LocalNode.make_...`)."""
    inputs, outputs = local_shapes(division, view, strategy, device)
    return LocalNode(proto, view, device, inputs, outputs, layouts=strategy.outputs, division=division, **add)


def describe_copies(view: NodeView, strategy: NodeStrategy, division: Division) -> tuple[object, ...]:
    """Return all that a sharded model holds of a strategy: equal for two sizes, it computes the same at both."""
    if strategy.edit is None:
        return (strategy,)
    copies = []
    for device in range(division.count):
        local = make_local_node(
            division,
            view,
            strategy,
            device,
            deepcopy(view.node),
            make_ints=str,
            make_override=lambda *entries: str(entries),
            make_zeros=lambda name: f"zeros of {name}",
            make_node=lambda op, inputs, **attributes: f"{op} of {inputs}, {attributes}",
        )
        strategy.edit(local)
        copies.append(local.proto.SerializeToString())
    return replace(strategy, edit=None), *copies


def _is_scale(view: NodeView, position: int) -> bool:
    """Return whether an input is a known number that keeps summands finite, and infinite ones infinite."""
    factor = view.constants.get(position)
    return factor is not None and factor.size == 1 and bool(np.isfinite(factor).all() and factor.all())


class StrategyTable:
    """Computes the strategies of nodes; equal nodes are computed once."""

    def __init__(self, division: Division) -> None:
        self.division = division

    def list(self, view: NodeView, cuts: CutsByAxis, free: FreeAxes) -> list[NodeStrategy]:
        """Return the strategies of a node: first the whole one, then the split ones without duplicates.

        Args:
            view: The node.
            cuts: ("in" or "out", position, axis) -> cuts of that axis that other nodes may ask for.
            free: ("in" or "out", position) -> per axis, whether it may be split.
        """
        whole = NodeStrategy(_lay_out(view.inputs), _lay_out(view.outputs))
        distinct: dict[tuple[Layouts, Layouts], NodeStrategy] = {}
        for strategy in (whole, *self._split_strategies(view, cuts, free)):
            if self._is_allowed(strategy, free):
                distinct.setdefault((strategy.inputs, strategy.outputs), strategy)
        return [*distinct.values()]

    def _is_allowed(self, strategy: NodeStrategy, free: FreeAxes) -> bool:
        for side, layouts in (("in", strategy.inputs), ("out", strategy.outputs)):
            for position, layout in enumerate(layouts):
                if layout is None or not layout.is_split:
                    continue
                # Only axes of a fixed size are cut at fixed positions, and only others in runs. At another size, the
                # result of a Squeeze has more axes.
                may_cut = free[side, position][layout.axis : layout.axis + 1]
                if may_cut != (not layout.is_in_runs,):
                    return False
        return True

    def _split_strategies(self, view: NodeView, cuts: CutsByAxis, free: FreeAxes) -> Iterator[NodeStrategy]:
        if view.node.op_type == "Shape" and view.node.domain == "":
            for layout in self._layouts("in", view.shape(0), cuts):
                if not layout.is_in_runs:
                    yield NodeStrategy((layout,), (REPLICATED,), overrides_shape=True)
            return
        for item in list_axis_rules(view):
            yield from self._by_rule(view, item, cuts)
        if view.node.domain not in ("", "ai.onnx"):
            return
        if view.op in RESHAPES:
            yield from self._reshapes(view, cuts, free["out", 0])
        if view.op in ("Split", "Concat"):
            yield from self._own_axis(view, cuts)
        if view.op in WINDOWED and view.rank() > ROW_AXIS:
            # By rows: each device has the rows of the input under the windows of its rows.
            for source, result, edit in list_windows(view, self.division):
                yield NodeStrategy((source, *_lay_out(view.inputs[1:])), (result,), edit=edit)
        yield from self._partials(view)

    def _by_rule(self, view: NodeView, rule: AxisRule, cuts: CutsByAxis) -> Iterator[NodeStrategy]:
        """Yield the strategies of an axis rule, one per cut that some of its axes may have."""
        sizes = self._list_sizes(view, rule)
        # A rule that asks for sums of parts needs a type that they can be added up in.
        summed = _EXACT_TYPES if view.op in _EXACT_SUMS else FLOAT_TYPES
        if sizes is None or (rule.effect != "map" and not self._can_sum(view, summed)):
            return
        for outer, blocks, *overlap in _list_cuts(view, rule, sizes, cuts):
            layouts = {
                key: Layout(axis, 1, 0, *overlap)
                if overlap[0]
                else self.division.split(axis, size, outer * fused, blocks)
                for key, (axis, size, fused) in sizes.items()
            }
            layouts |= {key: self._share(view, *key, *cut) for key, cut in rule.shared.items()}
            if None in layouts.values():
                continue
            # Devices with equal parts would add these up twice.
            if rule.effect != "map" and any(self.division.copies(layout) > 1 for layout in layouts.values() if layout):
                continue
            rest = REPLICATED if rule.effect == "map" else PARTIAL
            outputs = _lay_out(view.outputs, layouts, "out", rest)
            if rule.effect == "map" and any(
                layout == REPLICATED and ("out", position) not in rule.shared and not rule.shares_range
                for position, layout in enumerate(outputs)
            ):
                continue
            inputs = _lay_out(view.inputs, layouts, "in")
            weighs_means, shares_range = rule.effect == "mean", rule.shares_range
            yield NodeStrategy(inputs, outputs, rule.edit, weighs_means=weighs_means, shares_range=shares_range)

    def _share(self, view: NodeView, side: str, position: int, axis: int, units: int) -> Layout | None:
        """Return the layout of fewer units than devices, each on several of them; None if they cannot be shared out."""
        shapes = view.inputs if side == "in" else view.outputs
        shape = shapes[position] if position < len(shapes) else None
        if shape is None or units == 1:
            return REPLICATED
        return self.division.split(axis, shape[axis], 1, units) if units < self.division.count else None

    @staticmethod
    def _list_sizes(view: NodeView, rule: AxisRule) -> _AxisSizes | None:
        """Return the axes that a rule cuts; None if one of their tensors is not there."""
        sizes: _AxisSizes = {}
        for side, axes, shapes in (("in", rule.inputs, view.inputs), ("out", rule.outputs, view.outputs)):
            for position, axis in axes.items():
                shape = shapes[position] if position < len(shapes) else None
                if shape is None:
                    return None
                sizes[side, position] = axis, shape[axis], rule.fused.get(position, 1) if side == "in" else 1
        return sizes

    def _can_sum(self, view: NodeView, types: frozenset[int]) -> bool:
        return view.opset >= _MIN_SUM_OPSET and all(kind in types for kind in view.element_types)

    def _reshapes(self, view: NodeView, cuts: CutsByAxis, fixed: Sequence[bool]) -> Iterator[NodeStrategy]:
        source, result = view.shape(0), view.result()
        pairs: set[tuple[Layout, Layout]] = set()
        for layout in self._layouts("in", source, cuts):
            if (other := reshape_layout(source, result, layout, self.division)) is not None:
                pairs |= {(layout, other), (layout, other.in_runs(result[other.axis]))}
        for layout in self._layouts("out", result, cuts):
            if (other := reshape_layout(result, source, layout, self.division)) is not None:
                pairs |= {(other, layout), (other.in_runs(source[other.axis]), layout)}
        for before, after in sorted(pairs):
            if can_reshape_parts(view, before, after, self.division, fixed):
                edit = set_reshape_target(before) if view.op == "Reshape" else None
                yield NodeStrategy((before, *_lay_out(view.inputs[1:])), (after,), edit=edit)

    def _layouts(self, side: str, shape: tuple[int, ...], cuts: CutsByAxis) -> Iterator[Layout]:
        """Yield the split layouts that the first input or output may have."""
        for axis, size in enumerate(shape):
            for outer, blocks, rows, _ in sorted(cuts.get((side, 0, axis), frozenset())):
                if not rows and (layout := self.division.split(axis, size, outer, blocks)) is not None:
                    yield layout

    def _own_axis(self, view: NodeView, cuts: CutsByAxis) -> Iterator[NodeStrategy]:
        """Yield strategies that split every part of a Split or Concat along its own axis."""
        equal = equal_parts(view)
        if equal is None:
            return
        axis, parts = equal
        is_split = view.op == "Split"
        one, side, other_side = (view.shape(0), "in", "out") if is_split else (view.result(), "out", "in")
        # In the whole, the parts follow one another. Parts that are fused themselves would interleave.
        listed = [(cut, parts) for cut in cuts.get((side, 0, axis), ())]
        listed += [(cut, 1) for position in range(parts) for cut in cuts.get((other_side, position, axis), ())]
        for blocks in sorted({blocks for (outer, blocks, rows, _), fused in listed if outer == fused and not rows}):
            part = self.division.split(axis, one[axis] // parts, 1, blocks)
            whole = self.division.split(axis, one[axis], parts, blocks)
            if part is None or whole is None:
                continue
            if is_split:
                yield NodeStrategy((whole, *_lay_out(view.inputs[1:])), (part,) * parts, edit=set_split_sizes)
            else:
                yield NodeStrategy((part,) * parts, (whole,))

    def _partials(self, view: NodeView) -> Iterator[NodeStrategy]:
        """Yield strategies that pass summands on, for linear operators."""
        if not self._can_sum(view, FLOAT_TYPES) or not view.outputs:
            return
        outputs = tuple(None if shape is None else PARTIAL for shape in view.outputs)
        whole = _lay_out(view.inputs)
        if view.op in _LINEAR_IN_FIRST:
            yield NodeStrategy((PARTIAL, *whole[1:]), outputs)
        if view.op in _LINEAR_TOGETHER:
            yield NodeStrategy((PARTIAL,) * len(view.inputs), outputs)
        if view.op in ("Mul", "Div") and _is_scale(view, 1):
            yield NodeStrategy((PARTIAL, REPLICATED), outputs)
        if view.op == "Mul" and _is_scale(view, 0):
            yield NodeStrategy((REPLICATED, PARTIAL), outputs)
        if view.op in ("Add", "Sub") and view.shape(0) == view.result():
            yield NodeStrategy((PARTIAL, REPLICATED), outputs, only_first=1)
        if view.op == "Add" and view.shape(1) == view.result():
            yield NodeStrategy((REPLICATED, PARTIAL), outputs, only_first=0)


def _list_cuts(view: NodeView, rule: AxisRule, sizes: _AxisSizes, cuts: CutsByAxis) -> list[Cut]:
    """Return the cuts that some axes of a rule may have, and all of them can follow."""
    options: set[Cut] = {(1, rule.units, (), ())} if rule.units and sizes else set()
    # Summands of rows that two devices have would count twice, and invalid integers could divide by zero.
    may_overlap = rule.effect == "map" and not rule.units and len({size for _, size, _ in sizes.values()}) == 1
    may_be_invalid = set(view.element_types) <= FLOAT_TYPES
    for (side, position), (axis, _, fused) in sizes.items():
        for outer, blocks, rows, valid in cuts.get((side, position, axis), frozenset()):
            can_follow = outer % fused == 0 and (outer > 0 or fused == 1)
            if can_follow and (may_overlap or not rows) and (may_be_invalid or not valid):
                options.add((outer // fused, blocks, rows, valid))
    if rule.units:
        options = {cut for cut in options if cut[0] == 1 and rule.units % cut[1] == 0}
    return sorted(options)


def _lay_out(
    shapes: Sequence[Shape | None],
    layouts: Mapping[tuple[str, int], Layout | None] = MappingProxyType({}),
    side: str = "",
    rest: Layout = REPLICATED,
) -> Layouts:
    """Return the layout of each tensor of a side: `rest` if it is not cut, None if it is not there."""
    return tuple(
        None if shape is None else layouts.get((side, position), rest) for position, shape in enumerate(shapes)
    )
