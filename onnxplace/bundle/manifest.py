"""The manifest of a bundle: its records as pydantic models."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from onnxplace.errors import Diagnostic
from onnxplace.feeds.dimensions import MAX_DIMENSION, MAX_RANK, drop_derived_sizes
from onnxplace.model_metadata import ModelMetadata, TrainingStep
from onnxplace.target.target import Device, Link, LinkModel, Pool, Shared, Target

SCHEMA_VERSION = "1.0"
# What the devices of the host's process hold, next to what each device holds.
HOST = "host"


Seconds = Annotated[float, Field(ge=0, lt=1e12, allow_inf_nan=False)]


Bytes = Annotated[int, Field(ge=0, lt=1 << 62)]


Dimension = Annotated[int, Field(ge=0, le=MAX_DIMENSION)]


Shape = Annotated[tuple[Dimension | str | None, ...], Field(max_length=MAX_RANK)]


class Record(BaseModel):
    """A part of the manifest; unknown fields, of a newer minor version, are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


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


class InitialRecord(Record):
    """Where the initial value of a carried state is: plain bytes in a file, of the type of its input."""

    file: str
    """A file of the bundle, or one that it links to."""
    linked: bool = False
    """Whether the file is one of the model's weights files, by its path below the folder that contains the bundle."""
    offset: Bytes
    bytes: Bytes
    shape: Annotated[tuple[Dimension, ...], Field(max_length=MAX_RANK)]


class WeightRecord(InitialRecord):
    """Where a weight is that streams: its segments take it as an input."""

    dtype: str
    """ONNX Runtime's name of its type, such as `tensor(float16)`."""
    home: Literal["host", "disk"]
    """Whether the host's memory keeps it between runs, or it is read from its file each time."""


class StreamRecord(Record):
    """How weights stream to a device, in the order in which its program runs the segments that read them."""

    device: str
    pool_bytes: Annotated[int, Field(ge=1, lt=1 << 62)]
    """Memory on the device for weights that have arrived or are on their way."""
    bytes_per_second: dict[Literal["host", "disk"], Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    """Predicted rate from each home."""


class StateRecord(Record):
    """A carried state: `input` takes the value that `output` had in the previous call, unless it is fed."""

    output: str
    input: str
    device: str
    """The device that keeps it between calls."""
    initial: InitialRecord | None = None
    """Its value in the first call, unless it is fed."""


class ValueRecord(Record):
    """A value that enters or leaves a segment."""

    dtype: str
    shape: Shape | None
    bytes: Bytes
    producer: str | None
    """The segment that computes it; None for an input of the model."""
    readers: tuple[str, ...]


class StaticRecord(Record):
    """A segment for devices that need static shapes: its model for the sizes that the bundle was compiled for."""

    file: str
    """That of the segment where the sizes of its inputs never vary."""
    shapes: dict[str, Annotated[tuple[Dimension, ...], Field(max_length=MAX_RANK)]] = {}
    """Shapes of the inputs whose sizes vary in other requests."""
    values: dict[str, str] = {}
    """Inputs that follow from the sizes and are constants in this model: their bytes, as hexadecimal digits."""


class CompiledRecord(Record):
    """A segment as a provider compiled it: a model whose EPContext nodes refer to binary files beside it."""

    files: Annotated[tuple[str, ...], Field(min_length=1)]
    """The model, then its binary files; a bundle works without them."""
    made_for: str
    """Provider, hardware, ONNX Runtime and options that it was compiled for, and is opened with."""
    compile_seconds: Seconds
    """Measured time to open the model from which it was compiled."""
    open_seconds: Seconds
    """Measured time to open it."""


class SegmentRecord(Record):
    """A part of the model that one device runs in one call."""

    id: str
    file: str
    device: str
    nodes: Bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    seconds: Seconds
    """Predicted time, the overhead of the call included; measured if there was a trial."""
    weights_bytes: Bytes
    workspace_bytes: Bytes
    keeps_order: bool = False
    """Whether its session computes the nodes one by one in the order of the file, without fusing them."""
    streamed: tuple[str, ...] = ()
    """Weights that stream: they are inputs of its model, in addition to `inputs`, and one block in the pool."""
    planned_seconds: Seconds | None = None
    """Predicted from the costs of its nodes; None if there was no trial."""
    static: StaticRecord | None = None
    """Its model for devices that need static shapes; None if no device does, or if sizes depend on data.

    The host computes it at other sizes.
    """
    compiled: tuple[CompiledRecord, ...] = ()
    """Compiled models of it, by hardware."""
    optimised: str = ""
    """Its model as ONNX Runtime optimised it for the processor of `optimised_for`; a bundle works without it."""


class Step(Record):
    """One step of a device's program."""

    op: Literal["run", "send", "receive", "free"]
    segment: str = ""
    value: str = ""
    peer: str = ""


class RouteRecord(Record):
    """A way of a request through the bundle: its programs on other devices."""

    devices: dict[str, str]
    """Device with a program -> the device that follows this program for requests on this route."""
    seconds: dict[str, Seconds]
    """Segment -> predicted time on its device of this route; measured if there was a trial."""
    share: Annotated[float, Field(ge=0, le=1)]
    """Share of the requests that the prediction sends along this route."""


class RepeatRecord(Record):
    """Consecutive equal layers of the model, of which one was measured."""

    count: Annotated[int, Field(ge=2)]
    nodes: Bytes
    """Nodes of one layer."""
    first: str
    """The first node of the first layer."""


class ShardedKindRecord(Record):
    """Nodes of one operator that are split alike."""

    op: str
    layout: str
    """How their results are split, in words; `whole` for not at all."""
    count: Bytes
    """Number of nodes of the original model."""
    seconds: Seconds
    """What they take together on one device."""
    node: str = ""
    """The most expensive of them."""


class SplitStateRecord(Record):
    """A carried state that lies in parts on several devices."""

    input: str
    """Name in the original model."""
    output: str
    axis: Annotated[int, Field(ge=-1)]
    """Axis along which the parts follow one another; -1 if each part is a copy of the whole."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: tuple[Bytes, ...] = ()
    """Size of each part along the axis."""
    copies: Annotated[int, Field(ge=1)] = 1
    """So many parts, one after the other, are equal copies of one."""


class ShardingRecord(Record):
    """How operators are split over devices."""

    ways: Annotated[int, Field(ge=2)]
    """Number of devices that share operators."""
    stages: Annotated[int, Field(ge=1)] = 1
    """Number of pipeline stages, each on a group of `ways` devices."""
    exchanges: dict[str, int]
    """Kind of exchange -> number."""
    kinds: tuple[ShardedKindRecord, ...]
    """The most expensive first."""
    states: tuple[SplitStateRecord, ...] = ()


class BatchingRecord(Record):
    """Whether requests can be joined into one, proven when the model was compiled."""

    dimension: str = ""
    """The symbolic dimension along which requests can be joined; empty if they cannot."""
    inputs: dict[str, Annotated[int, Field(ge=0, lt=MAX_RANK)]] = {}
    """Input -> its axis with the dimension; other inputs have to be the same for all requests."""
    outputs: dict[str, Annotated[int, Field(ge=0, lt=MAX_RANK)]] = {}
    """Output -> its axis with the dimension; other outputs are the same for all requests."""
    reason: str = ""
    """Why requests cannot be joined."""
    node: str = ""
    """The node that prevents it; empty if it is none."""


class TrainingNodesRecord(Record):
    """The number of nodes of each phase of a training step, as placement counts them."""

    forward: Bytes
    backward: Bytes
    update: Bytes
    owned_backward: Bytes
    """Backward nodes whose forward node is known."""
    of_one_parameter: Bytes
    """Backward and update nodes that compute the gradient, a moment or the new values of one parameter only."""


class TrainingRecord(TrainingStep):
    """The training step that a model is, by its metadata or by its flow of data.

    Names are those of the original model.
    """

    nodes: TrainingNodesRecord | None = None
    """None where nodes were not recognised."""


class Predicted(Record):
    """The compiler's prediction for one inference."""

    step_seconds: Seconds
    """From the call to the last output, one request at a time."""
    single_device_seconds: Seconds
    """On the best single device, whether the model fits there or not; 0 if each refuses some node.

    Measured where the trial compared with it.
    """
    single_device_fits: bool = True
    """Whether some device takes every node of the model, and has room for it."""
    lower_bound_seconds: Seconds
    """Lower bound over all placements, proven for the costs of nodes; comparable with the step that these plan."""
    interval_seconds: Seconds
    """Between two results, with requests in flight on all devices: the largest load of a device, a channel, or Python.

    Measured where there was a trial with requests in flight.
    """
    request_seconds: Seconds = 0
    """Part of a step before its first segment begins and after its last one ends."""
    weight_wait_seconds: Seconds = 0
    """Part of a step in which it waits for weights that stream; the times of segments do not include it."""


class TrialRecord(Record):
    """Measurements of the bundle in its last trial, from which its segments' times are."""

    step_seconds: Seconds
    """Median time of a request."""
    planned_seconds: Seconds
    """Predicted from the costs of the nodes."""
    requests: Bytes
    """Number of requests that counted."""
    waiting: Annotated[float, Field(ge=0, le=1)]
    """Share of their time in which threads waited for a core."""
    uncertainty: Annotated[float, Field(ge=0, le=1)] = 0
    """Share by which the median may be wrong: more where the speed of the machine drifted."""
    interval_seconds: Seconds = 0
    """Measured between two results, with requests in flight; 0 if that was not measured."""
    in_flight: Bytes = 0
    """Number of requests in flight of that measurement."""
    one_device_seconds: Seconds = 0
    """Median step of the unsplit model in one session with the cores of one device, in turns with the bundle.

    0, as the others below, if that was not measured.
    """
    all_cores_seconds: Seconds = 0
    """The same with all cores of this machine."""
    speedup_low: Seconds = 0
    speedup_high: Seconds = 0
    """Eight of ten turns had a speed-up over one device between the two."""


class SizeRecord(Record):
    """A size of requests: the step of each plan at it, by which a session chooses."""

    dimensions: dict[str, Dimension]
    """Sizes of symbolic dimensions."""
    seconds: Annotated[tuple[Seconds | None, ...], Field(min_length=1)]
    """Step of each plan, the bundle's own first; measured if there was a trial, None if it does not take the size."""
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0
    """How often it is, next to others that were compiled for; 0 for a size between them."""

    @property
    def text(self) -> str:
        """Return the sizes as `--shape` takes them, without those that follow from others."""
        return ",".join(f"{name}={size}" for name, size in drop_derived_sizes(self.dimensions).items())

    @property
    def fastest(self) -> int:
        """Return the index of the plan with the shortest step."""
        steps = [math.inf if seconds is None else seconds for seconds in self.seconds]
        return steps.index(min(steps))


class DeviceRecord(Record):
    """The compiler's prediction for one device in one inference.

    With several routes, memory counts the segments of all routes, and the time is that of the first one that uses it.
    """

    id: str
    nodes: Bytes
    compute_seconds: Seconds
    weights_bytes: Bytes
    peak_bytes: Bytes
    """The most that weights, each once, and values take; bounded by the limit."""
    limit_bytes: Bytes


class HeldRecord(Record):
    """What a device, or a process, holds for all plans of a bundle, each of which has run its size."""

    weights_bytes: Bytes
    """Weights of all plans. Those that sessions read where they lie count once; others that plans pack, once for each.
    """
    shared_bytes: Bytes
    """How much more they would be if each plan had its own."""
    peak_bytes: Bytes
    """The most that these weights and the values of one plan take."""


class FileRecord(Record):
    """A file of the bundle."""

    sha256: str
    bytes: Bytes


class LinkRecord(FileRecord):
    """A weights file of the model that the bundle refers to, as it was when the model was compiled."""

    mtime_ns: int = 0
    """0 for a file of the bundle around a plan, which is checked as the files of that bundle."""
    ctime_ns: int = 0
    """When the file or its attributes changed last, which no program can put back."""

    @property
    def is_shared(self) -> bool:
        """Return whether it is a file of the bundle around a plan: no time is recorded, which a file of its own has."""
        return not (self.mtime_ns or self.ctime_ns)


class TargetRecord(Record):
    """The devices and links that the bundle was compiled for."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    link_model: LinkModel
    shared: tuple[Shared, ...] = ()
    pools: tuple[Pool, ...] = ()

    def target(self) -> Target:
        """Return them as a target; raises TargetError if they are invalid."""
        return Target(self.devices, self.links, self.link_model, self.shared, self.pools)


class Manifest(Record):
    """Everything a runtime needs to know about a bundle, and the bundle's origin."""

    format: Literal["onnxplace bundle"] = "onnxplace bundle"
    """Marks a folder as a bundle."""
    schema_version: str
    model: str
    model_digest: str
    dimensions: dict[str, Dimension]
    """Sizes of symbolic dimensions that the costs assume; other sizes can be run."""
    pipeline: str
    placer: str
    versions: dict[str, str]
    target: TargetRecord
    inputs: tuple[InputRecord, ...]
    outputs: tuple[OutputRecord, ...]
    states: tuple[StateRecord, ...] = ()
    """Values carried from call to call."""
    segments: tuple[SegmentRecord, ...]
    values: dict[str, ValueRecord]
    programs: dict[str, tuple[Step, ...]]
    predicted: Predicted
    trial: TrialRecord | None = None
    """None if it was not run: if its devices are missing here, or its costs were not measured."""
    devices: tuple[DeviceRecord, ...]
    transfers: Bytes
    transfer_bytes: Bytes
    diagnostics: tuple[Diagnostic, ...]
    files: dict[str, FileRecord]
    optimised_for: str = ""
    """ONNX Runtime and processor of the optimised models, which are used for no others."""
    custom_operators: tuple[str, ...] = ()
    """Operators that ONNX Runtime lacks, as `domain.Name`; they need a library."""
    repeats: tuple[RepeatRecord, ...] = ()
    sharding: ShardingRecord | None = None
    """None if no operator is split."""
    streamed: dict[str, WeightRecord] = {}
    """Weights that stream, by name."""
    streams: tuple[StreamRecord, ...] = ()
    """Of each device with such weights."""
    routes: tuple[RouteRecord, ...] = ()
    """Further routes of requests; the programs, on their own devices, are the first route."""
    batching: BatchingRecord | None = None
    """Whether requests can be joined; None if that was not examined."""
    training: TrainingRecord | None = None
    """None if the model is no training step."""
    metadata: ModelMetadata = ModelMetadata()
    """What the ONNX file said of the model."""
    linked: dict[str, LinkRecord] = {}
    """Weights files that the segments refer to, by their path below the folder that contains the bundle."""
    plans: tuple[str, ...] = ()
    """Folders of further plans for other sizes: bundles of the same model, which share its weights."""
    sizes: tuple[SizeRecord, ...] = ()
    """Sizes that it was compiled for, if there were several, and sizes between them."""
    held: dict[str, HeldRecord] = {}
    """Device -> what it holds for all plans, if there are several; `host` for the process with all CPU devices."""
    plans_overlap: bool = False
    """Whether the devices also have room for the values of all plans at once, so that requests of different plans may
    overlap."""
    link_levels: Annotated[int, Field(ge=1, le=2)] = 1
    """How many folders above the bundle's own the paths in `linked` begin: 2 in a plan of a bundle with linked weights.
    """

    @property
    def step_seconds(self) -> float:
        """Return the step: of the trial, if there was one, else the predicted one."""
        return self.trial.step_seconds if self.trial else self.predicted.step_seconds

    @property
    def speedup(self) -> float | None:
        """Return how many times as fast the step is as one device; None if that is unknown.

        Both times are of one trial, or of one set of costs.
        """
        single, step = self.predicted.single_device_seconds, self.step_seconds
        if self.trial and not self.trial.one_device_seconds:
            step = self.trial.planned_seconds
        return single / step if min(single, step) > 0 else None

    @property
    def is_unsure(self) -> bool:
        """Return whether other programs disturbed the measurements, or these contradict each other."""
        return any(note.code == "C004" for note in self.diagnostics)

    @property
    def gap(self) -> float | None:
        """Return how far the step that the costs of nodes plan is above their lower bound, as a share of it."""
        planned = self.trial.planned_seconds if self.trial else self.predicted.step_seconds
        bound = self.predicted.lower_bound_seconds
        return planned / bound - 1 if bound > 0 else None

    @property
    def has_equal_sizes(self) -> bool:
        """Return whether dimensions of one name need one size: a split of operators, or states, were chosen for it."""
        return self.sharding is not None or bool(self.states)
