"""Predict the timelines of requests, as they were submitted."""

from __future__ import annotations

from collections.abc import Sequence

from onnxplace.bundle import Manifest, SimulatedRequest, SubmittedRequest, list_routes, simulate_requests
from onnxplace.runtime import Event, EventKind
from onnxplace.traces.timelines import RequestTimeline

_Span = tuple[str, EventKind, str, float, float, int | None]


def predict_timelines(manifest: Manifest, requests: Sequence[RequestTimeline]) -> tuple[RequestTimeline, ...]:
    """Return the predicted timelines of requests that are submitted at the same times, with the same routes.

    The events of `requests` do not matter. A predicted event is a segment that runs, or a value on its way.
    """
    submitted = [SubmittedRequest(item.submitted_seconds, item.route, item.conversation) for item in requests]
    simulated = simulate_requests(manifest, submitted)
    return tuple(_make_timeline(manifest, request, result) for request, result in zip(requests, simulated))


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
        )
        for device, kind, name, start, finish, size in runs + copies
    ]
    return tuple(sorted(events, key=lambda event: (event.start_seconds, event.device)))
