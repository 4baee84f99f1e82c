"""Choose a strategy per node: least compute, exchanges and copies, within the memory for weights.

The choice is a sum of cost tables over variables: a strategy per node, and per value the layouts in which it is
available. A value has a table with its producer, which says in which layout it is made, and one with each reader, which
says what it costs to read it in the layout that the reader wants. `elimination` minimises the sum. This is the intra-
operator part of Alpa (Zheng et al., OSDI 2022), solved by elimination instead of an integer program.

A limit on memory couples all nodes, which elimination cannot express. So weights get a price per byte (Lagrangian
relaxation): the choice at one price is again a sum of tables, and the price is searched at which it fits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from onnxplace.passes.sharding.elimination import CostTable, Factor, Solution, minimise, order_factor
from onnxplace.passes.sharding.layouts import PARTIAL, REPLICATED, Layout
from onnxplace.passes.sharding.node_strategies import NodeStrategy
from onnxplace.passes.sharding.sharding_costs import ExchangeCosts
from onnxplace.passes.sharding.strategy_space import StrategySpace

Option = tuple[Layout, Layout]
"""How a value is available: as its producer makes it, and in one more layout (the same one if none is needed)."""

# Steps of the search for the price of a byte of weights, and the largest price in seconds per byte: 0.1 s for a
# kilobyte outweighs any exchange.
_PRICE_STEPS, _MAX_PRICE = 12, 1e-4


class ChoiceNetwork:
    """The choice as cost tables over variables: a strategy per node, and an option per value."""

    def __init__(self, space: StrategySpace, strategy_seconds: Sequence[Sequence[float]], costs: ExchangeCosts) -> None:
        self._space, self._costs = space, costs
        self._facts, self._model = space.facts, space.facts.model
        self._sizes: list[int] = [len(strategies) for strategies in space.strategies]
        self._factors: list[Factor] = []
        self._tables: dict[object, CostTable] = {}
        self._state_layouts: dict[str, tuple[int, list[Layout]]] = {}
        self._wants_cache: dict[object, list[tuple[Layout, ...]]] = {}
        self._strategy_seconds = [np.array(seconds) for seconds in strategy_seconds]
        cache: dict[object, CostTable] = {}
        self._read_bytes = [self._weigh(index, cache) for index in range(len(self._sizes))]
        self._border_seconds = self._list_border_seconds()
        self._add_values()

    def solve(self, price: float, max_entries: int) -> Solution:
        """Return the cheapest choice when each byte of weights that a node reads costs this many seconds."""
        terms = zip(self._strategy_seconds, self._read_bytes)
        unary = [Factor((index,), seconds + price * weights) for index, (seconds, weights) in enumerate(terms)]
        return minimise(self._sizes, [*unary, *self._factors], max_entries)

    def seconds(self, values: Sequence[int]) -> float:
        """Return the seconds of the nodes alone, without exchanges."""
        return float(sum(seconds[value] for seconds, value in zip(self._strategy_seconds, values)))

    def read_bytes(self, values: Sequence[int]) -> float:
        """Return the bytes of weights that nodes read, each on the device that reads most of it."""
        return float(sum(weights[value] for weights, value in zip(self._read_bytes, values)))

    def strategies(self, values: Sequence[int]) -> tuple[NodeStrategy, ...]:
        return tuple(options[value] for options, value in zip(self._space.strategies, values))

    def states(self, values: Sequence[int]) -> dict[str, Layout]:
        """Return the layouts of carried states; values without those of the states leave these whole."""
        return {
            name: layouts[values[variable]] if variable < len(values) else REPLICATED
            for name, (variable, layouts) in self._state_layouts.items()
        }

    def whole_values(self) -> list[int] | None:
        """Return the values of the nodes that compute all of them whole; None if some node must be split."""
        values = []
        for options in self._space.strategies:
            whole = (number for number, strategy in enumerate(options) if is_whole(strategy))
            if (value := next(whole, None)) is None:
                return None
            values.append(value)
        return values

    def _weigh(self, index: int, cache: dict[object, CostTable]) -> CostTable:
        """Return, per strategy of a node, the bytes of weights that it reads on the device with the most."""
        operands, weights = self._model.operands[index], self._facts.is_weight
        division = self._space.division
        held = tuple((position, self._facts.bytes(name)) for position, name in enumerate(operands) if name in weights)
        options = self._space.strategies[index]
        key = held, (id(options) if held else len(options))
        if key not in cache:
            cache[key] = np.array(
                [
                    sum(size * division.largest_fraction(strategy.inputs[position]) for position, size in held)
                    for strategy in options
                ],
                dtype=np.float64,
            )
        return cache[key]

    def _list_border_seconds(self) -> dict[str, float]:
        """Return, per value, what it costs to end a session behind its producer: to reorder all that is alive there."""
        last = {name: index for index, reads in enumerate(self._model.reads) for name in reads}
        ending: dict[int, int] = defaultdict(int)
        alive, borders = 0, dict[str, float]()
        for index, node in enumerate(self._model.nodes):
            for name in node.output:
                ending[last.get(name, index)] += self._facts.bytes(name)
                alive += self._facts.bytes(name)
            alive -= ending[index]
            share = alive / self._costs.count
            borders.update(dict.fromkeys(node.output, share * self._costs.reorder_seconds_per_byte))
        return borders

    def _new_variable(self, size: int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1

    def _add_values(self) -> None:
        model, weights = self._model, self._facts.is_weight
        readers: dict[str, list[int]] = defaultdict(list)
        for index, reads in enumerate(model.reads):
            for name in reads:
                readers[name].append(index)
        # The layout of a carried state is a variable of its own, which its producer and its readers share: the state
        # stays where it is between two calls.
        for name in model.states:
            layouts = self._list_state_layouts(name, readers[name])
            self._state_layouts[name] = self._new_variable(len(layouts)), layouts
        # Inputs arrive whole.
        for name in (value.name for value in model.inputs if value.name not in weights):
            variable, layouts = self._state_layouts.get(name, (None, [REPLICATED]))
            self._add_value(name, variable, layouts, readers[name], False, None)
        self._add_results(readers)

    def _add_results(self, readers: Mapping[str, Sequence[int]]) -> None:
        """Add what nodes compute, with the readers of each value."""
        model = self._model
        returned = {model.sources.get(output.name, output.name) for output in model.outputs}
        state_of_output = {model.sources.get(out, out): name for name, out in model.states.items()}
        for index, node in enumerate(model.nodes):
            for position, name in enumerate(node.output):
                if name:
                    produced = [strategy.outputs[position] or REPLICATED for strategy in self._space.strategies[index]]
                    state = state_of_output.get(name)
                    self._add_value(name, index, produced, readers[name], name in returned and state is None, state)

    def _list_state_layouts(self, name: str, readers: Sequence[int]) -> list[Layout]:
        """Return the layouts that a state may have: whole, and those in which some node can read it."""
        wants = {layout for index in readers for want in self._wants(index, name) for layout in want}
        return [
            REPLICATED,
            *sorted(layout for layout in wants if layout.is_split and layout.outer == 1 and not layout.rows),
        ]

    def _wants(self, index: int, name: str) -> list[tuple[Layout, ...]]:
        """Return, per strategy of a reader, the layouts in which it reads a value."""
        options, operands = self._space.strategies[index], self._model.operands[index]
        positions = tuple([position for position, item in enumerate(operands) if item == name])
        # Equal nodes share one list of strategies, so its identity stands for them.
        key = id(options), positions
        if key in self._wants_cache:
            return self._wants_cache[key]
        result = []
        for strategy in options:
            layouts = [strategy.inputs[position] or REPLICATED for position in positions]
            result.append(tuple(dict.fromkeys(layouts)))
        self._wants_cache[key] = result
        return result

    def _add_value(
        self,
        name: str,
        producer: int | None,
        produced: Sequence[Layout],
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
        # A value is available as it is produced and, after one exchange, in one more layout, which its readers share.
        # From a whole copy, any part can be cut off without an exchange.
        sources = list(dict.fromkeys(produced))
        wanted = {layout for _, wants in users for want in wants for layout in want}
        if not users and not is_output:
            return
        options = self._options(sources, wanted, size)
        border = self._border_seconds.get(name, 0.0)  # inputs have none
        # A value that is always whole needs no variable: readers cut their parts off locally.
        if len(options) == 1 and options[0] == (REPLICATED, REPLICATED):
            for index, wants in users:
                self._add_table(("local", tuple(wants), size), (index,), partial(self._local_table, wants, size))
            return
        variable = self._new_variable(len(options))
        key = tuple(options), size
        unary = self._table(
            ("unary", key, is_output, border), lambda: self._option_table(options, size, is_output, border)
        )
        self._factors.append(Factor((variable,), unary))
        if producer is not None:
            self._add_table(
                ("made", key, tuple(produced)), (producer, variable), lambda: self._producer_table(produced, options)
            )
        for index, wants in users:
            if index == producer:
                continue  # a state that its own producer variable reads
            self._add_table(
                ("read", key, tuple(wants)), (index, variable), partial(self._reader_table, wants, options, size)
            )

    def _table(self, key: object, build: Callable[[], CostTable]) -> CostTable:
        if key not in self._tables:
            self._tables[key] = build()
        return self._tables[key]

    def _add_table(self, key: object, scope: tuple[int, ...], build: Callable[[], CostTable]) -> None:
        self._factors.append(order_factor(scope, self._table(key, build)))

    def _options(self, sources: Sequence[Layout], wanted: set[Layout], size: int) -> list[Option]:
        options = []
        for source in sources:
            options.append((source, source))
            if source == REPLICATED:
                continue  # all others are local then
            # All rows that are exchanged are right.
            others = sorted({layout._replace(valid=()) for layout in wanted} | {REPLICATED})
            options += [
                (source, other)
                for other in others
                if other != source
                and not self._space.division.holds(source, other)
                and self._seconds(source, other, size) < math.inf
            ]
        return options

    def _seconds(self, source: Layout, result: Layout, size: int) -> float:
        return self._costs.overlap_seconds(self._space.division, source, result, size)

    def _option_table(self, options: Sequence[Option], size: int, is_output: bool, border: float) -> CostTable:
        """Return what each option costs: its exchange with its border, and that of an output of the model."""
        seconds = self._seconds
        costs = [seconds(source, other, size) + (border if source != other else 0.0) for source, other in options]
        if is_output:
            for index, option in enumerate(options):
                # An output of the model is returned whole, from one of its two layouts.
                if REPLICATED not in option:
                    costs[index] += seconds(option[0], REPLICATED, size)
        return np.array(costs)

    def _producer_table(self, produced: Sequence[Layout], options: Sequence[Option]) -> CostTable:
        # Infinity forbids: the option has to begin with the layout in which this strategy makes the value.
        return np.array([[0.0 if layout == source else math.inf for source, _ in options] for layout in produced])

    def _reader_table(self, wants: Sequence[tuple[Layout, ...]], options: Sequence[Option], size: int) -> CostTable:
        return np.array(
            [[sum(self._read_seconds(layout, option, size) for layout in want) for option in options] for want in wants]
        )

    def _read_seconds(self, layout: Layout, option: Option, size: int) -> float:
        if layout in option:
            return 0.0
        cuts = (self._seconds(held, layout, size) for held in option if self._space.division.holds(held, layout))
        return min(cuts, default=math.inf)

    def _local_table(self, wants: Sequence[tuple[Layout, ...]], size: int) -> CostTable:
        option = REPLICATED, REPLICATED
        return np.array([sum(self._read_seconds(layout, option, size) for layout in want) for want in wants])


def is_whole(strategy: NodeStrategy) -> bool:
    """Return whether a strategy computes a node on every device, from whole inputs."""
    return all(layout in (None, REPLICATED) for layout in (*strategy.inputs, *strategy.outputs))


@dataclass(frozen=True)
class LayoutChoice:
    """A strategy per node."""

    strategies: tuple[NodeStrategy, ...]
    states: dict[str, Layout]
    """Carried state (input name) -> its layout."""
    seconds: float
    """Predicted step: compute of the slowest device and exchanges, one after the other."""
    lower_bound_seconds: float
    """No choice of these strategies that reads as few bytes of weights has a shorter predicted step."""
    weight_bytes: int
    """Weights on the device that has the most."""


@dataclass(frozen=True)
class ChoiceProblem:
    """The space of strategies with all costs."""

    space: StrategySpace
    strategy_seconds: Sequence[Sequence[float]]
    """Per node and strategy: seconds of the slowest device."""
    costs: ExchangeCosts
    max_entries: int = 1 << 20
    """The largest table of the exact method."""

    @cached_property
    def _network(self) -> ChoiceNetwork:
        return ChoiceNetwork(self.space, self.strategy_seconds, self.costs)

    def restrict(self, index: int, numbers: Sequence[int]) -> ChoiceProblem:
        """Return the problem in which a node has only some of its strategies, given by their positions."""
        strategies, seconds = list(self.space.strategies), list(self.strategy_seconds)
        strategies[index] = tuple(strategies[index][number] for number in numbers)
        seconds[index] = [seconds[index][number] for number in numbers]
        return replace(self, space=replace(self.space, strategies=tuple(strategies)), strategy_seconds=seconds)

    def solve(self, weight_limit_bytes: int | None = None) -> LayoutChoice | None:
        """Return the cheapest choice whose weights fit; None if none was found that does.

        A price per byte of weights trades time for memory. It is searched between a choice that is too heavy and one
        that fits, at the price that makes both cost the same, which ends at the best price (a Lagrangian dual).
        """
        # Free of charge, the fastest choice; at the largest price, the one with the least weights.
        heavy = self._solve_at(0.0)
        if weight_limit_bytes is None or heavy.choice.weight_bytes <= weight_limit_bytes:
            return heavy.choice
        light = self._solve_at(_MAX_PRICE)
        if light.choice.weight_bytes > weight_limit_bytes:
            return None
        return self._search(heavy, light, weight_limit_bytes)

    def solve_least_weights(self) -> LayoutChoice:
        """Return the cheapest choice of those that split as many weights as possible."""
        light = self._solve_at(_MAX_PRICE)
        return self._search(self._solve_at(0.0), light, light.choice.weight_bytes)

    def _search(self, heavy: _PricedChoice, light: _PricedChoice, weight_limit_bytes: int) -> LayoutChoice:
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
            # At this price both ends cost the same: a choice between them shows if and only if it costs less.
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
        # Without a proof, the solution may be worse than no sharding at all: that one is always at hand.
        whole = network.whole_values()
        if whole is not None:
            whole_cost = network.seconds(whole) + price * network.read_bytes(whole)
            if whole_cost < cost:
                values, cost = tuple(whole), whole_cost
        strategies, read_bytes = network.strategies(values), network.read_bytes(values)
        choice = LayoutChoice(
            strategies=strategies,
            states=network.states(values),
            seconds=cost - price * read_bytes,
            # For each choice, seconds + price * bytes is at least the bound. So the seconds of each choice that reads
            # no more bytes than this one are at least the bound less the price of these.
            lower_bound_seconds=max(min(solution.lower_bound, cost) - price * read_bytes, 0.0),
            weight_bytes=count_weight_bytes(self.space, strategies),
        )
        return _PricedChoice(choice, read_bytes)


class _PricedChoice(NamedTuple):
    """A choice, with what a price of weights applies to."""

    choice: LayoutChoice
    read_bytes: float

    def cost(self, price: float) -> float:
        return self.choice.seconds + price * self.read_bytes


def count_weight_bytes(space: StrategySpace, strategies: Sequence[NodeStrategy]) -> int:
    """Return the bytes of weights on the device that has the most."""
    facts, division = space.facts, space.division
    # A weight that nodes read in two layouts is stored in both.
    held: set[tuple[str, Layout]] = set()
    for operands, strategy in zip(facts.model.operands, strategies):
        for name, layout in zip(operands, strategy.inputs):
            if name in facts.is_weight:
                held.add((name, layout or REPLICATED))
    sizes = [
        sum(int(facts.bytes(name) * division.fraction(layout, device)) for name, layout in sorted(held))
        for device in range(division.count)
    ]
    return max(sizes)


def is_sharded(choice: LayoutChoice) -> bool:
    """Return whether some operator is split."""
    return any(strategy.is_split or PARTIAL in strategy.outputs for strategy in choice.strategies)
