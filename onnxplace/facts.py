"""Facts: costs of nodes, their devices and order, programs of devices, and what passes changed in a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxplace.bundle.manifest import DeviceRecord, Predicted, ShardedKindRecord, SplitStateRecord, Step, StreamRecord
from onnxplace.errors import format_count
from onnxplace.graph.graph_kernels import is_acyclic
from onnxplace.graph.op_graph import Floats, Ints, Longs, OpGraph
from onnxplace.model.model import Model
from onnxplace.model_metadata import TrainingRoles
from onnxplace.simulation.simulator import Simulation

if TYPE_CHECKING:
    from onnxplace.state import State


def require(condition: bool, message: str) -> None:
    """Raise ValueError unless a condition holds."""
    if not condition:
        raise ValueError(message)


def require_memory(state: State, simulation: Simulation) -> None:
    """Raise ValueError if a simulated peak exceeds the memory of its device or pool."""
    peaks = (*simulation.peak_bytes, *simulation.pool_peak_bytes)
    for memory, peak in zip(state.target.memories, peaks):
        require(int(peak) <= memory.memory_bytes, f"{memory.id} needs {int(peak)} bytes of {memory.memory_bytes}")


# ---------------------------------------------------------------------------------------------------------------- costs


# The time of a node on a device that refuses it: longer than any real time (`MAX_SECONDS`), and finite. What a refused
# node is part of is refused too, since times add up.
REFUSED_SECONDS = 1e9


def is_refused(seconds: Floats) -> NDArray[np.bool_]:
    """Return, per time, whether it says that a device does not take a node, or a group with such a node."""
    refused: NDArray[np.bool_] = np.asarray(seconds) >= REFUSED_SECONDS
    return refused


class Source(IntEnum):
    """The origin of a node's time."""

    MEASURED = 0
    """Measured on this machine with ONNX Runtime."""
    GIVEN = 1
    """Given by a cost file, as measured or written by the user."""
    ESTIMATED = 2
    """Estimated by a roofline model, from operations and bytes; cost files may hold such times, too."""
    KNOWN = 3
    """Known to be zero: constants, folded and removed nodes."""


@dataclass(frozen=True)
class Repeat:
    """Equal consecutive layers, in the model's order."""

    start: int
    """Position of the first node."""
    nodes: int
    """Number of nodes per layer."""
    count: int
    """Number of layers."""

    @property
    def stop(self) -> int:
        """Return the position after the last node."""
        return self.start + self.nodes * self.count


@dataclass(frozen=True)
class Quality:
    """The reliability of a measurement of a whole model."""

    runs: int
    """Runs without the profiler that were used."""
    spread: float
    """Half of the runs are within this share of the median."""
    uncertainty: float
    """Standard error of the median, as a share of it; more where the speed of the machine drifted."""
    waiting: float
    """Share of the time in which these runs waited for a core; it was subtracted."""
    kernels: int
    """Number of kernels that the profiler measured."""
    kernel_seconds: float
    """Sum of their times, as the profiler reported them."""
    overhead_seconds: float
    """Time that the profiler added to each kernel; it was subtracted."""


@dataclass(frozen=True)
class Profile:
    """The operator graph with the cost of each node on each class of device."""

    derived_from: ClassVar[tuple[type, ...]] = (Model,)

    graph: OpGraph
    seconds: Mapping[str, Floats]
    """Cost class (`Device.cost_class`) -> seconds, per node; `REFUSED_SECONDS` where devices do not take the node."""
    sources: Mapping[str, NDArray[np.uint8]]
    """Cost class -> `Source`, per node."""
    unit: Ints
    """Dense id per node; nodes with one id were measured as one kernel and stay together."""
    whole_seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Cost class -> median time of the whole model in one session; measured classes only."""
    user_groups: Ints | None = None
    """The graph's own groups: an id per node, -1 for none."""
    backward: NDArray[np.bool_] | None = None
    """Per node: part of the backward pass of a training step."""
    training: TrainingRoles | None = None
    """What nodes are for, if the model is a training step in ONNX; None for cost graphs."""
    repeats: tuple[Repeat, ...] = ()
    """Equal layers of the model, which were measured as one; empty if they were not searched for."""
    spread: Mapping[str, Floats] = field(default_factory=lambda: MappingProxyType({}))
    """Cost class -> half the interquartile range of the times, in seconds, per node; measured classes only."""
    quality: Mapping[str, Quality] = field(default_factory=lambda: MappingProxyType({}))
    """Cost class -> reliability of its measurement; only for classes measured on the whole model."""
    errors: Mapping[str, Floats] = field(default_factory=lambda: MappingProxyType({}))
    """Cost class -> relative error of each node there, by itself; of the classes whose errors were measured."""
    prints: tuple[str, ...] = ()
    """Fingerprint per node, which identifies it in cost files and other models; empty if not computed."""
    unsharded_seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Cost class -> seconds of the whole model before it was sharded; empty for models that are not."""
    needs_host: bool = False
    """Whether some values can be on a host only, such as texts: next to a CPU device, no other one can be alone."""

    def rewritten(
        self,
        graph: OpGraph,
        source: NDArray[np.integer],
        unit: Ints,
        new_seconds: Floats | float,
        share: Floats | float,
    ) -> Profile:
        """Return the profile of a rewritten graph, without roles and groups.

        Args:
            graph: The new graph.
            source: Per new node, the node that it is a part or copy of; -1 for none.
            unit: Per new node, its kernel.
            new_seconds: Time of nodes without a source; as sure as the rest of their class.
            share: What a node takes of the time and workspace of its source.
        """
        is_new, seconds, sources = source < 0, dict[str, Floats](), dict[str, NDArray[np.uint8]]()
        for name, times in self.seconds.items():
            is_measured = bool(np.isin(self.sources[name], (Source.MEASURED, Source.KNOWN)).all())
            new_source = np.uint8(Source.MEASURED if is_measured else Source.ESTIMATED)
            scaled = np.where(is_refused(times[source]), REFUSED_SECONDS, times[source] * share)
            seconds[name] = np.where(is_new, new_seconds, scaled)
            sources[name] = np.where(is_new, new_source, self.sources[name][source]).astype(np.uint8)
        workspace = np.where(is_new, 0, self.graph.workspace_bytes[source] * share).astype(np.int64)
        return Profile(
            graph=replace(graph, workspace_bytes=workspace),
            seconds=MappingProxyType(seconds),
            sources=MappingProxyType(sources),
            unit=unit,
            backward=None if self.backward is None else ~is_new & self.backward[source],
            unsharded_seconds=self.unsharded_seconds,
            needs_host=self.needs_host,
        )

    def check(self, state: State) -> None:
        """Raise ValueError unless every device's class has a finite cost for every node."""
        count = len(self.graph)
        for device in state.target.devices:
            require(device.cost_class in self.seconds, f"no costs for {device.id} (class {device.cost_class})")
        for name, seconds in self.seconds.items():
            require(len(seconds) == count, f"{name}: expected {count} costs, one per node, got {len(seconds)}")
            invalid = np.flatnonzero(~(np.isfinite(seconds) & (seconds >= 0)))
            node = self.graph.names[invalid[0]] if len(invalid) else ""
            require(len(invalid) == 0, f"{name}: expected a finite, non-negative cost for node {node!r}")
        for name, spread in self.spread.items():
            is_valid = len(spread) == count and bool((np.isfinite(spread) & (spread >= 0)).all())
            require(is_valid, f"{name}: expected a finite, non-negative spread per node")
        require(len(self.unit) == count, f"expected {count} units, one per node, got {len(self.unit)}")
        roles = self.training
        require(roles is None or len(roles.phase) == len(roles.parameter) == count, "expected a role per node")
        require(len(self.prints) in (0, count), f"expected {count} fingerprints or none, got {len(self.prints)}")


# ------------------------------------------------------------------------------------------------------------ placement


@dataclass(frozen=True)
class Groups:
    """Nodes that must share a device, and groups that are pinned to one."""

    derived_from: ClassVar[tuple[type, ...]] = (Profile,)

    group: Ints
    """Dense id per node."""
    pinned: Ints
    """Device index per group, -1 where the placer is free."""
    reasons: tuple[str, ...]
    """Per group, the reason why its nodes belong together; an empty text for a single node."""

    def check(self, state: State) -> None:
        """Raise ValueError unless groups cover the nodes and pins name devices."""
        nodes, groups = len(state[Profile].graph), int(self.group.max(initial=-1)) + 1
        require(len(self.group) == nodes, f"expected {nodes} groups, one per node, got {len(self.group)}")
        require(bool((np.bincount(self.group, minlength=len(self.pinned)) > 0).all()), "group ids are not dense")
        require(len(self.pinned) == len(self.reasons) == groups, "expected a pin and a reason per group")
        require(
            bool((self.pinned < len(state.target.devices)).all()), "a group is pinned to a device that does not exist"
        )


@dataclass(frozen=True)
class Clusters:
    """Nodes contracted into one for the placer; each cluster lies in one group."""

    derived_from: ClassVar[tuple[type, ...]] = (Groups,)

    cluster: Ints
    """Dense id per node."""

    def check(self, state: State) -> None:
        """Raise ValueError unless clusters respect groups and their graph is acyclic."""
        group = state[Groups].group
        require(len(self.cluster) == len(group), f"expected a cluster per node, got {len(self.cluster)}")
        cluster_group = np.zeros(int(self.cluster.max(initial=-1)) + 1, dtype=np.int64)
        cluster_group[self.cluster] = group
        require(bool((cluster_group[self.cluster] == group).all()), "a cluster spans two groups")
        graph = state[Profile].graph
        edges = graph.producer, graph.inputs.starts, graph.inputs.items
        require(is_acyclic(self.cluster, len(cluster_group), *edges), "clusters form a cycle")


@dataclass(frozen=True)
class Placement:
    """The device of each node."""

    derived_from: ClassVar[tuple[type, ...]] = (Profile, Groups, Clusters)

    device: Ints
    """Index into the target's devices, per node of the profile's graph."""
    placer: str
    """Name of the pass that made the placement."""

    def __repr__(self) -> str:
        used = format_count(len(set(self.device.tolist())), "device")
        return f"Placement of {format_count(len(self.device), 'node')} on {used}, by {self.placer}"

    def check(self, state: State) -> None:
        """Raise ValueError unless every node has a device, groups stay together and pins hold."""
        graph = state[Profile].graph
        require(len(self.device) == len(graph), f"expected {len(graph)} devices, one per node, got {len(self.device)}")
        require(bool(((self.device >= 0) & (self.device < len(state.target.devices))).all()), "a node is on no device")
        if Groups in state:
            groups = state[Groups]
            group_device = np.zeros(len(groups.pinned), dtype=np.int64)
            group_device[groups.group] = self.device
            split = np.flatnonzero(group_device[groups.group] != self.device)
            require(len(split) == 0, f"the group of {graph.names[split[0]] if len(split) else ''!r} is split")
            misplaced = (groups.pinned >= 0) & (groups.pinned != group_device)
            require(not bool(misplaced.any()), "a pinned group is on another device")


@dataclass(frozen=True)
class Schedule:
    """The order of all nodes, and the simulated step that follows from it."""

    derived_from: ClassVar[tuple[type, ...]] = (Placement,)

    order: Ints
    """Every node once, topological; each device runs its nodes in this order."""
    simulation: Simulation
    """The step node by node, without the overhead of segments."""
    lower_bound_seconds: float
    """No placement has a shorter makespan."""

    def check(self, state: State) -> None:
        """Raise ValueError unless the order is topological and every device keeps within its memory."""
        graph = state[Profile].graph
        rank = np.full(len(graph), -1, dtype=np.int64)
        rank[self.order] = np.arange(len(self.order))
        require(len(self.order) == len(graph) and bool((rank >= 0).all()), "expected every node once")
        inputs = graph.predecessors
        early = np.flatnonzero(rank[inputs.items] > rank[inputs.rows])
        node = graph.names[inputs.rows[early[0]]] if len(early) else ""
        require(len(early) == 0, f"node {node!r} is before its input")
        require_memory(state, self.simulation)


WeightSource = Literal["host", "disk"]
"""Where the bytes of a weight that streams are between its runs: in the host's memory, or in a file of the bundle."""


@dataclass(frozen=True)
class Streaming:
    """Weights that are not held by the devices that read them, but come in time for each run.

    In the profile's graph, such weights have no bytes, and a pool counts as a weight of the first node that reads one.
    """

    derived_from: ClassVar[tuple[type, ...]] = (Placement,)

    sources: Mapping[str, WeightSource]
    """Weight -> where its bytes are."""
    weight_bytes: Mapping[str, int]
    """Weight -> its bytes."""
    streams: Mapping[int, StreamRecord]
    """Index of each device that reads such weights -> how they come."""

    def check(self, state: State) -> None:
        """Raise ValueError unless every device that reads such a weight has a stream."""
        require(self.sources.keys() == self.weight_bytes.keys(), "expected a source and a size per weight")
        graph, device = state[Profile].graph, state[Placement].device
        weights = np.array([name in self.sources for name in graph.weight_names], dtype=bool)
        readers = set(device[graph.weights.rows[weights[graph.weights.items]]].tolist())
        require(readers <= self.streams.keys(), "a device reads weights that do not come to it")


# -------------------------------------------------------------------------------------------------- programs of devices


@dataclass(frozen=True)
class Segment:
    """A convex subgraph of the model, which one device runs in one call."""

    id: str
    """Its name, by device and position there: `cpu0-000`."""
    device: int
    nodes: Ints
    """Node ids, in the model's order."""
    inputs: tuple[str, ...]
    """Values that it reads from outside."""
    outputs: tuple[str, ...]
    """Values that other segments, or the caller, read."""


@dataclass(frozen=True)
class Segments:
    """The model as segments, and each device's program."""

    derived_from: ClassVar[tuple[type, ...]] = (Schedule,)

    segments: tuple[Segment, ...]
    """In topological order."""
    programs: tuple[tuple[Step, ...], ...]
    """Program of each device of the target."""
    graph: OpGraph
    """Its nodes are segments."""
    seconds: Floats
    """[device, segment], with the overhead of calls and without contention."""
    simulation: Simulation
    """The predicted step of `graph`, with contention."""

    def check(self, state: State) -> None:
        """Raise ValueError unless segments partition the nodes, receives have sends, and devices keep their limits."""
        covered = sorted(int(node) for segment in self.segments for node in segment.nodes)
        require(covered == list(range(len(state[Profile].graph))), "segments must partition the nodes")
        placement = state[Placement].device
        for segment in self.segments:
            require(bool((placement[segment.nodes] == segment.device).all()), "a segment runs nodes of two devices")
        steps = [(device.id, step) for device, program in zip(state.target.devices, self.programs) for step in program]
        sends = {(step.value, device, step.peer) for device, step in steps if step.op == "send"}
        receives = {(step.value, step.peer, device) for device, step in steps if step.op == "receive"}
        require(sends == receives, f"unmatched transfers: {sorted(sends ^ receives)[:3]}")
        require_memory(state, self.simulation)


@dataclass(frozen=True)
class Route:
    """A further way of requests through the programs: on other devices."""

    device: Ints
    """Per device of the target, the one that follows its program; -1 for devices without a program."""
    seconds: Floats
    """Per segment: predicted time on its device of this route, one request at a time."""
    share: float
    """The share of requests that take it."""


@dataclass(frozen=True)
class Routes:
    """Further routes: copies of the model, of a pipeline, or of stages."""

    derived_from: ClassVar[tuple[type, ...]] = (Segments,)
    routes: tuple[Route, ...]
    """Without the first one: the programs on their own devices."""
    interval_seconds: float
    """Between two results, with requests in flight on all routes; at least Python's part of a request."""
    limit: str
    """What takes all of the interval: `Python`, or what the busiest device does: `computes`, `sends`, `receives`."""

    def check(self, state: State) -> None:
        """Raise ValueError unless each route gives each program to its own device."""
        segments, used = state[Segments], np.array([bool(program) for program in state[Segments].programs])
        for route in self.routes:
            is_valid = bool((route.device[~used] == -1).all()) and route.device.max(initial=-1) < len(used)
            is_valid &= len(set(route.device[used].tolist()) - {-1}) == used.sum()
            require(bool(is_valid), "a route must give each program to a device of its own")
            require(len(route.seconds) == len(segments.segments), "expected a time per segment")


@dataclass(frozen=True)
class Prediction:
    """What the manifest says of times and memory, before anything ran."""

    derived_from: ClassVar[tuple[type, ...]] = (Segments, Routes)

    request: Predicted
    """One request at a time, and the interval with many of them."""
    devices: tuple[DeviceRecord, ...]
    """Of each device of the target."""
    segment_seconds: Floats
    """Per segment, with the overhead of its call."""
    weights_bytes: Longs
    """Per segment, each weight once."""
    workspace_bytes: Longs
    """Per segment."""
    transfer_bytes: tuple[int, ...]
    """Of each transfer in a step."""

    def check(self, state: State) -> None:
        """Raise ValueError unless it is about all segments and devices."""
        segments, devices = len(state[Segments].segments), len(state.target.devices)
        lengths = {len(item) for item in (self.segment_seconds, self.weights_bytes, self.workspace_bytes)}
        require(lengths == {segments}, f"expected predictions for {segments} segments")
        require(len(self.devices) == devices, f"expected predictions for {devices} devices, got {len(self.devices)}")


@dataclass(frozen=True)
class Emitted:
    """The bundle on disk."""

    derived_from: ClassVar[tuple[type, ...]] = (Segments, Routes)

    path: Path

    def check(self, state: State) -> None:
        """Raise ValueError unless the bundle has a manifest."""
        require((self.path / "manifest.json").is_file(), f"no manifest in {self.path}")


# --------------------------------------------------------------------------------------------------- changes of a model


@dataclass(frozen=True)
class Original:
    """The model and its costs before passes rewrote it or let weights stream: the reference of the bundle."""

    derived_from: ClassVar[tuple[type, ...]] = (Model,)

    model: Model
    """With the inputs and outputs of the model that is compiled."""
    profile: Profile
    """What other compilations can use."""
    joined_model: Model | None = None
    """The same, with the weights of a sharded model, which it puts together; None if no weights are in parts."""

    @staticmethod
    def of(state: State) -> Original:
        """Return that of a state; a state without one is its own original."""
        return state[Original] if Original in state else Original(state[Model], state[Profile])

    def check(self, state: State) -> None:
        """Raise ValueError unless its costs are those of the target's devices."""
        self.profile.check(state)


@dataclass(frozen=True)
class LayoutAlternative:
    """A layout of a node or value, with all other nodes chosen again for it."""

    layout: str
    """In words, as in `ShardedKindRecord`."""
    is_kept: bool
    seconds: float | None
    """The step as the choice of layouts counts it; None if no choice with it fits."""
    exchanges: Mapping[str, int] = field(default_factory=dict)
    """Kind of exchange -> how many more there are than with the layout that was kept; less than 0 for fewer."""
    neighbours: Mapping[str, str] = field(default_factory=dict)
    """Node that it reads from, or that reads its values -> change of that node's layout, such as `axis 1 -> axis 2`."""
    others: int = 0
    """Number of further nodes whose layouts change."""


class Layouts(Protocol):
    """A choice of layouts that can be made again with another layout of one node."""

    def list_alternatives(self, node: str, value: str = "") -> tuple[LayoutAlternative, ...]:
        """Return the layouts of a node, or of a value that it makes or reads: first the kept one, then by seconds."""
        ...


@dataclass(frozen=True)
class Shards:
    """Which nodes are parts of operators, and the devices that hold them."""

    derived_from: ClassVar[tuple[type, ...]] = (Model,)

    device: Ints
    """Per node, the index of the device that it is a part for; -1 for free nodes."""
    ways: int = 1
    """Number of devices that share operators; 1 if none are split."""
    stages: int = 1
    """Number of pipeline stages, each on a group of `ways` devices."""
    kinds: tuple[ShardedKindRecord, ...] = ()
    """What was split how, the most expensive first."""
    exchanges: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Kind of exchange (all-gather, all-to-all, reduce-scatter, all-reduce, halo) -> number."""
    seconds: float = 0.0
    """The step that the choice of layouts promises: one device that stands for all, and its channel."""
    lower_bound_seconds: float = 0.0
    """No choice of layouts that reads as few bytes of weights has a shorter step, unless its exchanges overlap more."""
    split_states: tuple[SplitStateRecord, ...] = ()
    """Carried states, each of which lies in parts on the devices."""
    choice: Layouts | None = None
    """The choice of layouts, which can list its alternatives; None if nothing is split."""

    def check(self, state: State) -> None:
        """Raise ValueError unless every node has a device of the target, or none."""
        require(len(self.device) == len(state[Profile].graph), f"expected a device per node, got {len(self.device)}")
        is_valid = (self.device >= -1) & (self.device < len(state.target.devices))
        require(bool(is_valid.all()), "a part is on no device of the target")


@dataclass(frozen=True)
class Recomputation:
    """What runs a second time, so that its values need not stay in memory."""

    derived_from: ClassVar[tuple[type, ...]] = (Model,)

    nodes: int
    """Number of nodes that repeat another one."""
    seconds: float
    """What they add to a step on one device."""
    peak_before_bytes: int
    """What one device held at most before, weights included."""
    peak_after_bytes: int
    """What it holds now."""

    @property
    def is_changed(self) -> bool:
        """Return whether the model is another one: its order, or nodes that run twice, always lower the memory."""
        return self.peak_after_bytes < self.peak_before_bytes

    def check(self, state: State) -> None:
        """Raise ValueError unless recomputing lowered the memory."""
        require(self.peak_after_bytes <= self.peak_before_bytes, "recomputation needs more memory than none")
        require(self.nodes == 0 or self.is_changed, "nodes run twice without need")


@dataclass(frozen=True)
class MicroBatches:
    """Which nodes compute which part of a batch."""

    derived_from: ClassVar[tuple[type, ...]] = (Model,)

    count: int
    """Number of parts."""
    part: Ints
    """Per node, its part of the batch; -1 for nodes that are computed once."""
    source: Ints
    """Per node, its node in the model before; -1 for nodes that cut, join, add up or copy."""
    replica: Ints
    """Per node, the replica that computes it, which has its own devices."""
    replicas: int = 1
    """Number of replicas."""

    def check(self, state: State) -> None:
        """Raise ValueError unless every node has a part, or none, and a replica."""
        nodes = len(state[Profile].graph)
        require(len(self.part) == len(self.source) == nodes, f"expected a part per node, got {len(self.part)}")
        require(bool(((self.part >= -1) & (self.part < self.count)).all()), "a node computes no part of the batch")
        replica = self.replica
        require(len(replica) == nodes, f"expected a replica per node, got {len(replica)}")
        require(bool(((replica >= 0) & (replica < self.replicas)).all()), "a node belongs to no replica")
