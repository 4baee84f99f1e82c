"""What it costs to change the layout of a value: slices, gathers, exchanges and sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxplace.passes.sharding.layouts import PARTIAL, REPLICATED, Layout
from onnxplace.target import Target


@dataclass(frozen=True)
class ExchangeCosts:
    """Costs of exchanges in a group of devices; its slowest link and device count."""

    count: int
    """Number of devices."""
    latency_seconds: float
    """Of a message."""
    seconds_per_byte: float
    """Of a message."""
    segment_seconds: float
    """What a cut costs a device: one more segment."""
    copy_seconds_per_byte: float
    """Of slices, concatenations and sums."""
    kernel_seconds: float
    """The least that such an operator takes."""

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

    def halo_seconds(self, rows_bytes: float, window_bytes: float) -> float:
        """Return the seconds to exchange halos: bytes that a device receives, and bytes of its window."""
        if rows_bytes <= 0:
            return 0.0
        seconds = self.segment_seconds + self.latency_seconds
        return seconds + rows_bytes * self.seconds_per_byte + window_bytes * self.copy_seconds_per_byte
