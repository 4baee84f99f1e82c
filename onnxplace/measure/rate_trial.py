"""Run bundles with several requests in flight, to measure the time between results and the segments' times."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
from pydantic import Field

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.bundle_routes import list_route_devices
from onnxplace.bundle.manifest import Manifest
from onnxplace.bundle.split_states import SplitStates
from onnxplace.feeds.feeds import Array
from onnxplace.machine.repeated_runs import Stopwatch, read_run_delays
from onnxplace.measure.cached_trials import RequestCount, Seconds, Share, measure_once
from onnxplace.measure.size_comparison import await_early
from onnxplace.measure.trial import measure_segment_seconds
from onnxplace.pipeline.registry import create_runtime
from onnxplace.runtime.interface import Event, Result
from onnxplace.runtime.timelines import find_medians
from onnxplace.utils.progress import report_progress

MAX_REQUESTS_IN_FLIGHT = 8
# A worker waits for its core while the thread that submits requests uses it, and longer if other programs do, too.
MAX_WAITING_SHARE = 0.1
# Rounds of turns at most, and the least time of a turn that counts.
TURNS, TURN_SECONDS = 5, 0.25
# Undisturbed turns of one bundle differ by up to this share. A bundle that is further behind in a round is out.
TURN_NOISE = 0.05


@dataclass(frozen=True)
class RateTrial:
    """Measured times of a bundle with requests in flight."""

    interval_seconds: Seconds
    """Median time between two results over the turns in which workers waited least for a core."""
    segment_seconds: Mapping[str, Seconds]
    """Median time of each segment on its devices, while the others work on other requests."""
    in_flight: Annotated[int, Field(ge=1, le=MAX_REQUESTS_IN_FLIGHT)]
    """Number of requests in flight."""
    requests: RequestCount
    """Number of requests that counted."""
    waiting: Share
    """Share of the time of these turns in which a worker waited for a core."""

    @property
    def is_doubtful(self) -> bool:
        """Return whether other work on the machine may have slowed the trial."""
        return self.waiting > MAX_WAITING_SHARE


def choose_in_flight(manifest: Manifest) -> int:
    """Return the number of requests in flight of a trial: twice the number of devices, at most eight."""
    return min(2 * max(len(list_route_devices(manifest)), 1), MAX_REQUESTS_IN_FLIGHT)


def run_rate_trials(
    bundles: Sequence[Bundle], feeds: Mapping[str, Array], in_flight: int, *, cached: bool = True
) -> tuple[RateTrial, ...]:
    """Run bundles in rounds with requests in flight: a turn of each one, of a quarter of a second or more.

    A bundle that is clearly behind in a round takes part in no others. They end when two agree on the rates of the
    rest, without other work on the machine. Earlier measurements of equal segments and feeds are reused if `cached`.
    Raises ExecutionError if a segment fails, TargetError if a device is missing.
    """

    def measure() -> tuple[RateTrial, ...]:
        runtime = create_runtime("onnxruntime")
        with ExitStack() as stack:
            streams = []
            for bundle in bundles:
                session = stack.enter_context(runtime.open(bundle, trace=True))
                start = partial(session.submit, SplitStates(bundle.manifest).cut_feeds(feeds))
                streams.append(RequestStream(start, in_flight))
            await_early()
            return tuple(_summarise(turns, in_flight) for turns in run_rounds(streams))

    return measure_once(RateTrial, ["rounds", str(in_flight)], bundles, feeds, cached, True, measure)


@dataclass(frozen=True)
class Turn:
    """A span with requests in flight all the time."""

    seconds: float
    results: int
    events: tuple[Sequence[Event], ...]
    """Events of each result."""
    waiting: float
    """Share of the time in which a worker waited for a core."""

    @property
    def interval_seconds(self) -> float:
        """Return the time between two results."""
        return self.seconds / self.results


class RequestStream:
    """Keeps a number of requests in flight: each result starts the next request."""

    def __init__(self, start: Callable[[], Future[Result]], in_flight: int) -> None:
        self._start, self._in_flight = start, in_flight
        self._finished: queue.SimpleQueue[tuple[float, Future[Result]]] = queue.SimpleQueue()

    def take_turn(self) -> Turn:
        """Run requests for a turn; the first results, while requests start, and the last ones do not count.

        Raises the error of a request that fails.
        """
        for _ in range(self._in_flight):
            self._submit()
        for _ in range(self._in_flight):
            began, _ = self._await_result()
            self._submit()
        events: list[Sequence[Event]] = []
        stopwatch, last = Stopwatch(_read_worker_delays), began
        while not events or last - began < TURN_SECONDS:
            # Whole rounds: results of copies come in groups.
            for _ in range(self._in_flight):
                last, result = self._await_result()
                self._submit()
                events.append(result.events)
        stopwatch.stop()
        for _ in range(self._in_flight):
            self._await_result()
        return Turn(last - began, len(events), tuple(events), max(stopwatch.waiting_share, 0.0))

    def _submit(self) -> None:
        future = self._start()
        future.add_done_callback(lambda finished: self._finished.put((time.perf_counter(), finished)))

    def _await_result(self) -> tuple[float, Result]:
        """Return when the next request finished, and its result; raises its error."""
        finished, future = self._finished.get()
        return finished, future.result()


def run_rounds(streams: Sequence[RequestStream]) -> list[list[Turn]]:
    """Return the turns of each stream, until two rounds agree on the rates of those that may be the fastest."""
    turns: list[list[Turn]] = [[] for _ in streams]
    running = list(range(len(streams)))
    for number in range(1, TURNS + 1):
        for index in running:
            turns[index].append(streams[index].take_turn())
        report_progress(number, TURNS)
        if any(turns[index][-1].waiting > MAX_WAITING_SHARE for index in running):
            continue
        seconds = {index: [turn.interval_seconds for turn in turns[index]] for index in running}
        most = (1 + TURN_NOISE) * min(own[-1] for own in seconds.values())
        running = [index for index in running if seconds[index][-1] <= most]
        if number > 1 and all(abs(seconds[i][-1] / seconds[i][-2] - 1) <= TURN_NOISE for i in running):
            break
    return turns


def _summarise(turns: Sequence[Turn], in_flight: int) -> RateTrial:
    """Return medians over the turns in which workers waited least for a core: two, or half of more."""
    turns = sorted(turns, key=lambda turn: turn.waiting)[: len(turns) // 2 + 1]
    return RateTrial(
        interval_seconds=float(np.median([turn.interval_seconds for turn in turns])),
        segment_seconds=find_medians(measure_segment_seconds(events) for turn in turns for events in turn.events),
        in_flight=in_flight,
        requests=sum(turn.results for turn in turns),
        waiting=float(np.median([turn.waiting for turn in turns])),
    )


def _read_worker_delays() -> dict[str, int]:
    """Return the run delays of all threads except this one, which workers may keep from a core at any time."""
    own = str(threading.get_native_id())
    return {thread: delay for thread, delay in read_run_delays(pool=True).items() if thread != own}


def apply_rate_trial(manifest: Manifest, trial: RateTrial) -> Manifest:
    """Return a manifest that predicts the measured time between two results."""
    predicted = manifest.predicted.model_copy(update={"interval_seconds": trial.interval_seconds})
    updates = {"interval_seconds": trial.interval_seconds, "in_flight": trial.in_flight}
    record = manifest.trial.model_copy(update=updates) if manifest.trial else None
    return manifest.model_copy(update={"predicted": predicted, "trial": record})
