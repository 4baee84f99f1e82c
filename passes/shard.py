"""Split operators over devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from onnxplace.facts import Original, Profile, Shards
from onnxplace.model.model import Model
from onnxplace.passes.sharding.apply.apply_sharding import ShardingOptions, shard_state
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class Shard(Pass):
    """Split operators over devices: heads, columns, channels, rows or batch.

    Each value gets a layout: replicated, split along an axis, or partial (a summand on each device). The layouts are
    chosen for the whole graph at once, so that compute, exchanges and copies take the least time together. The result
    is plain ONNX: a copy of each node per device, pinned to it, with slices, concatenations and sums where layouts
    change. Operators without a rule are computed on every device. If nothing gains, the model stays as it is.

    With several stages, the model is also cut into consecutive parts of about equal time, each on its own group:
    the inter-operator part of Alpa, for many requests in flight.

    The choice is exact where the tables of variable elimination stay small. The time of a part is that of the whole
    node, scaled by a roofline. Layouts follow OneFlow's SBP; the choice is the intra-operator part of Alpa (OSDI 2022).

    Raises:
        UsageError: the map names no node, or asks for a split that an operator does not have.
        TargetError: the map is a model, whose specifications are for another number of devices.
    """

    name: ClassVar[str] = "shard"
    requires: ClassVar[tuple[type, ...]] = (Model, Profile)
    provides: ClassVar[tuple[type, ...]] = (Model, Profile, Shards, Original)

    ways: Annotated[int, Ge(0)] = 0
    """The most devices that share an operator; 0 for all devices."""
    stages: Annotated[int, Ge(0)] = 1
    """Number of pipeline stages, each on a group of `ways` devices of one kind; 0 for as many as there are groups."""
    exact: bool = False
    """Use exactly `ways` devices, even where fewer, or one alone, are expected to be faster."""
    weights: Literal["fit", "least"] = "fit"
    """`fit`: split weights and values as far as memory demands. `least`: split as many weights as possible."""
    fixed: bool = False
    """The sizes of symbolic dimensions are fixed, so that axes of these sizes, such as the batch, are split too."""
    metadata: bool = False
    """Write the layouts into the bundle's whole model too, in ONNX's own sharding specifications."""
    map: str = ""
    """How to split the nodes or modules that a regular expression matches: a JSON file, or {"layers.*": "columns"}.

    Or a model whose nodes have sharding specifications."""

    def run(self, state: State) -> State:
        return shard_state(state, ShardingOptions(**vars(self)))
