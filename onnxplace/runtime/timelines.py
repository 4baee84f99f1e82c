"""Timelines of requests: recorded on one clock, predicted for the same submissions, and both compared."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median
from typing import TYPE_CHECKING, TypeVar

from onnxplace.bundle.bundle_routes import list_route_devices, list_routes
from onnxplace.bundle.manifest import Manifest
from onnxplace.runtime.interface import Event, EventKind, Result

if TYPE_CHECKING:
    from onnxplace.bundle.bundle_simulation import SimulatedRequest

Key = TypeVar("Key", bound=Hashable)

# Requests that a session keeps for its trace: the last ones.
MAX_TRACED_REQUESTS = 1000


@dataclass(frozen=True)
class RequestTimeline:
    """The events of one request, measured or predicted."""

    number: int
    """Position in the order of submission, from 0."""
    submitted_seconds: float
    """Time of the submission, on the clock that all requests share."""
    finish_seconds: float
    """Time when its result was there, on the same clock."""
    events: tuple[Event, ...]
    """Events, with times since the submission."""
    route: int = 0
    conversation: int = 0
    joined: int = 1
    """Number of callers' requests that ran as this one (`Batching`)."""
    copy: int = 0
    """Index of the copy of the bundle that ran it."""
    tag: str = ""
    """`logid` of the RunOptions of its callers; empty if they gave none."""
    plan: int = 0
    """Index of the bundle's plan that ran it."""


@dataclass(frozen=True)
class _RecordedResult:
    """A result, and when its request was submitted by the clock of the caller."""

    called_seconds: float
    result: Result
    tag: str = ""


class TraceRecorder:
    """Keeps the results of the last requests, without their outputs; threads may add to it at the same time."""

    def __init__(self, capacity: int = MAX_TRACED_REQUESTS) -> None:
        self._entries: deque[_RecordedResult] = deque(maxlen=capacity)

    def add(self, called_seconds: float, result: Result, tag: str = "") -> None:
        """Keep the events of a result; `called_seconds` counts if its runtime does not say when it was submitted."""
        self._entries.append(_RecordedResult(called_seconds, replace(result, outputs={}), tag))

    def add_future(self, called_seconds: float, future: Future[Result], *, tag: str = "") -> None:
        """Keep the events of a future's result, unless the request failed; a callback of the future."""
        if not future.cancelled() and future.exception() is None:
            self.add(called_seconds, future.result(), tag)

    def list_timelines(self) -> tuple[RequestTimeline, ...]:
        """Return the requests in the order of submission.

        Requests that were joined to run as one are one timeline.
        """
        groups: dict[int, list[_RecordedResult]] = {}
        unique = itertools.count(-1, -1)
        for entry in list(self._entries):
            # The parts of a joined request share its events. All empty tuples are one object.
            groups.setdefault(id(entry.result.events) if entry.result.events else next(unique), []).append(entry)
        timelines = sorted(map(_make_timeline, groups.values()), key=lambda item: item.submitted_seconds)
        return tuple(replace(item, number=number) for number, item in enumerate(timelines))


def _make_timeline(entries: list[_RecordedResult]) -> RequestTimeline:
    first, events = entries[0], entries[0].result.events
    submitted = first.called_seconds
    if events and events[0].submitted_seconds is not None:
        submitted = events[0].submitted_seconds
    finish = submitted + max((event.finish_seconds for event in events), default=0.0)
    if len(entries) == 1:  # the times of joined requests include those before they were joined
        finish = max(finish, submitted + first.result.seconds)
    route, conversation, copy = (events[0].route, events[0].conversation, events[0].copy) if events else (0, 0, 0)
    return RequestTimeline(
        number=0,
        submitted_seconds=submitted,
        finish_seconds=finish,
        events=events,
        route=route,
        conversation=conversation,
        joined=len(entries),
        copy=copy,
        tag=", ".join(dict.fromkeys(entry.tag for entry in entries if entry.tag)),
        plan=first.result.plan,
    )


# Predict the timelines of requests, as they were submitted.


def predict_timelines(manifest: Manifest, requests: Sequence[RequestTimeline]) -> tuple[RequestTimeline, ...]:
    """Return the predicted timelines of requests that are submitted at the same times, with the same routes.

    The events of `requests` do not matter. A predicted event is a segment that runs, a value on its way, or weights
    that stream. Copies of the bundle do not delay each other.
    """
    # Which import compiled loops, and with them numba: sessions need neither.
    from onnxplace.bundle.bundle_simulation import SubmittedRequest, simulate_requests

    predicted: dict[int, RequestTimeline] = {}
    for copy in sorted({item.copy for item in requests}):
        chosen = [index for index, item in enumerate(requests) if item.copy == copy]
        items = [requests[index] for index in chosen]
        submitted = [SubmittedRequest(item.submitted_seconds, item.route, item.conversation) for item in items]
        simulated = simulate_requests(manifest, submitted)
        for index, item, result in zip(chosen, items, simulated):
            # The part of a request before its first segment and after its last one.
            finish = result.end_seconds + manifest.predicted.request_seconds
            events = _list_events(manifest, item, result)
            predicted[index] = replace(item, finish_seconds=finish, events=events, tag="")
    return tuple(predicted[index] for index in range(len(requests)))


def predict_stream(
    manifest: Manifest, requests: Sequence[RequestTimeline], in_flight: int
) -> tuple[RequestTimeline, ...]:
    """Return the predicted timelines of requests of which `in_flight` run at once: one that ends starts the next one.

    So a prediction does not wait for submissions that came late because the measured requests took long. The first
    requests are submitted when the first of `requests` was.
    """
    origin = min((item.submitted_seconds for item in requests), default=0.0)
    submitted = [origin] * len(requests)
    predicted: tuple[RequestTimeline, ...] = ()
    for _ in range(len(requests)):  # each round settles as many requests as are in flight, at least one
        started = [replace(item, submitted_seconds=seconds) for item, seconds in zip(requests, submitted)]
        predicted = predict_timelines(manifest, started)
        ends = sorted(item.finish_seconds for item in predicted)
        last, submitted = submitted, [origin] * min(in_flight, len(requests)) + ends[: max(len(ends) - in_flight, 0)]
        if submitted == last:
            break
    return predicted


def _list_events(manifest: Manifest, request: RequestTimeline, simulated: SimulatedRequest) -> tuple[Event, ...]:
    """Return runs, copies and loads of a request, ordered by start."""
    devices, origin = list_routes(manifest)[request.route].devices, request.submitted_seconds
    segments = {segment.id: segment for segment in manifest.segments}

    def make_event(device: str, kind: EventKind, name: str, start: float, finish: float, size: int | None) -> Event:
        return Event(
            device=device,
            kind=kind,
            name=name,
            start_seconds=start - origin,
            finish_seconds=finish - origin,
            request=request.number,
            submitted_seconds=origin,
            route=request.route,
            conversation=request.conversation,
            bytes=size,
            copy=request.copy,
        )

    events = [
        make_event(devices[segment.device], "run", segment.id, float(start), float(finish), None)
        for segment, start, finish in zip(manifest.segments, simulated.start_seconds, simulated.finish_seconds)
    ]
    for sent in simulated.transfers:
        size = manifest.values[sent.value].bytes
        events.append(make_event(sent.destination, "copy", sent.value, sent.start_seconds, sent.finish_seconds, size))
    for load in simulated.loads:
        device, names = devices[segments[load.segment].device], segments[load.segment].streamed
        size = sum(manifest.streamed[name].bytes for name in names)
        events.append(make_event(device, "load", load.segment, load.start_seconds, load.finish_seconds, size))
    return tuple(sorted(events, key=lambda event: (event.start_seconds, event.device)))


# Compare measured with predicted timelines: busy shares of devices, and the largest differences.


@dataclass(frozen=True)
class BusyShare:
    """The share of the time in which a device ran segments: from the first submission to the last result."""

    device: str
    share: float
    predicted_share: float


@dataclass(frozen=True)
class Difference:
    """A segment or a transfer, with the medians of its times."""

    name: str
    """Name of the segment or the value."""
    device: str
    """The device where the segment runs, or the value arrives."""
    seconds: float
    predicted_seconds: float


@dataclass(frozen=True)
class TimelineComparison:
    """Measured and predicted timelines of the same requests."""

    requests: int
    devices: tuple[BusyShare, ...]
    segment: Difference | None
    """The segment whose measured time differs most from the prediction; None if there is none in both."""
    transfer: Difference | None
    """The transfer whose measured time differs most; None if there is none in both."""


def compare_timelines(
    manifest: Manifest, measured: Sequence[RequestTimeline], predicted: Sequence[RequestTimeline]
) -> TimelineComparison:
    """Compare the timelines of the same requests.

    A transfer takes from when its value was computed and requested until it has arrived.
    """
    producers = {name: value.producer or "" for name, value in manifest.values.items()}
    shares, predicted_shares = _find_busy_shares(measured), _find_busy_shares(predicted)
    devices = [
        BusyShare(device, shares.get(device, 0.0), predicted_shares.get(device, 0.0))
        for device in list_route_devices(manifest)
    ]
    time_transfers = partial(_time_transfers, producers=producers)
    return TimelineComparison(
        requests=len(measured),
        devices=tuple(devices),
        segment=_find_largest_difference(measured, predicted, _time_segments),
        transfer=_find_largest_difference(measured, predicted, time_transfers),
    )


def _find_busy_shares(timelines: Sequence[RequestTimeline]) -> dict[str, float]:
    """Return, per device, the share of the time in which at least one segment runs there.

    For a device of several copies of the bundle, that is the mean over the copies with requests.
    """
    if not timelines:
        return {}
    start = min(item.submitted_seconds for item in timelines)
    length = max(item.finish_seconds for item in timelines) - start
    runs: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for item in timelines:
        for event in item.events:
            if event.kind == "run":
                span = (item.submitted_seconds + event.start_seconds, item.submitted_seconds + event.finish_seconds)
                runs.setdefault(event.device, {}).setdefault(event.copy, []).append(span)
    return {
        device: mean(map(_measure_union, copies.values())) / length if length > 0 else 0.0
        for device, copies in runs.items()
    }


def _measure_union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total, end = 0.0, float("-inf")
    for start, finish in sorted(spans):
        total += max(finish - max(start, end), 0.0)
        end = max(end, finish)
    return total


def _time_segments(events: Iterable[Event]) -> dict[tuple[str, str], float]:
    """Return the seconds of segments by name and device."""
    return {
        (event.name, event.device): event.finish_seconds - event.start_seconds
        for event in events
        if event.kind == "run"
    }


def _time_transfers(events: Iterable[Event], producers: Mapping[str, str]) -> dict[tuple[str, str], float]:
    """Return the seconds of transfers by value and destination."""
    events = list(events)
    computed = {event.name: event for event in events if event.kind == "run"}
    requested = {(event.name, event.device): event.start_seconds for event in events if event.kind == "wait"}
    seconds = {}
    for event in events:
        producer = computed.get(producers.get(event.name, ""))
        if event.kind != "copy" or producer is None or producer.device == event.device:
            continue
        began = max(producer.finish_seconds, requested.get((event.name, event.device), event.start_seconds))
        seconds[event.name, event.device] = event.finish_seconds - min(began, event.start_seconds)
    return seconds


def _find_largest_difference(
    measured: Sequence[RequestTimeline],
    predicted: Sequence[RequestTimeline],
    time_events: Callable[[Iterable[Event]], Mapping[tuple[str, str], float]],
) -> Difference | None:
    """Return the entry whose medians differ most, the first of several."""
    medians, predicted_medians = (
        find_medians(time_events(timeline.events) for timeline in timelines) for timelines in (measured, predicted)
    )
    differences = [
        Difference(*key, seconds=seconds, predicted_seconds=predicted_medians[key])
        for key, seconds in medians.items()
        if key in predicted_medians
    ]
    return max(differences, key=lambda item: abs(item.seconds - item.predicted_seconds), default=None)


def find_medians(measurements: Iterable[Mapping[Key, float]]) -> dict[Key, float]:
    """Return the median of each key over the measurements that have it.

    >>> find_medians([{"a": 1.0, "b": 4.0}, {"a": 2.0}])
    {'a': 1.5, 'b': 4.0}
    """
    values = defaultdict[Key, list[float]](list)
    for measurement in measurements:
        for key, value in measurement.items():
            values[key].append(value)
    return {key: median(own) for key, own in values.items()}
