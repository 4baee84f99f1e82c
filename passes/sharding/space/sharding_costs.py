"""What strategies cost: seconds of each device's part of a node, and of the exchanges that change layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxplace.graph.op_graph import Floats
from onnxplace.model.tensors import packed_size
from onnxplace.passes.profiling.roofline import PeakRates, Work, count_work, device_peaks
from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Division, Layout
from onnxplace.passes.sharding.rules.node_views import NodeView, Shape
from onnxplace.passes.sharding.space.node_strategies import NodeStrategy, local_shapes
from onnxplace.passes.sharding.space.strategy_space import StrategySpace
from onnxplace.passes.sharding.space.tensor_facts import TensorFacts
from onnxplace.target.target import Device, Target

# At this rate a core reads weights while others read too: larger models do not stay in caches between inferences. Rows
# of BERT's products took 6.1 ms a layer on two cores, with all weights read by both, and 5.0 ms where they stay cached.
STREAMED_BYTES_PER_SECOND = 15e9


@dataclass(frozen=True)
class ExchangePhases:
    """What an exchange takes: first the devices, then their channels, then the devices again."""

    cut_seconds: float = 0.0
    """To cut off what each device gets."""
    first_seconds: float = 0.0
    """Until the first part may leave; the others are cut while it does."""
    link_seconds: float = 0.0
    join_seconds: float = 0.0
    """To put together or add up what has arrived."""
    rounds: int = 1
    """Each ends a segment."""

    def seconds(self, segment_seconds: float) -> float:
        """Return the seconds in all, for devices that wait meanwhile."""
        return self.rounds * segment_seconds + self.first_seconds + self.link_seconds + self.join_seconds


@dataclass(frozen=True)
class ExchangeCosts:
    """Costs of exchanges in a group of devices; its slowest link and device count.

    Where the devices are on several hosts, as many on each, an all-gather and the two steps of an all-reduce may cross
    between hosts once: each device exchanges with those at its own place on other hosts, and then within its host.
    """

    count: int
    """Number of devices."""
    latency_seconds: float
    """Latency of a message."""
    seconds_per_byte: float
    """Time per byte of a message."""
    segment_seconds: float
    """What a cut costs a device: one more segment."""
    copy_seconds_per_byte: float
    """Time per byte of slices, concatenations and sums."""
    kernel_seconds: float
    """The least that such an operator takes."""
    hosts: tuple[tuple[int, ...], ...] = ()
    """The devices of each host, as positions in the group; empty for one host, or if they are not as many on each."""
    near_latency_seconds: float = 0.0
    """Latency of a message within a host, where there are several."""
    near_seconds_per_byte: float = 0.0
    reorder_seconds_per_byte: float = 0.0
    """Time per byte of a value that leaves a session and comes back, or is cut within it, where sessions keep it in a
    layout that only they know."""

    @staticmethod
    def of(
        target: Target, devices: Sequence[int], copy_bytes_per_second: float, kernel_seconds: float
    ) -> ExchangeCosts:
        """Return the costs in a group of devices of a target."""
        latency, per_byte = target.link_arrays()
        pairs = np.ix_(list(devices), list(devices))
        names = [target.devices[device].host for device in devices]
        hosts = [tuple(place for place, name in enumerate(names) if name == host) for host in dict.fromkeys(names)]
        if len(hosts) == 1 or len({len(places) for places in hosts}) > 1:
            hosts = []
        is_near = np.array([[one == other for other in names] for one in names])
        return ExchangeCosts(
            count=len(devices),
            latency_seconds=float(latency[pairs].max()),
            seconds_per_byte=float(per_byte[pairs].max()),
            segment_seconds=max(target.devices[device].segment_seconds for device in devices),
            copy_seconds_per_byte=1.0 / copy_bytes_per_second,
            kernel_seconds=kernel_seconds,
            hosts=tuple(hosts),
            near_latency_seconds=float(latency[pairs][is_near].max()),
            near_seconds_per_byte=float(per_byte[pairs][is_near].max()),
        )

    def seconds(self, source: Layout, result: Layout, size_bytes: int) -> float:
        """Return the seconds of a change of layout, infinite where there is none in one exchange.

        They are those that it takes in the simulator, if all devices begin at the same time and wait for it.
        """
        if source == result:
            return 0.0
        if source.is_in_runs or result.is_in_runs:
            return math.inf
        has_copies = source.is_split and self._parts(source) < self.count
        if source == REPLICATED or (has_copies and source.contains(result)):
            if result.is_split:
                return self._slice_seconds(result, size_bytes / self._parts(result))
            return self._operator_seconds(size_bytes)  # zeros on all but one device
        if result == PARTIAL:
            return math.inf
        if source.is_split and result.is_split and min(self._parts(source), self._parts(result)) < self.count:
            return math.inf
        return self.phases(source, result, size_bytes).seconds(self.segment_seconds)

    def phases(self, source: Layout, result: Layout, size_bytes: int) -> ExchangePhases:
        """Return what an exchange takes, phase by phase, from a split or partial value to a split or whole one."""
        if source.is_split and result.is_split:  # all-to-all
            share = size_bytes / self.count
            return self._cut_and_send(result, share / self.count, self._join_seconds(source, share))
        if source.is_split:
            return self._gather(source, size_bytes)
        if result.is_split:
            return self._reduce_scatter(result, size_bytes / self._parts(result))
        # All-reduce: each device sends its whole summand to each other one, or the part that this one adds up.
        direct = self._send(size_bytes, self._operator_seconds((self.count + 1) * size_bytes))
        return self._shorter(direct, self._two_step_sum(size_bytes)) if self.count > 2 else direct

    def takes_two_rounds(self, source: Layout, result: Layout, size_bytes: int) -> bool:
        """Return whether an exchange is shorter in two rounds.

        An all-reduce is then reduce-scatter and all-gather. In an all-gather, each part crosses to another host once;
        in a reduce-scatter, each host adds up its summands first.
        """
        return self.phases(source, result, size_bytes).rounds == 2

    def _shorter(self, direct: ExchangePhases, in_two_rounds: ExchangePhases) -> ExchangePhases:
        return min(direct, in_two_rounds, key=lambda phases: phases.seconds(self.segment_seconds))

    def _gather(self, source: Layout, size_bytes: float) -> ExchangePhases:
        """Return the phases of an all-gather: directly, or by host where that is shorter."""
        parts = self._parts(source)
        share, join_seconds = size_bytes / parts, self._join_seconds(source, size_bytes)
        if parts < self.count:  # from as many devices as there are parts
            return ExchangePhases(link_seconds=self._far_seconds(parts - 1, share), join_seconds=join_seconds)
        direct = self._send(share, join_seconds)
        if not self._has_near_links:
            return direct
        relay_seconds = (len(self.hosts) - 1) * self._operator_seconds(2 * share)
        # One message more than there are: near ones wait behind those that cross to their receivers.
        link_seconds = self._far_seconds(len(self.hosts), share) + relay_seconds + self._near_seconds(share)
        return self._shorter(direct, replace(direct, link_seconds=link_seconds, rounds=2))

    def _reduce_scatter(self, result: Layout, share: float) -> ExchangePhases:
        """Return the phases of a reduce-scatter, also by host; `share` is what each device adds up, in bytes."""
        direct = self._cut_and_send(result, share, self._operator_seconds((self.count + 1) * share))
        if not self._has_near_links or self._parts(result) < self.count:
            return direct
        hosts, local = len(self.hosts), len(self.hosts[0])
        link_seconds = self._near_seconds(share) + hosts * self._operator_seconds((local + 1) * share)
        link_seconds += self._far_seconds(hosts - 1, share)
        join_seconds = self._operator_seconds((hosts + 1) * share)
        return self._shorter(direct, replace(direct, link_seconds=link_seconds, join_seconds=join_seconds, rounds=2))

    def _parts(self, layout: Layout) -> int:
        """Return the number of different parts of a value."""
        return min(layout.blocks, self.count) if layout.is_split and layout.blocks else self.count

    @property
    def _has_near_links(self) -> bool:
        return bool(self.hosts) and len(self.hosts[0]) > 1

    def _far_seconds(self, messages: int, sent_bytes: float) -> float:
        return messages * (self.latency_seconds + sent_bytes * self.seconds_per_byte)

    def _near_seconds(self, share: float) -> float:
        """Return the seconds in which each device sends one share per host to each other device of its host."""
        messages = (len(self.hosts[0]) - 1) * len(self.hosts)
        return messages * (self.near_latency_seconds + share * self.near_seconds_per_byte)

    def _two_step_sum(self, size_bytes: int) -> ExchangePhases:
        part = Layout(0, 1, self.count)
        first, second = (self.phases(*pair, size_bytes) for pair in ((PARTIAL, part), (part, REPLICATED)))
        between = first.link_seconds + first.join_seconds + second.link_seconds
        return replace(first, link_seconds=between, join_seconds=second.join_seconds, rounds=2)

    def _operator_seconds(self, moved_bytes: float) -> float:
        """Return the seconds of an operator that reads and writes so many bytes."""
        return self.kernel_seconds + moved_bytes * self.copy_seconds_per_byte

    def _send(self, sent_bytes: float, join_seconds: float) -> ExchangePhases:
        """Return the phases in which each device sends what it has to each other one."""
        return ExchangePhases(link_seconds=self._messages_seconds(sent_bytes), join_seconds=join_seconds)

    def _messages_seconds(self, sent_bytes: float, piece_seconds: float = 0.0) -> float:
        """Return the seconds of messages to all others; between two of them, a device makes a piece."""
        near = len(self.hosts[0]) - 1 if self.hosts else 0
        near_seconds = self.near_latency_seconds + sent_bytes * self.near_seconds_per_byte
        far = (self.count - 1 - near) * max(self._far_seconds(1, sent_bytes), piece_seconds)
        return far + near * max(near_seconds, piece_seconds)

    def _cut_and_send(self, layout: Layout, part_bytes: float, join_seconds: float) -> ExchangePhases:
        """Return the phases in which each device cuts a part off for each device, and sends those of the others.

        Where a call costs something, the parts leave together. Otherwise only the first one is waited for.
        """
        slice_seconds = self._slice_seconds(layout, part_bytes)
        cut_seconds = self.count * slice_seconds
        first_seconds = piece_seconds = slice_seconds
        if self.segment_seconds > slice_seconds:
            first_seconds, piece_seconds = cut_seconds, 0.0
        return ExchangePhases(
            cut_seconds=cut_seconds,
            first_seconds=first_seconds,
            link_seconds=self._messages_seconds(part_bytes, piece_seconds),
            join_seconds=join_seconds,
        )

    def _slice_seconds(self, layout: Layout, part_bytes: float) -> float:
        """Return the seconds to cut a part off: a slice, or one per row of an axis of several tensors, joined."""
        join_seconds = self._operator_seconds(2 * part_bytes) if layout.outer > 1 else 0.0
        return layout.outer * self._operator_seconds(2 * part_bytes / layout.outer) + join_seconds

    def _join_seconds(self, source: Layout, size_bytes: float) -> float:
        """Return the seconds to put parts together, after the last one has arrived."""
        slices = source.outer * self._operator_seconds(0) if source.outer > 1 else 0.0
        return slices + self._operator_seconds(2 * size_bytes)

    def overlap_seconds(self, division: Division, source: Layout, result: Layout, size_bytes: int) -> float:
        """Return the seconds of a change of layout in which parts overlap, or do not any longer.

        Rows that a device lacks come from its neighbours. Without any, its part is cut off the one that it has.
        """
        if not division.shares_rows(source, result):
            return self.seconds(source, result, size_bytes)
        if not division.holds(source, result):
            return self.overlap_phases(division, source, result, size_bytes).seconds(self.segment_seconds)
        size = (source.rows or result.rows)[-1][1]
        if division.held(source, size) == division.held(result, size):
            return 0.0  # only fewer of the rows are known to be valid
        moved = max(high - low for low, high in division.held(result, size)) * size_bytes / size
        return self._operator_seconds(2 * moved) + moved * self.reorder_seconds_per_byte

    def overlap_phases(self, division: Division, source: Layout, result: Layout, size_bytes: int) -> ExchangePhases:
        """Return what an exchange takes, phase by phase, also where parts overlap."""
        if not division.shares_rows(source, result):
            return self.phases(source, result, size_bytes)
        size = (source.rows or result.rows)[-1][1]
        pairs = list(zip(division.valid(source, size), division.held(result, size)))
        moved = max(want[1] - want[0] for _, want in pairs) * size_bytes / size
        received = max(rows_outside(want, have) for have, want in pairs) * size_bytes / size
        cut_seconds = self._operator_seconds(2 * received)
        return ExchangePhases(
            cut_seconds=cut_seconds,
            first_seconds=cut_seconds,
            link_seconds=self.latency_seconds + received * self.seconds_per_byte,
            join_seconds=self._operator_seconds(2 * moved),
        )


@dataclass(frozen=True)
class _PartWork:
    """The work of a device's part of a node next to that of the whole."""

    operations_ratio: float
    part_weight_bytes: int
    whole_weight_bytes: int
    roofline_ratio: float


def peak_rates(device: Device) -> PeakRates:
    """Return the assumed peaks of a device; only their proportions matter where times were measured."""
    peaks = device_peaks(device)
    if device.kind != "cpu":
        return peaks
    return replace(
        peaks,
        operations_per_second=peaks.operations_per_second * device.cores,
        type_operations_per_second=device.type_operations_per_second,
    )


@dataclass(frozen=True)
class WorkCosts:
    """Computes which fraction of a node's time a device's part of it takes."""

    space: StrategySpace
    peaks: tuple[PeakRates, ...]
    """Per device."""

    measured: tuple[bool, ...] = ()
    """Per device, whether times of whole nodes were measured; none by default."""

    def part_seconds(self, index: int, strategy: NodeStrategy, device: int, whole_seconds: float) -> float:
        """Return the seconds of a device's part of a node that takes `whole_seconds`.

        A measured time is that of reading the node's weights, at `STREAMED_BYTES_PER_SECOND`, plus that of its
        operations: parts that share weights read all of them. An estimated time is scaled as it was made, by a
        roofline.
        """
        return self._scale(self._work(index, strategy, device), device, whole_seconds)

    def _scale(self, work: _PartWork | None, device: int, whole_seconds: float) -> float:
        if work is None:
            return whole_seconds
        peaks = self.peaks[device]
        if not (self.measured and self.measured[device]):
            return min(whole_seconds, whole_seconds * work.roofline_ratio)
        launch = min(peaks.kernel_seconds, whole_seconds)
        rate = max(peaks.bytes_per_second, STREAMED_BYTES_PER_SECOND)
        streaming = min(work.whole_weight_bytes / rate, whole_seconds - launch)
        share = work.part_weight_bytes / work.whole_weight_bytes if work.whole_weight_bytes else 0.0
        computing = whole_seconds - launch - streaming
        return min(whole_seconds, launch + streaming * share + computing * work.operations_ratio)

    def _work(self, index: int, strategy: NodeStrategy, device: int) -> _PartWork | None:
        """Return the work of a device's part of a node; None if it is that of the whole."""
        view = self.space.views[index]
        if strategy.subgraphs:
            return self._subgraph_work(strategy, device)
        if view is None or not strategy.is_split or strategy.overrides_shape:
            return None
        inputs, outputs = local_shapes(self.space.division, view, strategy, device)
        whole, whole_weight_bytes = self._count(view, view.inputs, view.outputs)
        part, part_weight_bytes = self._count(view, inputs, outputs)
        seconds = [self.peaks[device].seconds(view.node, self.space.facts.types, work) for work in (part, whole)]
        return _PartWork(
            operations_ratio=part[0] / whole[0] if whole[0] else 1.0,
            part_weight_bytes=part_weight_bytes,
            whole_weight_bytes=whole_weight_bytes,
            roofline_ratio=seconds[0] / seconds[1],
        )

    def _subgraph_work(self, strategy: NodeStrategy, device: int) -> _PartWork:
        """Return the work of a device's part of all subgraphs of a node."""
        whole_seconds = part_seconds = 0.0
        for subgraph in strategy.subgraphs:
            inner = WorkCosts(subgraph.space, self.peaks)
            for index, part in enumerate(subgraph.strategies):
                seconds = inner.whole_seconds(index)
                whole_seconds += seconds
                part_seconds += inner.part_seconds(index, part, device, seconds)
        ratio = part_seconds / whole_seconds
        return _PartWork(operations_ratio=ratio, part_weight_bytes=0, whole_weight_bytes=0, roofline_ratio=ratio)

    def _count(
        self, view: NodeView, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None]
    ) -> tuple[Work, int]:
        """Return the work of a node on parts of these shapes, and the bytes of weights among its inputs."""
        facts, node = self.space.facts, view.node
        shapes = {
            name: shape
            for name, shape in zip((*node.input, *node.output), (*inputs, *outputs))
            if name and shape is not None
        }
        sizes = {name: packed_size(_numeric_type(facts, name), shape) for name, shape in shapes.items()}
        reads = tuple(dict.fromkeys(name for name in node.input if name))
        weight_bytes = sum(size for name, size in sizes.items() if name in facts.is_weight)
        return count_work(node, reads, shapes, sizes), weight_bytes

    def whole_seconds(self, index: int) -> float:
        """Return the seconds of a whole node on the first device, by the roofline; those of a kernel if unknown."""
        view = self.space.views[index]
        if view is None:
            return self.peaks[0].kernel_seconds
        work, _ = self._count(view, view.inputs, view.outputs)
        return self.peaks[0].seconds(view.node, self.space.facts.types, work)

    def table(self, device_seconds: Floats, costs: ExchangeCosts) -> list[list[float]]:
        """Return the seconds of each strategy of each node: of the slowest device.

        Args:
            device_seconds: [device of the group, node].
            costs: Costs of exchanges.
        """
        cache: dict[object, list[list[_PartWork | None]]] = {}
        result = []
        for index, strategies in enumerate(self.space.strategies):
            key = self.space.kinds[index], id(strategies)
            if key not in cache:
                cache[key] = [self._device_works(index, strategy) for strategy in strategies]
            seconds = device_seconds[:, index].tolist()
            result.append(
                [
                    max(self._scale(work, device, seconds[device]) for device, work in enumerate(works))
                    + self._range_seconds(index, strategy, costs)
                    # The other devices do not compute it, but wait in the next exchange for the one that does.
                    + (costs.latency_seconds if strategy.only_first >= 0 else 0.0)
                    for strategy, works in zip(strategies, cache[key])
                ]
            )
        return result

    def _device_works(self, index: int, strategy: NodeStrategy) -> list[_PartWork | None]:
        devices = range(self.space.division.count)
        if self.space.division.is_even and not strategy.overlaps:  # the first device has the largest part
            return [self._work(index, strategy, 0)] * len(devices)
        return [self._work(index, strategy, device) for device in devices]

    def _range_seconds(self, index: int, strategy: NodeStrategy, costs: ExchangeCosts) -> float:
        """Return the seconds to find the extremes of parts, and to exchange them."""
        layout = strategy.inputs[0] if strategy.shares_range else None
        if layout is None:
            return 0.0
        size = self.space.facts.bytes(self.space.facts.model.nodes[index].input[0])
        reading = 2 * size * self.space.division.largest_fraction(layout) * costs.copy_seconds_per_byte
        return 6 * costs.kernel_seconds + reading + costs.seconds(layout, REPLICATED, 8 * costs.count)


def rows_outside(want: tuple[int, int], have: tuple[int, int]) -> int:
    """Return how many of the rows [low, high) are not among those that a device has."""
    return want[1] - want[0] - max(0, min(want[1], have[1]) - max(want[0], have[0]))


def _numeric_type(facts: TensorFacts, name: str) -> int:
    """Return the element type of a value; 32-bit floats where it is unknown, or text."""
    kind = facts.types.get(name, 1)
    return kind if kind not in (0, 8) else 1
