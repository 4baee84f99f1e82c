"""Write timelines in the trace event format of Chrome, which Perfetto opens, too.

The format is that of Google's "Trace Event Format": https://perfetto.dev/docs/getting-started/other-formats. Perfetto
asks for more than it says, and this file keeps to that: thread numbers are unique over all processes, events of a row
do not overlap, and an arrow begins and ends inside events.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.bundle_routes import list_route_devices, list_routes
from onnxplace.bundle.manifest import Manifest
from onnxplace.runtime.interface import Event
from onnxplace.runtime.timelines import RequestTimeline

# The names of the nodes in each segment.


def read_segment_nodes(bundle: Bundle) -> dict[str, tuple[str, ...]]:
    """Return the names of the nodes of each segment, by segment; a node without a name goes by its operator."""
    import onnx

    models = {item.id: onnx.load(bundle.file(item.file), load_external_data=False) for item in bundle.manifest.segments}
    return {segment: tuple(node.name or node.op_type for node in model.graph.node) for segment, model in models.items()}


# Colours of requests in Chrome's viewer, among the names that the format defines; they repeat.
_COLORS = (
    "thread_state_running",
    "rail_response",
    "thread_state_iowait",
    "rail_animation",
    "thread_state_runnable",
    "good",
    "rail_load",
    "startup",
    "cq_build_running",
    "yellow",
)
# Times are multiples of an eighth of a microsecond. Readers multiply by 1000 and cut off: such numbers stay exact, so
# that events that touch do not overlap afterwards.
_TICKS_PER_MICROSECOND = 8
_ROWS = ("compute", "incoming", "outgoing", "weights")
# A thread with the number of a process would be its main thread.
FIRST_THREAD = 100


@dataclass
class _Rows:
    """Rows of one kind, such as the compute of a device: as many as its events need in order not to overlap."""

    name: str
    ends: list[int] = field(default_factory=list)
    """When the last event of each row ends."""
    first_thread: int = 0
    """The thread of the first row; the others follow. Known once all events have rows."""

    def choose(self, start: int, finish: int) -> tuple[int, int]:
        """Return the first row that is free from `start` on, and the start; events come in the order of their start.

        Of two events that touch, rounding may set the second one a tick too early: then it starts where the first ends.
        """
        for row, end in enumerate(self.ends):
            if end <= start + 1:
                start = max(start, end)
                self.ends[row] = max(start, finish)
                return row, start
        self.ends.append(finish)
        return len(self.ends) - 1, start

    def list_threads(self) -> list[tuple[int, str]]:
        """Return the thread and the text of each row; the first one has no number."""
        texts = [self.name if row == 0 else f"{self.name} {row + 1}" for row in range(len(self.ends))]
        return list(enumerate(texts, self.first_thread))


@dataclass(frozen=True)
class _Span:
    """An event on the common clock, in ticks, and its row."""

    event: Event
    start: int
    finish: int
    rows: _Rows
    row: int

    @property
    def thread(self) -> int:
        return self.rows.first_thread + self.row


def chrome_trace(
    measured: Sequence[RequestTimeline],
    predicted: Sequence[RequestTimeline],
    manifest: Manifest,
    segment_nodes: Mapping[str, Sequence[str]] | None = None,
    further: Mapping[str, tuple[Manifest, Mapping[str, Sequence[str]]]] | None = None,
) -> dict[str, Any]:
    """Return timelines in Chrome's trace format, in microseconds since the first submission.

    There are two processes, "measured" and "predicted", and of each further plan two, such as "measured plan1". Each
    has a row for the segments that a device runs, for values that it waits for and receives, for values that it sends
    where that takes time itself, for weights that stream to it, and rows for requests in flight. Arrows lead from the
    segment that computes a value over its transfer to the segment that reads it first.

    Args:
        measured: The requests as they ran.
        predicted: The same requests as predicted; may be empty.
        manifest: The bundle's.
        segment_nodes: The names of the nodes of each segment, if they are to be shown.
        further: The same of further plans, by name.
    """
    origin = min((item.submitted_seconds for item in (*measured, *predicted)), default=0.0)
    arrows, thread = itertools.count(1), FIRST_THREAD
    entries: list[dict[str, Any]] = []
    plans = [("", (manifest, segment_nodes or {})), *(further or {}).items()]
    kinds = itertools.product(enumerate(plans), (("measured", measured), ("predicted", predicted)))
    for process, ((plan, (name, described)), (kind, timelines)) in enumerate(kinds, 1):
        if own := [item for item in timelines if item.plan == plan]:
            writer = _ProcessWriter(process, f"{kind} {name}".rstrip(), origin, *described)
            entries += writer.write(own, thread, arrows)
            thread = 1 + max(entry["tid"] for entry in entries)
    other = {"model": manifest.model, "requests": len(measured)}
    return {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": other}


@dataclass
class _ProcessWriter:
    """Writes the timelines of one process of the trace."""

    process: int
    name: str
    origin_seconds: float
    """Where the trace begins, on the common clock."""
    manifest: Manifest
    nodes: Mapping[str, Sequence[str]]
    """Names of the nodes of each segment."""

    def __post_init__(self) -> None:
        self.routes = list_routes(self.manifest)
        self.segments = {segment.id: segment for segment in self.manifest.segments}

    def write(
        self, timelines: Sequence[RequestTimeline], first_thread: int, arrows: Iterator[int]
    ) -> list[dict[str, Any]]:
        """Return the entries of all requests; arrows come after the events that they connect."""
        rows = {
            (device, kind, copy): _Rows(_name_row(device, kind, copy))
            for copy in sorted({0, *(timeline.copy for timeline in timelines)})
            for device in list_route_devices(self.manifest)
            for kind in _ROWS
        }
        items = sorted(
            (
                (self._tick(timeline, event.start_seconds), self._tick(timeline, event.finish_seconds), index, event)
                for index, timeline in enumerate(timelines)
                for event in timeline.events
            ),
            key=lambda item: item[:3],
        )
        spans: list[list[_Span]] = [[] for _ in timelines]
        for start, finish, index, event in items:
            key = (event.device, self._choose_row(event), event.copy)
            own = rows.setdefault(key, _Rows(_name_row(*key)))
            row, start = own.choose(start, finish)
            spans[index].append(_Span(event, start, max(start, finish), own, row))
        in_flight = _Rows("requests")
        requests = [self._describe_request(timeline, in_flight) for timeline in timelines]
        for item in (*rows.values(), in_flight):
            item.first_thread, first_thread = first_thread, first_thread + len(item.ends)
        for entry in requests:
            entry["tid"] += in_flight.first_thread
        events = [self._describe_event(span, timeline) for timeline, own in zip(timelines, spans) for span in own]
        flows = [arrow for own in spans for arrow in self._draw_arrows(own, arrows)]
        return [*self._name_rows([*rows.values(), in_flight]), *events, *requests, *flows]

    def _tick(self, timeline: RequestTimeline, seconds: float) -> int:
        return _count_ticks(timeline.submitted_seconds - self.origin_seconds + seconds)

    def _choose_row(self, event: Event) -> str:
        """Return the row of an event: a copy that the producer of a value does is outgoing."""
        if event.kind in ("run", "load"):
            return "compute" if event.kind == "run" else "weights"
        return "outgoing" if event.kind == "copy" and self._find_source(event) == event.device else "incoming"

    def _find_source(self, event: Event) -> str | None:
        """Return the device that computes a value on the route of its request; None for inputs of the model."""
        value = self.manifest.values.get(event.name)
        segment = self.segments.get(value.producer or "") if value is not None else None
        route = self.routes[event.route if event.route < len(self.routes) else 0]
        return None if segment is None else route.devices.get(segment.device, segment.device)

    def _name_rows(self, rows: Iterable[_Rows]) -> list[dict[str, Any]]:
        """Return the names of the process and its rows, in their order."""
        named = [thread for item in rows for thread in item.list_threads()]
        process: dict[str, Any] = {"ph": "M", "pid": self.process, "tid": 0}
        entries = [
            {**process, "name": "process_name", "args": {"name": self.name}},
            {**process, "name": "process_sort_index", "args": {"sort_index": self.process}},
        ]
        for position, (number, text) in enumerate(named):
            row = {"ph": "M", "pid": self.process, "tid": number}
            entries.append({**row, "name": "thread_name", "args": {"name": text}})
            entries.append({**row, "name": "thread_sort_index", "args": {"sort_index": position}})
        return entries

    def _describe_request(self, timeline: RequestTimeline, rows: _Rows) -> dict[str, Any]:
        """Return the entry of a request, with its row in place of a thread."""
        start, finish = self._tick(timeline, 0.0), _count_ticks(timeline.finish_seconds - self.origin_seconds)
        row, start = rows.choose(start, max(start, finish))
        entry = self._make_entry("request", f"request {timeline.number}", start, max(start, finish), timeline)
        return {**entry, "tid": row}

    def _describe_event(self, span: _Span, timeline: RequestTimeline) -> dict[str, Any]:
        """Return the entry of an event: a segment with its nodes, or a value with its producer and its size."""
        event = span.event
        entry = self._make_entry(event.kind, event.name, span.start, span.finish, timeline)
        details: dict[str, Any] = {}
        if event.kind == "run":
            if segment := self.segments.get(event.name):
                details["nodes"] = segment.nodes
            if names := self.nodes.get(event.name):
                details |= {"first node": names[0], "last node": names[-1]}
        else:
            if source := self._find_source(event):
                details["from"] = source
            if event.bytes is not None:
                details["bytes"] = event.bytes
            elif event.name in self.manifest.values:
                details["compiled bytes"] = self.manifest.values[event.name].bytes
        return {**entry, "tid": span.thread, "args": {**entry["args"], **details}}

    def _make_entry(
        self, category: str, name: str, start: int, finish: int, timeline: RequestTimeline
    ) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "request": timeline.number, "route": timeline.route, "conversation": timeline.conversation,
        }  # fmt: skip
        joined = timeline.joined if timeline.joined > 1 else 0
        further = {"copy": timeline.copy, "joined requests": joined, "tag": timeline.tag}
        arguments |= {key: value for key, value in further.items() if value}
        return {
            "ph": "X",
            "pid": self.process,
            "cat": category,
            "name": name,
            "cname": _COLORS[timeline.number % len(_COLORS)],
            "ts": start / _TICKS_PER_MICROSECOND,
            "dur": (finish - start) / _TICKS_PER_MICROSECOND,
            "args": arguments,
        }

    def _draw_arrows(self, spans: Sequence[_Span], arrows: Iterator[int]) -> Iterator[dict[str, Any]]:
        """Yield arrows of a request, each as its start, a step at the transfer, and its end."""
        runs = {span.event.name: span for span in spans if span.event.kind == "run"}
        for copy in spans:
            if copy.event.kind != "copy" or self._choose_row(copy.event) != "incoming":
                continue
            value = self.manifest.values.get(copy.event.name)
            producer = runs.get(value.producer or "") if value is not None else None
            if value is None or producer is None or producer.event.finish_seconds > copy.event.start_seconds:
                continue
            readers = [
                runs[name]
                for name in value.readers
                if name in runs
                and runs[name].event.device == copy.event.device
                and runs[name].event.start_seconds >= copy.event.finish_seconds
            ]
            yield from self._draw_arrow(producer, copy, min(readers, key=lambda item: item.start, default=None), arrows)

    def _draw_arrow(
        self, producer: _Span, copy: _Span, reader: _Span | None, arrows: Iterator[int]
    ) -> Iterator[dict[str, Any]]:
        base = {"pid": self.process, "cat": "transfer", "name": copy.event.name, "id": next(arrows)}
        # One tick before its end, the producer is still open for readers of the file.
        leaves = max(producer.start, min(producer.finish - 1, copy.start))
        ends = [("s", leaves, producer.thread), ("t", copy.start, copy.thread)]
        ends = [*ends, ("f", reader.start, reader.thread)] if reader else [ends[0], ("f", copy.start, copy.thread)]
        for phase, tick, thread in ends:
            binding = {"bp": "e"} if phase == "f" else {}
            yield {**base, "ph": phase, "tid": thread, "ts": tick / _TICKS_PER_MICROSECOND, **binding}


def _name_row(device: str, kind: str, copy: int) -> str:
    """Return the name of a row; copies of the bundle after the first have their own rows."""
    return f"copy {copy} {device} {kind}" if copy else f"{device} {kind}"


def _count_ticks(seconds: float) -> int:
    return round(seconds * 1e6 * _TICKS_PER_MICROSECOND)
