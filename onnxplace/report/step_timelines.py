"""Timelines of a report: simulated steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from onnxplace.report.page_records import Timeline, TimelineRow
from onnxplace.report.placed_step import PlacedStep
from onnxplace.report.text import format_bytes

# With more links in use, each device has one row for all that it sends.
MAX_LINKS = 24


@dataclass
class TimelineColumns:
    """Rows and spans, as they are collected."""

    rows: dict[TimelineRow, int] = field(default_factory=dict)
    row: list[int] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    finish: list[float] = field(default_factory=list)
    label: list[str] = field(default_factory=list)
    detail: list[str] = field(default_factory=list)

    def add_row(self, row: TimelineRow) -> None:
        """Add a row if it is new."""
        self.rows.setdefault(row, len(self.rows))

    def add(self, row: TimelineRow, start: float, finish: float, label: str, detail: str) -> None:
        """Add a span, and its row if it is new."""
        self.add_row(row)
        self.row.append(self.rows[row])
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
        columns.add_row(row)
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
    has_row_per_link = len(set(zip(sent.source.tolist(), sent.destination.tolist()))) <= MAX_LINKS
    for value, source, destination, begin, end in sorted(transfers, key=lambda item: item[1:4]):
        link = step.name_link(source, destination) if has_row_per_link else f"{step.device_names[source]} sends"
        row = TimelineRow(link, "link", source)
        size = format_bytes(int(step.graph.value_bytes[value]))
        columns.add(row, begin, end, step.graph.value_names[value], size)
    return columns.build(name, note)
