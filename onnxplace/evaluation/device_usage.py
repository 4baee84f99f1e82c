"""What a step did on each device and link, and what each device held, beside what the compiler predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from onnxplace.bundle import Bundle, DeviceRecord, SegmentRecord, list_crossing_values, record_crossing_values
from onnxplace.errors import Diagnostic, OnnxplaceError
from onnxplace.evaluation.memory_use import BundleMemory, measure_memory
from onnxplace.evaluation.trial import measure_segment_seconds
from onnxplace.machine import available_memory_bytes
from onnxplace.pipeline import Observer, find_plugin
from onnxplace.runtime import Event, EventKind, Runtime

WARM_UP_RUNS = 2


@dataclass(frozen=True)
class DeviceUse:
    """A device in one step; None for what was not predicted, or could not be measured."""

    id: str
    predicted_busy_seconds: float
    busy_seconds: float
    predicted_peak_bytes: int | None
    """Of a CPU device what its part of the process takes; of a GPU weights and values."""
    peak_bytes: int | None


@dataclass(frozen=True)
class LinkUse:
    """What crosses from one device to another in one step; None for what could not be measured."""

    source: str
    destination: str
    values: int
    predicted_bytes: int
    bytes: int | None
    predicted_seconds: float
    """The sum of what each value takes, whether or not they overlap."""
    seconds: float
    """The same sum: from when a value is made and asked for until it is there."""


@dataclass(frozen=True)
class ProcessUse:
    """The process that opens and runs the bundle; None for what was not predicted, or could not be measured."""

    predicted_opening_bytes: int | None
    opening_bytes: int | None
    predicted_running_bytes: int | None
    running_bytes: int | None


@dataclass(frozen=True)
class DeviceUsage:
    """What a step did and took."""

    devices: tuple[DeviceUse, ...]
    links: tuple[LinkUse, ...]
    process: ProcessUse
    notes: tuple[Diagnostic, ...]
    """What could not be measured, and why."""


class TracedRequests:
    """Requests that were traced, one after the other."""

    def __init__(self) -> None:
        self._spans: dict[tuple[str, EventKind, str], list[tuple[float, float]]] = {}
        self._segments: dict[str, list[float]] = {}

    def add(self, events: Sequence[Event]) -> None:
        """Add what one request did."""
        for event in events:
            span = (event.start_seconds, event.finish_seconds)
            self._spans.setdefault((event.device, event.kind, event.name), []).append(span)
        for segment, seconds in measure_segment_seconds(events).items():
            self._segments.setdefault(segment, []).append(seconds)

    def busy(self, segments: Iterable[SegmentRecord]) -> float:
        """Return the seconds that their device was neither waiting nor copying: the sum of medians of each segment.

        Most are short, and seldom wait for a core.
        """
        return sum((float(np.median(self._segments[segment.id])) for segment in segments), 0.0)

    def copying(self, device: str) -> float:
        """Return the seconds that a device copied what it received: the sum of medians of each copy."""
        copies = (
            np.diff(spans) for (where, kind, _), spans in self._spans.items() if (where, kind) == (device, "copy")
        )
        return sum((float(np.median(taken)) for taken in copies), 0.0)

    def transfer(self, value: str, producer: str, source: str, destination: str) -> float:
        """Return the median seconds from when a value was made, and asked for, until it was there."""
        made, asked, there = (
            np.array(self._spans[key])
            for key in ((source, "run", producer), (destination, "wait", value), (destination, "copy", value))
        )
        return float(np.median(there[:, 1] - np.maximum(made[:, 1], asked[:, 0])))


def measure_usage(
    bundle: Bundle, feeds: Mapping[str, Any], rounds: int, with_memory: bool, observer: Observer | None = None
) -> DeviceUsage:
    """Run a bundle so many times, each with the same feeds, and find out what it does and takes.

    Feeds include what states begin with. What cannot be measured is noted.
    """
    runtime = cast("type[Runtime]", find_plugin("runtimes", "onnxruntime"))()
    if observer:
        observer("tracing", 0, 1 + with_memory)
    traced = _trace_requests(runtime, bundle, feeds, rounds)
    crossed, notes = _record_crossing(runtime, bundle, feeds)
    found = measure_memory(bundle, {**feeds, **(crossed or {})}, observer) if with_memory else BundleMemory()
    return DeviceUsage(
        _compare_devices(bundle, traced, found),
        _compare_links(bundle, traced, crossed),
        _compare_process(bundle, found),
        (*notes, *found.notes),
    )


def _trace_requests(runtime: Runtime, bundle: Bundle, feeds: Mapping[str, Any], rounds: int) -> TracedRequests:
    found = TracedRequests()
    with runtime.open(bundle, trace=True) as session:
        for number in range(WARM_UP_RUNS + rounds):
            session.reset_state()  # states that are not fed would go on growing
            events = session.run(feeds).events
            if number >= WARM_UP_RUNS:
                found.add(events)
    return found


def _record_crossing(
    runtime: Runtime, bundle: Bundle, feeds: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, tuple[Diagnostic, ...]]:
    """Return the values that cross between devices; None, and why, if keeping them all is more than there is room."""
    manifest = bundle.manifest
    crossing = {name for names in list_crossing_values(manifest).values() for name in names}
    if not crossing:
        return {}, ()
    needs = manifest.predicted.running_bytes + sum(manifest.values[name].bytes for name in crossing)
    if needs > (free := available_memory_bytes()):
        message = f"what crosses was not recorded: that would take {needs} bytes of memory, and {free} are free"
        return None, (Diagnostic("C020", message, where=manifest.model),)
    try:
        with runtime.open(record_crossing_values(bundle)) as session:
            return session.run(feeds).outputs, ()
    except OnnxplaceError as problem:
        message = f"what crosses between devices was not recorded: {problem.message}"
        return None, (Diagnostic(problem.code, message, where=problem.where, hint=problem.hint),)


def _compare_devices(bundle: Bundle, traced: TracedRequests, taken: BundleMemory) -> tuple[DeviceUse, ...]:
    return tuple(
        DeviceUse(
            device.id,
            device.compute_seconds,
            traced.busy(segment for segment in bundle.manifest.segments if segment.device == device.id),
            _get_predicted_bytes(device),
            taken.device_bytes.get(device.id),
        )
        for device in bundle.manifest.devices
    )


def _get_predicted_bytes(device: DeviceRecord) -> int | None:
    """Return what a device's part takes; bundles from before do not say it for CPU devices."""
    if not device.id.startswith("cpu:"):
        return device.peak_bytes
    return device.process_bytes or (0 if not device.nodes else None)


def _compare_links(bundle: Bundle, traced: TracedRequests, crossed: Mapping[str, Any] | None) -> tuple[LinkUse, ...]:
    manifest, target = bundle.manifest, bundle.target
    latency, per_byte = target.link_arrays()
    found = []
    for (source, destination), names in list_crossing_values(manifest).items():
        ends = target.position(source), target.position(destination)
        sizes = [manifest.values[name].bytes for name in names]
        found.append(
            LinkUse(
                source,
                destination,
                len(names),
                sum(sizes),
                None if crossed is None else sum(count_value_bytes(crossed[name]) for name in names),
                float(len(names) * latency[ends] + sum(sizes) * per_byte[ends]),
                sum(traced.transfer(name, manifest.values[name].producer or "", source, destination) for name in names),
            )
        )
    return tuple(found)


def _compare_process(bundle: Bundle, taken: BundleMemory) -> ProcessUse:
    predicted, found = bundle.manifest.predicted, taken.process
    return ProcessUse(
        predicted.opening_bytes or None,
        found.opening_bytes if found else None,
        predicted.running_bytes or None,
        found.running_bytes if found else None,
    )


def count_value_bytes(value: Any) -> int:
    """Return the bytes of an array, of all in a sequence, or of the text of strings; 0 for an absent optional."""
    if value is None:
        return 0
    if isinstance(value, (list, tuple)):
        return sum(map(count_value_bytes, value))
    if isinstance(value, Mapping):
        return sum(count_value_bytes(part) for pair in value.items() for part in pair)
    array = np.asarray(value)
    return sum(len(str(text).encode()) for text in array.ravel()) if array.dtype.kind in "OUS" else array.nbytes
