"""What the other layouts of a node or value would cost, and what they would force on other nodes.

A layout is compared with another one by solving the choice again, in which the node has only the strategies with that
layout: its cost is the min-marginal of the choice. All other nodes are free, so their layouts follow the node's where
that is cheaper than an exchange.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from onnxplace.bundle import LayoutAlternativeRecord, ShardedKindRecord
from onnxplace.passes.sharding.apply.apply_sharding import GroupChoice, describe_strategy
from onnxplace.passes.sharding.apply.sharded_model import write_sharded_model
from onnxplace.passes.sharding.choose.layout_choice import LayoutChoice
from onnxplace.passes.sharding.rules.layouts import REPLICATED
from onnxplace.passes.sharding.space.node_strategies import NodeStrategy

# Nodes of all choices that are made to compare the layouts of a bundle's kinds of nodes: about a second.
MAX_CHOSEN_NODES = 4_000
# Choices this close to their lower bound count as proven.
SMALL_GAP = 1e-4


class LayoutExplainer:
    """Compares the layouts of nodes and values in a choice of the pass `shard` (`Shards.choice`)."""

    def __init__(self, group: GroupChoice) -> None:
        self._model, self._group = group.space.facts.model, group
        self._index = {node.name: index for index, node in enumerate(self._model.nodes)}
        self._kept = group.choice.strategies
        self._exchanges = self._count_exchanges(group.choice)

    def list_alternatives(self, node: str, value: str = "") -> tuple[LayoutAlternativeRecord, ...]:
        """Return the layouts of a node, or of a value that it makes or reads: first the kept one, then by seconds."""
        index, numbers = self._index[node], dict[str, list[int]]()
        for number, strategy in enumerate(self._group.space.strategies[index]):
            numbers.setdefault(self._name_layout(index, strategy, value), []).append(number)
        kept = self._name_layout(index, self._kept[index], value)
        seconds = self._group.choice.seconds
        others = [self._compare(index, layout, own) for layout, own in numbers.items() if layout != kept]
        others.sort(key=lambda item: (item.seconds is None, item.seconds))
        return LayoutAlternativeRecord(layout=kept, is_kept=True, seconds=seconds), *others

    def _name_layout(self, index: int, strategy: NodeStrategy, value: str) -> str:
        if not value:
            return describe_strategy(strategy)
        names = (*self._model.operands[index], *self._model.nodes[index].output)
        layouts = dict(zip(names, (*strategy.inputs, *strategy.outputs)))
        return str(layouts.get(value) or REPLICATED)

    def _compare(self, index: int, layout: str, numbers: Sequence[int]) -> LayoutAlternativeRecord:
        """Return what the choice is where a node has only the strategies at some positions."""
        choice = self._group.solve(self._group.problem.restrict(index, numbers))
        if choice is None or math.isinf(choice.seconds):
            return LayoutAlternativeRecord(layout=layout, is_kept=False, seconds=None)
        exchanges = self._count_exchanges(choice)
        exchanges.subtract(self._exchanges)
        changes = {
            other: " -> ".join(layouts)
            for other, strategies in enumerate(zip(self._kept, choice.strategies))
            if other != index and len(set(layouts := [*map(describe_strategy, strategies)])) > 1
        }
        nodes, reads = self._model.nodes, self._model.reads
        neighbours = [
            other
            for other in changes
            if any(not set(nodes[a].output).isdisjoint(reads[b]) for a, b in ((index, other), (other, index)))
        ]
        return LayoutAlternativeRecord(
            layout=layout,
            is_kept=False,
            seconds=choice.seconds,
            exchanges={kind: count for kind, count in sorted(exchanges.items()) if count},
            neighbours={self._model.nodes[other].name: changes[other] for other in neighbours},
            others=len(changes) - len(neighbours),
        )

    def _count_exchanges(self, choice: LayoutChoice) -> Counter[str]:
        return Counter(write_sharded_model(self._group.space, choice, self._group.costs).exchanges)


def compare_kinds(group: GroupChoice, kinds: Sequence[ShardedKindRecord]) -> tuple[ShardedKindRecord, ...]:
    """Return the kinds of nodes of a choice with the layouts of a node of each, as far as time allows.

    Only choices without a limit of memory that elimination proves are quickly made again.
    """
    choice, budget = group.choice, MAX_CHOSEN_NODES // max(len(group.space.strategies), 1)
    if budget < 2 or choice.peak_bytes or choice.lower_bound_seconds < (1 - SMALL_GAP) * choice.seconds:
        return tuple(kinds)
    explainer, compared = LayoutExplainer(group), []
    # A node has at most as many layouts as strategies.
    strategies = dict(zip((node.name for node in group.space.facts.model.nodes), group.space.strategies))
    for kind in kinds:
        budget -= len(strategies[kind.node])
        alternatives = explainer.list_alternatives(kind.node) if budget >= 0 else ()
        compared.append(kind.model_copy(update={"alternatives": alternatives}))
    return tuple(compared)
