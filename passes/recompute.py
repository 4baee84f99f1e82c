"""Compute values again instead of keeping them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onnxplace.errors import UsageError
from onnxplace.facts import Original, Profile, Recomputation
from onnxplace.model.model import Model
from onnxplace.passes.recomputation.apply_recomputation import recompute_state
from onnxplace.state import Pass, State
from onnxplace.target.parsing import parse_bytes
from onnxplace.target.target import Target

# The limit that follows from the devices of the target.
FIT = "fit"
# Share of the memory of several devices together; no placement fills them evenly.
SHARE_OF_SEVERAL = 0.9


@dataclass(frozen=True)
class Recompute(Pass):
    """Compute values a second time instead of keeping them, as far as a memory limit demands.

    A training step keeps what its forward pass computes until the backward pass reads it. This pass puts the nodes into
    an order that frees values early: updates follow their gradients. Where that does not suffice, it adds copies of
    cheap nodes directly before their late readers, which read the copies (gradient checkpointing). It chooses nodes by
    their seconds against the bytes that they free, and judges each choice by the exact memory of the whole schedule on
    one device, in the way of Checkmate (MLSys 2020). The results are the same bit for bit. Random nodes, and nodes with
    subgraphs, run once. Any model with values that live long profits; it need not be a training step.

    Raises:
        UsageError: the limit is no number of bytes.
    """

    name: ClassVar[str] = "recompute"
    requires: ClassVar[tuple[type, ...]] = (Model, Profile)
    provides: ClassVar[tuple[type, ...]] = (Model, Profile, Recomputation, Original)

    limit: str = FIT
    """The memory that one device would have: bytes, such as 4GiB; `fit` for that of all devices of the target."""

    def run(self, state: State) -> State:
        return recompute_state(state, self._limit_bytes(state.target))

    def _limit_bytes(self, target: Target) -> int:
        if self.limit == FIT:
            total = target.total_bytes
            return total if len(target.devices) == 1 else int(SHARE_OF_SEVERAL * total)
        try:
            return parse_bytes(self.limit)
        except UsageError:
            message = f"expected bytes or fit, got {self.limit!r}"
            raise UsageError("U005", message, where="recompute{limit=}", hint="recompute{limit=512MiB}") from None
