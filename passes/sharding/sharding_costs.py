"""What strategies cost: seconds of each device's part of a node, and of the exchanges that change layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxplace.graph import Floats
from onnxplace.model import packed_size
from onnxplace.passes.profiling import PeakRates, count_moved_bytes, count_operations, device_peaks
from onnxplace.passes.sharding.layouts import PARTIAL, REPLICATED, Division, Layout
from onnxplace.passes.sharding.node_strategies import NodeStrategy, local_shapes
from onnxplace.passes.sharding.node_views import NodeView, Shape
from onnxplace.passes.sharding.strategy_space import StrategySpace
from onnxplace.passes.sharding.tensor_facts import TensorFacts
from onnxplace.target import Device, Target

# At this rate a core reads weights while others read too: larger models do not stay in caches between inferences. Rows
# of BERT's products took 6.1 ms a layer on two cores, with all weights read by both, and 5.0 ms where they stay cached.
STREAMED_BYTES_PER_SECOND = 15e9


@dataclass(frozen=True)
class ExchangeCosts:
    """Costs of exchanges in a group of devices; its slowest link and device count."""

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
    reorder_seconds_per_byte: float = 0.0
    """Time per byte of a value that leaves a session and comes back, or is cut within it, where sessions keep it in a
    layout of their own."""

    @staticmethod
    def of(
        target: Target, devices: Sequence[int], copy_bytes_per_second: float, kernel_seconds: float
    ) -> ExchangeCosts:
        """Return the costs in a group of devices of a target."""
        latency, per_byte = target.link_arrays()
        pairs = np.ix_(list(devices), list(devices))
        return ExchangeCosts(
            count=len(devices),
            latency_seconds=float(latency[pairs].max()),
            seconds_per_byte=float(per_byte[pairs].max()),
            segment_seconds=max(target.devices[device].segment_seconds for device in devices),
            copy_seconds_per_byte=1.0 / copy_bytes_per_second,
            kernel_seconds=kernel_seconds,
        )

    @property
    def _round_seconds(self) -> float:
        """Return the fixed cost of an exchange in which each device sends to each other one."""
        return self.segment_seconds + (self.count - 1) * self.latency_seconds

    def seconds(self, source: Layout, result: Layout, size_bytes: int) -> float:
        """Return the seconds of a change of layout, infinite where there is none in one exchange."""
        if source == result:
            return 0.0
        if source == REPLICATED:
            if result.is_split:
                return self.kernel_seconds + size_bytes / self.count * self.copy_seconds_per_byte
            return self.kernel_seconds + size_bytes * self.copy_seconds_per_byte  # zeros on all but one device
        others, copy, link = self.count - 1, self.copy_seconds_per_byte, self.seconds_per_byte
        if result == PARTIAL:
            return math.inf
        share = size_bytes / self.count
        if source.is_split:
            if result == REPLICATED:  # all-gather
                return self._round_seconds + others * share * link + size_bytes * copy
            return self._round_seconds + others * share / self.count * link + 2 * share * copy  # all-to-all
        if result.is_split:  # reduce-scatter
            return self._round_seconds + others * share * link + 3 * share * copy
        return min(self.direct_sum_seconds(size_bytes), self.two_step_sum_seconds(size_bytes))

    def direct_sum_seconds(self, size_bytes: int) -> float:
        """Return the seconds of an all-reduce in which each device sends its whole summand to each other one."""
        others = self.count - 1
        return (
            self._round_seconds
            + others * size_bytes * self.seconds_per_byte
            + self.count * size_bytes * self.copy_seconds_per_byte
        )

    def two_step_sum_seconds(self, size_bytes: int) -> float:
        """Return the seconds of an all-reduce by reduce-scatter and all-gather."""
        if self.count == 2:
            return math.inf
        others, share = self.count - 1, size_bytes / self.count
        return (
            2 * self._round_seconds
            + 2 * others * share * self.seconds_per_byte
            + 3 * size_bytes * self.copy_seconds_per_byte
        )

    def overlap_seconds(self, division: Division, source: Layout, result: Layout, size_bytes: int) -> float:
        """Return the seconds of a change of layout in which parts overlap, or do not any longer.

        Rows that a device lacks come from its neighbours. Without any, its part is cut off the one that it has.
        """
        if not division.shares_rows(source, result):
            return self.seconds(source, result, size_bytes)
        size = (source.rows or result.rows)[-1][1]
        pairs = list(zip(division.valid(source, size), division.held(result, size)))
        moved = max(want[1] - want[0] for _, want in pairs) * size_bytes / size
        received = max(rows_outside(want, have) for have, want in pairs) * size_bytes / size
        copying = moved * self.copy_seconds_per_byte
        if division.holds(source, result):
            if division.held(source, size) == division.held(result, size):
                return 0.0  # only fewer of the rows are known to be right
            return self.kernel_seconds + copying + moved * self.reorder_seconds_per_byte
        return self.segment_seconds + self.latency_seconds + received * self.seconds_per_byte + copying


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
        if view is None or not strategy.is_split or strategy.overrides_shape:
            return None
        inputs, outputs = local_shapes(self.space.division, view, strategy, device)
        whole, part = self._count(view, view.inputs, view.outputs), self._count(view, inputs, outputs)
        seconds = [self._roofline(work, view, device) for work in (part, whole)]
        return _PartWork(
            operations_ratio=part[0] / whole[0] if whole[0] else 1.0,
            part_weight_bytes=self._count_weights(view, inputs),
            whole_weight_bytes=self._count_weights(view, view.inputs),
            roofline_ratio=seconds[0] / seconds[1],
        )

    def _count(
        self, view: NodeView, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None]
    ) -> tuple[float, int]:
        """Return operations and bytes of a node on parts of these shapes."""
        facts, node = self.space.facts, view.node
        shapes = {
            name: shape
            for name, shape in zip((*node.input, *node.output), (*inputs, *outputs))
            if name and shape is not None
        }
        sizes = {name: packed_size(_numeric_type(facts, name), shape) for name, shape in shapes.items()}
        reads = tuple(dict.fromkeys(name for name in node.input if name))
        return count_operations(node, shapes), count_moved_bytes(node, reads, sizes)

    def _count_weights(self, view: NodeView, inputs: Sequence[Shape | None]) -> int:
        """Return the bytes of the inputs that are weights."""
        facts, node = self.space.facts, view.node
        weights = {
            name: shape for name, shape in zip(node.input, inputs) if name in facts.is_weight and shape is not None
        }
        return sum(packed_size(_numeric_type(facts, name), shape) for name, shape in weights.items())

    def whole_seconds(self, index: int) -> float:
        """Return the seconds of a whole node on the first device, by the roofline; those of a kernel if unknown."""
        view = self.space.views[index]
        if view is None:
            return self.peaks[0].kernel_seconds
        return self._roofline(self._count(view, view.inputs, view.outputs), view, 0)

    def _roofline(self, work: tuple[float, int], view: NodeView, device: int) -> float:
        peaks = self.peaks[device]
        rate = peaks.operations_of(view.node, self.space.facts.types)
        return max(work[0] / rate, work[1] / peaks.bytes_per_second) + peaks.kernel_seconds

    def table(self, device_seconds: Floats) -> list[list[float]]:
        """Return the seconds of each strategy of each node: of the slowest device.

        Args:
            device_seconds: [device of the group, node].
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
                    for works in cache[key]
                ]
            )
        return result

    def _device_works(self, index: int, strategy: NodeStrategy) -> list[_PartWork | None]:
        devices = range(self.space.division.count)
        if self.space.division.is_even and not strategy.overlaps:  # the first device has the largest part
            return [self._work(index, strategy, 0)] * len(devices)
        return [self._work(index, strategy, device) for device in devices]


def rows_outside(want: tuple[int, int], have: tuple[int, int]) -> int:
    """Return how many of the rows [low, high) are not among those that a device has."""
    return want[1] - want[0] - max(0, min(want[1], have[1]) - max(want[0], have[0]))


def _numeric_type(facts: TensorFacts, name: str) -> int:
    """Return the element type of a value; 32-bit floats where it is unknown, or text."""
    kind = facts.types.get(name, 1)
    return kind if kind not in (0, 8) else 1
