"""The charts of a report: timelines of simulated steps and of traces, and memory over a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from onnxplace.errors import InputError, format_count
from onnxplace.graph.op_graph import Floats, Longs
from onnxplace.reports.page_records import MemoryCurve, MemoryItem, Timeline, TimelineRow
from onnxplace.reports.step_analysis import PlacedStep
from onnxplace.simulation.simulator import MemoryChanges, list_memory_changes
from onnxplace.utils.files import format_path, read_json
from onnxplace.utils.quantities import format_bytes

# ----------------------------------------------------------------------------------------- timelines of simulated steps


# With more links in use, each device has one row for all that it sends.
MAX_LINKS = 24


@dataclass
class TimelineColumns:
    """Rows and spans, as they are collected."""

    rows: dict[TimelineRow, int] = field(default_factory=dict)
    spans: list[tuple[int, float, float, str, int, str]] = field(default_factory=list)
    """In the order of the columns of a `Timeline`."""

    def add_row(self, row: TimelineRow) -> int:
        """Add a row if it is new; return its index."""
        return self.rows.setdefault(row, len(self.rows))

    def add(self, row: TimelineRow, start: float, finish: float, label: str, detail: str, reader: int = -1) -> None:
        """Add a span, and its row if it is new."""
        self.spans.append((self.add_row(row), start, finish, label, reader, detail))

    def build(self, name: str, note: str) -> Timeline:
        """Return the timeline."""
        columns: list[tuple[Any, ...]] = [*zip(*self.spans)] or [()] * 6
        return Timeline(name, note, max(columns[2], default=0.0), tuple(self.rows), *columns)


def draw_step(step: PlacedStep, name: str, note: str) -> Timeline:
    """Return the timeline of a simulated step: a row for each device, each link, and each stream of weights."""
    columns, simulation = TimelineColumns(), step.simulation
    rows = [TimelineRow(device, "compute", index) for index, device in enumerate(step.device_names)]
    for row in rows:
        columns.add_row(row)
    start, finish = simulation.start_seconds.tolist(), simulation.finish_seconds.tolist()
    device = step.device.tolist()
    for node in step.order.tolist():
        columns.add(rows[device[node]], start[node], finish[node], step.graph.names[node], step.details[node])
    sent = simulation.transfers
    sent_columns = sent.value, sent.source, sent.destination, sent.start_seconds, sent.finish_seconds
    transfers = zip(*(column.tolist() for column in sent_columns))
    span = {node: index for index, node in enumerate(step.order.tolist())}
    has_row_per_link = len(set(zip(sent.source.tolist(), sent.destination.tolist()))) <= MAX_LINKS
    for value, source, destination, begin, end in sorted(transfers, key=lambda item: item[1:4]):
        link = step.name_link(source, destination) if has_row_per_link else f"{step.device_names[source]} sends"
        row = TimelineRow(link, "link", source)
        size = format_bytes(int(step.graph.value_bytes[value]))
        readers = [node for node in step.graph.readers[value].tolist() if device[node] == destination]
        first = span[min(readers, key=lambda node: start[node])]
        columns.add(row, begin, end, step.graph.value_names[value], size, first)
    _add_loads(columns, step, span)
    return columns.build(name, note)


def _add_loads(columns: TimelineColumns, step: PlacedStep, span: Mapping[int, int]) -> None:
    """Add the weights that stream; those that come in the step before are drawn at the end of this one."""
    end, load = step.simulation.makespan_seconds, step.stream.blocks["load"]
    for node in (step.order[load[step.order] > 0] if len(load) else step.order[:0]).tolist():
        finish, device = float(step.simulation.arrival_seconds[node]), int(step.device[node])
        start, row = finish - float(load[node]), _name_stream(step.device_names[device], device)
        if finish > 0:
            columns.add(row, max(start, 0.0), finish, step.graph.names[node], "weights", span[node])
        if start < 0:
            columns.add(row, max(start + end, 0.0), min(finish, 0.0) + end, step.graph.names[node], "for the next step")


def _name_stream(device: str, index: int) -> TimelineRow:
    return TimelineRow(f"weights → {device}", "link", index)


# -------------------------------------------------------------------------------------------------- timelines of traces


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

    name: str = ""
    """The name of a process or a thread."""
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
    """An event of a trace, with the fields that a report shows."""

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
        """Return whether it is a segment that ran, a value that was copied, or weights that were loaded."""
        return self.phase == "X" and self.category in ("run", "copy", "load")

    def names(self, kind: str) -> bool:
        """Return whether it names a process or a thread, as `kind` says."""
        return self.phase == "M" and self.name == kind


def read_trace(path: Path, device_names: Sequence[str], segments: Iterable[str], plan: str) -> tuple[Timeline, ...]:
    """Return the timelines of a file that `run --trace` or `bench --trace` wrote: measured, then predicted.

    Of a `plan` of a bundle, they are those of this plan in a trace of the bundle, or of a trace of the plan alone.

    Raises:
        InputError: It is not such a file, or a trace of another bundle.
    """
    events = _read_events(path)
    names = {item.process: item.arguments.name for item in events if item.names("process_name")}
    timelines, known = [], frozenset(segments)
    for name in ("measured", "predicted"):
        process = f"{name} {plan}" if f"{name} {plan}" in names.values() else name
        own = [item for item in events if names.get(item.process) == process]
        rows = {item.thread: item.arguments.name for item in own if item.names("thread_name")}
        spans = [item for item in own if item.is_span]
        for span in spans:
            if span.category == "run" and span.name not in known:
                message = f"expected a trace of this bundle, found the segment {span.name!r} in it"
                hint = "trace the bundle again: `onnxplace run BUNDLE --trace F.json`"
                raise InputError("D020", message, where=format_path(path), hint=hint)
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
    # Spans, names and what is malformed; other programs add further kinds of entries.
    entries = {
        index: entry
        for index, entry in enumerate(data["traceEvents"])
        if not isinstance(entry, dict) or entry.get("ph") in ("X", "M")
    }
    try:
        return [*TypeAdapter(dict[int, _TraceEvent]).validate_python(entries).values()]
    except ValidationError as problem:
        first = problem.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        message = f"traceEvents is malformed at {field!r}: {first['msg']}"
        raise InputError("D020", message, where=format_path(path), hint=_HINT) from None


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
    """Return the row of an event: the compute of a device, a link, or a stream of weights."""
    device, source = row.partition(" ")[0], span.arguments.source
    if span.category == "run":
        return TimelineRow(device, "compute", index.get(device, -1))
    if span.category == "load":
        return _name_stream(device, index.get(device, -1))
    if " outgoing" in row:
        return TimelineRow(f"{device} sends", "link", index.get(device, -1))
    return TimelineRow(f"{source} → {device}" if source else f"→ {device}", "link", index.get(source, -1))


# --------------------------------------------------------------------------------------------------------------- memory


# Points of a curve; of more changes, the largest of each interval is kept.
MAX_POINTS = 2000
# Parts of the peak that are named.
MAX_CONTENTS = 12


def draw_memory(step: PlacedStep, weights_bytes: Sequence[int]) -> tuple[MemoryCurve, ...]:
    """Return the memory of each device over a step.

    Args:
        step: The simulated step.
        weights_bytes: Per device, the weights, which it holds throughout.
    """
    done = step.simulation
    times = done.start_seconds, done.finish_seconds, done.transfers, done.makespan_seconds
    changes = list_memory_changes(step.graph, step.device, step.order, *times)
    return tuple(_draw_device(step, changes, index, base) for index, base in enumerate(weights_bytes))


def _draw_device(step: PlacedStep, changes: MemoryChanges, device: int, weights_bytes: int) -> MemoryCurve:
    own = np.flatnonzero(changes.device == device)
    held = weights_bytes + np.cumsum(changes.change_bytes[own])
    peak = int(held.argmax()) if len(held) and held.max() > weights_bytes else -1
    seconds, sizes = _thin(changes.seconds[own], held)
    contents = _list_contents(step, changes, own[: peak + 1])
    if weights_bytes:
        contents.append(MemoryItem("weights", "weights", weights_bytes))
    contents.sort(key=lambda item: (-item.bytes, item.name))
    return MemoryCurve(
        device=device,
        limit_bytes=step.target.devices[device].memory_bytes,
        seconds=(0.0, *seconds.tolist(), step.simulation.makespan_seconds),
        bytes=(weights_bytes, *sizes.tolist(), int(held[-1]) if len(held) else weights_bytes),
        peak_seconds=float(changes.seconds[own[peak]]) if peak >= 0 else 0.0,
        peak_bytes=int(held[peak]) if peak >= 0 else weights_bytes,
        contents=tuple(contents[:MAX_CONTENTS]),
        other_items=len(contents[MAX_CONTENTS:]),
        other_bytes=sum(item.bytes for item in contents[MAX_CONTENTS:]),
    )


def _list_contents(step: PlacedStep, changes: MemoryChanges, until: Longs) -> list[MemoryItem]:
    """Return the values and workspaces that are held after these changes."""
    held: Counter[tuple[str, int]] = Counter()
    columns = (changes.value, changes.node, changes.change_bytes)
    for value, node, size in zip(*(column[until].tolist() for column in columns)):
        held[("value", value) if value >= 0 else ("workspace", node)] += size
    names = {"value": step.graph.value_names, "workspace": step.graph.names}
    return [MemoryItem(names[kind][index], kind, size) for (kind, index), size in sorted(held.items()) if size > 0]


def _thin(seconds: Floats, sizes: Longs) -> tuple[Floats, Longs]:
    """Return at most `MAX_POINTS` points of a curve, with the largest and the last one of each interval."""
    if len(seconds) <= MAX_POINTS:
        return seconds, sizes
    parts = np.array_split(np.arange(len(seconds)), MAX_POINTS // 2)
    kept = np.unique([index for part in parts for index in (part[int(sizes[part].argmax())], part[-1])])
    return seconds[kept], sizes[kept]
