"""The space of strategies: spread candidate layouts through a model until no node asks for a new one.

The user's shard map, of patterns of node names to kinds of split, restricts it.

The spread is a fixed point: each axis of each value has a set of cuts, a node lists its strategies for the cuts of its
values, and each layout that a strategy gives a value may add a cut there, upon which its other nodes are listed again.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from onnx import NodeProto

from onnxplace.errors import UsageError, format_value, suggest_nearest
from onnxplace.graph.op_graph import number_densely
from onnxplace.model.lineage import RANDOM_OPERATORS
from onnxplace.model.nested_graphs import has_subgraphs, iterate_subgraphs
from onnxplace.model.node_metadata import match_nodes, suggest_nodes
from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Division, Layout
from onnxplace.passes.sharding.rules.node_views import NodeView
from onnxplace.passes.sharding.space.node_strategies import (
    Cuts,
    NodeStrategy,
    StrategySpace as StrategySpace,
    StrategyTable,
    describe_copies,
)
from onnxplace.passes.sharding.space.subgraph_strategies import list_subgraph_strategies
from onnxplace.passes.sharding.space.tensor_facts import TensorFacts
from onnxplace.utils.files import parse_json, read_json
from onnxplace.utils.groups import group_pairs

# More cuts of one axis would only slow the choice down.
_MAX_CUTS = 6
# Windows give a value fewer overlaps than that.
_MAX_OVERLAPS = 24
_STANDARD_DOMAINS = ("", "ai.onnx", "com.microsoft", "ai.onnx.ml")
_AxisCuts = tuple[Cuts, ...]

_WHERE = "--shard-map"
_EXAMPLE = '{"layers.*.mlp.*": "columns", "lm_head": "whole"}'
KINDS = ("whole", "split", "batch", "rows", "columns", "sum")
"""`whole`: not split. `split`: in any way. `batch`: the first axis of the result. `rows`: an axis between the first and
the last one. `columns`: the last axis, or the channels of a convolution. `sum`: the summed axis. Also `axis N`."""
_AXIS = re.compile(r"axis [0-9]{1,9}")


def is_unrepeatable(node: NodeProto) -> bool:
    """Return whether a node has to run once: its operator is not a standard one, or its result is random.

    Two devices would draw two values.
    """
    if node.domain not in _STANDARD_DOMAINS:
        return True
    if node.op_type in RANDOM_OPERATORS or (node.op_type == "Dropout" and len(node.input) > 2):
        return True
    return any(is_unrepeatable(inner) for graph in iterate_subgraphs(node) for inner in graph.node)


def visit_until_stable(count: int, visit: Callable[[int], Iterable[int]]) -> None:
    """Visit all nodes in order, and again those that a visit returns, until none returns any."""
    queue, queued = deque(range(count)), [True] * count
    while queue:
        index = queue.popleft()
        queued[index] = False
        for other in visit(index):
            if not queued[other]:
                queued[other] = True
                queue.append(other)


def build_space(facts: TensorFacts, division: Division) -> StrategySpace:
    """Return the strategies of all nodes.

    Every axis that may be split starts with its evenest cut. The rules carry cuts from one value to the next, so that
    reshapes find those that keep heads and fused parts together.
    """
    return _Spreader(facts, division).run()


class _Spreader:
    def __init__(self, facts: TensorFacts, division: Division) -> None:
        self._facts, self._division = facts, division
        self._table = StrategyTable(division)
        nodes = facts.model.nodes
        # Weights that the model returns must stay whole, so the nodes that return them run once, too.
        returned = set(facts.model.sources.values())
        self._single = frozenset(
            index for index, node in enumerate(nodes) if is_unrepeatable(node) or not returned.isdisjoint(node.output)
        )
        self._views = [None if index in self._single else facts.view(index) for index in range(len(nodes))]
        self._other_shapes = [
            [] if view is None else facts.list_other_shapes((*node.input, *node.output))
            for view, node in zip(self._views, nodes)
        ]
        self._kinds = number_densely(map(self._describe, range(len(nodes)))).tolist()
        self._cuts = {name: self._first_cuts(name) for name in facts.shapes}
        used = [(index, node) for index, node in enumerate(nodes) if self._views[index] is not None]
        self._users = group_pairs(
            (name, index) for index, node in used for name in dict.fromkeys((*node.input, *node.output))
        )
        given = facts.is_weight | facts.model.input_names
        self._given = [tuple(name in given for name in node.input) for node in nodes]
        self._cache: dict[object, Sequence[NodeStrategy]] = {}

    def _describe(self, index: int) -> Hashable:
        # Nodes of one kind look alike to every rule: in operator, attributes, shapes, constants, and in which inputs
        # are weights. Layers that repeat then share their lists of strategies.
        view, fixed = self._views[index], self._facts.fixed
        if view is None:
            return index
        node = view.node
        return (
            node.domain,
            node.op_type,
            tuple(attribute.SerializeToString() for attribute in node.attribute),
            view.inputs,
            view.outputs,
            tuple((position, array.tobytes()) for position, array in view.constants.items()),
            view.element_types,
            view.entries,
            tuple((fixed.get(name), self._facts.can_split(name)) for name in (*node.input, *node.output)),
            tuple(name in self._facts.is_weight for name in node.input),
            str(self._other_shapes[index]),
        )

    def _first_cuts(self, name: str) -> _AxisCuts:
        cuts = []
        for axis, size in enumerate(self._facts.shapes[name]):
            # The evenest cut, or one whose parts are on several devices each, such as few heads of keys.
            split = self._division.split
            layout = (split(axis, size) or split(axis, size, 1, size)) if self._is_free(name, axis) else None
            cuts.append(frozenset() if layout is None else frozenset([layout[1:]]))
        return tuple(cuts)

    def _is_free(self, name: str, axis: int) -> bool:
        fixed = self._facts.fixed.get(name)
        return fixed is not None and fixed[axis] and self._facts.can_split(name)

    def run(self) -> StrategySpace:
        strategies: list[Sequence[NodeStrategy]] = [()] * len(self._kinds)

        # A node is listed again when one of its values may get a new layout; cuts only ever grow, so this ends.
        def list_and_spread(index: int) -> list[int]:
            strategies[index] = self._strategies(index)
            return self._spread(index, strategies[index])

        visit_until_stable(len(strategies), list_and_spread)
        return StrategySpace(
            facts=self._facts,
            division=self._division,
            views=tuple(self._views),
            strategies=tuple(strategies),
            kinds=tuple(self._kinds),
            single=self._single,
        )

    def _strategies(self, index: int) -> Sequence[NodeStrategy]:
        view, node = self._views[index], self._facts.model.nodes[index]
        if view is None:
            whole = NodeStrategy(
                tuple(REPLICATED if name else None for name in self._facts.model.operands[index]),
                tuple(REPLICATED if name else None for name in node.output),
            )
            if index in self._single or not has_subgraphs(node):
                return (whole,)
            return (whole, *list_subgraph_strategies(self._facts, index, self._division, build_space))
        cuts = tuple(self._cuts.get(name, ()) if name else () for name in (*node.input, *node.output))
        key = self._kinds[index], cuts, self._given[index]
        if key not in self._cache:
            self._cache[key] = self._compute(index, view, cuts)
        return self._cache[key]

    def _compute(self, index: int, view: NodeView, cuts: tuple[_AxisCuts, ...]) -> Sequence[NodeStrategy]:
        node, count = view.node, len(view.inputs)
        by_axis: dict[tuple[str, int, int], Cuts] = {}
        free: dict[tuple[str, int], tuple[bool, ...]] = {}
        for number, (name, axes) in enumerate(zip((*node.input, *node.output), cuts)):
            side, position = ("in", number) if number < count else ("out", number - count)
            free[side, position] = tuple(
                self._is_free(name, axis) for axis in range(len(self._facts.shapes.get(name, ())))
            )
            by_axis |= {(side, position, axis): options for axis, options in enumerate(axes)}
        # Inputs of the model and weights are there whole, never as summands of several devices.
        given = self._given[index]
        whole, *rest = (
            strategy
            for strategy in self._table.list(view, by_axis, free)
            if not any(is_given and layout == PARTIAL for is_given, layout in zip(given, strategy.inputs))
        )
        others = self._other_shapes[index]
        # Too little is known about shapes at other sizes to trust any split.
        if others is None:
            return (whole,)
        copies = {item: describe_copies(view, item, self._division) for item in rest if others}
        for shapes in others if rest else ():
            # What rules list at the bound sizes may be right for these alone: [N, 8] is [8, N] reshaped if N is 1.
            other = replace(view, inputs=shapes[:count], outputs=shapes[count:])
            listed = {describe_copies(other, item, self._division) for item in self._table.list(other, by_axis, free)}
            rest = [item for item in rest if copies[item] in listed]
        return (whole, *rest)

    def _spread(self, index: int, strategies: Sequence[NodeStrategy]) -> list[int]:
        """Add the layouts that a node may have to its values; return the nodes whose values got new ones."""
        node = self._facts.model.nodes[index]
        touched: list[int] = []
        names = (*self._facts.model.operands[index], *node.output)
        for strategy in strategies:
            for name, layout in zip(names, (*strategy.inputs, *strategy.outputs)):
                if layout is not None and layout.is_split and self._add(name, layout):
                    touched += self._users.get(name, ())
        return touched

    def _add(self, name: str, layout: Layout) -> bool:
        cuts = self._cuts[name]
        options, cut = cuts[layout.axis], layout[1:]
        if cut in options:
            return False
        alike = sum(bool(rows) == bool(layout.rows) for _, _, rows, _ in options)
        if alike >= (_MAX_OVERLAPS if layout.rows else _MAX_CUTS):
            return False
        self._cuts[name] = (*cuts[: layout.axis], options | {cut}, *cuts[layout.axis + 1 :])
        return True


def restrict_space(space: StrategySpace, shard_map: str) -> StrategySpace:
    """Return the space with only those strategies that the user's map allows.

    Raises UsageError for a map that matches no node, or asks for a split that a node does not have. Raises InputError
    for a file that cannot be read.
    """
    rules = _read_map(shard_map)
    names = [node.name for node in space.facts.model.nodes]
    strategies = list(space.strategies)
    unmatched = []
    decided: set[int] = set()
    for (pattern, kind), positions in zip(rules.items(), match_nodes(list(rules), names, _WHERE)):
        # The first pattern that matches a node decides about it.
        free = [index for index in positions if index not in decided]
        decided.update(free)
        if not positions:
            unmatched.append(pattern)
        matching = {index: _filter(space, index, kind) for index in free}
        if free and not any(matching.values()):
            _raise_impossible(space, free, pattern, kind)
        for index, options in matching.items():
            if options:
                strategies[index] = options
    if unmatched:
        listed = ", ".join(repr(pattern) for pattern in unmatched[:3])
        hint = suggest_nodes(unmatched[0], names)
        raise UsageError("U020", f"no node or module matches {listed}", where=_WHERE, hint=hint)
    return replace(space, strategies=tuple(strategies))


def _filter(space: StrategySpace, index: int, kind: str) -> Sequence[NodeStrategy]:
    """Return the strategies of a node that are of a kind."""
    return tuple(strategy for strategy in space.strategies[index] if _is_kind(space, index, strategy, kind))


def _is_kind(space: StrategySpace, index: int, strategy: NodeStrategy, kind: str) -> bool:
    node = space.facts.model.nodes[index]
    name, layout = next(((n, item) for n, item in zip(node.output, strategy.outputs) if item is not None), ("", None))
    if kind == "whole":
        return not strategy.is_split and layout != PARTIAL
    if not strategy.is_split or layout is None:
        return False
    if kind in ("split", "sum"):
        return kind == "split" or layout == PARTIAL
    return layout.is_split and _is_axis_of_kind(node, len(space.facts.shapes[name]), layout.axis, kind)


def _is_axis_of_kind(node: NodeProto, rank: int, axis: int, kind: str) -> bool:
    """Return whether an axis of a result is the one that a kind of split cuts."""
    if kind.startswith("axis "):
        return axis == int(kind.removeprefix("axis "))
    channels = 1 if "Conv" in node.op_type else rank - 1
    if kind == "batch":
        return axis == 0
    if kind == "columns":
        return axis == channels
    # A matrix has no axis between its first and its last: its rows are those of its first.
    return axis not in (0, channels) or (rank == 2 and axis == 0)


def _raise_impossible(space: StrategySpace, positions: Sequence[int], pattern: str, kind: str) -> None:
    index = positions[0]
    name = space.facts.model.nodes[index].name
    possible = [item for item in KINDS if _filter(space, index, item)]
    ways = space.division.count
    message = f"node {name!r} ({space.facts.model.nodes[index].op_type}) cannot be split by {kind!r} in {ways} ways"
    hint = f"it can be: {', '.join(possible)}"
    view = space.views[index]
    if view is not None and kind != "whole":
        hint += f"; its result has the shape {list(view.result())}, and each device needs a part of its own"
    raise UsageError("U023", message, where=f"{_WHERE} {pattern!r}", hint=hint)


def _read_map(text: str) -> Mapping[str, str]:
    """Read a shard map: from a file, or from the JSON text itself."""
    is_text = text.lstrip().startswith("{")
    data = parse_json(text, "U023", "a shard map", _WHERE) if is_text else read_json(text, "U023", "a shard map")
    where = _WHERE if is_text else text
    if not isinstance(data, dict) or not data or not all(isinstance(kind, str) for kind in data.values()):
        raise UsageError("U023", "expected a map of patterns to kinds of split", where=where, hint=f"write {_EXAMPLE}")
    for kind in data.values():
        if kind not in KINDS and not _AXIS.fullmatch(kind):
            hint = f"{suggest_nearest(kind, KINDS)}; or an axis of the result, such as 'axis 1'"
            raise UsageError("U023", f"unknown kind of split {format_value(kind)}", where=where, hint=hint)
    return data
