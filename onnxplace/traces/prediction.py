"""Predict the timelines of requests, as they were submitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxplace.bundle import Manifest, SimulatedRequest, SubmittedRequest, list_routes, simulate_requests
from onnxplace.runtime import Event, EventKind
from onnxplace.traces.timelines import RequestTimeline

_Span = tuple[str, EventKind, str, float, float, int | None]


def predict_timelines(manifest: Manifest, requests: Sequence[RequestTimeline]) -> tuple[RequestTimeline, ...]:
    """Return the predicted timelines of requests that are submitted at the same times, with the same routes.

    The events of `requests` do not matter. A predicted event is a segment that runs, or a value on its way. Copies of
    the bundle do not delay each other.
    """
    predicted: dict[int, RequestTimeline] = {}
    for copy in sorted({item.copy for item in requests}):
        chosen = [index for index, item in enumerate(requests) if item.copy == copy]
        items = [requests[index] for index in chosen]
        submitted = [SubmittedRequest(item.submitted_seconds, item.route, item.conversation) for item in items]
        simulated = simulate_requests(manifest, submitted)
        for index, item, result in zip(chosen, items, simulated):
            predicted[index] = _make_timeline(manifest, item, result)
    return tuple(predicted[index] for index in range(len(requests)))


def predict_stream(
    manifest: Manifest, requests: Sequence[RequestTimeline], in_flight: int
) -> tuple[RequestTimeline, ...]:
    """Return the predicted timelines of requests of which so many are in flight: one that ends starts the next one.

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


def _make_timeline(manifest: Manifest, request: RequestTimeline, simulated: SimulatedRequest) -> RequestTimeline:
    events = _list_events(manifest, request, simulated)
    # The part of a request before its first segment and after its last one.
    finish = simulated.end_seconds + manifest.predicted.request_seconds
    return RequestTimeline(
        number=request.number,
        submitted_seconds=request.submitted_seconds,
        finish_seconds=finish,
        events=events,
        route=request.route,
        conversation=request.conversation,
        joined=request.joined,
        copy=request.copy,
    )


def _list_events(manifest: Manifest, request: RequestTimeline, simulated: SimulatedRequest) -> tuple[Event, ...]:
    """Return runs and copies of a request, ordered by start."""
    devices, origin, values = list_routes(manifest)[request.route].devices, request.submitted_seconds, manifest.values
    runs: list[_Span] = [
        (devices[segment.device], "run", segment.id, float(start), float(finish), None)
        for segment, start, finish in zip(manifest.segments, simulated.start_seconds, simulated.finish_seconds)
    ]
    copies: list[_Span] = [
        (item.destination, "copy", item.value, item.start_seconds, item.finish_seconds, values[item.value].bytes)
        for item in simulated.transfers
    ]
    events = [
        Event(
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
        for device, kind, name, start, finish, size in runs + copies
    ]
    return tuple(sorted(events, key=lambda event: (event.start_seconds, event.device)))
