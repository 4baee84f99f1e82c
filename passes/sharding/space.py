"""The space of strategies: spread candidate layouts through a model until no node asks for a new one."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnx import NodeProto

from onnxplace.model import RANDOM_OPERATORS, Model, iterate_subgraphs
from onnxplace.passes.sharding.layouts import PARTIAL, REPLICATED, Division, Layout
from onnxplace.passes.sharding.node_views import NodeView
from onnxplace.passes.sharding.strategies import Cuts, Strategy, StrategyTable, describe_copies
from onnxplace.passes.sharding.tensor_facts import TensorFacts

# More cuts of one axis would only slow the choice down.
_MAX_CUTS = 6
_STANDARD_DOMAINS = ("", "ai.onnx", "com.microsoft", "ai.onnx.ml")
_AxisCuts = tuple[Cuts, ...]


@dataclass(frozen=True)
class StrategySpace:
    """All strategies of each node of a model."""

    facts: TensorFacts
    division: Division
    views: tuple[NodeView | None, ...]
    strategies: tuple[Sequence[Strategy], ...]
    """Per node; the first one computes the node whole on every device. Equal nodes share one sequence."""
    kinds: tuple[int, ...]
    """Per node; nodes of one kind have equal views."""
    single: frozenset[int] = frozenset()
    """Nodes that run once, on the first device."""


def find_single_nodes(model: Model) -> frozenset[int]:
    """Return the nodes that run once: unrepeatable ones, and those that return an initializer.

    Weights that the model returns must stay whole.
    """
    returned = set(model.sources.values())
    return frozenset(
        index for index, node in enumerate(model.nodes) if is_unrepeatable(node) or not returned.isdisjoint(node.output)
    )


def is_unrepeatable(node: NodeProto) -> bool:
    """Return whether a node has to run once: its operator is not a standard one, or its result is random.

    Two devices would draw two values.
    """
    if node.domain not in _STANDARD_DOMAINS:
        return True
    if node.op_type in RANDOM_OPERATORS or (node.op_type == "Dropout" and len(node.input) > 2):
        return True
    return any(is_unrepeatable(inner) for graph in iterate_subgraphs(node) for inner in graph.node)


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
        self._single = find_single_nodes(facts.model)
        self._views = [None if index in self._single else facts.view(index) for index in range(len(nodes))]
        self._other_shapes = [
            [] if view is None else facts.list_other_shapes((*node.input, *node.output))
            for view, node in zip(self._views, nodes)
        ]
        self._kinds = self._number_kinds()
        self._cuts = {name: self._first_cuts(name) for name in facts.shapes}
        self._users: dict[str, list[int]] = defaultdict(list)
        for index, node in enumerate(nodes):
            if self._views[index] is not None:
                for name in dict.fromkeys((*node.input, *node.output)):
                    self._users[name].append(index)
        given = facts.is_weight | facts.model.input_names
        self._given = [tuple(name in given for name in node.input) for node in nodes]
        self._cache: dict[object, Sequence[Strategy]] = {}

    def _number_kinds(self) -> list[int]:
        numbers: dict[object, int] = {}
        kinds = []
        for index, view in enumerate(self._views):
            key: object = index
            if view is not None:
                node, fixed = view.node, self._facts.fixed
                key = (
                    node.domain,
                    node.op_type,
                    tuple(attribute.SerializeToString() for attribute in node.attribute),
                    view.inputs,
                    view.outputs,
                    tuple((position, array.tobytes()) for position, array in view.constants.items()),
                    view.element_types,
                    tuple((fixed.get(name), self._facts.can_split(name)) for name in (*node.input, *node.output)),
                    tuple(name in self._facts.is_weight for name in node.input),
                    str(self._other_shapes[index]),
                )
            kinds.append(numbers.setdefault(key, len(numbers)))
        return kinds

    def _first_cuts(self, name: str) -> _AxisCuts:
        cuts = []
        for axis, size in enumerate(self._facts.shapes[name]):
            layout = self._division.split(axis, size) if self._is_free(name, axis) else None
            cuts.append(frozenset() if layout is None else frozenset([(layout.outer, layout.blocks)]))
        return tuple(cuts)

    def _is_free(self, name: str, axis: int) -> bool:
        fixed = self._facts.fixed.get(name)
        return fixed is not None and fixed[axis] and self._facts.can_split(name)

    def run(self) -> StrategySpace:
        nodes = self._facts.model.nodes
        strategies: list[Sequence[Strategy]] = [()] * len(nodes)
        queue = deque(range(len(nodes)))
        queued = [True] * len(nodes)
        while queue:
            index = queue.popleft()
            queued[index] = False
            strategies[index] = self._strategies(index)
            for user in self._spread(index, strategies[index]):
                if not queued[user]:
                    queued[user] = True
                    queue.append(user)
        return StrategySpace(
            facts=self._facts,
            division=self._division,
            views=tuple(self._views),
            strategies=tuple(strategies),
            kinds=tuple(self._kinds),
            single=self._single,
        )

    def _strategies(self, index: int) -> Sequence[Strategy]:
        view, node = self._views[index], self._facts.model.nodes[index]
        if view is None:
            whole = Strategy(
                tuple(REPLICATED if name else None for name in node.input),
                tuple(REPLICATED if name else None for name in node.output),
            )
            return (whole,)
        cuts = tuple(self._cuts.get(name, ()) if name else () for name in (*node.input, *node.output))
        key = self._kinds[index], cuts, self._given[index]
        if key not in self._cache:
            self._cache[key] = self._compute(index, view, cuts)
        return self._cache[key]

    def _compute(self, index: int, view: NodeView, cuts: tuple[_AxisCuts, ...]) -> Sequence[Strategy]:
        node, count = view.node, len(view.inputs)
        by_axis: dict[tuple[str, int, int], Cuts] = {}
        free: dict[tuple[str, int], tuple[bool, ...]] = {}
        for number, (name, axes) in enumerate(zip((*node.input, *node.output), cuts)):
            side, position = ("in", number) if number < count else ("out", number - count)
            free[side, position] = tuple(
                self._is_free(name, axis) for axis in range(len(self._facts.shapes.get(name, ())))
            )
            for axis, options in enumerate(axes):
                if options:
                    by_axis[side, position, axis] = options
        given = self._given[index]
        whole, *rest = (
            strategy
            for strategy in self._table.list(view, by_axis, free)
            if not any(is_given and layout == PARTIAL for is_given, layout in zip(given, strategy.inputs))
        )
        others = self._other_shapes[index]
        if others is None:
            return (whole,)
        for shapes in others if rest else ():
            # What rules list at the bound sizes may be right for these alone: [N, 8] is [8, N] reshaped if N is 1.
            other = replace(view, inputs=shapes[:count], outputs=shapes[count:])
            listed = {describe_copies(other, item, self._division) for item in self._table.list(other, by_axis, free)}
            rest = [item for item in rest if describe_copies(view, item, self._division) in listed]
        return (whole, *rest)

    def _spread(self, index: int, strategies: Sequence[Strategy]) -> list[int]:
        """Add the layouts that a node may have to its values; return the nodes whose values got new ones."""
        node = self._facts.model.nodes[index]
        touched: list[int] = []
        names = (*node.input, *node.output)
        for strategy in strategies:
            for name, layout in zip(names, (*strategy.inputs, *strategy.outputs)):
                if layout is not None and layout.is_split and self._add(name, layout):
                    touched += self._users[name]
        return touched

    def _add(self, name: str, layout: Layout) -> bool:
        cuts = self._cuts[name]
        options, cut = cuts[layout.axis], (layout.outer, layout.blocks)
        if cut in options or len(options) >= _MAX_CUTS:
            return False
        self._cuts[name] = (*cuts[: layout.axis], options | {cut}, *cuts[layout.axis + 1 :])
        return True
