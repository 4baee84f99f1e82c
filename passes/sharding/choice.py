"""Choose a strategy per node: least compute, exchanges and copies, within the memory for weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from onnxplace.model import captured_names, iterate_subgraphs
from onnxplace.passes.sharding.cost_tables import Factor, Table, order_factor
from onnxplace.passes.sharding.elimination import Solution, minimise
from onnxplace.passes.sharding.exchange_costs import ExchangeCosts
from onnxplace.passes.sharding.layouts import PARTIAL, REPLICATED, Layout
from onnxplace.passes.sharding.space import StrategySpace
from onnxplace.passes.sharding.strategies import Strategy

# Steps of the bisection for the price of a byte of weights, and the largest price in seconds per byte.
_PRICE_STEPS, _MAX_PRICE = 12, 1.0
Option = tuple[Layout, Layout]
"""How a value is available: as its producer makes it, and in one more layout (the same one if none is needed)."""


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

    def solve(self, weight_limit_bytes: int | None = None) -> Choice | None:
        """Return the cheapest choice whose weights fit; None if none was found that does.

        A price per byte of weights, found by bisection, trades time for memory.
        """
        choice = self._solve_at(0.0)
        if weight_limit_bytes is None or choice.weight_bytes <= weight_limit_bytes:
            return choice
        low, high, best = 0.0, 1e-13, None
        while best is None:
            candidate = self._solve_at(high)
            if candidate.weight_bytes <= weight_limit_bytes:
                best = candidate
            elif high > _MAX_PRICE:
                return None
            else:
                low, high = high, high * 16
        for _ in range(_PRICE_STEPS):
            middle = math.sqrt(max(low, high * 1e-6) * high)
            candidate = self._solve_at(middle)
            if candidate.weight_bytes <= weight_limit_bytes:
                best, high = (candidate if candidate.seconds <= best.seconds else best), middle
            else:
                low = middle
        return best

    def solve_least_weights(self) -> Choice:
        """Return the cheapest choice of those that split as many weights as possible."""
        least = self._solve_at(_MAX_PRICE)
        choice = self.solve(least.weight_bytes)
        return least if choice is None else choice

    def _solve_at(self, price: float) -> Choice:
        """Return the cheapest choice when each byte of weights on a device costs this many seconds."""
        network = _Network(self, price)
        solution = network.solve(self.max_entries)
        strategies = network.strategies(solution)
        weight_bytes = count_weight_bytes(self.space, strategies)
        paid = price * sum(network.paid_bytes[i][solution.values[i]] for i in range(len(strategies)))
        return Choice(
            strategies=strategies,
            states=network.states(solution),
            seconds=solution.cost - paid,
            lower_bound_seconds=max(solution.lower_bound - paid, 0.0),
            weight_bytes=weight_bytes,
        )


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


class _Network:
    """The choice as cost tables over variables: a strategy per node, and an option per value."""

    def __init__(self, problem: ChoiceProblem, price: float) -> None:
        self._problem, self._price = problem, price
        space = problem.space
        self._facts, self._space = space.facts, space
        self._model = space.facts.model
        self._sizes: list[int] = [len(strategies) for strategies in space.strategies]
        self._factors: list[Factor] = []
        self._tables: dict[object, Table] = {}
        self._state_layouts: dict[str, tuple[int, list[Layout]]] = {}
        self.paid_bytes = [self._weigh(index) for index in range(len(self._sizes))]
        for index, seconds in enumerate(problem.strategy_seconds):
            unary = np.array(seconds) + price * np.array(self.paid_bytes[index])
            self._factors.append(Factor((index,), unary))
        self._add_values()

    def solve(self, max_entries: int) -> Solution:
        return minimise(self._sizes, self._factors, max_entries)

    def strategies(self, solution: Solution) -> tuple[Strategy, ...]:
        return tuple(options[solution.values[index]] for index, options in enumerate(self._space.strategies))

    def states(self, solution: Solution) -> dict[str, Layout]:
        return {name: layouts[solution.values[variable]] for name, (variable, layouts) in self._state_layouts.items()}

    def _weigh(self, index: int) -> list[float]:
        """Return, per strategy of a node, the bytes of weights that it reads on the device with the most."""
        node, weights = self._model.nodes[index], self._facts.is_weight
        division = self._space.division
        held = [(position, name) for position, name in enumerate(node.input) if name in weights]
        if not held:
            return [0.0] * self._sizes[index]
        fractions = {}
        result = []
        for strategy in self._space.strategies[index]:
            total = 0.0
            for position, name in held:
                layout = strategy.inputs[position] or REPLICATED
                if layout not in fractions:
                    fractions[layout] = max(division.fraction(layout, device) for device in range(division.count))
                total += self._facts.bytes(name) * fractions[layout]
            result.append(total)
        return result

    def _new_variable(self, size: int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1

    def _add_values(self) -> None:
        model, weights = self._model, self._facts.is_weight
        readers: dict[str, list[int]] = defaultdict(list)
        for index, reads in enumerate(model.reads):
            for name in reads:
                readers[name].append(index)
        returned = {model.sources.get(output.name, output.name) for output in model.outputs}
        state_of_output = {model.sources.get(out, out): name for name, out in model.states.items()}
        for name in model.states:
            wants = {layout for index in readers[name] for want in self._wants(index, name) for layout in want}
            layouts = [REPLICATED, *sorted(layout for layout in wants if layout.is_split and layout.outer == 1)]
            self._state_layouts[name] = self._new_variable(len(layouts)), layouts
        for value in model.inputs:
            if value.name in weights:
                continue
            if value.name in self._state_layouts:
                variable, layouts = self._state_layouts[value.name]
                self._add_value(value.name, variable, layouts, readers[value.name], False, None)
            else:
                self._add_value(value.name, None, [REPLICATED], readers[value.name], False, None)
        for index, node in enumerate(model.nodes):
            for position, name in enumerate(node.output):
                if name:
                    made = [strategy.outputs[position] or REPLICATED for strategy in self._space.strategies[index]]
                    state = state_of_output.get(name)
                    self._add_value(name, index, made, readers[name], name in returned and state is None, state)

    def _wants(self, index: int, name: str) -> list[tuple[Layout, ...]]:
        """Return, per strategy of a reader, the layouts in which it reads a value."""
        node = self._model.nodes[index]
        positions = [position for position, item in enumerate(node.input) if item == name]
        is_captured = not positions or any(name in captured_names(graph) for graph in iterate_subgraphs(node))
        result = []
        for strategy in self._space.strategies[index]:
            layouts = [strategy.inputs[position] or REPLICATED for position in positions]
            if is_captured:
                layouts.append(REPLICATED)
            result.append(tuple(dict.fromkeys(layouts)))
        return result

    def _add_value(
        self,
        name: str,
        producer: int | None,
        made: Sequence[Layout],
        readers: Sequence[int],
        is_output: bool,
        state: str | None,
    ) -> None:
        """Add the tables of a value: what its layouts cost its producer, and each of its readers.

        A producer without a choice (an input of the model) has no variable of its own.
        """
        users: list[tuple[int, list[tuple[Layout, ...]]]] = [(index, self._wants(index, name)) for index in readers]
        if state is not None:
            variable, layouts = self._state_layouts[state]
            users.append((variable, [(layout,) for layout in layouts]))
        size = self._facts.bytes(name)
        sources = list(dict.fromkeys(made))
        wanted = {layout for _, wants in users for want in wants for layout in want}
        if not users and not is_output:
            return
        options = self._options(sources, wanted, size)
        if len(options) == 1 and options[0] == (REPLICATED, REPLICATED):
            for index, wants in users:
                self._add_table(("local", tuple(wants), size), (index,), partial(self._local_table, wants, size))
            return
        variable = self._new_variable(len(options))
        key = tuple(options), size
        unary = self._table(("unary", key, is_output), lambda: self._option_table(options, size, is_output))
        self._factors.append(Factor((variable,), unary))
        if producer is not None:
            self._add_table(
                ("made", key, tuple(made)), (producer, variable), lambda: self._producer_table(made, options)
            )
        for index, wants in users:
            if index == producer:
                continue  # a state that its own producer variable reads
            self._add_table(
                ("read", key, tuple(wants)), (index, variable), partial(self._reader_table, wants, options, size)
            )

    def _table(self, key: object, build: Callable[[], Table]) -> Table:
        if key not in self._tables:
            self._tables[key] = build()
        return self._tables[key]

    def _add_table(self, key: object, scope: tuple[int, ...], build: Callable[[], Table]) -> None:
        self._factors.append(order_factor(scope, self._table(key, build)))

    def _options(self, sources: Sequence[Layout], wanted: set[Layout], size: int) -> list[Option]:
        seconds = self._problem.costs.seconds
        options = []
        for source in sources:
            options.append((source, source))
            if source == REPLICATED:
                continue  # all others are local then
            others = sorted(wanted | {REPLICATED})
            options += [
                (source, other) for other in others if other != source and seconds(source, other, size) < math.inf
            ]
        return options

    def _option_table(self, options: Sequence[Option], size: int, is_output: bool) -> Table:
        """Return what each option costs: its exchange, and that of an output of the model."""
        seconds = self._problem.costs.seconds
        costs = [seconds(source, other, size) for source, other in options]
        if is_output:
            for index, option in enumerate(options):
                if REPLICATED not in option:
                    costs[index] += seconds(option[0], REPLICATED, size)
        return np.array(costs)

    def _producer_table(self, made: Sequence[Layout], options: Sequence[Option]) -> Table:
        return np.array([[0.0 if layout == source else math.inf for source, _ in options] for layout in made])

    def _reader_table(self, wants: Sequence[tuple[Layout, ...]], options: Sequence[Option], size: int) -> Table:
        return np.array(
            [[sum(self._read_seconds(layout, option, size) for layout in want) for option in options] for want in wants]
        )

    def _read_seconds(self, layout: Layout, option: Option, size: int) -> float:
        if layout in option:
            return 0.0
        if REPLICATED in option:
            return self._problem.costs.seconds(REPLICATED, layout, size)
        return math.inf

    def _local_table(self, wants: Sequence[tuple[Layout, ...]], size: int) -> Table:
        option = REPLICATED, REPLICATED
        return np.array([sum(self._read_seconds(layout, option, size) for layout in want) for want in wants])


def is_sharded(choice: Choice) -> bool:
    """Return whether some operator is split."""
    return any(strategy.is_split or PARTIAL in strategy.outputs for strategy in choice.strategies)
