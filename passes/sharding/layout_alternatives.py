"""What the other layouts of a node or value would cost, and what they would force on other nodes.

A layout is compared with another one by solving the choice again, in which the node has only the strategies with that
layout: its cost is the min-marginal of the choice. All other nodes are free, so their layouts follow the node's where
that is cheaper than an exchange.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnxplace.facts import LayoutAlternative, ShardedKind
from onnxplace.model import Model
from onnxplace.passes.sharding.apply_sharding import ShardingOptions, choose_group, describe_strategy
from onnxplace.passes.sharding.layout_choice import LayoutChoice
from onnxplace.passes.sharding.layouts import REPLICATED
from onnxplace.passes.sharding.node_strategies import NodeStrategy
from onnxplace.passes.sharding.sharded_model import write_sharded_model
from onnxplace.state import State

# Nodes of all choices that are made to compare the layouts of a bundle's kinds of nodes: about a second.
MAX_CHOSEN_NODES = 4_000


class LayoutExplainer:
    """Compares the layouts of nodes and values in the choice that the pass `shard` applies to a state.

    Raises ValueError if the pass splits nothing.
    """

    def __init__(self, state: State, options: ShardingOptions) -> None:
        state, group = choose_group(state, options)
        if group is None:
            raise ValueError("the pass splits nothing")
        self._model, self._group = state[Model], group
        self._kept = group.choice.strategies
        self._exchanges = self._count_exchanges(group.choice)

    def list_alternatives(self, index: int, value: str = "") -> tuple[LayoutAlternative, ...]:
        """Return the layouts of a node, or of a value that it makes or reads: first the kept one, then by seconds."""
        numbers: dict[str, list[int]] = {}
        for number, strategy in enumerate(self._group.space.strategies[index]):
            numbers.setdefault(self._name_layout(index, strategy, value), []).append(number)
        kept = self._name_layout(index, self._kept[index], value)
        seconds = self._group.choice.seconds
        others = [self._compare(index, layout, own) for layout, own in numbers.items() if layout != kept]
        others.sort(key=lambda item: (item.seconds is None, item.seconds))
        return LayoutAlternative(kept, is_kept=True, seconds=seconds), *others

    def count_strategies(self, index: int) -> int:
        return len(self._group.space.strategies[index])

    def _name_layout(self, index: int, strategy: NodeStrategy, value: str) -> str:
        if not value:
            return describe_strategy(strategy)
        node = self._model.nodes[index]
        layouts = dict(zip((*node.input, *node.output), (*strategy.inputs, *strategy.outputs)))
        return str(layouts.get(value) or REPLICATED)

    def _compare(self, index: int, layout: str, numbers: Sequence[int]) -> LayoutAlternative:
        """Return what the choice is where a node has only the strategies at some positions."""
        choice = self._group.solve(self._group.problem.restrict(index, numbers))
        if choice is None or math.isinf(choice.seconds):
            return LayoutAlternative(layout, is_kept=False, seconds=None)
        exchanges = self._count_exchanges(choice)
        differences = {
            kind: exchanges.get(kind, 0) - self._exchanges.get(kind, 0)
            for kind in sorted(exchanges.keys() | self._exchanges.keys())
        }
        changes = {
            other: " -> ".join(layouts)
            for other, strategies in enumerate(zip(self._kept, choice.strategies))
            if other != index and len(set(layouts := [*map(describe_strategy, strategies)])) > 1
        }
        neighbours = [other for other in self._list_neighbours(index) if other in changes]
        return LayoutAlternative(
            layout=layout,
            is_kept=False,
            seconds=choice.seconds,
            exchanges={kind: count for kind, count in differences.items() if count},
            neighbours={self._model.nodes[other].name: changes[other] for other in neighbours},
            others=len(changes) - len(neighbours),
        )

    def _count_exchanges(self, choice: LayoutChoice) -> Mapping[str, int]:
        return write_sharded_model(self._group.space, choice, self._group.costs).exchanges

    def _list_neighbours(self, index: int) -> list[int]:
        """Return the nodes that a node reads from, and those that read its values."""
        nodes, reads = self._model.nodes, self._model.reads
        own, read = set(nodes[index].output), set(reads[index])
        return [
            other
            for other, node in enumerate(nodes)
            if other != index and not (own.isdisjoint(reads[other]) and read.isdisjoint(node.output))
        ]


def compare_kinds(state: State, options: ShardingOptions, kinds: Sequence[ShardedKind]) -> tuple[ShardedKind, ...]:
    """Return what `shard_state` made of a state, with the layouts of a node of each kind, as far as time allows."""
    index = {node.name: position for position, node in enumerate(state[Model].nodes)}
    budget = MAX_CHOSEN_NODES // max(len(index), 1)
    if budget < 2:
        return tuple(kinds)
    explainer, compared = LayoutExplainer(state, options), []
    for kind in kinds:
        budget -= explainer.count_strategies(index[kind.node])
        alternatives = explainer.list_alternatives(index[kind.node]) if budget >= 0 else ()
        compared.append(replace(kind, alternatives=alternatives))
    return tuple(compared)
