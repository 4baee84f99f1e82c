"""Choose a strategy per node: least compute, exchanges and copies, within the memory for weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from onnxplace.passes.sharding.choice_network import ChoiceNetwork
from onnxplace.passes.sharding.exchange_costs import ExchangeCosts
from onnxplace.passes.sharding.layouts import PARTIAL, REPLICATED, Layout
from onnxplace.passes.sharding.space import StrategySpace
from onnxplace.passes.sharding.strategies import Strategy

# Steps of the search for the price of a byte of weights, and the largest price in seconds per byte.
_PRICE_STEPS, _MAX_PRICE = 12, 1e-4


@dataclass(frozen=True)
class Choice:
    """A strategy per node."""

    strategies: tuple[Strategy, ...]
    states: dict[str, Layout]
    """Carried state (input name) -> its layout."""
    seconds: float
    """Predicted step: compute of the slowest device and exchanges, one after the other."""
    lower_bound_seconds: float
    """No choice of these strategies has a shorter predicted step."""
    weight_bytes: int
    """Weights on the device that has the most."""


@dataclass(frozen=True)
class ChoiceProblem:
    """The space of strategies with all costs."""

    space: StrategySpace
    strategy_seconds: Sequence[Sequence[float]]
    """Per node and strategy: seconds of the slowest device, with halos."""
    costs: ExchangeCosts
    max_entries: int = 1 << 20
    """The largest table of the exact method."""

    @cached_property
    def _network(self) -> ChoiceNetwork:
        return ChoiceNetwork(self.space, self.strategy_seconds, self.costs)

    def solve(self, weight_limit_bytes: int | None = None) -> Choice | None:
        """Return the cheapest choice whose weights fit; None if none was found that does.

        A price per byte of weights trades time for memory. It is searched between a choice that is too heavy and one
        that fits, at the price that makes both cost the same, which ends at the best price (a Lagrangian dual).
        """
        heavy = self._solve_at(0.0)
        if weight_limit_bytes is None or heavy.choice.weight_bytes <= weight_limit_bytes:
            return heavy.choice
        light = self._solve_at(_MAX_PRICE)
        if light.choice.weight_bytes > weight_limit_bytes:
            return None
        return self._search(heavy, light, weight_limit_bytes)

    def solve_least_weights(self) -> Choice:
        """Return the cheapest choice of those that split as many weights as possible."""
        light = self._solve_at(_MAX_PRICE)
        return self._search(self._solve_at(0.0), light, light.choice.weight_bytes)

    def _search(self, heavy: _PricedChoice, light: _PricedChoice, weight_limit_bytes: int) -> Choice:
        """Return the cheapest choice that fits, of those at prices between two choices; `light` fits."""
        best = min(
            (item.choice for item in (heavy, light) if item.choice.weight_bytes <= weight_limit_bytes),
            key=lambda choice: choice.seconds,
        )
        for _ in range(_PRICE_STEPS):
            saved_bytes = heavy.read_bytes - light.read_bytes
            added_seconds = light.choice.seconds - heavy.choice.seconds
            if saved_bytes <= 0 or added_seconds <= 0:
                break
            price = added_seconds / saved_bytes
            middle = self._solve_at(price)
            if middle.cost(price) >= light.cost(price) * (1 - 1e-9):
                break
            if middle.choice.weight_bytes <= weight_limit_bytes:
                light = middle
                best = min(best, middle.choice, key=lambda choice: choice.seconds)
            else:
                heavy = middle
        return best

    def _solve_at(self, price: float) -> _PricedChoice:
        """Return the cheapest choice when each byte of weights on a device costs this many seconds."""
        network = self._network
        solution = network.solve(price, self.max_entries)
        values, cost = solution.values, solution.cost
        whole = network.whole_values()
        if whole is not None:
            whole_cost = network.seconds(whole) + price * network.read_bytes(whole)
            if whole_cost < cost:
                values, cost = tuple(whole), whole_cost
        strategies, read_bytes = network.strategies(values), network.read_bytes(values)
        choice = Choice(
            strategies=strategies,
            states=network.states(values),
            seconds=cost - price * read_bytes,
            lower_bound_seconds=max(min(solution.lower_bound, cost) - price * read_bytes, 0.0),
            weight_bytes=count_weight_bytes(self.space, strategies),
        )
        return _PricedChoice(choice, read_bytes)


class _PricedChoice(NamedTuple):
    """A choice, with what a price of weights applies to."""

    choice: Choice
    read_bytes: float

    def cost(self, price: float) -> float:
        return self.choice.seconds + price * self.read_bytes


def count_weight_bytes(space: StrategySpace, strategies: Sequence[Strategy]) -> int:
    """Return the bytes of weights on the device that has the most."""
    facts, division = space.facts, space.division
    held: set[tuple[str, Layout]] = set()
    for node, reads, strategy in zip(facts.model.nodes, facts.model.reads, strategies):
        layouts = dict(zip(node.input, strategy.inputs))
        for name in reads:
            if name in facts.is_weight:
                held.add((name, layouts.get(name) or REPLICATED))
    sizes = [
        sum(int(facts.bytes(name) * division.fraction(layout, device)) for name, layout in sorted(held))
        for device in range(division.count)
    ]
    return max(sizes)


def is_sharded(choice: Choice) -> bool:
    """Return whether some operator is split."""
    return any(strategy.is_split or PARTIAL in strategy.outputs for strategy in choice.strategies)
