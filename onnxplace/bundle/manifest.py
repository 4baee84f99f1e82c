"""The manifest of a bundle: its records, as pydantic models, and their JSON Schema."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from onnxplace.feeds import MAX_DIMENSION, MAX_RANK
from onnxplace.target import Device, Link, LinkModel, Shared, Target
from onnxplace.utils import read_field_docs

SCHEMA_VERSION = "1.1"


Seconds = Annotated[float, Field(ge=0, lt=1e12, allow_inf_nan=False)]


Bytes = Annotated[int, Field(ge=0, lt=1 << 62)]


Dimension = Annotated[int, Field(ge=0, le=MAX_DIMENSION)]


Shape = Annotated[tuple[Dimension | str | None, ...], Field(max_length=MAX_RANK)]


class Record(BaseModel):
    """A part of the manifest: unknown fields, of a newer minor version, are passed over; nothing is altered."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class InputRecord(Record):
    """An input of the model, as the caller feeds it."""

    name: str
    dtype: str
    shape: Shape | None
    optional: bool = False


class OutputRecord(Record):
    """An output of the model, and the value that it returns."""

    name: str
    dtype: str
    shape: Shape | None
    value: str


class StateRecord(Record):
    """A value that one call hands to the next: what `output` returned is what `input` takes, unless it is fed."""

    output: str
    input: str
    device: str
    """Where it stays between calls."""


class ValueRecord(Record):
    """A value that crosses the border of a segment."""

    dtype: str
    shape: Shape | None
    bytes: Bytes
    producer: str | None
    """The segment that makes it; None for an input of the model."""
    readers: tuple[str, ...]


class SegmentRecord(Record):
    """A piece of the model that one device runs in one call."""

    id: str
    file: str
    device: str
    nodes: Bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    seconds: Seconds
    """Predicted, the overhead of the call included; as measured if there was a trial."""
    weights_bytes: Bytes
    workspace_bytes: Bytes


class Step(Record):
    """One step of a device's program."""

    op: Literal["run", "send", "receive", "free"]
    segment: str = ""
    value: str = ""
    peer: str = ""


class RepeatRecord(Record):
    """Equal layers of the model, one after the other: measured as one."""

    count: Annotated[int, Field(ge=2)]
    nodes: Bytes
    """Of one layer."""
    first: str
    """The first node of the first layer."""


class Predicted(Record):
    """What the compiler expects of one step."""

    step_seconds: Seconds
    """From the call to the last output, one request at a time."""
    single_device_seconds: Seconds
    """The best single device, whether it fits there or not."""
    single_device_fits: bool = True
    """Whether the whole model would fit on one device."""
    lower_bound_seconds: Seconds
    """No placement on these devices takes less, by the costs of nodes; at most what this one took in its trial."""
    interval_seconds: Seconds
    """Between two results, with requests in flight on all devices: the largest load of a device or a channel."""
    running_bytes: Bytes = 0
    """What the process takes while it runs steps, one at a time, itself included; 0 where it was not predicted."""
    opening_bytes: Bytes = 0
    """What it takes at most while it opens sessions; 0 where it was not predicted."""
    request_seconds: Seconds = 0
    """Part of a step before its first segment begins and after its last one ends."""


class TrialRecord(Record):
    """What came out when the bundle was run right after it was compiled; its segments' times are from there."""

    step_seconds: Seconds
    """The median step."""
    planned_seconds: Seconds
    """What the costs of the nodes had foretold."""
    requests: Bytes
    """How many counted."""
    waiting: Annotated[float, Field(ge=0, le=1)]
    """Which share of their time threads waited for a core."""


class DeviceRecord(Record):
    """What the compiler expects of one device in one step."""

    id: str
    nodes: Bytes
    compute_seconds: Seconds
    weights_bytes: Bytes
    peak_bytes: Bytes
    """Of weights, each once, and values: what the limit bounds."""
    limit_bytes: Bytes
    process_bytes: Bytes = 0
    """What it takes of a process alone: sessions with their copies of weights, values, and holes between them.

    Several CPU devices of a process share one arena, and its holes. 0 on GPUs.
    """


class FileRecord(Record):
    """A file of the bundle."""

    sha256: str
    bytes: Bytes


class LinkRecord(FileRecord):
    """A weights file of the model that the bundle refers to, as it was when the model was compiled."""

    mtime_ns: int


class TargetRecord(Record):
    """The devices and links it was compiled for."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    link_model: LinkModel
    shared: tuple[Shared, ...] = ()

    def target(self) -> Target:
        return Target(self.devices, self.links, self.link_model, self.shared)


class DiagnosticRecord(Record):
    """Something the compiler had to say."""

    code: str
    message: str
    where: str = ""
    hint: str = ""


class Manifest(Record):
    """Everything a runtime needs to know about a bundle, and where the bundle came from."""

    format: Literal["onnxplace bundle"] = "onnxplace bundle"
    """By which a folder is known as a bundle; the first ones did not say it."""
    schema_version: str
    model: str
    model_digest: str
    dimensions: dict[str, Dimension]
    """What symbolic dimensions were bound to for the costs; others can be run."""
    pipeline: str
    placer: str
    versions: dict[str, str]
    target: TargetRecord
    inputs: tuple[InputRecord, ...]
    outputs: tuple[OutputRecord, ...]
    states: tuple[StateRecord, ...] = ()
    """Values kept from call to call; since format 1.1."""
    segments: tuple[SegmentRecord, ...]
    values: dict[str, ValueRecord]
    programs: dict[str, tuple[Step, ...]]
    predicted: Predicted
    trial: TrialRecord | None = None
    """None if it was not run: where its devices are not here, or its costs were not measured."""
    devices: tuple[DeviceRecord, ...]
    transfers: Bytes
    transfer_bytes: Bytes
    diagnostics: tuple[DiagnosticRecord, ...]
    files: dict[str, FileRecord]
    custom_operators: tuple[str, ...] = ()
    """Those that ONNX Runtime has not, as `domain.Name`: they need a library; since format 1.1."""
    repeats: tuple[RepeatRecord, ...] = ()
    linked: dict[str, LinkRecord] = {}
    """Weights files that the segments refer to, by their path below the folder that the bundle is in."""


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of manifest.json, each field with what is written about it."""
    schema = Manifest.model_json_schema()
    parts = {Manifest.__name__: schema, **schema["$defs"]}
    for plain in (Device, Link, Shared):  # dataclasses: pydantic before 2.13 leaves out what is written about them
        parts[plain.__name__]["description"] = inspect.getdoc(plain)
    for kind in (Device, Link, Shared, *_records(Record)):
        # pydantic could do this as well, but as soon as the classes are made, which takes 30 ms of each start.
        for name, about in read_field_docs(kind).items():
            if name in parts.get(kind.__name__, {}).get("properties", {}):
                parts[kind.__name__]["properties"][name]["description"] = about
    return schema


def _records(kind: type[Record]) -> Iterator[type[Record]]:
    """Yield all that derive from a record."""
    for derived in kind.__subclasses__():
        yield derived
        yield from _records(derived)
