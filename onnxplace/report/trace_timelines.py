"""Timelines of a report: the events of a trace file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from onnxplace.errors import InputError, format_count
from onnxplace.report.page_records import Timeline, TimelineRow
from onnxplace.report.step_timelines import TimelineColumns
from onnxplace.report.text import format_bytes
from onnxplace.utils import format_path, read_json

# More spans would make the page slow; a trace with more shows its first requests.
MAX_SPANS = 60_000
# A trace of a longer time than this, 11 days, is malformed.
MAX_MICROSECONDS = 1e12
MAX_COUNT = 1 << 62
_HINT = "`onnxplace run BUNDLE --trace F.json` writes one"

_Microseconds = Annotated[float, Field(ge=0, le=MAX_MICROSECONDS, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class _Arguments(BaseModel):
    """Facts about an event, besides its name and times."""

    model_config = ConfigDict(extra="ignore")

    name: str = ""
    """Name of a process or a thread."""
    request: int = 0
    source: str = Field(default="", alias="from")
    bytes: _Count | None = None
    compiled_bytes: _Count | None = Field(default=None, alias="compiled bytes")
    nodes: _Count | None = None

    def describe(self) -> str:
        """Return it as text."""
        sizes = [format_bytes(size) for size in (self.bytes, self.compiled_bytes) if size is not None]
        nodes = [] if self.nodes is None else [format_count(self.nodes, "node")]
        return ", ".join([*sizes, *nodes, f"request {self.request}"])


class _TraceEvent(BaseModel):
    """An event of a trace, as far as a report looks at it."""

    model_config = ConfigDict(extra="ignore")

    phase: str = Field(default="", alias="ph")
    """`X` for a span, `M` for the name of a process or a thread."""
    process: int = Field(default=0, alias="pid")
    thread: int = Field(default=0, alias="tid")
    category: str = Field(default="", alias="cat")
    name: str = ""
    start: _Microseconds = Field(default=0.0, alias="ts")
    duration: _Microseconds = Field(default=0.0, alias="dur")
    arguments: _Arguments = Field(default_factory=_Arguments, alias="args")

    @model_validator(mode="after")
    def require_times(self) -> Self:
        """Raise ValueError for a span without its times."""
        if self.is_span and not {"start", "duration"} <= self.model_fields_set:
            raise ValueError("expected ts and dur, found one or none of them")
        return self

    @property
    def is_span(self) -> bool:
        """Return whether it is a segment that ran, or a value that was copied."""
        return self.phase == "X" and self.category in ("run", "copy")


def read_trace(path: Path, device_names: Sequence[str], segments: Iterable[str]) -> tuple[Timeline, ...]:
    """Return the timelines of a file that `run --trace` or `bench --trace` wrote: measured, then predicted.

    Raises:
        InputError: It is not such a file, or a trace of another bundle.
    """
    events = _read_events(path)
    names = {item.process: item.arguments.name for item in events if _is_name(item, "process_name")}
    timelines, known = [], frozenset(segments)
    for name in ("measured", "predicted"):
        own = [item for item in events if names.get(item.process) == name]
        rows = {item.thread: item.arguments.name for item in own if _is_name(item, "thread_name")}
        spans = [item for item in own if item.is_span]
        _require_segments(spans, known, path)
        if spans:
            timelines.append(_draw_events(spans, rows, name, device_names))
    if not timelines:
        message = "expected measured or predicted events, found none"
        raise InputError("D020", message, where=format_path(path), hint=_HINT)
    return tuple(timelines)


def _read_events(path: Path) -> list[_TraceEvent]:
    data = read_json(path, "D020", "a trace")
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise InputError("D020", "expected a JSON object with traceEvents", where=format_path(path), hint=_HINT)
    entries = {index: entry for index, entry in enumerate(data["traceEvents"]) if _is_relevant(entry)}
    try:
        return [*TypeAdapter(dict[int, _TraceEvent]).validate_python(entries).values()]
    except ValidationError as problem:
        first = problem.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        message = f"traceEvents is malformed at {field!r}: {first['msg']}"
        raise InputError("D020", message, where=format_path(path), hint=_HINT) from None


def _is_relevant(entry: object) -> bool:
    """Return whether an entry of a trace may be a span or a name, or is malformed; other programs add further kinds."""
    return not isinstance(entry, dict) or entry.get("ph") in ("X", "M")


def _is_name(event: _TraceEvent, kind: str) -> bool:
    return event.phase == "M" and event.name == kind


def _require_segments(spans: Sequence[_TraceEvent], known: frozenset[str], path: Path) -> None:
    """Raise InputError if a trace runs segments that the bundle does not have."""
    for span in spans:
        if span.category == "run" and span.name not in known:
            message = f"expected a trace of this bundle, found the segment {span.name!r} in it"
            hint = "trace the bundle again: `onnxplace run BUNDLE --trace F.json`"
            raise InputError("D021", message, where=format_path(path), hint=hint)


def _draw_events(
    spans: Sequence[_TraceEvent], rows: Mapping[int, str], name: str, device_names: Sequence[str]
) -> Timeline:
    """Return the timeline of the events of one process of a trace."""
    columns, index = TimelineColumns(), {device: position for position, device in enumerate(device_names)}
    for device in device_names:
        columns.add_row(TimelineRow(device, "compute", index[device]))
    for span in sorted(spans, key=lambda item: item.start)[:MAX_SPANS]:
        row = _choose_row(span, rows.get(span.thread, ""), index)
        start, finish = span.start * 1e-6, (span.start + span.duration) * 1e-6
        columns.add(row, start, finish, span.name, span.arguments.describe())
    more = f"; the first {MAX_SPANS} of {len(spans)} events" if len(spans) > MAX_SPANS else ""
    count = format_count(len({span.arguments.request for span in spans}), "request")
    return columns.build(name, f"{count} of the trace{more}")


def _choose_row(span: _TraceEvent, row: str, index: Mapping[str, int]) -> TimelineRow:
    """Return the row of an event: the compute of a device, or a link."""
    device, source = row.partition(" ")[0], span.arguments.source
    if span.category == "run":
        return TimelineRow(device, "compute", index.get(device, -1))
    if " outgoing" in row:
        return TimelineRow(f"{device} sends", "link", index.get(device, -1))
    return TimelineRow(f"{source} → {device}" if source else f"→ {device}", "link", index.get(source, -1))
