"""The data of a report: plain records, which the page shows and `onnxplace report --json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PAGE_VERSION = 1
"""A change that readers of the JSON notice changes it."""


@dataclass(frozen=True)
class Entry:
    """A label with its text."""

    label: str
    text: str


@dataclass(frozen=True)
class DeviceSummary:
    """The work and memory of one device in a step."""

    id: str
    kind: str
    nodes: int
    compute_seconds: float
    idle_seconds: float
    """The time of the step in which it computes nothing."""
    weights_bytes: int
    peak_bytes: int
    limit_bytes: int


@dataclass(frozen=True)
class TimelineRow:
    """A line of a timeline: what a device computes, or what a link carries."""

    name: str
    kind: str
    """`compute` or `link`."""
    device: int
    """Index of the device; of a link, of the one that sends, or -1."""


@dataclass(frozen=True)
class Timeline:
    """Spans of time as parallel columns."""

    name: str
    """Such as `predicted` or `measured`."""
    note: str
    """Origin of the times."""
    end_seconds: float
    rows: tuple[TimelineRow, ...]
    row: tuple[int, ...]
    """Index of the row of each span."""
    start_seconds: tuple[float, ...]
    finish_seconds: tuple[float, ...]
    label: tuple[str, ...]
    """Segment, node or value of each span."""
    detail: tuple[str, ...]
    """Further facts about each span, such as the number of nodes, or the bytes."""


@dataclass(frozen=True)
class MemoryItem:
    """A part of the memory that a device holds at its peak."""

    name: str
    kind: str
    """`weights`, `value` or `workspace`."""
    bytes: int


@dataclass(frozen=True)
class MemoryCurve:
    """The memory of a device over a step, and what fills it at the peak."""

    device: int
    limit_bytes: int
    seconds: tuple[float, ...]
    bytes: tuple[int, ...]
    """Memory from each of `seconds` to the next one; the weights are part of it."""
    peak_seconds: float
    peak_bytes: int
    contents: tuple[MemoryItem, ...]
    """The largest parts."""
    other_items: int
    """Number of parts that `contents` leaves out."""
    other_bytes: int


@dataclass(frozen=True)
class Crossing:
    """A value that crosses between devices."""

    value: str
    bytes: int
    source: str
    destinations: tuple[str, ...]
    times: int
    """Number of times that it is sent in a step."""
    transfer_seconds: float
    """Time of all its transfers."""
    wait_seconds: float
    """Time in which readers wait for this value alone."""
    gain_seconds: float | None
    """Time by which the step would be longer with its readers on the device that computes it; None if unknown."""
    reason: str


@dataclass(frozen=True)
class Attempt:
    """A placement or strategy that the compiler considered."""

    name: str
    seconds: float
    is_kept: bool


@dataclass(frozen=True)
class AttemptGroup:
    """Attempts that were compared with each other."""

    title: str
    code: str
    """Code of the note that reports them."""
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True)
class ChainPart:
    """A part of the chain of events that determines the length of a step."""

    kind: str
    """`compute`, `transfer`, `wait` or `request`."""
    where: str
    """A device or a link."""
    seconds: float
    events: int


@dataclass(frozen=True)
class Bound:
    """The step, its lower bound, and what lies between them."""

    step_seconds: float
    lower_bound_seconds: float
    single_device_seconds: float
    even_seconds: float
    """The compute time of each device if it were spread evenly."""
    busiest_device: str
    busiest_seconds: float
    chain: tuple[ChainPart, ...]
    """The longest part first; together they are the step."""
    remarks: tuple[str, ...]
    """Sentences about causes that keep the step above the bound."""


@dataclass(frozen=True)
class LayerTree:
    """The nodes of the model below the parts of their names, as parallel columns; parents come before children."""

    label: tuple[str, ...]
    parent: tuple[int, ...]
    """-1 for the roots."""
    op: tuple[str, ...]
    """Operator of a node; empty for a layer."""
    device: tuple[int, ...]
    """Index of the device of a node; -1 for a layer."""
    seconds: tuple[float, ...]
    """Planned time of a node; 0 for a layer, and where it is not known."""


@dataclass(frozen=True)
class Table:
    """A table with a caption."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Note:
    """A diagnostic of the compiler."""

    code: str
    message: str
    where: str
    hint: str


@dataclass(frozen=True)
class PageData:
    """Everything that a report says about one bundle or one placement."""

    title: str
    source: str
    """Name of the bundle's folder, or of the cost graph."""
    kind: str
    """`bundle` or `placement`."""
    summary: tuple[Entry, ...]
    devices: tuple[DeviceSummary, ...]
    timelines: tuple[Timeline, ...]
    memory: tuple[MemoryCurve, ...]
    crossings: tuple[Crossing, ...]
    bound: Bound
    attempts: tuple[AttemptGroup, ...]
    layers: LayerTree
    division: tuple[Table, ...]
    """Shards, stages, replicas, repeats and the training step, where there are any."""
    notes: tuple[Note, ...]
    passes: tuple[Entry, ...]
    """The pipeline: each pass with its options."""
    origin: tuple[Entry, ...]
    """Versions, digests and sizes."""
    files: Mapping[str, tuple[int, str]]
    """Bytes and SHA-256 of each file."""
    version: int = PAGE_VERSION
