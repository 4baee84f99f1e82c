"""Take times on a busy machine: know when a sample waited for a core, and go by those that did not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxplace.feeds import Array
from onnxplace.machine import read_run_delays
from onnxplace.runtime import Event, RuntimeSession

# A sample in which threads waited for a core for more than this share of its time says little.
MAX_WAITING_SHARE = 0.05
# With fewer calm samples than this, the quickest of all tells more than their middle.
MIN_UNDISTURBED_SAMPLES = 3


@dataclass
class Samples:
    """Times of one thing, each with how long threads of this process waited for a core meanwhile."""

    seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    """Per sample: seconds waited over seconds that passed."""

    def add(self, seconds: Iterable[float], waited: float) -> None:
        for taken in seconds:
            self.seconds.append(taken)
            self.waited.append(waited)

    @property
    def calm(self) -> int:
        """Return how many samples did not wait."""
        return sum(share <= MAX_WAITING_SHARE for share in self.waited)

    def typical(self) -> float:
        """Return the median of what did not wait, or the shortest time if nearly everything did."""
        quiet = [taken for taken, share in zip(self.seconds, self.waited) if share <= MAX_WAITING_SHARE]
        return float(np.median(quiet)) if len(quiet) >= MIN_UNDISTURBED_SAMPLES else min(self.seconds)


@dataclass(frozen=True)
class RequestTimes:
    """What happened in one request."""

    events: tuple[Event, ...]
    waited: float
    """Seconds that threads waited for a core, over the seconds of the request."""

    def runs(self) -> dict[str, Event]:
        """Return the runs by the name of their segment."""
        return {event.name: event for event in self.events if event.kind == "run"}

    def taken(self, kind: str, device: str | None = None, names: Collection[str] | None = None) -> list[float]:
        """Return how long each event of a kind took, of one device, of some segments or values."""
        return [
            event.finish_seconds - event.start_seconds
            for event in self.events
            if event.kind == kind and device in (None, event.device) and (names is None or event.name in names)
        ]


def run_once(session: RuntimeSession, feeds: Mapping[str, Array]) -> RequestTimes:
    """Run a request of a session that traces, and watch what its threads wait for."""
    before, began = read_waited_seconds(), time.perf_counter()
    events = session.submit(feeds).result().events
    return RequestTimes(events, (read_waited_seconds() - before) / max(time.perf_counter() - began, 1e-9))


def read_waited_seconds() -> float:
    """Return how long other threads of this process were ready to run and had no core; 0 where the system hides it.

    The calling thread is left out: what it waits for after the others are done is none of their time.
    """
    me = str(threading.get_native_id())
    return sum(nanoseconds for task, nanoseconds in read_run_delays(pool=True).items() if task != me) * 1e-9


def take_turns(tasks: Sequence[Callable[[], object]], seconds: float, least: int) -> None:
    """Do tasks in turn, so that what disturbs the machine for a while disturbs each of them a little.

    Each is done `least` times; after that, while the time lasts, the one that has taken least time so far is next.
    """
    began = time.perf_counter()
    spent, done = [0.0] * len(tasks), [0] * len(tasks)
    while min(done, default=least) < least or (tasks and time.perf_counter() - began <= seconds):
        measure = done if min(done) < least else spent
        chosen = min(range(len(tasks)), key=measure.__getitem__)
        before = time.perf_counter()
        tasks[chosen]()
        spent[chosen] += time.perf_counter() - before
        done[chosen] += 1
