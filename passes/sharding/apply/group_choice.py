"""The choice of layouts for a group of devices, and what other layouts of a node or value would cost.

A layout is compared with another one by solving the choice again, in which the node has only the strategies with that
layout: its cost is the min-marginal of the choice. All other nodes are free, so their layouts follow the node's where
that is cheaper than an exchange.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnxplace.facts import LayoutAlternative
from onnxplace.model.model import Model
from onnxplace.passes.sharding.apply.sharded_model import write_sharded_model
from onnxplace.passes.sharding.choose.layout_choice import ChoiceProblem, LayoutChoice
from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Layout
from onnxplace.passes.sharding.space.node_strategies import NodeStrategy
from onnxplace.passes.sharding.space.sharding_costs import WorkCosts
from onnxplace.passes.sharding.space.strategy_space import StrategySpace
from onnxplace.utils.groups import group_pairs


@dataclass(frozen=True)
class GroupProblem:
    """The choice of layouts for a group of devices."""

    devices: tuple[int, ...]
    work: WorkCosts
    problem: ChoiceProblem
    limit_bytes: tuple[int, ...]
    """Memory per device; that of all stages together."""


@dataclass(frozen=True)
class GroupChoice(GroupProblem):
    """A choice for a group of devices, with the problem that it solves."""

    choice: LayoutChoice
    solve: Callable[[ChoiceProblem], LayoutChoice | None]
    """Solves such a problem within the memory; None if no choice fits."""
    step_seconds: float
    """Predicted step; at most the seconds of the choice, whose exchanges overlap with nothing."""

    @property
    def space(self) -> StrategySpace:
        return self.work.space

    @property
    def _model(self) -> Model:
        return self.space.facts.model

    @cached_property
    def _own_exchanges(self) -> Counter[str]:
        return self._count_exchanges(self.choice)

    def list_alternatives(self, node: str, value: str = "") -> tuple[LayoutAlternative, ...]:
        """Return the layouts of a node, or of a value that it makes or reads: first the kept one, then by seconds."""
        index = next(index for index, item in enumerate(self._model.nodes) if item.name == node)
        strategies = enumerate(self.space.strategies[index])
        numbers = group_pairs((self._name_layout(index, strategy, value), number) for number, strategy in strategies)
        kept = self._name_layout(index, self.choice.strategies[index], value)
        others = [self._compare(index, layout, own) for layout, own in numbers.items() if layout != kept]
        others.sort(key=lambda item: (item.seconds is None, item.seconds))
        return LayoutAlternative(kept, is_kept=True, seconds=self.choice.seconds), *others

    def _name_layout(self, index: int, strategy: NodeStrategy, value: str) -> str:
        if not value:
            return describe_strategy(strategy)
        names = (*self._model.operands[index], *self._model.nodes[index].output)
        layouts = dict(zip(names, strategy.layouts))
        return str(layouts.get(value) or REPLICATED)

    def _compare(self, index: int, layout: str, numbers: Sequence[int]) -> LayoutAlternative:
        """Return what the choice is where a node has only the strategies at some positions."""
        choice = self.solve(self.problem.restrict(index, numbers))
        if choice is None or math.isinf(choice.seconds):
            return LayoutAlternative(layout, is_kept=False, seconds=None)
        exchanges = self._count_exchanges(choice)
        exchanges.subtract(self._own_exchanges)
        changes = {
            other: " -> ".join(layouts)
            for other, strategies in enumerate(zip(self.choice.strategies, choice.strategies))
            if other != index and len(set(layouts := [*map(describe_strategy, strategies)])) > 1
        }
        nodes, reads = self._model.nodes, self._model.reads
        neighbours = [
            other
            for other in changes
            if any(not set(nodes[a].output).isdisjoint(reads[b]) for a, b in ((index, other), (other, index)))
        ]
        return LayoutAlternative(
            layout=layout,
            is_kept=False,
            seconds=choice.seconds,
            exchanges={kind: count for kind, count in sorted(exchanges.items()) if count},
            neighbours={self._model.nodes[other].name: changes[other] for other in neighbours},
            others=len(changes) - len(neighbours),
        )

    def _count_exchanges(self, choice: LayoutChoice) -> Counter[str]:
        return Counter(write_sharded_model(self.space, choice, self.problem.costs).exchanges)


def describe_strategy(strategy: NodeStrategy) -> str:
    """Return in words how a node is split."""
    first = next((layout for layout in strategy.outputs if layout is not None), None)
    if not strategy.is_split:
        return "summands" if first == PARTIAL else "whole"
    if first == PARTIAL:
        return "summed axis"
    if first is not None and first.is_split:
        return str(Layout(first.axis, first.outer)) + (", overlapping" if strategy.overlaps else "")
    return "whole"
