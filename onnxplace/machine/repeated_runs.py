"""Time equal runs on a machine with other load.

Waiting for a core is separated from computing.

The time that a run waited is subtracted, and the runs that waited least are preferred.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from onnxplace.graph import Floats, Longs
from onnxplace.machine.run_delay import longest_wait, read_run_delays

T = TypeVar("T")

# A run is undisturbed if it waited for at most this share of its time.
MAX_WAITING_SHARE = 0.01
# No median is taken of fewer runs, unless fewer are asked for.
MIN_RUNS = 3
# A measurement is doubtful if even the undisturbed runs waited for more of their time than this.
# Likewise if the relative error of their median is larger.
DOUBTFUL_WAITING_SHARE = 0.05
# A larger share of a run is not credible: the system counts a wait when it ends, wherever it began.
MAX_CREDIBLE_WAITING_SHARE = 0.9
# The machine is busy if even the undisturbed runs waited for a larger share of their time than this.
BUSY_WAITING_SHARE = 0.02
# On a busy machine, parts of a run can be told apart only from so many runs.
BUSY_RUNS = 15
# Clocks and caches settle in this time; runs that look stable earlier need not be.
MIN_SECONDS = 0.25


@dataclass(frozen=True)
class Runs:
    """Times of equal runs, in their order."""

    passed: Floats
    """Seconds from start to end of each run."""
    waited: Floats
    """Seconds of each run without a core."""

    @cached_property
    def calm(self) -> Longs:
        """Return the indices of the undisturbed runs.

        If these are too few, return the less disturbed half of all runs.
        """
        shares = self.waited / np.maximum(self.passed, 1e-9)
        by_share = np.argsort(shares, kind="stable")
        min_count = min(MIN_RUNS, len(shares))
        undisturbed = int((shares <= MAX_WAITING_SHARE).sum())
        count = undisturbed if undisturbed >= MIN_RUNS else max(len(shares) // 2, min_count)
        return np.sort(by_share[:count]).astype(np.int64)

    @property
    def own(self) -> Floats:
        """Return the seconds of the undisturbed runs, without those that they waited."""
        own: Floats = (self.passed - self.waited)[self.calm]
        return own

    @property
    def seconds(self) -> float:
        """Return the median of the undisturbed runs in seconds."""
        return float(np.median(self.own))

    @property
    def spread(self) -> float:
        """Return the median deviation from the median, as a share of it."""
        return float(np.median(np.abs(self.own - self.seconds)) / max(self.seconds, 1e-12))

    @property
    def uncertainty(self) -> float:
        """Return the standard error of the median, as a share of it.

        It is that of a normal distribution.
        """
        # 1.4826 turns a median deviation into a standard deviation; a median is 1.2533 times less exact than a mean.
        return 1.2533 * 1.4826 * self.spread / float(np.sqrt(len(self.own)))

    @property
    def waiting(self) -> float:
        """Return the share of time that undisturbed runs waited for a core."""
        return float(self.waited[self.calm].sum() / max(float(self.passed[self.calm].sum()), 1e-9))


@dataclass(frozen=True)
class RepeatPolicy:
    """Limits for repeated runs: they end once their median is stable."""

    repeat: int
    """Highest number of runs."""
    seconds: float
    """Stop after this time, but not before `MIN_RUNS` runs."""
    tolerance: float
    """A median is stable if its standard error is below this share of it."""
    least: int = MIN_RUNS
    """No median is stable before this number of runs."""

    def run(self, call: Callable[[], T], pool: bool) -> tuple[Runs, T]:
        """Call until the median is stable; return times and last result.

        Args:
            call: The work of one run.
            pool: Whether other threads of this process compute for the call.
        """
        passed: list[float] = []
        waited: list[float] = []
        while True:
            delays, start = read_run_delays(pool), time.perf_counter()
            result = call()
            passed.append(time.perf_counter() - start)
            waited.append(min(longest_wait(delays, read_run_delays(pool)), MAX_CREDIBLE_WAITING_SHARE * passed[-1]))
            # Not after each run: the statistics take longer than a small model.
            count = len(passed)
            if count < self.repeat and count % max(count // 8, 1):
                continue
            runs = Runs(np.array(passed), np.array(waited))
            if self.enough(runs):
                return runs, result

    def enough(self, runs: Runs) -> bool:
        """Return whether no more runs are needed."""
        count, spent = len(runs.passed), float(runs.passed.sum())
        if count < min(MIN_RUNS, self.repeat):
            return False
        if count >= self.repeat or spent >= self.seconds:
            return True
        if spent < MIN_SECONDS or count < self.least:
            return False
        return runs.uncertainty <= self.tolerance and (runs.waiting <= BUSY_WAITING_SHARE or count >= BUSY_RUNS)
