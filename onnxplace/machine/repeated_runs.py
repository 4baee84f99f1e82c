"""Time equal runs on a machine that has other work too: waiting for a core is told apart from computing.

What a run waited is taken off its time, and runs that waited least count first.
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

# A run that waited for less than this share of its time was not disturbed.
MAX_WAITING_SHARE = 0.01
MIN_RUNS = 3
# Where even the calm runs waited for more of their time than this, or their median is less sure, measures are doubted.
DOUBTFUL_WAITING_SHARE = 0.05
# More of a run than this was not waited: the system counts a wait when it ends, wherever it began.
MAX_CREDIBLE_WAITING_SHARE = 0.9
# Where even the calm runs waited for more than this, parts of a run have to be told from many.
BUSY_WAITING_SHARE = 0.02
BUSY_RUNS = 15
# Clocks and caches settle in this time; what looks stable before need not be.
MIN_SECONDS = 0.25


@dataclass(frozen=True)
class Runs:
    """Equal runs, in the order in which they were made."""

    passed: Floats
    """Seconds from begin to end."""
    waited: Floats
    """Of them, the seconds without a core."""

    @cached_property
    def calm(self) -> Longs:
        """Return the runs to go by: all that were not disturbed, or the calmer half if these are fewer."""
        shares = self.waited / np.maximum(self.passed, 1e-9)
        calmest = np.argsort(shares, kind="stable")
        least = min(MIN_RUNS, len(shares))
        undisturbed = int((shares <= MAX_WAITING_SHARE).sum())
        count = undisturbed if undisturbed >= MIN_RUNS else max(len(shares) // 2, least)
        return np.sort(calmest[:count]).astype(np.int64)

    @property
    def own(self) -> Floats:
        """Return the seconds of the runs to go by, without what they waited."""
        own: Floats = (self.passed - self.waited)[self.calm]
        return own

    @property
    def seconds(self) -> float:
        """Return the median run."""
        return float(np.median(self.own))

    @property
    def spread(self) -> float:
        """Return how far half of the runs are from the median at most, as a share of it."""
        return float(np.median(np.abs(self.own - self.seconds)) / max(self.seconds, 1e-12))

    @property
    def uncertainty(self) -> float:
        """Return the standard error of the median as a share of it, by the spread, as for a normal distribution."""
        return 1.2533 * 1.4826 * self.spread / float(np.sqrt(len(self.own)))

    @property
    def waiting(self) -> float:
        """Return which share of their time the runs to go by waited for a core."""
        return float(self.waited[self.calm].sum() / max(float(self.passed[self.calm].sum()), 1e-9))


@dataclass(frozen=True)
class RepeatPolicy:
    """How often to run: until stable, though within these bounds."""

    repeat: int
    """Most runs."""
    seconds: float
    """Stop after this long, though not before three runs."""
    tolerance: float
    """Stable is what has a standard error below this share."""
    least: int = MIN_RUNS
    """Nothing is stable before so many runs."""

    def run(self, call: Callable[[], T], pool: bool) -> tuple[Runs, T]:
        """Call until stable; returns the runs, and what the last call gave.

        `pool` says that other threads of this process compute for the call.
        """
        passed: list[float] = []
        waited: list[float] = []
        while True:
            before, began = read_run_delays(pool), time.perf_counter()
            made = call()
            passed.append(time.perf_counter() - began)
            waited.append(min(longest_wait(before, read_run_delays(pool)), MAX_CREDIBLE_WAITING_SHARE * passed[-1]))
            # Looked at now and then only: it takes longer than a small model runs.
            count = len(passed)
            if count < self.repeat and count % max(count // 8, 1):
                continue
            runs = Runs(np.array(passed), np.array(waited))
            if self.enough(runs):
                return runs, made

    def enough(self, runs: Runs) -> bool:
        """Return whether these runs will do."""
        count, spent = len(runs.passed), float(runs.passed.sum())
        if count < min(MIN_RUNS, self.repeat):
            return False
        if count >= self.repeat or spent >= self.seconds:
            return True
        if spent < MIN_SECONDS or count < self.least:
            return False
        return runs.uncertainty <= self.tolerance and (runs.waiting <= BUSY_WAITING_SHARE or count >= BUSY_RUNS)
