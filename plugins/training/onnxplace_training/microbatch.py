"""Compute the batch of a training step in parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge

from onnxplace.facts import MicroBatches, Original, Profile, Shards
from onnxplace.model.model import Model
from onnxplace.state import Pass, State
from onnxplace_training.apply_microbatches import microbatch_state


@dataclass(frozen=True)
class Microbatch(Pass):
    """Compute the batch of a training step in parts, so that devices work on several parts at a time.

    Micro-batches are shards in time: the rules that split operators over devices prove that a node can be computed for
    some samples at a time. Such nodes get a copy per part. Weights and states stay whole, gradients are the sums of
    those of the parts, added in their order, and the update is computed once. What mixes samples is computed whole,
    from all parts. The result is plain ONNX, and equals the undivided step up to the order of sums.

    The placer `pipelined` puts consecutive layers on one device each and orders the parts (GPipe, NeurIPS 2019;
    PipeDream's 1F1B, SOSP 2019).

    With `replicas`, the devices are divided into as many groups, and each group computes its own parts (data
    parallelism). Each parameter is owned by one replica, which adds up the gradients of all, computes the new value and
    keeps it with its moments (ZeRO, SC 2020); the other replicas get a copy in each step.

    Raises:
        UsageError: the number of devices is no multiple of `replicas`, or `count` is less than `replicas`.
        InfeasibleError: there is no batch, it is smaller than `count`, or most of the step mixes its samples.
    """

    name: ClassVar[str] = "microbatch"
    requires: ClassVar[tuple[type, ...]] = (Model, Profile)
    provides: ClassVar[tuple[type, ...]] = (Model, Profile, Shards, MicroBatches, Original)

    count: Annotated[int, Ge(2)] = 4
    """Number of parts of the batch."""
    replicas: Annotated[int, Ge(1)] = 1
    """Number of groups of devices that compute their own parts."""

    def run(self, state: State) -> State:
        return microbatch_state(state, self.count, self.replicas)
