"""The roles of nodes in a training step: their phase, and the one parameter that they work for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph import Bools, Ints
from onnxplace.training_step import TrainingStep


class Phase(IntEnum):
    """The part of a training step that a node belongs to."""

    FORWARD = 0
    """Computes the loss, metrics or buffers."""
    BACKWARD = 1
    """Computes gradients."""
    UPDATE = 2
    """Computes moments, and new values of parameters."""


@dataclass(frozen=True)
class TrainingRoles:
    """What each node of a training step is for."""

    step: TrainingStep
    """Loss, parameters, moments and buffers, by the model's metadata or by its flow of data."""
    phase: NDArray[np.uint8]
    """`Phase` per node."""
    parameter: Ints
    """Per node, the only parameter whose gradient, moments or new values it computes.

    An index into `step.parameters`; -1 for nodes that work for several parameters or for none.
    """
    owner: Ints
    """Per node, the forward node that a backward node belongs to; -1 for none and for nodes of other phases."""

    def spread(self, source: NDArray[np.integer], is_again: Bools | None = None) -> TrainingRoles:
        """Return the roles of a rewritten graph.

        Args:
            source: Per new node, the node that it is a part or copy of; -1 for none.
            is_again: Per new node, whether it computes something again for the backward pass. It is a backward node
                then, and belongs to the node that it is a copy of.
        """
        is_again = np.zeros(len(source), dtype=bool) if is_again is None else is_again
        is_copy, has_source = (source >= 0) & ~is_again, source >= 0
        # The first copy of a forward node stands for all of them.
        first = np.full(len(self.phase) + 1, -1, dtype=np.int64)  # the last one for no node
        copies = np.flatnonzero(is_copy)[::-1]
        first[source[copies]] = copies
        owner = np.where(is_copy, first[self.owner[source]], np.where(has_source, first[source], -1))
        phase = np.where(is_copy, self.phase[source], np.where(is_again, Phase.BACKWARD, Phase.FORWARD))
        return replace(
            self,
            phase=phase.astype(np.uint8),
            parameter=np.where(is_copy, self.parameter[source], -1).astype(np.int32),
            owner=owner.astype(np.int32),
        )

    def count(self, phase: Phase) -> int:
        """Return the number of nodes of a phase."""
        return int((self.phase == phase).sum())
