"""Estimate the step of a choice of layouts: what a device computes while its exchanges are under way.

The choice adds up the costs of nodes and exchanges, as if a device waited for each exchange. But an exchange begins as
soon as its value is there, and the device goes on with nodes that do not need it: the exchange of the queries overlaps
with the product of the keys. Here one device, which stands for all, runs the nodes in their order, next to one channel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from onnxplace.passes.sharding.choose.layout_choice import LayoutChoice
from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Division, Layout
from onnxplace.passes.sharding.space.sharding_costs import ExchangeCosts
from onnxplace.passes.sharding.space.strategy_space import StrategySpace


def estimate_step_seconds(
    space: StrategySpace, choice: LayoutChoice, strategy_seconds: Sequence[Sequence[float]], costs: ExchangeCosts
) -> float:
    """Return the seconds of a step, without the call of its first segment.

    `strategy_seconds` are those of the slowest device's part of each node, per strategy.
    """
    facts, model = space.facts, space.facts.model
    step = _Step(space.division, costs, {name: choice.states.get(name, REPLICATED) for name in model.input_names})
    wanted: dict[str, dict[Layout, None]] = {}
    for index, strategy in enumerate(choice.strategies):
        for name, layout in _reads(space, index, strategy.inputs):
            wanted.setdefault(name, {})[layout] = None
    for output in model.outputs:
        state = next((name for name, result in model.states.items() if result == output.name), None)
        layout = REPLICATED if state is None else choice.states[state]
        wanted.setdefault(model.sources.get(output.name, output.name), {})[layout] = None
    for name in step.layouts:
        step.send(name, wanted.get(name, {}), facts.bytes(name))
    for index, (node, strategy) in enumerate(zip(model.nodes, choice.strategies)):
        for name, layout in _reads(space, index, strategy.inputs):
            step.receive(name, layout, facts.bytes(name))
        number = next(number for number, item in enumerate(space.strategies[index]) if item is strategy)
        step.run(strategy_seconds[index][number])
        for name, produced in zip(node.output, strategy.outputs):
            if name:
                step.layouts[name] = produced or REPLICATED
                step.send(name, wanted.get(name, {}), facts.bytes(name))
    for output in model.outputs:
        if output.name not in model.states.values():
            name = model.sources.get(output.name, output.name)
            step.receive(name, REPLICATED, facts.bytes(name))
    step.run(0.0)
    return step.busy_until


def _reads(space: StrategySpace, index: int, layouts: Sequence[Layout | None]) -> Iterator[tuple[str, Layout]]:
    """Yield what a node reads, weights left out, with the layouts."""
    known = dict(zip(space.facts.model.operands[index], layouts))
    for name in space.facts.model.reads[index]:
        if name not in space.facts.is_weight:
            yield name, known.get(name) or REPLICATED


@dataclass
class _Step:
    """A device that runs nodes, and its channel."""

    division: Division
    costs: ExchangeCosts
    layouts: dict[str, Layout]
    """How each value was produced."""
    busy_until: float = 0.0
    channel_until: float = 0.0
    unpaid_calls: int = 0
    """Of segments that begin after what was sent, with the next node that runs."""
    arrival: dict[tuple[str, Layout], float] = field(default_factory=dict)
    """When exchanged values are there, before they are put together."""
    ready: set[tuple[str, Layout]] = field(default_factory=set)

    def run(self, seconds: float) -> None:
        """Run a node."""
        self.busy_until += seconds + self.unpaid_calls * self.costs.segment_seconds
        self.unpaid_calls = 0

    def send(self, name: str, wanted: dict[Layout, None], size_bytes: int) -> None:
        """Begin the exchanges of a value that was produced."""
        source = self.layouts[name]
        for layout in wanted:
            # What can be cut from a copy does not come from other devices.
            is_local = self.division.holds(source, layout) or layout in (PARTIAL, source)
            is_direct = layout == REPLICATED or self.division.shares_rows(source, layout)
            if is_local or not (is_direct or REPLICATED not in wanted):
                continue
            phases = self.costs.overlap_phases(self.division, source, layout, size_bytes)
            begin = max(self.channel_until, self.busy_until + phases.first_seconds)
            self.busy_until += phases.cut_seconds
            self.unpaid_calls += phases.rounds
            self.channel_until = begin + phases.link_seconds
            self.arrival[name, layout] = self.channel_until

    def receive(self, name: str, layout: Layout, size_bytes: int) -> None:
        """Wait for a value in a layout, and put it together; once for all readers."""
        source = self.layouts[name]
        if layout == source or (name, layout) in self.ready:
            return
        self.ready.add((name, layout))
        if (name, layout) in self.arrival:
            self.busy_until = max(self.busy_until, self.arrival[name, layout])
            phases = self.costs.overlap_phases(self.division, source, layout, size_bytes)
            self.busy_until += phases.join_seconds
            return
        if not self.division.holds(source, layout):
            self.receive(name, REPLICATED, size_bytes)
            source = REPLICATED
        self.busy_until += self.costs.overlap_seconds(self.division, source, layout, size_bytes)
