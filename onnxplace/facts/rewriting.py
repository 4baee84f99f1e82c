"""What passes changed in a model: split operators, micro-batches, nodes that are computed again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from onnxplace.facts.conditions import require
from onnxplace.facts.costs import Profile
from onnxplace.graph import Ints
from onnxplace.model import Model

if TYPE_CHECKING:
    from onnxplace.state import State


@dataclass(frozen=True)
class ShardedKind:
    """Nodes of one operator that are split alike."""

    op: str
    layout: str
    """How their results are split, in words: `axis 1`, `summed axis`, or `whole` for not at all."""
    count: int
    """Number of nodes of the original model."""
    seconds: float
    """What they take together on one device."""


@dataclass(frozen=True)
class SplitState:
    """A carried state that lies in parts on several devices."""

    input: str
    """Name in the original model."""
    output: str
    """Output of the original model that becomes the state."""
    axis: int
    """Axis along which the parts follow one another; -1 if each part is a copy of the whole."""
    inputs: tuple[str, ...]
    """Inputs of the parts, in their order along the axis."""
    outputs: tuple[str, ...]
    """Outputs of the parts, in the same order."""
    sizes: tuple[int, ...] = ()
    """Size of each part along the axis."""


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
    kinds: tuple[ShardedKind, ...] = ()
    """What was split how, the most expensive first."""
    exchanges: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Kind of exchange (all-gather, all-to-all, reduce-scatter, all-reduce, halo) -> number."""
    seconds: float = 0.0
    """The step as the choice of layouts counts it: parts and exchanges one after the other, without contention."""
    lower_bound_seconds: float = 0.0
    """No choice of layouts has a shorter such step."""
    split_states: tuple[SplitState, ...] = ()
    """Carried states, each of which lies in parts on the devices."""
    whole_profile: Profile | None = None
    """The costs of the unsharded model, which is what other compilations can use; None if nothing is split."""
    whole: Model | None = None
    """The unsharded model, with the inputs and outputs of the sharded one; None if nothing is split."""
    whole_of_parts: Model | None = None
    """The same, with the weights of the sharded model, which it puts together."""

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
    whole: Model | None
    """The model before; None if it stayed as it was."""
    whole_profile: Profile | None
    """Its costs, which is what other compilations can use."""

    def check(self, state: State) -> None:
        """Raise ValueError unless recomputing lowered the memory."""
        require(self.peak_after_bytes <= self.peak_before_bytes, "recomputation needs more memory than none")
        require(self.nodes == 0 or self.whole is not None, "expected the model without recomputation")


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
    """Per node, the replica that computes it, which has devices of its own."""
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
