"""Measure time and memory of each device and link in one inference, next to the predictions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from onnxplace.bundle.bundle import Bundle, list_crossing_values, record_crossing_values
from onnxplace.bundle.bundle_routes import list_routes, move_to_route
from onnxplace.bundle.bundle_simulation import list_load_seconds, list_weight_waits
from onnxplace.bundle.manifest import Manifest, SegmentRecord
from onnxplace.errors import Diagnostic, OnnxplaceError
from onnxplace.machine.hardware import available_memory_bytes
from onnxplace.measure.memory_use import BundleMemory, Opening, measure_memory
from onnxplace.measure.step_inputs import RepeatedStep
from onnxplace.measure.trial import count_process_bytes, measure_segment_seconds
from onnxplace.pipeline.pipeline import Observer
from onnxplace.pipeline.registry import create_runtime
from onnxplace.runtime.interface import DEFAULT_MAX_IN_FLIGHT, Event, EventKind, Runtime, RuntimeSession, open_session
from onnxplace.runtime.timelines import RequestTimeline, TraceRecorder, find_medians

WARM_UP_RUNS = 2
# Traced requests for each one in flight: the first and the last ones, with fewer in flight, matter less then.
TRACED_PER_REQUEST = 8


@dataclass(frozen=True)
class DeviceUse:
    """A device in one inference; None for values that were not measured, or not predicted for these sizes."""

    id: str
    predicted_busy_seconds: float | None
    busy_seconds: float
    predicted_peak_bytes: int | None
    """Weights, each once, and values."""
    peak_bytes: int | None
    """Memory of the device's part of the process, or of the GPU."""


@dataclass(frozen=True)
class LinkUse:
    """Transfers between two devices in one inference; None for values not measured, or not predicted."""

    source: str
    destination: str
    values: int
    predicted_bytes: int | None
    bytes: int | None
    predicted_seconds: float | None
    """Sum over values, whether or not they overlap."""
    seconds: float
    """The same sum: each value from when it is computed and requested until it has arrived."""


@dataclass(frozen=True)
class StreamUse:
    """Weights that stream in one inference; None for values not measured, or not predicted for these sizes."""

    device: str
    bytes: int
    predicted_bytes_per_second: float | None
    bytes_per_second: float | None
    """While weights are on their way."""
    predicted_wait_seconds: float | None
    wait_seconds: float
    """Time in which the device waits for weights alone."""


@dataclass(frozen=True)
class ProcessUse:
    """Memory of the process that opens and runs the bundle; None for values not measured."""

    opening_bytes: int | None
    running_bytes: int | None
    all_plans_bytes: int | None = None
    """Of a process that has opened all plans, and run each at its size; None, as the next, if there is one plan."""
    predicted_all_plans_bytes: int | None = None


@dataclass(frozen=True)
class DeviceUsage:
    """Time and memory of one inference, by device and link."""

    devices: tuple[DeviceUse, ...]
    links: tuple[LinkUse, ...]
    streams: tuple[StreamUse, ...]
    process: ProcessUse
    opening: Opening | None
    """What it took to open the bundle, if memory was measured."""
    timelines: tuple[RequestTimeline, ...]
    """Timelines of the requests in flight together, or else of those that followed one another."""
    notes: tuple[Diagnostic, ...]
    """Why some values could not be measured."""


class TracedRequests:
    """Events of requests that were traced one after the other."""

    def __init__(self) -> None:
        self._requests: list[Sequence[Event]] = []
        self._spans: dict[tuple[str, EventKind, str], list[tuple[float, float]]] = {}
        self.timelines: tuple[RequestTimeline, ...] = ()
        """Timelines of these requests, or of those that were in flight together afterwards."""

    def add(self, events: Sequence[Event]) -> None:
        """Add the events of one request."""
        self._requests.append(events)
        for event in events:
            span = (event.start_seconds, event.finish_seconds)
            self._spans.setdefault((event.device, event.kind, event.name), []).append(span)

    def busy(self, segments: Iterable[SegmentRecord]) -> float:
        """Return the seconds in which the segments' device neither waited nor copied.

        It is the sum of the segments' medians: most segments are short, and seldom wait for a core.
        """
        seconds = find_medians(map(measure_segment_seconds, self._requests))
        return sum((seconds[segment.id] for segment in segments), 0.0)

    def copying(self, device: str) -> float:
        """Return the seconds that a device copied received values: the sum of the copies' medians."""
        copies = (
            np.diff(spans) for (owner, kind, _), spans in self._spans.items() if (owner, kind) == (device, "copy")
        )
        return sum((float(np.median(seconds)) for seconds in copies), 0.0)

    def median_seconds(self, device: str, kind: EventKind, name: str) -> float:
        """Return the median seconds of an event that began after its request; 0 if there was none."""
        seconds = [finish - start for start, finish in self._spans.get((device, kind, name), []) if start > 0]
        return float(np.median(seconds)) if seconds else 0.0

    def transfer(self, value: str, producer: str, source: str, destination: str) -> float:
        """Return the median seconds from when a value was computed and requested until it had arrived."""
        runs, waits, copies = (
            np.array(self._spans[key])
            for key in ((source, "run", producer), (destination, "wait", value), (destination, "copy", value))
        )
        return float(np.median(copies[:, 1] - np.maximum(runs[:, 1], waits[:, 0])))


def measure_usage(
    bundle: Bundle,
    feeds: Mapping[str, Any],
    rounds: int,
    with_memory: bool,
    observer: Observer | None = None,
    in_flight: int = 1,
    runtime: Runtime | None = None,
    around: Bundle | None = None,
) -> DeviceUsage:
    """Run a bundle `rounds` times on the same feeds and measure devices, links and memory.

    Then run some more requests, `in_flight` of them at the same time, for their timelines. The feeds include initial
    values of states. Values that cannot be measured are noted. The runtime is `onnxruntime` by default. The memory of
    all plans is that of the bundle `around` a plan.
    """
    runtime = runtime or create_runtime("onnxruntime")
    if observer:
        observer("tracing", 0, 1 + with_memory)
    traced = _trace_requests(runtime, bundle, feeds, rounds, in_flight)
    busy = _measure_busy_seconds(runtime, bundle, feeds, rounds, traced)
    crossed, notes = _record_crossing(runtime, bundle, feeds)
    memory = measure_memory(bundle, {**feeds, **(crossed or {})}, observer, around) if with_memory else BundleMemory()
    process = memory.process
    opening, running = (process.opening_bytes, process.running_bytes) if process else (None, None)
    predicted = count_process_bytes((around or bundle).manifest) if memory.all_plans_bytes else None
    return DeviceUsage(
        devices=tuple(
            DeviceUse(
                id=device.id,
                predicted_busy_seconds=device.compute_seconds,
                busy_seconds=busy.get(device.id, 0.0),
                predicted_peak_bytes=device.peak_bytes,
                peak_bytes=memory.device_bytes.get(device.id),
            )
            for device in bundle.manifest.devices
        ),
        links=_compare_links(bundle, traced, crossed),
        streams=tuple(_compare_streams(bundle.manifest, traced)),
        process=ProcessUse(opening, running, memory.all_plans_bytes, predicted),
        opening=process.opening if process else None,
        timelines=traced.timelines,
        notes=(*notes, *memory.notes),
    )


def _trace_requests(
    runtime: Runtime, bundle: Bundle, feeds: Mapping[str, Any], rounds: int, in_flight: int = 1
) -> TracedRequests:
    traced, recorder = TracedRequests(), TraceRecorder()
    max_in_flight = max(in_flight, DEFAULT_MAX_IN_FLIGHT)
    with open_session(runtime, bundle, trace=True, max_in_flight=max_in_flight) as session:
        step = RepeatedStep(bundle, feeds)
        for number in range(WARM_UP_RUNS + rounds):
            inputs = step.prepare(session)
            called = time.perf_counter()
            result = session.run(inputs)
            if number >= WARM_UP_RUNS:
                traced.add(result.events)
                recorder.add(called, result)
        if in_flight > 1:
            recorder = _record_in_flight(session, feeds, in_flight, TRACED_PER_REQUEST * in_flight)
    traced.timelines = recorder.list_timelines()
    return traced


def _record_in_flight(session: RuntimeSession, feeds: Mapping[str, Any], in_flight: int, count: int) -> TraceRecorder:
    """Run `count` requests, `in_flight` of them at the same time; raises the error of one that fails."""
    recorder, places, futures = TraceRecorder(count), threading.Semaphore(in_flight), []
    for _ in range(count):
        places.acquire()
        called = time.perf_counter()
        future = session.submit(feeds)
        future.add_done_callback(partial(recorder.add_future, called))
        future.add_done_callback(lambda _: places.release())
        futures.append(future)
    for future in futures:
        future.result()
    return recorder


def _record_crossing(
    runtime: Runtime, bundle: Bundle, feeds: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, tuple[Diagnostic, ...]]:
    """Return the values that cross between devices; None and a note if memory does not suffice to keep them."""
    manifest = bundle.manifest
    crossing = {name for names in list_crossing_values(manifest).values() for name in names}
    if not crossing:
        return {}, ()
    needs = count_process_bytes(manifest) + sum(manifest.values[name].bytes for name in crossing)
    if needs > (free := available_memory_bytes()):
        message = f"values that cross were not recorded: that needs {needs} bytes of memory, {free} are free"
        return None, (Diagnostic("C020", message, where=manifest.model),)
    try:
        with runtime.open(record_crossing_values(bundle)) as session:
            return session.run(feeds).outputs, ()
    except OnnxplaceError as problem:
        message = f"values that cross between devices were not recorded: {problem.message}"
        return None, (Diagnostic(problem.code, message, where=problem.where, hint=problem.hint),)


def _measure_busy_seconds(
    runtime: Runtime, bundle: Bundle, feeds: Mapping[str, Any], rounds: int, first: TracedRequests
) -> dict[str, float]:
    """Return the seconds in which each device is busy with one request, on the first route that uses it.

    `first` are requests on the first route; others are traced for devices that it does not use.
    """
    busy: dict[str, float] = {}
    for index, route in enumerate(list_routes(bundle.manifest)):
        if devices := [device for device in route.devices.values() if device not in busy]:
            moved = replace(bundle, manifest=move_to_route(bundle.manifest, route))
            traced = _trace_requests(runtime, moved, feeds, rounds) if index else first
            for device in devices:
                busy[device] = traced.busy(item for item in moved.manifest.segments if item.device == device)
    return busy


def _compare_links(bundle: Bundle, traced: TracedRequests, crossed: Mapping[str, Any] | None) -> tuple[LinkUse, ...]:
    manifest, target = bundle.manifest, bundle.target
    latency, per_byte = target.link_arrays()
    links = []
    for (source, destination), names in list_crossing_values(manifest).items():
        ends = target.position(source), target.position(destination)
        sizes = [manifest.values[name].bytes for name in names]
        producers = {name: manifest.values[name].producer or "" for name in names}
        links.append(
            LinkUse(
                source=source,
                destination=destination,
                values=len(names),
                predicted_bytes=sum(sizes),
                bytes=None if crossed is None else sum(count_value_bytes(crossed[name]) for name in names),
                predicted_seconds=float(len(names) * latency[ends] + sum(sizes) * per_byte[ends]),
                seconds=sum(traced.transfer(name, producers[name], source, destination) for name in names),
            )
        )
    return tuple(links)


def _compare_streams(manifest: Manifest, traced: TracedRequests) -> Iterator[StreamUse]:
    """Yield the stream of each device on the first route."""
    loads = dict(zip((item.id for item in manifest.segments), list_load_seconds(manifest, list_routes(manifest)[0])))
    waits = list_weight_waits(manifest)
    for stream in manifest.streams:
        own = [item for item in manifest.segments if item.device == stream.device and item.streamed]
        sizes = {item.id: sum(manifest.streamed[name].bytes for name in item.streamed) for item in own}
        seconds = {name: traced.median_seconds(stream.device, "load", name) for name in sizes}
        known = sum(size for name, size in sizes.items() if seconds[name])
        yield StreamUse(
            device=stream.device,
            bytes=sum(sizes.values()),
            predicted_bytes_per_second=sum(sizes.values()) / max(sum(loads[item.id] for item in own), 1e-12),
            bytes_per_second=known / sum(seconds.values()) if known else None,
            predicted_wait_seconds=waits.get(stream.device, 0.0),
            wait_seconds=sum(traced.median_seconds(stream.device, "wait", item.id) for item in own),
        )


def count_value_bytes(value: Any) -> int:
    """Return the bytes of an array, a sequence's elements, or strings' text; 0 for an absent optional."""
    if value is None:
        return 0
    if isinstance(value, (list, tuple)):
        return sum(map(count_value_bytes, value))
    if isinstance(value, Mapping):
        return sum(count_value_bytes(part) for pair in value.items() for part in pair)
    array = np.asarray(value)
    return sum(len(str(text).encode()) for text in array.ravel()) if array.dtype.kind in "OUS" else array.nbytes
