"""Time equal runs on a machine with other load.

Waiting for a core is separated from computing: the time that a run waited is subtracted, and the runs that waited least
are preferred. Linux counts for each thread the time that it was ready and had no core (`schedstat`, second number). On
other systems this is unknown, and counts as zero.

The quota of a container is no such wait: it stops a process that has used its share of a period, perhaps in one run of
many. So a run counts as long as its processor time takes at the rate of the quota, wherever the stops fell.

A core may also be slower for a while: its clock changes, or a neighbour uses the other half of it, on virtual machines
unseen. So a short loop that always does the same is timed after each run; where it takes longer than its least time,
the run does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np

from onnxplace.graph.op_graph import Floats, Longs
from onnxplace.utils.control_groups import find_core_limit
from onnxplace.utils.progress import report_progress

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
# The speed of the machine drifts if halves of so many runs, or more, in so much time differ by more standard errors.
DRIFT_RUNS, DRIFT_SECONDS, DRIFT_ERRORS = 15, 0.3, 2
# Clocks and caches settle in this time; runs that look stable earlier need not be.
MIN_SECONDS = 0.1
# Additions of the reference loop, which need no memory and take about 60 us.
REFERENCE_ADDITIONS = 5_000
# A core is slower than at other times if the loop takes longer by this factor. Clocks have steps of 7 %.
MAX_SLOWDOWN = 1.1
# Times of the loop that tell how long it takes at least.
MIN_REFERENCES = 10


@dataclass(frozen=True)
class Runs:
    """Times of equal runs, in their order."""

    elapsed_seconds: Floats
    """Seconds from start to end of each run."""
    waiting_seconds: Floats
    """Seconds of each run without a core; negative if a quota would not let it be as fast all the time."""
    reference_seconds: Floats = field(default_factory=lambda: np.full(1, find_least_reference_seconds()))
    """Of the reference loop after each run."""

    @staticmethod
    def join(parts: Sequence[Runs]) -> Runs:
        """Return runs that were made in several parts."""
        return Runs(*(np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(Runs)))

    @cached_property
    def undisturbed(self) -> Longs:
        """Return the indices of the undisturbed runs.

        If these are too few, return the less disturbed half of all runs.
        """
        slowdown = self.reference_seconds / self.reference_seconds.min()
        shares = self.waiting_seconds / np.maximum(self.elapsed_seconds, 1e-9) + np.maximum(slowdown - MAX_SLOWDOWN, 0)
        by_share = np.argsort(shares, kind="stable")
        min_count = min(MIN_RUNS, len(shares))
        undisturbed_count = int((shares <= MAX_WAITING_SHARE).sum())
        count = undisturbed_count if undisturbed_count >= MIN_RUNS else max(len(shares) // 2, min_count)
        return np.sort(by_share[:count]).astype(np.int64)

    @property
    def computing_seconds(self) -> Floats:
        """Return the seconds of the undisturbed runs, without those that they waited."""
        computing_seconds: Floats = (self.elapsed_seconds - self.waiting_seconds)[self.undisturbed]
        return computing_seconds

    @property
    def seconds(self) -> float:
        """Return the median of the undisturbed runs in seconds."""
        return float(np.median(self.computing_seconds))

    @property
    def spread(self) -> float:
        """Return the median deviation from the median, as a share of it."""
        return float(np.median(np.abs(self.computing_seconds - self.seconds)) / max(self.seconds, 1e-12))

    @property
    def uncertainty(self) -> float:
        """Return the standard error of the median, as a share of it; more if the speed of the machine drifts."""
        return max(self.error, self.drift)

    @property
    def error(self) -> float:
        """Return the standard error of the median of a normal distribution, as a share of the median."""
        # 1.4826 turns a median deviation into a standard deviation; a median is 1.2533 times less exact than a mean.
        return 1.2533 * 1.4826 * self.spread / float(np.sqrt(len(self.computing_seconds)))

    @property
    def drift(self) -> float:
        """Return by which share the median may be wrong as the speed of the machine drifts.

        It is half the difference of the medians of first and second half; the slowdown of all runs if that is larger.
        """
        halves = [float(np.median(half)) for half in np.array_split(self.computing_seconds, 2) if len(half)]
        return max((max(halves) - min(halves)) / 2 / max(self.seconds, 1e-12), self.slowdown)

    @property
    def slowdown(self) -> float:
        """Return by which share all runs may be too long, as their cores were slower than at other times."""
        ratio = float(self.reference_seconds.min()) / find_least_reference_seconds()
        return ratio - 1 if ratio > MAX_SLOWDOWN else 0.0

    @property
    def waiting(self) -> float:
        """Return the share of time that undisturbed runs waited for a core."""
        waited, elapsed = self.waiting_seconds[self.undisturbed].sum(), self.elapsed_seconds[self.undisturbed].sum()
        return max(float(waited / max(float(elapsed), 1e-9)), 0.0)


@dataclass(frozen=True)
class RepeatPolicy:
    """Limits for repeated runs.

    They end once their median is sure, or once the speed of the machine drifts: further runs would do so as well, and
    make it no surer.
    """

    max_runs: int
    """Highest number of runs."""
    seconds: float
    """Stop after this time, but not before `MIN_RUNS` runs."""
    tolerance: float
    """A median is stable if its standard error is below this share of it."""
    min_runs: int = MIN_RUNS
    """No median is stable before this number of runs."""

    def run(self, call: Callable[[], T], pool: bool) -> tuple[Runs, T]:
        """Call until the median is stable; return times and last result.

        Args:
            call: The work of one run.
            pool: Whether other threads of this process compute for the call.
        """
        elapsed: list[float] = []
        waiting: list[float] = []
        references: list[float] = []
        while True:
            stopwatch = Stopwatch(lambda: read_run_delays(pool))
            result = call()
            stopwatch.stop()
            elapsed.append(stopwatch.elapsed_seconds)
            waiting.append(stopwatch.waiting_share * stopwatch.elapsed_seconds)
            references.append(stopwatch.reference_seconds)
            # Not after each run: the statistics take longer than a small model.
            count = len(elapsed)
            if count < self.max_runs and count % max(count // 8, 1):
                continue
            runs = Runs(np.array(elapsed), np.array(waiting), np.array(references))
            if self.has_enough(runs):
                return runs, result
            report_progress(self.estimate_share(runs))

    def estimate_share(self, runs: Runs) -> float:
        """Return the share of the most runs or the most time that is over; stable medians may end them earlier."""
        spent = float(runs.elapsed_seconds.sum())
        return max(len(runs.elapsed_seconds) / self.max_runs, spent / self.seconds if self.seconds else 0.0)

    def has_enough(self, runs: Runs) -> bool:
        """Return whether no more runs are needed."""
        count, spent = len(runs.elapsed_seconds), float(runs.elapsed_seconds.sum())
        if count < min(MIN_RUNS, self.max_runs):
            return False
        if count >= self.max_runs or spent >= self.seconds:
            return True
        if spent < MIN_SECONDS or count < self.min_runs:
            return False
        # More runs lower the error, and no drift.
        is_long = count >= DRIFT_RUNS and spent >= DRIFT_SECONDS
        return (is_long and runs.drift > DRIFT_ERRORS * runs.error) or runs.uncertainty <= self.tolerance


# --------------------------------------------------------------------------------------------------- waiting for a core


class Stopwatch:
    """Times work of this process, from its construction on, and how long threads waited for a core meanwhile.

    Args:
        read_delays: Returns the run delays of the threads that count.
    """

    elapsed_seconds: float
    waiting_share: float
    """Share of the time; negative if a quota would not let this process be as fast all the time."""
    reference_seconds: float
    """Of the reference loop after the work."""

    def __init__(self, read_delays: Callable[[], dict[str, int]]) -> None:
        self._read_delays, self._delays = read_delays, read_delays()
        self._cpu_seconds, self._began = time.process_time(), time.perf_counter()

    def stop(self) -> None:
        """Set the results."""
        self.elapsed_seconds = max(time.perf_counter() - self._began, 1e-9)
        least_seconds = (time.process_time() - self._cpu_seconds) / find_core_limit()
        waited = longest_wait(self._delays, self._read_delays()) / self.elapsed_seconds
        self.waiting_share = min(waited, MAX_CREDIBLE_WAITING_SHARE, 1 - least_seconds / self.elapsed_seconds)
        self.reference_seconds = time_reference()


_references: list[float] = []


def time_reference() -> float:
    """Return the seconds of the reference loop, which takes longer on a core that is slower at the moment."""
    began = time.perf_counter()
    sum(range(REFERENCE_ADDITIONS))
    seconds = max(time.perf_counter() - began, 1e-9)
    _references.append(seconds)
    if len(_references) > MIN_REFERENCES:
        _references.remove(max(_references))
    return seconds


def find_least_reference_seconds() -> float:
    """Return the least seconds of the reference loop in this process so far."""
    while len(_references) < MIN_REFERENCES:
        time_reference()
    return min(_references)


def find_typical_seconds(seconds: Sequence[float] | Floats) -> float:
    """Return the median; the mean where a quota of less than a core stops some of the runs for long."""
    return float(np.mean(seconds) if find_core_limit() < 1 else np.median(seconds))


def read_run_delays(pool: bool) -> dict[str, int]:
    """Return the run delay of threads, in nanoseconds, by thread id.

    Args:
        pool: Whether to read all threads of the process; else only the calling one, under the id "".
    """
    if not pool:
        delay = _read_waited_nanoseconds("/proc/thread-self/schedstat")
        return {} if delay is None else {"": delay}
    delays = {path.parent.name: _read_waited_nanoseconds(path) for path in Path("/proc/self/task").glob("*/schedstat")}
    return {thread: delay for thread, delay in delays.items() if delay is not None}


def longest_wait(before: dict[str, int], after: dict[str, int]) -> float:
    """Return the seconds that the most delayed thread waited.

    The other threads wait for it.

    >>> longest_wait({"1": 0, "2": 0}, {"1": 500_000_000, "2": 250_000_000})
    0.5
    """
    return max((after[thread] - before.get(thread, 0) for thread in after), default=0) * 1e-9


def _read_waited_nanoseconds(path: str | Path) -> int | None:
    """Return the second number of a schedstat file.

    Returns None without such a file.
    """
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read().split()[1])
    except (OSError, ValueError, IndexError):  # another system, a thread that ended, a kernel without it
        return None
