"""Choose a strategy per node: least compute, exchanges and copies, within the memory for weights.

The choice is a sum of cost tables over variables: a strategy per node, and per value the layouts in which it is
available. A value has a table with its producer, which says in which layout it is made, and one with each reader, which
says what it costs to read it in the layout that the reader wants. `elimination` minimises the sum. This is the intra-
operator part of Alpa (Zheng et al., OSDI 2022), solved by elimination instead of an integer program.

With a limit of memory, `choice_memory` lists what each choice holds and when.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from onnxplace.passes.sharding.choose.choice_memory import ChoiceMemory
from onnxplace.passes.sharding.choose.elimination import CostTable, Factor, Solution, evaluate, minimise, order_factor
from onnxplace.passes.sharding.choose.factor_solver import FactorProblem, peak_bytes, solve
from onnxplace.passes.sharding.choose.priced_elimination import solve_by_prices
from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Layout
from onnxplace.passes.sharding.space.node_strategies import NodeStrategy
from onnxplace.passes.sharding.space.sharding_costs import ExchangeCosts
from onnxplace.passes.sharding.space.strategy_space import StrategySpace

Option = tuple[Layout, Layout]
"""How a value is available: as its producer makes it, and in one more layout (the same one if none is needed)."""

# The price of a byte of weights where there are to be as few as possible: 0.1 s for a kilobyte outweighs any exchange.
_MAX_PRICE = 1e-4
# Within a limit of memory, the search for a better choice ends after this time.
_MAX_SECONDS = 20.0
# Choices further above their bound than this share are searched for this time.
_LARGE_GAP, _SEARCH_SECONDS = 0.01, 2.0


class ChoiceNetwork:
    """The choice as cost tables over variables: a strategy per node, and an option per value."""

    def __init__(self, space: StrategySpace, strategy_seconds: Sequence[Sequence[float]], costs: ExchangeCosts) -> None:
        self.space, self._costs = space, costs
        self._facts, self._model = space.facts, space.facts.model
        self.sizes: list[int] = [len(strategies) for strategies in space.strategies]
        self._factors: list[Factor] = []
        self._tables: dict[object, CostTable] = {}
        self._state_layouts: dict[str, tuple[int, list[Layout]]] = {}
        self.options: dict[str, tuple[int, list[Option]]] = {}
        """Value -> its variable and options; those that are always whole have none."""
        self._wants_cache: dict[object, list[tuple[Layout, ...]]] = {}
        self._strategy_seconds = [np.array(seconds) for seconds in strategy_seconds]
        cache: dict[object, CostTable] = {}
        self._read_bytes = [self._weigh(index, cache) for index in range(len(self.sizes))]
        self._border_seconds = self._list_border_seconds()
        self._add_values()

    def factors(self, price: float = 0.0) -> list[Factor]:
        """Return all cost tables, where each byte of weights that a node reads costs this many seconds."""
        terms = zip(self._strategy_seconds, self._read_bytes)
        unary = [Factor((index,), seconds + price * weights) for index, (seconds, weights) in enumerate(terms)]
        return [*unary, *self._factors]

    def restrict(self, index: int, numbers: Sequence[int]) -> ChoiceNetwork:
        """Return the network in which a node has only some of its strategies: the others cost infinitely much."""
        restricted, seconds = copy(self), np.full(self.sizes[index], math.inf)
        seconds[numbers] = self._strategy_seconds[index][numbers]
        restricted._strategy_seconds = [*self._strategy_seconds]
        restricted._strategy_seconds[index] = seconds
        return restricted

    def read_bytes(self, values: Sequence[int]) -> float:
        """Return the bytes of weights that nodes read, each on the device that reads most of it."""
        return float(sum(weights[value] for weights, value in zip(self._read_bytes, values)))

    def strategies(self, values: Sequence[int]) -> tuple[NodeStrategy, ...]:
        return tuple(options[value] for options, value in zip(self.space.strategies, values))

    def states(self, values: Sequence[int]) -> dict[str, Layout]:
        """Return the layouts of carried states."""
        return {name: layouts[values[variable]] for name, (variable, layouts) in self._state_layouts.items()}

    def _weigh(self, index: int, cache: dict[object, CostTable]) -> CostTable:
        """Return, per strategy of a node, the bytes of weights that it reads on the device with the most."""
        operands, weights = self._model.operands[index], self._facts.is_weight
        division = self.space.division
        held = tuple((position, self._facts.bytes(name)) for position, name in enumerate(operands) if name in weights)
        options = self.space.strategies[index]
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
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _add_values(self) -> None:
        model, weights = self._model, self._facts.is_weight
        # The layout of a carried state is a variable, which its producer and its readers share: the state
        # stays where it is between two calls.
        for name in model.states:
            layouts = self._list_state_layouts(name)
            self._state_layouts[name] = self._new_variable(len(layouts)), layouts
        # Inputs arrive whole.
        for name in (value.name for value in model.inputs if value.name not in weights):
            variable, layouts = self._state_layouts.get(name, (None, [REPLICATED]))
            self._add_value(name, variable, layouts, False, None)
        returned = {model.sources.get(output.name, output.name) for output in model.outputs}
        state_of_output = {model.sources.get(out, out): name for name, out in model.states.items()}
        for index, node in enumerate(model.nodes):
            for position, name in enumerate(node.output):
                if name:
                    produced = [strategy.outputs[position] or REPLICATED for strategy in self.space.strategies[index]]
                    state = state_of_output.get(name)
                    self._add_value(name, index, produced, name in returned and state is None, state)

    def _list_state_layouts(self, name: str) -> list[Layout]:
        """Return the layouts that a state may have: whole, and those in which some node can read it."""
        readers = self._model.readers.get(name, ())
        wants = {layout for index in readers for want in self.wants(index, name) for layout in want}
        return [
            REPLICATED,
            *sorted(layout for layout in wants if layout.is_split and layout.outer == 1 and not layout.rows),
        ]

    def wants(self, index: int, name: str) -> list[tuple[Layout, ...]]:
        """Return, per strategy of a reader, the layouts in which it reads a value."""
        options, operands = self.space.strategies[index], self._model.operands[index]
        positions = tuple([position for position, item in enumerate(operands) if item == name])
        # Equal nodes share one list of strategies, so its identity stands for them.
        key = id(options), positions
        if key not in self._wants_cache:
            self._wants_cache[key] = [
                tuple(dict.fromkeys(strategy.inputs[position] or REPLICATED for position in positions))
                for strategy in options
            ]
        return self._wants_cache[key]

    def _add_value(
        self, name: str, producer: int | None, produced: Sequence[Layout], is_output: bool, state: str | None
    ) -> None:
        """Add the tables of a value: what its layouts cost its producer, and each of its readers.

        A producer without a choice (an input of the model) has no variable.
        """
        users = [(index, self.wants(index, name)) for index in self._model.readers.get(name, ())]
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
        if options == [(REPLICATED, REPLICATED)]:
            for index, wants in users:
                self._add_table(("local", tuple(wants), size), (index,), partial(self._local_table, wants, size))
            return
        variable = self._new_variable(len(options))
        self.options[name] = variable, options
        key = tuple(options), size
        build = partial(self._option_table, options, size, is_output, border)
        self._add_table(("unary", key, is_output, border), (variable,), build)
        if producer is not None:
            # Infinity forbids: the option has to begin with the layout in which a strategy makes the value.
            self._add_table(
                ("made", key, tuple(produced)),
                (producer, variable),
                lambda: np.array([[0.0 if made == source else math.inf for source, _ in options] for made in produced]),
            )
        for index, wants in users:
            if index == producer:
                continue  # a state that its own producer variable reads
            self._add_table(
                ("read", key, tuple(wants)), (index, variable), partial(self._reader_table, wants, options, size)
            )

    def _add_table(self, key: object, scope: tuple[int, ...], build: Callable[[], CostTable]) -> None:
        if key not in self._tables:
            self._tables[key] = build()
        self._factors.append(order_factor(scope, self._tables[key]))

    def _options(self, sources: Sequence[Layout], wanted: set[Layout], size: int) -> list[Option]:
        options = []
        for source in sources:
            options.append((source, source))
            if source == REPLICATED:
                continue  # all others are local then
            # All rows that are exchanged are valid.
            others = sorted({layout._replace(valid=()) for layout in wanted} | {REPLICATED})
            options += [
                (source, other)
                for other in others
                if other != source
                and not self.space.division.holds(source, other)
                and self._seconds(source, other, size) < math.inf
            ]
        return options

    def _seconds(self, source: Layout, result: Layout, size: int) -> float:
        return self._costs.overlap_seconds(self.space.division, source, result, size)

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

    def _reader_table(self, wants: Sequence[tuple[Layout, ...]], options: Sequence[Option], size: int) -> CostTable:
        return np.array(
            [[sum(self._read_seconds(layout, option, size) for layout in want) for option in options] for want in wants]
        )

    def _read_seconds(self, layout: Layout, option: Option, size: int) -> float:
        if layout in option:
            return 0.0
        cuts = (self._seconds(held, layout, size) for held in option if self.space.division.holds(held, layout))
        return min(cuts, default=math.inf)

    def _local_table(self, wants: Sequence[tuple[Layout, ...]], size: int) -> CostTable:
        option = REPLICATED, REPLICATED
        return np.array([sum(self._read_seconds(layout, option, size) for layout in want) for want in wants])


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
    peak_bytes: float = 0.0
    """Where memory is limited: the most that it holds at one time, by its own account (`choice_memory`)."""


@dataclass(frozen=True)
class ChoiceProblem:
    """The space of strategies with all costs."""

    space: StrategySpace
    strategy_seconds: Sequence[Sequence[float]]
    """Per node and strategy: seconds of the slowest device."""
    costs: ExchangeCosts

    @cached_property
    def _network(self) -> ChoiceNetwork:
        return ChoiceNetwork(self.space, self.strategy_seconds, self.costs)

    def restrict(self, index: int, numbers: Sequence[int]) -> ChoiceProblem:
        """Return the problem in which a node has only some of its strategies, given by their positions."""
        restricted = replace(self)
        vars(restricted)["_network"] = self._network.restrict(index, numbers)
        return restricted

    def solve(self, limit_bytes: Sequence[int] | None = None) -> LayoutChoice | None:
        """Return the cheapest choice within the memory of each device; None if none was found that fits."""
        network = self._network
        if limit_bytes is None:
            return self._solve_freely(0.0)
        memory = ChoiceMemory(network.space, network.sizes, network.options, network.wants, limit_bytes)
        problem = FactorProblem(
            sizes=[*network.sizes, *memory.sizes],
            factors=[*network.factors(), *memory.factors],
            holdings=memory.holdings,
            limit=memory.limit,
        )
        solution = _improve(problem, solve_by_prices(problem, seconds=_MAX_SECONDS))
        return replace(self._read(solution), peak_bytes=peak_bytes(problem, solution.values)) if solution.fits else None

    def solve_least_weights(self) -> LayoutChoice:
        """Return the cheapest choice of those that split as many weights as possible."""
        return self._solve_freely(_MAX_PRICE)

    def _solve_freely(self, price: float) -> LayoutChoice:
        network = self._network
        factors = network.factors(price)
        solution = _improve(FactorProblem(network.sizes, factors), minimise(network.sizes, factors))
        # Without a proof, the solution may be worse than whole nodes, which are the first of all choices.
        if solution.cost > solution.lower_bound:
            whole = [0] * len(network.sizes)
            cost = evaluate(factors, whole)
            solution = replace(solution, values=whole, cost=cost) if cost < solution.cost else solution
        return self._read(solution, price)

    def _read(self, solution: Solution, price: float = 0.0) -> LayoutChoice:
        """Return the choice that a solution is, where each byte of weights costs this many seconds."""
        network, values = self._network, solution.values
        strategies, read_seconds = network.strategies(values), price * network.read_bytes(values)
        return LayoutChoice(
            strategies=strategies,
            states=network.states(values),
            seconds=solution.cost - read_seconds,
            # For each choice, seconds + price * bytes is at least the bound. So the seconds of each choice that reads
            # no more bytes than this one are at least the bound less the price of these.
            lower_bound_seconds=max(min(solution.lower_bound, solution.cost) - read_seconds, 0.0),
            weight_bytes=count_weight_bytes(self.space, strategies),
        )


def _improve(problem: FactorProblem, solution: Solution) -> Solution:
    """Return the better one of a solution that elimination did not prove and what the search finds in short time."""
    if solution.fits and (1 - _LARGE_GAP) * solution.cost <= solution.lower_bound:
        return solution
    other = solve(problem, seconds=_SEARCH_SECONDS, max_entries=0)  # elimination was tried
    bound = max(solution.lower_bound, other.lower_bound)
    best = other if other.fits and (not solution.fits or other.cost < solution.cost) else solution
    return replace(best, lower_bound=min(bound, best.cost) if best.fits else bound)


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
