"""Seconds of each strategy: the measured time of the whole node, scaled by a roofline of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxplace.graph import Floats
from onnxplace.model import packed_size
from onnxplace.passes.profiling import PeakRates, count_moved_bytes, count_operations, device_peaks
from onnxplace.passes.sharding.exchange_costs import ExchangeCosts
from onnxplace.passes.sharding.layouts import Layout
from onnxplace.passes.sharding.node_views import NodeView, Shape
from onnxplace.passes.sharding.space import StrategySpace
from onnxplace.passes.sharding.strategies import Strategy
from onnxplace.passes.sharding.tensor_facts import TensorFacts
from onnxplace.passes.sharding.windows import ROW_AXIS
from onnxplace.target import Device


def peak_rates(device: Device) -> PeakRates:
    """Return the assumed peaks of a device; only their proportions matter where times were measured."""
    peaks = device_peaks(device)
    if device.kind != "cpu":
        return peaks
    return PeakRates(peaks.operations_per_second * device.cores, peaks.bytes_per_second, peaks.kernel_seconds)


def local_shapes(
    space: StrategySpace, view: NodeView, strategy: Strategy, device: int
) -> tuple[tuple[Shape | None, ...], tuple[Shape | None, ...]]:
    """Return the shapes of a device's parts of inputs and outputs."""
    division = space.division

    def parts(shapes: Sequence[Shape | None], layouts: Sequence[Layout | None]) -> list[Shape | None]:
        return [
            shape if shape is None or layout is None else division.local_shape(layout, shape, device)
            for shape, layout in zip(shapes, layouts)
        ]

    inputs = parts(view.inputs, strategy.inputs)
    if strategy.window is not None:
        low, high = strategy.window.rows[device]
        shape = list(inputs[strategy.window.input] or ())
        shape[ROW_AXIS] = high - low
        inputs[strategy.window.input] = tuple(shape)
    return tuple(inputs), tuple(parts(view.outputs, strategy.outputs))


@dataclass(frozen=True)
class WorkCosts:
    """Computes which fraction of a node's time a device's part of it takes."""

    space: StrategySpace
    peaks: tuple[PeakRates, ...]
    """Per device."""

    def fraction(self, index: int, strategy: Strategy, device: int) -> float:
        """Return the time of a device's part of a node, as a fraction of the whole."""
        view = self.space.views[index]
        if view is None or not strategy.is_split or strategy.overrides_shape:
            return 1.0
        inputs, outputs = local_shapes(self.space, view, strategy, device)
        whole = self._seconds(view, view.inputs, view.outputs, device)
        return min(1.0, self._seconds(view, inputs, outputs, device) / whole)

    def whole_seconds(self, index: int) -> float:
        """Return the seconds of a whole node on the first device, by the roofline; those of a kernel if unknown."""
        view = self.space.views[index]
        if view is None:
            return self.peaks[0].kernel_seconds
        return self._seconds(view, view.inputs, view.outputs, 0)

    def _seconds(
        self, view: NodeView, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None], device: int
    ) -> float:
        """Return the seconds of a node on parts of these shapes, by the roofline."""
        facts, node = self.space.facts, view.node
        shapes = {
            name: shape
            for name, shape in zip((*node.input, *node.output), (*inputs, *outputs))
            if name and shape is not None
        }
        sizes = {name: packed_size(_numeric_type(facts, name), shape) for name, shape in shapes.items()}
        peaks = self.peaks[device]
        operations = count_operations(node, shapes) / peaks.operations_per_second
        reads = tuple(dict.fromkeys(name for name in node.input if name))
        moved = count_moved_bytes(node, reads, sizes) / peaks.bytes_per_second
        return max(operations, moved) + peaks.kernel_seconds

    def table(self, device_seconds: Floats, costs: ExchangeCosts) -> list[list[float]]:
        """Return the seconds of each strategy of each node: of the slowest device, with halos.

        Args:
            device_seconds: [device of the group, node].
            costs: Of exchanges.
        """
        cache: dict[object, list[list[float]]] = {}
        result = []
        for index, strategies in enumerate(self.space.strategies):
            key = self.space.kinds[index], id(strategies)
            if key not in cache:
                cache[key] = self._fractions(index, strategies)
            seconds = device_seconds[:, index]
            result.append(
                [
                    float((seconds * np.array(fractions)).max()) + self._halo_seconds(index, strategy, costs)
                    for strategy, fractions in zip(strategies, cache[key])
                ]
            )
        return result

    def _fractions(self, index: int, strategies: Sequence[Strategy]) -> list[list[float]]:
        devices = range(self.space.division.count)
        if self.space.division.is_even:  # the first device has the largest part
            return [[self.fraction(index, strategy, 0)] * len(devices) for strategy in strategies]
        return [[self.fraction(index, strategy, device) for device in devices] for strategy in strategies]

    def _halo_seconds(self, index: int, strategy: Strategy, costs: ExchangeCosts) -> float:
        view = self.space.views[index]
        if view is None or strategy.window is None:
            return 0.0
        source = strategy.inputs[strategy.window.input]
        size = view.shape(strategy.window.input)[ROW_AXIS]
        row_bytes = self.space.facts.bytes(view.node.input[strategy.window.input]) / max(size, 1)
        window_rows = max(high - low for low, high in strategy.window.rows)
        if source is None or not source.is_split:
            return costs.kernel_seconds + window_rows * row_bytes * costs.copy_seconds_per_byte
        received = max(
            window_rows_outside(low, high, self.space.division.ranges(source, size, device)[0])
            for device, (low, high) in enumerate(strategy.window.rows)
        )
        return costs.halo_seconds(received * row_bytes, window_rows * row_bytes)


def window_rows_outside(low: int, high: int, own: tuple[int, int]) -> int:
    """Return how many rows of a window a device does not have itself."""
    return high - low - max(0, min(high, own[1]) - max(low, own[0]))


def _numeric_type(facts: TensorFacts, name: str) -> int:
    """Return the element type of a value; 32-bit floats where it is unknown, or text."""
    kind = facts.types.get(name, 1)
    return kind if kind not in (0, 8) else 1
