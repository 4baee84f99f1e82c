"""The memory of a choice of layouts over time: what a device holds while it runs its copies of the nodes in order.

Time is the order of the nodes: node i runs at 2 i + 1, exchanges for it at 2 i, and outputs are returned at the end,
one after the other. Weights are held throughout, the model's inputs from the start, and its outputs to the end. Any
other value is held from its producer to its last reader, and to that of its views. Where a value changes its layout,
the first reader makes the exchange: until then the device holds its part as it was produced, with what other devices
send it, and from then on the part in the new layout. Outputs that are not whole are put together on one device, which
has their other parts since these were produced.

This is what the simulator counts (docs/architecture.md), except where readers of one value want both of its layouts,
or cut different parts off a copy, or rows off parts that overlap: these are not told apart. So the choice is only as
good as this account of it, and whether a sharded model fits is up to the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations

import numpy as np

from onnxplace.graph.op_graph import Csr, Longs
from onnxplace.model.lowering import build_op_graph
from onnxplace.passes.sharding.choose.elimination import Factor, order_factor
from onnxplace.passes.sharding.choose.factor_network import Holding
from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Layout
from onnxplace.passes.sharding.space.sharding_costs import rows_outside
from onnxplace.passes.sharding.space.strategy_space import StrategySpace


class ChoiceMemory:
    """What the choices of a network hold on a device, in bytes of the device with the least memory.

    A device with twice the memory counts half: one limit then holds for all. On unlike devices, the account takes the
    device that each single thing fills most, which is an upper bound of each of them.

    Args:
        space: The strategies of the nodes, which are the first variables.
        sizes: Number of choices of each variable.
        options: Value -> its variable, and the two layouts of each of its choices; those that stay whole have none.
        wants: The layouts in which each strategy of a node reads a value.
        limit_bytes: Memory per device.
    """

    def __init__(
        self,
        space: StrategySpace,
        sizes: Sequence[int],
        options: Mapping[str, tuple[int, list[tuple[Layout, Layout]]]],
        wants: Callable[[int, str], list[tuple[Layout, ...]]],
        limit_bytes: Sequence[int],
    ) -> None:
        self.limit = min(limit_bytes)
        self._scales = [self.limit / max(limit, 1) for limit in limit_bytes]
        self._space, self._facts = space, space.facts
        self._sizes, self._options, self._wants = sizes, options, wants
        self._shares: dict[Layout, float] = {}
        self.sizes: list[int] = []
        """Number of choices of further variables: the layouts in which a weight of several readers is held."""
        self.factors: list[Factor] = []
        """Which of these choices the nodes need."""
        self.holdings = [
            item
            for item in (*self._weights(), *self._values(), *self._cuts())
            if item.bytes.any() and item.begin < item.end
        ]

    def share(self, layout: Layout | None) -> float:
        """Return which fraction of a value a device holds of it in a layout."""
        if layout is None:
            return 0.0
        if layout not in self._shares:
            division = self._space.division
            self._shares[layout] = max(division.fraction(layout, d) * scale for d, scale in enumerate(self._scales))
        return self._shares[layout]

    @cached_property
    def _end(self) -> int:
        return 2 * len(self._space.strategies) + 1 + len(self._facts.model.outputs)

    # --- weights ---

    def _weights(self) -> Iterator[Holding]:
        facts = self._facts
        for name, users in facts.model.readers.items():
            if name not in facts.is_weight:
                continue
            wants = [self._wants(index, name) for index in users]
            layouts = sorted({layout for options in wants for want in options for layout in want})
            size = facts.bytes(name)
            if len(users) == 1 or len(layouts) == 1:
                held = [sum(size * self.share(layout) for layout in want) for want in wants[0]]
                yield Holding(users[0], 0, self._end, np.array(held))
                continue
            # Several readers share the parts of a weight, if they want them in one layout; it is held in two at most.
            sets = [*combinations(layouts, 1), *combinations(layouts, 2)]
            variable = len(self._sizes) + len(self.sizes)
            self.sizes.append(len(sets))
            for index, options in zip(users, wants):
                table = np.array([[0.0 if set(want) <= set(held) else np.inf for held in sets] for want in options])
                self.factors.append(order_factor((index, variable), table))
            yield Holding(variable, 0, self._end, np.array([size * sum(map(self.share, held)) for held in sets]))

    # --- values ---

    def _values(self) -> Iterator[Holding]:
        facts, model = self._facts, self._facts.model
        graph = build_op_graph(model, {name: facts.bytes(name) for name in facts.shapes})
        birth = np.where(graph.producer >= 0, 2 * graph.producer.astype(np.int64) + 1, 0)
        first, death = _find_readers(birth, graph.readers)
        death[graph.is_output] = self._end
        for value in range(len(birth) - 1, -1, -1):
            if graph.alias[value] >= 0:
                death[graph.alias[value]] = max(death[graph.alias[value]], death[value])
        returned = [model.sources.get(item.name, item.name) for item in model.outputs]
        merged = {name: self._end - len(returned) + index for index, name in enumerate(returned)}
        for output in model.states.values():
            merged.pop(model.sources.get(output, output), None)  # its parts stay where they are
        for value, name in enumerate(graph.value_names):
            begin, exchange, end, size = int(birth[value]), int(first[value]), int(death[value]), facts.bytes(name)
            # A view is in the memory of the value that it shows, until it changes its layout.
            own = 0 if graph.alias[value] >= 0 else size
            if name not in self._options:
                yield from self._unexchanged(name, int(graph.producer[value]), own, begin, end)
                continue
            variable, options = self._options[name]
            tables = np.array([self._option_bytes(option, own, size) for option in options]).T
            yield Holding(variable, begin, exchange + 1, tables[1])
            yield Holding(variable, begin + 1, exchange + 1, tables[2])
            has_copy = np.array([REPLICATED in option for option in options])
            stop = merged.get(name, end - 1) + 1
            for mask, last in ((has_copy, end), (~has_copy, stop)):
                yield Holding(variable, begin, last, np.where(mask, tables[0], 0.0))
                yield Holding(variable, exchange, last, np.where(mask, tables[3], 0.0))
            if name in merged:
                others = [size * self._exchanged(source, REPLICATED) for source, _ in options]
                yield Holding(variable, begin, stop, np.where(has_copy, 0.0, others))
                yield Holding(variable, stop - 1, end, np.where(has_copy, 0.0, size))

    def _option_bytes(self, option: tuple[Layout, Layout], own: int, size: int) -> tuple[float, float, float, float]:
        """Return what is held for good; until the exchange, by the producer and from others; and from then on."""
        source, result = option
        part = own * self.share(source)
        if source == result:
            return part, 0.0, 0.0, 0.0
        return 0.0, part, size * self._exchanged(source, result), size * self.share(result)

    def _exchanged(self, source: Layout, result: Layout) -> float:
        """Return which fraction of a value an exchange holds, next to the part as it was produced and the result."""
        division = self._space.division
        count = division.count
        if division.shares_rows(source, result):  # rows that a device cuts off for its neighbours, and those of theirs
            size = (source.rows or result.rows)[-1][1]
            pairs = zip(division.held(result, size), division.valid(source, size))
            return 2 * max(rows_outside(want, have) for want, have in pairs) / size
        if source == PARTIAL:
            # Summands of the others; or slices of the own one, to be sent, and those of the others.
            direct = min(count - 1.0, 2.0)
            return direct if result == REPLICATED else 2.0 - 1.0 / count
        # Tensors that are fused in one axis are cut apart and put together again.
        gathered = (source.outer > 1) + 1.0 - self.share(source)
        if result == REPLICATED:
            return gathered
        if source.axis == result.axis:  # cut off a whole copy
            return gathered + 1.0 + (result.outer > 1) * self.share(result)
        return self.share(source) + self.share(result)

    def _unexchanged(self, name: str, producer: int, own: int, begin: int, end: int) -> Iterator[Holding]:
        """Yield what a value holds that stays as it is produced."""
        if producer >= 0:
            position = list(self._facts.model.nodes[producer].output).index(name)
            layouts = [strategy.outputs[position] for strategy in self._space.strategies[producer]]
            yield Holding(producer, begin, end, np.array([own * self.share(layout) for layout in layouts]))
        elif name in self._facts.model.readers:
            reader = self._facts.model.readers[name][0]
            yield Holding(reader, begin, end, np.full(self._sizes[reader], float(own * self.share(REPLICATED))))

    # --- what a node cuts off ---

    def _cuts(self) -> Iterator[Holding]:
        """Yield the parts that nodes cut off whole values."""
        facts = self._facts
        for index, (operands, options) in enumerate(zip(facts.model.operands, self._space.strategies)):
            whole = [
                position
                for position, name in enumerate(operands)
                if name and name not in facts.is_weight and name not in self._options
            ]
            # A part of several ranges takes its bytes once more, to put them together.
            sizes = [
                sum(
                    facts.bytes(operands[p]) * self.share(layout) * (1 + (layout.outer > 1))
                    for p in whole
                    if (layout := strategy.inputs[p]) is not None and layout.is_split
                )
                for strategy in options
            ]
            yield Holding(index, 2 * index, 2 * index + 2, np.array(sizes, dtype=np.float64))


def _find_readers(birth: Longs, readers: Csr) -> tuple[Longs, Longs]:
    """Return when the exchange for the first reader of each value runs, and when the last reader has run."""
    first, last = np.full(len(birth), np.iinfo(np.int64).max), birth + 1
    np.minimum.at(first, readers.rows, 2 * readers.items.astype(np.int64))
    np.maximum.at(last, readers.rows, 2 * readers.items.astype(np.int64) + 2)
    return np.where(first <= last, first, birth), last
