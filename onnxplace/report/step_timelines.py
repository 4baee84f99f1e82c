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
from onnxplace.utils import read_json

# More spans would make the page slow; a trace with more shows its first requests.
MAX_SPANS = 60_000
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
    data = read_json(path, "D020", "a trace")
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise InputError("D020", "expected a JSON object with traceEvents", where=str(path), hint=_TRACE_HINT)
    names = {
        event.get("pid"): (event.get("args") or {}).get("name")
        for event in events
        if event.get("ph") == "M" and event.get("name") == "process_name"
    }
    timelines = []
    for name in ("measured", "predicted"):
        own = [event for event in events if names.get(event.get("pid")) == name]
        rows = {event.get("tid"): str((event.get("args") or {}).get("name")) for event in own if _names_row(event)}
        spans = [event for event in own if event.get("ph") == "X" and event.get("cat") in ("run", "copy")]
        _require_segments(spans, frozenset(segments), path)
        if spans:
            timelines.append(_draw_events(spans, rows, name, device_names, path))
    if not timelines:
        message = "it has no measured or predicted events"
        raise InputError("D020", message, where=str(path), hint=_TRACE_HINT)
    return tuple(timelines)


def _names_row(event: Mapping[str, Any]) -> bool:
    return event.get("ph") == "M" and event.get("name") == "thread_name"


def _require_segments(spans: Sequence[Mapping[str, Any]], known: frozenset[str], path: str | Path) -> None:
    """Raise InputError if a trace runs segments that the bundle does not have."""
    for event in spans:
        if event["cat"] == "run" and event.get("name") not in known:
            message = f"expected a trace of this bundle, found the segment {str(event.get('name'))!r} in it"
            hint = "trace the bundle again: `onnxplace run BUNDLE --trace F.json`"
            raise InputError("D021", message, where=str(path), hint=hint)


def _draw_events(
    spans: Sequence[Mapping[str, Any]],
    rows: Mapping[object, str],
    name: str,
    device_names: Sequence[str],
    path: str | Path,
) -> Timeline:
    """Return the timeline of the events of one process of a trace."""
    columns, index = TimelineColumns(), {device: position for position, device in enumerate(device_names)}
    for device in device_names:
        columns.rows.setdefault(TimelineRow(device, "compute", index[device]), len(columns.rows))
    try:
        ordered = sorted(spans, key=lambda event: float(event["ts"]))
        for event in ordered[:MAX_SPANS]:
            device = rows.get(event.get("tid"), "").partition(" ")[0]
            row = _choose_row(event, device, rows.get(event.get("tid"), ""), index)
            start, arguments = float(event["ts"]) * 1e-6, event.get("args") or {}
            finish = start + float(event["dur"]) * 1e-6
            columns.add(row, start, finish, str(event["name"]), _describe_event(arguments))
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        message = f"an event is malformed: {type(problem).__name__}: {problem}"
        raise InputError("D020", message, where=str(path), hint=_TRACE_HINT) from None
    requests = {(event.get("args") or {}).get("request") for event in spans}
    more = f"; the first {MAX_SPANS} of {len(spans)} events" if len(spans) > MAX_SPANS else ""
    count = f"{len(requests)} request{'s' * (len(requests) != 1)}"
    return columns.build(name, f"{count} of the trace{more}")


def _choose_row(event: Mapping[str, Any], device: str, row: str, index: Mapping[str, int]) -> TimelineRow:
    """Return the row of an event: the compute of a device, or a link."""
    if event["cat"] == "run":
        return TimelineRow(device, "compute", index.get(device, -1))
    source = str((event.get("args") or {}).get("from", ""))
    if " outgoing" in row:
        return TimelineRow(f"{device} sends", "link", index.get(device, -1))
    return TimelineRow(f"{source} → {device}" if source else f"→ {device}", "link", index.get(source, -1))


def _describe_event(arguments: Mapping[str, Any]) -> str:
    """Return what a trace says about an event, besides its name and times."""
    texts = []
    for key in ("bytes", "compiled bytes"):
        if isinstance(arguments.get(key), int):
            texts.append(format_bytes(arguments[key]))
    if isinstance(arguments.get("nodes"), int):
        texts.append(f"{arguments['nodes']} nodes")
    texts.append(f"request {arguments.get('request', 0)}")
    return ", ".join(texts)
