"""If, Loop and Scan, split along axes that their subgraphs carry through.

Devices cannot exchange values inside a subgraph, which each of them runs by itself. So a layout of one operand is
propagated through it: each inner node must take what it reads as it is there, by the rules of its operator, and what it
then asks of other operands, these get, too. If that ends without a contradiction, and states leave a turn of a loop as
they entered it, the whole node is split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Division, Layout
from onnxplace.passes.sharding.space.node_strategies import NodeStrategy, StrategySpace, SubgraphSplit
from onnxplace.passes.sharding.space.subgraph_models import (
    Place,
    Subgraph,
    build_subgraph_model,
    is_steady,
    list_subgraphs,
)
from onnxplace.passes.sharding.space.tensor_facts import TensorFacts


def list_subgraph_strategies(
    facts: TensorFacts, index: int, division: Division, build_space: Callable[[TensorFacts, Division], StrategySpace]
) -> list[NodeStrategy]:
    """Return the strategies that split a node with subgraphs; `build_space` lists those of the inner nodes."""
    subgraphs, spaces = list_subgraphs(facts.model, index), []
    for subgraph in subgraphs:
        inner = _describe_subgraph(facts, index, subgraph)
        if inner is None:
            return []
        spaces.append(build_space(inner, division))
    return _Propagation(facts, index, subgraphs, spaces).list_strategies() if subgraphs else []


def _describe_subgraph(facts: TensorFacts, index: int, subgraph: Subgraph) -> TensorFacts | None:
    """Return the facts of a subgraph as a model; None if shapes are unknown, or change from turn to turn."""
    # Axes that are not fixed become symbols: those that have the same sizes wherever they are known are one.
    sizes: dict[str, list[int | str]] = {}
    symbols: dict[tuple[int, ...], str] = {}
    for name in (name for name in facts.model.operands[index] if name in facts.shapes):
        others = [other.get(name, ()) for other in facts.others]
        sizes[name] = []
        for axis, (size, is_fixed) in enumerate(zip(facts.shapes[name], facts.fixed[name])):
            column = size, *(shape[axis] if axis < len(shape) else 0 for shape in others)
            sizes[name].append(size if is_fixed else symbols.setdefault(column, f"size{len(symbols)}"))
    dimensions = {symbol: column[0] for column, symbol in symbols.items()}
    model = build_subgraph_model(facts.model, index, subgraph, facts.types, sizes, dimensions)
    if model is None:
        return None
    inner, node = TensorFacts.of(model), facts.model.nodes[index]
    if not all(is_steady(subgraph, shapes) for shapes in (inner.shapes, *filter(None, inner.others))):
        return None
    for name, (position, axis) in subgraph.results.items():
        outer = facts.shapes.get(node.output[position]) if position >= 0 else None
        if outer and inner.shapes.get(name) != tuple(size for at, size in enumerate(outer) if at != axis):
            return None  # such as the other branch, of another shape
    return inner


def _enter(layout: Layout, place: Place) -> Layout | None:
    """Return a layout of an operand or result inside a subgraph, None for a split of the axis that it lacks there."""
    if not layout.is_split or place[1] < 0:
        return layout
    return None if layout.axis == place[1] else layout._replace(axis=layout.axis - (layout.axis > place[1]))


def _leave(layout: Layout, place: Place) -> Layout:
    """Return a layout inside a subgraph as one of the operand or result."""
    if not layout.is_split or place[1] < 0:
        return layout
    return layout._replace(axis=layout.axis + (layout.axis >= place[1]))


@dataclass
class _GraphFlow:
    """The layouts of the values of a subgraph, and a strategy for each of its nodes."""

    layouts: dict[str, Layout]
    """Operands of which nothing is asked yet are left out."""
    strategies: list[NodeStrategy] = field(default_factory=list)

    def weigh(
        self, operands: Sequence[str], strategy: NodeStrategy, weights: frozenset[str]
    ) -> tuple[int, int, int] | None:
        """Return how far a strategy is from taking its inputs as they are; None if it would need an exchange."""
        cut = asked = 0
        if strategy.shares_range or strategy.overlaps:  # devices would need values of each other
            return None
        for name, want in zip(operands, strategy.inputs):
            have = want if name in weights else self.layouts.get(name)
            if want is None or want == have or (have is None and want == REPLICATED):
                continue
            if not want.is_split or have not in (None, REPLICATED):
                return None
            cut, asked = cut + (have == REPLICATED), asked + (have is None)
        return int(PARTIAL in strategy.outputs), cut, asked


class _Propagation:
    """Propagates layouts of operands through the subgraphs of a node."""

    def __init__(
        self, facts: TensorFacts, index: int, subgraphs: Sequence[Subgraph], spaces: Sequence[StrategySpace]
    ) -> None:
        self._facts, self._subgraphs, self._spaces = facts, subgraphs, spaces
        self._operands, self._outputs = facts.model.operands[index], facts.model.nodes[index].output

    def list_strategies(self) -> list[NodeStrategy]:
        """Return a strategy for each layout of an operand that can be propagated to the end.

        Strategies with the same results are also taken together: each may split what the others leave whole, such as
        another branch.
        """
        found: dict[object, NodeStrategy] = {}
        together: dict[object, dict[int, Layout]] = defaultdict(dict)
        for position, layout in sorted({*self._list_seeds()}):
            if (strategy := self._propagate({position: layout})) is not None:
                found.setdefault((strategy.inputs, strategy.outputs), strategy)
                split = {at: item for at, item in enumerate(strategy.inputs) if item is not None and item.is_split}
                together[strategy.outputs] = {**split, **together[strategy.outputs]}
        for demands in together.values():
            if (strategy := self._propagate(demands)) is not None:
                found.setdefault((strategy.inputs, strategy.outputs), strategy)
        return [*found.values()]

    def _list_seeds(self) -> Iterator[tuple[int, Layout]]:
        """Yield the layouts of operands that some inner node can read."""
        for subgraph, space in zip(self._subgraphs, self._spaces):
            for operands, strategies in zip(space.facts.model.operands, space.strategies):
                for name, layout in ((name, lay) for item in strategies for name, lay in zip(operands, item.inputs)):
                    if layout is not None and layout.is_split and name in subgraph.operands:
                        yield subgraph.operands[name][0], _leave(layout, subgraph.operands[name])

    def _propagate(self, demands: Mapping[int, Layout]) -> NodeStrategy | None:
        """Return the strategy in which operands have these layouts, and others what follows from them."""
        demanded, before = dict(demands), dict[int, Layout]()
        flows: list[_GraphFlow] = []
        while demanded != before:
            before, flows = dict(demanded), []
            for subgraph, space in zip(self._subgraphs, self._spaces):
                flow = self._propagate_inside(subgraph, space, demanded)
                if flow is None:
                    return None
                flows.append(flow)
                for first, last in subgraph.states:
                    layout = flow.layouts.get(last, REPLICATED)
                    # A whole copy can be cut at the end of a turn.
                    if layout != REPLICATED and demanded.setdefault(subgraph.operands[first][0], layout) != layout:
                        return None
        return self._build(flows, demanded)

    def _is_free(self, name: str, layout: Layout) -> bool:
        """Return whether a value may have a layout; also summands need a known shape."""
        fixed = self._facts.fixed.get(name)
        is_split_freely = fixed is not None and (layout == PARTIAL or fixed[layout.axis : layout.axis + 1] == (True,))
        return layout == REPLICATED or (is_split_freely and self._facts.can_split(name))

    def _propagate_inside(
        self, subgraph: Subgraph, space: StrategySpace, demanded: dict[int, Layout]
    ) -> _GraphFlow | None:
        """Choose a strategy for each inner node, and add what it asks of operands; None for a contradiction."""
        model = space.facts.model
        flow = _GraphFlow({value.name: REPLICATED for value in model.inputs if value.name not in subgraph.operands})
        for name, place in subgraph.operands.items():
            if place[0] in demanded:
                if (inside := _enter(demanded[place[0]], place)) is None:
                    return None
                flow.layouts[name] = inside
        weights = space.facts.is_weight - subgraph.operands.keys()
        for node, operands, strategies in zip(model.nodes, model.operands, space.strategies):
            weighed = [(weight, at) for at, s in enumerate(strategies) if (weight := flow.weigh(operands, s, weights))]
            if not weighed:
                return None
            strategy = strategies[min(weighed)[1]]
            flow.strategies.append(strategy)
            for name, layout in zip(operands, strategy.inputs):
                if layout is not None and layout.is_split and name not in flow.layouts and name not in weights:
                    asked = _leave(layout, subgraph.operands[name])
                    if demanded.setdefault(subgraph.operands[name][0], asked) != asked:
                        return None
                    flow.layouts[name] = layout
            flow.layouts.update((n, layout) for n, layout in zip(node.output, strategy.outputs) if layout is not None)
        return flow

    def _build(self, flows: Sequence[_GraphFlow], demanded: Mapping[int, Layout]) -> NodeStrategy | None:
        """Return the strategy of the node; None if its subgraphs disagree, or split what cannot be split."""
        results: list[Layout] = []
        for position, name in enumerate(self._outputs):
            layouts = set()
            for subgraph, flow in zip(self._subgraphs, flows):
                layouts |= {
                    _leave(flow.layouts.get(inner, REPLICATED), place)
                    for inner, place in subgraph.results.items()
                    if place[0] == position
                }
                layouts |= {
                    demanded.get(subgraph.operands[first][0], REPLICATED)
                    for first, last in subgraph.states
                    if subgraph.results[last][0] == position
                }
            results.append(max(layouts))  # to a split one, whole copies can be cut
            if not layouts <= {REPLICATED, results[-1]} or (name and not self._is_free(name, results[-1])):
                return None
        if not all(self._is_free(self._operands[position], layout) for position, layout in demanded.items()):
            return None
        splits = []
        for subgraph, space, flow in zip(self._subgraphs, self._spaces, flows):
            if any(
                flow.layouts.get(name, REPLICATED) != REPLICATED for name, (at, _) in subgraph.results.items() if at < 0
            ):
                return None  # each device decides by itself whether a loop goes on
            inputs = {value.name: REPLICATED for value in space.facts.model.inputs}
            inputs |= {n: _enter(demanded.get(p[0], REPLICATED), p) or REPLICATED for n, p in subgraph.operands.items()}
            outputs = [
                REPLICATED if p[0] < 0 else _enter(results[p[0]], p) or REPLICATED for p in subgraph.results.values()
            ]
            splits.append(SubgraphSplit(subgraph.graph, space, tuple(flow.strategies), inputs, tuple(outputs)))
        return NodeStrategy(
            tuple(demanded.get(position, REPLICATED) if name else None for position, name in enumerate(self._operands)),
            tuple(layout if name else None for layout, name in zip(results, self._outputs)),
            subgraphs=tuple(splits),
        )
