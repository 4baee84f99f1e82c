"""Time samples on a busy machine: detect samples that waited for a core, and prefer the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxplace.feeds import Array
from onnxplace.machine import read_run_delays
from onnxplace.runtime import Event, RuntimeSession
from onnxplace.utils import report_progress

# A sample in which threads waited for a core for more than this share of its time is disturbed.
MAX_WAITING_SHARE = 0.05
# With fewer undisturbed samples than this, the shortest of all is a better estimate than their median.
MIN_UNDISTURBED_SAMPLES = 3


@dataclass
class Samples:
    """Samples of one time, and the share in which threads of this process waited for a core."""

    seconds: list[float] = field(default_factory=list)
    waiting_shares: list[float] = field(default_factory=list)
    """Per sample: seconds waited over seconds elapsed."""

    def add(self, seconds: Iterable[float], waiting_share: float) -> None:
        """Add samples that were taken in one request."""
        for sample in seconds:
            self.seconds.append(sample)
            self.waiting_shares.append(waiting_share)

    @property
    def undisturbed_count(self) -> int:
        """Return the number of samples that did not wait."""
        return len(self.list_undisturbed())

    def list_undisturbed(self) -> list[float]:
        """Return the samples that did not wait."""
        return [seconds for seconds, share in zip(self.seconds, self.waiting_shares) if share <= MAX_WAITING_SHARE]

    def estimate_typical(self) -> float:
        """Return the median of undisturbed samples, or the shortest sample if there are too few."""
        undisturbed = self.list_undisturbed()
        return float(np.median(undisturbed)) if len(undisturbed) >= MIN_UNDISTURBED_SAMPLES else min(self.seconds)


@dataclass(frozen=True)
class RequestTimes:
    """Events of one request, and whether they waited for a core."""

    events: tuple[Event, ...]
    waiting_share: float
    """Seconds that threads waited for a core, over the seconds of the request."""

    def get_runs(self) -> dict[str, Event]:
        """Return the runs by the name of their segment."""
        return {event.name: event for event in self.events if event.kind == "run"}

    def list_seconds(self, kind: str, device: str | None = None, names: Collection[str] | None = None) -> list[float]:
        """Return the seconds of events of a kind, of one device or all, of some segments or values or all."""
        return [
            event.finish_seconds - event.start_seconds
            for event in self.events
            if event.kind == kind and device in (None, event.device) and (names is None or event.name in names)
        ]


def run_once(session: RuntimeSession, feeds: Mapping[str, Array]) -> RequestTimes:
    """Run a request of a tracing session, and measure how long its threads wait for a core."""
    before, began = read_waited_seconds(), time.perf_counter()
    events = session.submit(feeds).result().events
    return RequestTimes(events, (read_waited_seconds() - before) / max(time.perf_counter() - began, 1e-9))


def read_waited_seconds() -> float:
    """Return how long other threads of this process waited for a core; 0 on systems that do not report it.

    The calling thread is left out: its wait after the others have finished is not part of their time.
    """
    caller = str(threading.get_native_id())
    return sum(nanoseconds for task, nanoseconds in read_run_delays(pool=True).items() if task != caller) * 1e-9


def take_turns(tasks: Sequence[Callable[[], object]], seconds: float, min_runs: int) -> None:
    """Run tasks in turn, so that a temporary disturbance of the machine affects all of them a little.

    Each task runs `min_runs` times. After that, until the time is over, the task with the least total time is next.
    """
    began = time.perf_counter()
    total_seconds, counts = [0.0] * len(tasks), [0] * len(tasks)
    while min(counts, default=min_runs) < min_runs or (tasks and time.perf_counter() - began <= seconds):
        order = counts if min(counts) < min_runs else total_seconds
        chosen = min(range(len(tasks)), key=order.__getitem__)
        before = time.perf_counter()
        tasks[chosen]()
        total_seconds[chosen] += time.perf_counter() - before
        counts[chosen] += 1
        report_progress(time.perf_counter() - began, seconds)
