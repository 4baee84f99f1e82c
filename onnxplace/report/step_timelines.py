"""Timelines of a report: simulated steps, and the events of a trace file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnxplace.errors import InputError
from onnxplace.report.page_records import Timeline, TimelineRow
from onnxplace.report.placed_step import PlacedStep
from onnxplace.report.text import format_bytes
from onnxplace.utils import format_path, read_json

# More spans would make the page slow; a trace with more shows its first requests.
MAX_SPANS = 60_000
# A trace of a longer time than this, 11 days, is malformed.
MAX_MICROSECONDS = 1e12
# Larger numbers of bytes and nodes are left out of a description.
MAX_COUNT = 1 << 62
# With more links in use, each device has one row for all that it sends.
MAX_LINKS = 24
_TRACE_HINT = "`onnxplace run BUNDLE --trace F.json` writes one"


@dataclass
class TimelineColumns:
    """Rows and spans, as they are collected."""

    rows: dict[TimelineRow, int] = field(default_factory=dict)
    row: list[int] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    finish: list[float] = field(default_factory=list)
    label: list[str] = field(default_factory=list)
    detail: list[str] = field(default_factory=list)

    def add(self, row: TimelineRow, start: float, finish: float, label: str, detail: str) -> None:
        """Add a span, and its row if it is new."""
        self.row.append(self.rows.setdefault(row, len(self.rows)))
        self.start.append(start)
        self.finish.append(finish)
        self.label.append(label)
        self.detail.append(detail)

    def build(self, name: str, note: str) -> Timeline:
        """Return the timeline."""
        return Timeline(
            name=name,
            note=note,
            end_seconds=max(self.finish, default=0.0),
            rows=tuple(self.rows),
            row=tuple(self.row),
            start_seconds=tuple(self.start),
            finish_seconds=tuple(self.finish),
            label=tuple(self.label),
            detail=tuple(self.detail),
        )


def draw_step(step: PlacedStep, name: str, note: str) -> Timeline:
    """Return the timeline of a simulated step: a row for each device, then one for each link that is used."""
    columns, simulation = TimelineColumns(), step.simulation
    rows = [TimelineRow(device, "compute", index) for index, device in enumerate(step.device_names)]
    for row in rows:
        columns.rows.setdefault(row, len(columns.rows))
    start, finish, device = (
        simulation.start_seconds.tolist(), simulation.finish_seconds.tolist(), step.device.tolist()
    )  # fmt: skip
    for node in step.order.tolist():
        columns.add(rows[device[node]], start[node], finish[node], step.graph.names[node], step.details[node])
    sent = simulation.transfers
    transfers = zip(
        sent.value.tolist(),
        sent.source.tolist(),
        sent.destination.tolist(),
        sent.start_seconds.tolist(),
        sent.finish_seconds.tolist(),
    )
    links = set(zip(sent.source.tolist(), sent.destination.tolist()))
    for value, source, destination, begin, end in sorted(transfers, key=lambda item: item[1:4]):
        own = len(links) <= MAX_LINKS
        link = step.name_link(source, destination) if own else f"{step.device_names[source]} sends"
        row = TimelineRow(link, "link", source)
        size = format_bytes(int(step.graph.value_bytes[value]))
        columns.add(row, begin, end, step.graph.value_names[value], size)
    return columns.build(name, note)


def read_trace(path: str | Path, device_names: Sequence[str], segments: Iterable[str]) -> tuple[Timeline, ...]:
    """Return the timelines of a file that `run --trace` or `bench --trace` wrote: measured, then predicted.

    Raises:
        InputError: It is not such a file, or a trace of another bundle.
    """
    events, known = _read_events(path), frozenset(segments)
    names = {event.process: event.row_name for event in events if event.kind == "process_name"}
    timelines = []
    for name in ("measured", "predicted"):
        own = [event for event in events if names.get(event.process) == name]
        rows = {event.thread: event.row_name for event in own if event.kind == "thread_name"}
        spans = [event for event in own if event.kind in ("run", "copy")]
        _require_segments(spans, known, path)
        if spans:
            timelines.append(_draw_events(spans, rows, name, device_names))
    if not timelines:
        message = "it has no measured or predicted events"
        raise InputError("D020", message, where=format_path(path), hint=_TRACE_HINT)
    return tuple(timelines)


@dataclass(frozen=True)
class TraceEvent:
    """What a report reads of an event of a trace."""

    kind: str
    """`run` or `copy` for a span, `process_name` or `thread_name` for the name of its row, another text for others."""
    name: str
    process: int
    thread: int
    start_seconds: float
    seconds: float
    arguments: Mapping[str, Any]

    @property
    def row_name(self) -> str:
        """Return the name that the event gives to its process or thread."""
        return str(self.arguments.get("name"))


def _read_events(path: str | Path) -> list[TraceEvent]:
    """Return the events of a trace that matter; raises InputError if the file is not one, or an event is malformed."""
    data = read_json(path, "D020", "a trace")
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(events, list):
        raise InputError("D020", "expected a JSON object with traceEvents", where=format_path(path), hint=_TRACE_HINT)
    records = []
    for number, event in enumerate(events):
        try:
            records.append(_read_event(event))
        except (AttributeError, KeyError, TypeError, ValueError):
            message = (
                "expected an object with whole numbers 'pid' and 'tid', times 'ts' and 'dur', and an object 'args', "
                f"got {event!r} as event {number}"
            )
            raise InputError("D020", message, where=format_path(path), hint=_TRACE_HINT) from None
    return [record for record in records if record is not None]


def _read_event(event: Mapping[str, Any]) -> TraceEvent | None:
    """Return a record of an event, None if it does not matter; raises an error if it is malformed."""
    phase, name, category = event.get("ph"), event.get("name"), event.get("cat")
    if phase == "X" and category in ("run", "copy"):
        kind, numbers = str(category), [event["ts"], event["dur"]]
    elif phase == "M" and name in ("process_name", "thread_name"):
        kind, numbers = str(name), [0.0, 0.0]
    else:
        return None
    places, arguments = [event["pid"], event["tid"]], event.get("args") or {}
    if not all(type(number) in (int, float) and abs(number) < MAX_MICROSECONDS for number in numbers):
        raise ValueError("not a time")
    if not all(type(place) is int for place in places) or not isinstance(arguments, dict):
        raise TypeError("not a row, or not an object")
    start, length = (float(number) * 1e-6 for number in numbers)
    return TraceEvent(kind, str(name), places[0], places[1], start, max(0.0, length), arguments)


def _require_segments(spans: Sequence[TraceEvent], known: frozenset[str], path: str | Path) -> None:
    """Raise InputError if a trace runs segments that the bundle does not have."""
    for event in spans:
        if event.kind == "run" and event.name not in known:
            message = f"expected a trace of this bundle, found the segment {event.name!r} in it"
            hint = "trace the bundle again: `onnxplace run BUNDLE --trace F.json`"
            raise InputError("D021", message, where=format_path(path), hint=hint)


def _draw_events(
    spans: Sequence[TraceEvent], rows: Mapping[int, str], name: str, device_names: Sequence[str]
) -> Timeline:
    """Return the timeline of the events of one process of a trace."""
    columns, index = TimelineColumns(), {device: position for position, device in enumerate(device_names)}
    for device in device_names:
        columns.rows.setdefault(TimelineRow(device, "compute", index[device]), len(columns.rows))
    for event in sorted(spans, key=lambda event: event.start_seconds)[:MAX_SPANS]:
        row_name = rows.get(event.thread, "")
        row = _choose_row(event, row_name.partition(" ")[0], row_name, index)
        finish = event.start_seconds + event.seconds
        columns.add(row, event.start_seconds, finish, event.name, _describe_event(event.arguments))
    requests = {str(event.arguments.get("request")) for event in spans}
    more = f"; the first {MAX_SPANS} of {len(spans)} events" if len(spans) > MAX_SPANS else ""
    count = f"{len(requests)} request{'s' * (len(requests) != 1)}"
    return columns.build(name, f"{count} of the trace{more}")


def _choose_row(event: TraceEvent, device: str, row: str, index: Mapping[str, int]) -> TimelineRow:
    """Return the row of an event: the compute of a device, or a link."""
    if event.kind == "run":
        return TimelineRow(device, "compute", index.get(device, -1))
    source = str(event.arguments.get("from", ""))
    if " outgoing" in row:
        return TimelineRow(f"{device} sends", "link", index.get(device, -1))
    return TimelineRow(f"{source} → {device}" if source else f"→ {device}", "link", index.get(source, -1))


def _describe_event(arguments: Mapping[str, Any]) -> str:
    """Return what a trace says about an event, besides its name and times."""
    texts = []
    for key in ("bytes", "compiled bytes"):
        if isinstance(arguments.get(key), int) and abs(arguments[key]) < MAX_COUNT:
            texts.append(format_bytes(arguments[key]))
    if isinstance(arguments.get("nodes"), int) and abs(arguments["nodes"]) < MAX_COUNT:
        texts.append(f"{arguments['nodes']} nodes")
    texts.append(f"request {arguments.get('request', 0)}")
    return ", ".join(texts)
