"""Waiting for another device without sleeping: the threads of devices notify each other by wakeup flags.

Waking a thread that sleeps in the kernel takes 30 to 40 us from one core to another, which is most of a hop between two
CPU devices. So where hops are frequent, a thread that waits for a value first watches a counter, without the
interpreter's lock, for a tenth of a millisecond. Flags only shorten waits: what is awaited is always checked under its
own lock afterwards, so a lost notification costs time and nothing else.

A thread does not notify when it sends, but right before it releases the interpreter's lock: a thread that is notified
earlier sleeps until it gets that lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations

import numpy as np

from onnxplace.bundle.manifest import Manifest
from onnxplace.runtimes.execution.segments import PlacedDevice

CALLERS = "callers"

# ONNX Runtime's own threads wait in the same way between nodes, and longer.
WATCH_SECONDS = 100e-6
# At most this many watches are left out after one that was in vain.
MAX_SKIPPED = 255
# The set of flags to notify is one number of 64 bits with a sign.
MAX_FLAGS = 63
# The transfers of one request at which flags are worth their import, and their mean distance.
MIN_TRANSFERS = 4
MAX_SECONDS_BETWEEN_TRANSFERS = 1e-3


class WakeupFlag:
    """What wakes the thread of one device while it watches; only that thread calls these methods."""

    def __init__(self, index: int, counters: np.ndarray, stride: int, kernel: Callable[..., int], pauses: int) -> None:
        self.index = index
        self._counters = counters.data  # whose items are read and written three times as fast as those of an array
        self._stride = stride
        self._kernel = kernel
        self._pauses = pauses
        self._planned = 0
        """Bit i is set if flag i is to be notified."""
        self._failures = 0
        self._skipped = 0

    def plan_notification(self, other: WakeupFlag) -> None:
        """Notify another flag with the next `notify` or `watch`."""
        self._planned |= 1 << other.index

    def notify(self) -> None:
        """Notify as planned; for a thread that is about to release the interpreter's lock."""
        planned, self._planned = self._planned, 0
        while planned:  # in Python, where the compiled function would release that lock and have to wait for it
            lowest = planned & -planned
            self._counters[(lowest.bit_length() - 1) * self._stride] += 1
            planned ^= lowest

    def watch(self, is_ready: Callable[[], bool], flag: WakeupFlag | None = None) -> None:
        """Notify as planned, and return when something is ready, or when its flag was not notified for a while.

        Args:
            is_ready: cheap, and called with the interpreter's lock only.
            flag: the one that announces it; this one unless it is given.
        """
        index = (flag or self).index
        while True:
            seen = self._counters[index * self._stride]  # before the check, so that no notification is missed
            if is_ready():
                return
            if self._skipped < self._failures:  # where watching is in vain, more and more often it is left out
                self._skipped += 1
                self.notify()
                return
            planned, self._planned, self._skipped = self._planned, 0, 0
            start = time.perf_counter()
            count = self._kernel(planned, index, seen, self._pauses)
            if count == seen or time.perf_counter() - start > 2 * WATCH_SECONDS:  # others use this core
                # Exponential backoff: after n failures in a row, 2^n - 1 watches are left out.
                self._failures = min(2 * self._failures + 1, MAX_SKIPPED)
                return
            self._failures = 0


def choose_wakeups(devices: Mapping[str, PlacedDevice], manifest: Manifest) -> dict[str, WakeupFlag]:
    """Return a flag for each device, and one for the callers of `run` under CALLERS.

    There are none unless the devices exchange values often and each has its own cores, nor for more than 62 devices.
    """
    have_cores = all(device.kind.is_host and device.cores for device in devices.values())
    if not (exchanges_often(manifest) and have_cores and len(devices) < MAX_FLAGS):
        return {}
    if any(set(one.cores) & set(other.cores) for one, other in combinations(devices.values(), 2)):
        return {}
    return install_wakeups(devices)


def exchanges_often(manifest: Manifest) -> bool:
    """Return whether waking the threads of devices is a large part of a step."""
    transfers = sum(step.op == "send" for program in manifest.programs.values() for step in program)
    return transfers >= MIN_TRANSFERS and manifest.predicted.step_seconds <= transfers * MAX_SECONDS_BETWEEN_TRANSFERS


def install_wakeups(devices: Iterable[str]) -> dict[str, WakeupFlag]:
    """Return flags for devices and callers."""
    from onnxplace.runtimes.execution.compiled_wait import STRIDE, NotifyAndWait  # which imports llvmlite

    names = [*devices, CALLERS]
    counters = np.zeros(STRIDE * len(names), np.int64)
    kernels = [NotifyAndWait(counters.ctypes.data) for _ in names]
    pauses = count_pauses(kernels[0])
    return {name: WakeupFlag(i, counters, STRIDE, kernels[i], pauses) for i, name in enumerate(names)}


def count_pauses(wait: Callable[[int, int, int, int], object]) -> int:
    """Return how many pauses take `WATCH_SECONDS`: they differ by a factor of ten between generations of processors."""
    wait(0, 0, -1, 1)
    start = time.perf_counter()
    wait(0, 0, 0, 500)
    return max(1, round(500 * WATCH_SECONDS / max(time.perf_counter() - start, 1e-7)))
