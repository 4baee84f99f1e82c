"""Compare measured with predicted timelines: busy shares of devices, and the largest differences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median

from onnxplace.bundle import Manifest, list_route_devices
from onnxplace.runtime import Event
from onnxplace.traces.timelines import RequestTimeline


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
    medians, predicted_medians = (_find_medians(timelines, time_events) for timelines in (measured, predicted))
    differences = [
        Difference(*key, seconds=seconds, predicted_seconds=predicted_medians[key])
        for key, seconds in medians.items()
        if key in predicted_medians
    ]
    return max(differences, key=lambda item: abs(item.seconds - item.predicted_seconds), default=None)


def _find_medians(
    timelines: Sequence[RequestTimeline], time_events: Callable[[Iterable[Event]], Mapping[tuple[str, str], float]]
) -> dict[tuple[str, str], float]:
    seconds: dict[tuple[str, str], list[float]] = {}
    for timeline in timelines:
        for key, value in time_events(timeline.events).items():
            seconds.setdefault(key, []).append(value)
    return {key: median(values) for key, values in seconds.items()}
