"""The data of a report: plain records, which the page shows and `onnxplace report --json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PAGE_VERSION = 2
"""A change that readers of the JSON notice changes it."""


@dataclass(frozen=True)
class Entry:
    """A label with its text."""

    label: str
    text: str


@dataclass(frozen=True)
class Quantity(Entry):
    """A figure that two reports can be compared by."""

    value: float | None = None
    """In seconds, bytes, or a count."""
    lower_is_better: bool = False
    """False where neither less nor more is better."""


@dataclass(frozen=True)
class Advice:
    """Something that would make the step shorter, or says that nothing of its kind would."""

    text: str
    step_seconds: float | None
    """The step with it; None where that is not computed."""


@dataclass(frozen=True)
class Verdict:
    """What a report says first."""

    sentence: str
    basis: str
    """`from trial` or `from node costs`."""
    step_seconds: float
    times_as_fast: float | None
    """As the best single device; None if its time is unknown."""
    above_bound: float | None
    """Part of the lower bound by which the step is longer than it; None without a bound."""
    limit: str
    """The device with most of the chain that determines the step; or `transfers`, `waiting for weights`, `waiting` or
    `the request`."""
    advice: tuple[Advice, ...]


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
    """`from trial`, `from node costs`, or of a trace `measured` and `predicted`."""
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
    reader: tuple[int, ...]
    """Index of the span that begins with what a transfer brings; -1 for other spans, and where it is not known."""
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
    layer: str = ""
    """The layer of the node that computes it; empty if names do not tell."""


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
    """`compute`, `transfer`, `weights` (that stream, and are waited for), `wait` or `request`."""
    where: str
    """A device or a link."""
    seconds: float
    events: int


@dataclass(frozen=True)
class Bound:
    """The step, its lower bound, and what lies between them."""

    step_seconds: float
    planned_seconds: float
    """The step that the costs of the lower bound plan; without a trial, that is the step."""
    lower_bound_seconds: float
    single_device_seconds: float
    even_seconds: float
    """The compute time of each device if it were spread evenly."""
    busiest_device: str
    busiest_seconds: float
    chain: tuple[ChainPart, ...]
    """The longest part first; together they are the step."""
    remarks: tuple[str, ...] = ()
    """Sentences about causes that keep the step above the bound."""

    @property
    def times_as_fast(self) -> float | None:
        """Return how many times as fast as one device the step is; None if that is unknown."""
        single, step = self.single_device_seconds, self.step_seconds
        return single / step if min(single, step) > 0 else None

    @property
    def above_bound(self) -> float | None:
        """Return how far the planned step is above its lower bound, as a share of it; None without a bound."""
        return self.planned_seconds / self.lower_bound_seconds - 1 if self.lower_bound_seconds > 0 else None


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
    node: tuple[int, ...]
    """Index of a node in the order of the model; -1 for a layer."""
    segment: tuple[int, ...]
    """Index of the segment that has the node; -1 for a layer."""
    shape: tuple[str, ...]
    """Shapes of the outputs of a node; empty where they are not known."""
    source: tuple[str, ...]
    """Source of the time: `measured`, `estimated`, `given` or `known`; empty where it is not recorded."""


@dataclass(frozen=True)
class NodeEdges:
    """The values between nodes, as parallel columns: one entry for each reader of a value."""

    source: tuple[int, ...] = ()
    """Index of the node that computes the value, as in `LayerTree.node`."""
    reader: tuple[int, ...] = ()
    bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class SegmentSummary:
    """A segment in words: its layers and operators."""

    id: str
    title: str
    """Such as `image/block_0: MatMul ×2, Softmax`."""
    seconds: float
    """From the trial, if there was one."""
    planned_seconds: float
    """By the costs of its nodes."""


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
    verdict: Verdict
    summary: tuple[Quantity, ...]
    devices: tuple[DeviceSummary, ...]
    timelines: tuple[Timeline, ...]
    memory: tuple[MemoryCurve, ...]
    crossings: tuple[Crossing, ...]
    bound: Bound
    attempts: tuple[AttemptGroup, ...]
    layers: LayerTree
    edges: NodeEdges
    segments: tuple[SegmentSummary, ...]
    """Those of a bundle, in the order in which the compiler lists them."""
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
    summary_line: str = ""
    """The line about the step that `compile` prints, of a bundle."""
    is_unsure: bool = False
    """Whether the times of the trial are unsure; the line then says why."""


@dataclass(frozen=True)
class ComparedQuantity:
    """A figure of two reports."""

    label: str
    texts: tuple[str, str]
    """A dash where a report does not have it."""
    difference: str
    """Of the second one, compared with the first."""
    better: Literal["", "A", "B"]


@dataclass(frozen=True)
class Comparison:
    """Two reports next to each other."""

    sentence: str
    """Which one to take, and why."""
    rows: tuple[ComparedQuantity, ...]
    tables: tuple[Table, ...] = ()
    """What they decide differently: devices of nodes, the division of work, passes."""
