"""What passes find out: frozen records with their invariants as code.

    Model -> Profile -> Groups -> Clusters
                     -> Placement -> Schedule -> Segments -> Emitted

An arrow reads "becomes stale with": a new Profile drops Groups, Placement and all that hangs on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph import Floats, Ints, OpGraph, is_acyclic
from onnxplace.model import Model
from onnxplace.simulation import Simulation

if TYPE_CHECKING:
    from onnxplace.state import State


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_memory(state: State, simulation: Simulation) -> None:
    for device, peak in zip(state.target.devices, simulation.peak_bytes):
        _require(int(peak) <= device.memory_bytes, f"{device.id} needs {int(peak)} bytes of {device.memory_bytes}")


class Source(IntEnum):
    """Where the time of a node comes from."""

    MEASURED = 0
    """Run on this machine by ONNX Runtime."""
    GIVEN = 1
    """From the user's cost file, which has it from a measurement or from the user."""
    ESTIMATED = 2
    """A roofline guess: floating-point operations and bytes against peaks; also one that a cost file holds."""
    KNOWN = 3
    """Costs nothing at run time: constants, folded and removed nodes."""


@dataclass(frozen=True)
class Repeat:
    """Equal layers, one after the other in the model's order."""

    start: int
    """Position of the first node."""
    nodes: int
    """Per layer."""
    count: int
    """How many layers."""

    @property
    def stop(self) -> int:
        """Return the position after the last node."""
        return self.start + self.nodes * self.count


@dataclass(frozen=True)
class Quality:
    """How sure a measurement of a whole model is."""

    runs: int
    """Without the profiler, that counted."""
    spread: float
    """Half of them are within this share of the median."""
    uncertainty: float
    """Standard error of the median, as a share of it."""
    waiting: float
    """Share of the time in which these runs waited for a core; it was taken off."""
    kernels: int
    kernel_seconds: float
    """What their times added up to as the profiler had them."""
    overhead_seconds: float
    """What the profiler added to each kernel; it was taken off."""


@dataclass(frozen=True)
class Profile:
    """The operator graph with what each node costs on each class of device."""

    derived_from: ClassVar[tuple[type, ...]] = (Model,)

    graph: OpGraph
    seconds: Mapping[str, Floats]
    """Cost class (`Device.cost_class`) -> seconds per node."""
    sources: Mapping[str, NDArray[np.uint8]]
    """Cost class -> `Source` per node."""
    unit: Ints
    """Dense id per node; nodes of one unit were measured as one kernel and stay together."""
    whole_seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Cost class -> median time of the whole model in one session; measured classes only."""
    given: Ints | None = None
    """The graph's own groups: an id per node, -1 for none."""
    backward: NDArray[np.bool_] | None = None
    """Per node: part of the backward pass of a training step."""
    repeats: tuple[Repeat, ...] = ()
    """Equal layers of the model, where it was looked at; whoever measured, measured them as one."""
    spread: Mapping[str, Floats] = field(default_factory=lambda: MappingProxyType({}))
    """Cost class -> per node, half the distance between the quartiles of its times, in seconds; measured ones only."""
    quality: Mapping[str, Quality] = field(default_factory=lambda: MappingProxyType({}))
    """Cost class -> how sure its measurement is; measured as a whole only."""
    prints: tuple[str, ...] = ()
    """Per node, what it does, by which it is known in other models and in cost files; none where nobody looked."""

    def check(self, state: State) -> None:
        """Raise ValueError unless every device's class has a finite cost for every node."""
        for device in state.target.devices:
            _require(device.cost_class in self.seconds, f"no costs for {device.id} (class {device.cost_class})")
        for name, seconds in self.seconds.items():
            _require(len(seconds) == len(self.graph), f"{name}: {len(seconds)} costs for {len(self.graph)} nodes")
            bad = np.flatnonzero(~(np.isfinite(seconds) & (seconds >= 0)))
            _require(len(bad) == 0, f"{name}: node {self.graph.names[bad[0]] if len(bad) else ''!r} has no valid cost")
        for name, spread in self.spread.items():
            sound = len(spread) == len(self.graph) and bool((np.isfinite(spread) & (spread >= 0)).all())
            _require(sound, f"{name}: a spread per node, not negative")
        _require(len(self.unit) == len(self.graph), "a unit per node")
        _require(len(self.prints) in (0, len(self.graph)), "a fingerprint per node")


@dataclass(frozen=True)
class Groups:
    """Nodes that must share a device, and those the user has put on one."""

    derived_from: ClassVar[tuple[type, ...]] = (Profile,)

    group: Ints
    """Dense id per node."""
    pinned: Ints
    """Device index per group, -1 where the placer is free."""
    reasons: tuple[str, ...]
    """Per group, why its nodes belong together; empty for a single node."""

    def check(self, state: State) -> None:
        """Raise ValueError unless groups cover the nodes and pins name devices."""
        _require(len(self.group) == len(state[Profile].graph), "a group per node")
        _require(bool((np.bincount(self.group, minlength=len(self.pinned)) > 0).all()), "group ids are not dense")
        _require(
            len(self.pinned) == len(self.reasons) == int(self.group.max(initial=-1)) + 1, "a pin and a reason per group"
        )
        _require(
            bool((self.pinned < len(state.target.devices)).all()), "a group is pinned to a device that is not there"
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
        _require(len(self.cluster) == len(group), "a cluster per node")
        representative = np.zeros(int(self.cluster.max(initial=-1)) + 1, dtype=np.int64)
        representative[self.cluster] = group
        _require(bool((representative[self.cluster] == group).all()), "a cluster spans two groups")
        graph = state[Profile].graph
        edges = graph.producer, graph.inputs.starts, graph.inputs.items
        _require(is_acyclic(self.cluster, len(representative), *edges), "clusters form a cycle")


@dataclass(frozen=True)
class Placement:
    """The device of each node."""

    derived_from: ClassVar[tuple[type, ...]] = (Profile, Groups, Clusters)

    device: Ints
    """Index into the target's devices, per node of the profile's graph."""
    placer: str
    """Name of the pass that decided."""

    def check(self, state: State) -> None:
        """Raise ValueError unless every node has a device, groups stay together and pins hold."""
        graph = state[Profile].graph
        _require(len(self.device) == len(graph), "a device per node")
        _require(bool(((self.device >= 0) & (self.device < len(state.target.devices))).all()), "a node is on no device")
        if Groups in state:
            groups = state[Groups]
            first = np.zeros(len(groups.pinned), dtype=np.int64)
            first[groups.group] = self.device
            torn = np.flatnonzero(first[groups.group] != self.device)
            _require(len(torn) == 0, f"the group of {graph.names[torn[0]] if len(torn) else ''!r} is torn apart")
            moved = (groups.pinned >= 0) & (groups.pinned != first)
            _require(not bool(moved.any()), "a pinned group is elsewhere")


@dataclass(frozen=True)
class Schedule:
    """The order of all nodes, and the simulated step that follows from it."""

    derived_from: ClassVar[tuple[type, ...]] = (Placement,)

    order: Ints
    """Every node once, topological; each device runs its nodes in this order."""
    simulation: Simulation
    """Of the whole graph, node by node: segments and their overhead not counted."""
    lower_bound_seconds: float

    def check(self, state: State) -> None:
        """Raise ValueError unless the order is topological and every device keeps within its memory."""
        graph = state[Profile].graph
        rank = np.full(len(graph), -1, dtype=np.int64)
        rank[self.order] = np.arange(len(self.order))
        _require(len(self.order) == len(graph) and bool((rank >= 0).all()), "every node once")
        before = graph.predecessors
        late = np.flatnonzero(rank[before.items] > rank[before.rows])
        _require(len(late) == 0, f"node {graph.names[before.rows[late[0]]] if len(late) else ''!r} is before its input")
        _require_memory(state, self.simulation)


@dataclass(frozen=True)
class Segment:
    """A convex piece of the model that one device runs in one call."""

    device: int
    nodes: Ints
    """In the model's order."""
    inputs: tuple[str, ...]
    """Values it reads from outside of it."""
    outputs: tuple[str, ...]
    """Values that others, or the caller, read."""


@dataclass(frozen=True)
class Instruction:
    """One step of a device's program.

    `run` a segment; `send` a value to a peer device; `receive` a value from a peer; `free` a value.
    """

    op: Literal["run", "send", "receive", "free"]
    segment: int = -1
    value: str = ""
    peer: int = -1


@dataclass(frozen=True)
class Segments:
    """The model in pieces, and each device's program over them."""

    derived_from: ClassVar[tuple[type, ...]] = (Schedule,)

    segments: tuple[Segment, ...]
    """In an order in which they could run one after the other."""
    programs: tuple[tuple[Instruction, ...], ...]
    """Per device of the target."""
    simulation: Simulation
    """The predicted step, segment by segment, overhead of calls included; nodes are segments."""

    def check(self, state: State) -> None:
        """Raise ValueError unless segments partition the nodes, receives have sends, and devices keep their limits."""
        covered = np.concatenate([s.nodes for s in self.segments]) if self.segments else np.zeros(0, dtype=np.int32)
        _require(
            sorted(covered.tolist()) == list(range(len(state[Profile].graph))), "segments must partition the nodes"
        )
        placed = state[Placement].device
        for segment in self.segments:
            _require(bool((placed[segment.nodes] == segment.device).all()), "a segment runs a node of another device")
        sends = {(i.value, d, i.peer) for d, program in enumerate(self.programs) for i in program if i.op == "send"}
        receives = {
            (i.value, i.peer, d) for d, program in enumerate(self.programs) for i in program if i.op == "receive"
        }
        _require(sends == receives, f"unmatched transfers: {sorted(sends ^ receives)[:3]}")
        _require_memory(state, self.simulation)


@dataclass(frozen=True)
class Emitted:
    """The bundle on disk."""

    derived_from: ClassVar[tuple[type, ...]] = (Segments,)

    path: Path

    def check(self, state: State) -> None:
        """Raise ValueError unless the bundle has a manifest."""
        _require((self.path / "manifest.json").is_file(), f"no manifest in {self.path}")
