"""What the networks of sequence policies read of a graph, and small layers that both have, with torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxplace_learned.policies.gradients import require_torch
from onnxplace_learned.sequences.sequence_graph import SequenceGraph
from onnxplace_learned.sequences.sequence_policy import SequenceShape

if TYPE_CHECKING:
    from torch import Tensor

Tensors = dict[str, "Tensor"]


@dataclass(frozen=True)
class SequenceInputs:
    """A graph for policies of one shape."""

    graph: SequenceGraph
    shape: SequenceShape

    @cached_property
    def bags(self) -> Tensor:
        """Return [item, bucket]: shares of types of operators."""
        return _tensor(self.graph.bags)

    @cached_property
    def features(self) -> Tensor:
        """Return [item, feature]."""
        return _tensor(self.graph.features(self.shape.devices))

    @cached_property
    def neighbours(self) -> Tensor:
        """Return [item, 12]: positions of neighbours."""
        return _tensor(self.graph.neighbour_positions())

    @cached_property
    def edges(self) -> tuple[Tensor, Tensor]:
        """Return sources and readers."""
        sources, readers = self.graph.edges
        return _tensor(sources.astype(np.int64)), _tensor(readers.astype(np.int64))

    @cached_property
    def allowed(self) -> Tensor:
        """Return [item, device]: where items may be, of all devices that the policy knows."""
        allowed = np.zeros((len(self.graph), self.shape.devices), dtype=bool)
        allowed[:, : self.graph.allowed.shape[1]] = self.graph.allowed
        return _tensor(allowed)

    @cached_property
    def present(self) -> Tensor:
        """Return [device]: which devices the target has, of those that the policy knows."""
        return _tensor(np.arange(self.shape.devices) < len(self.graph.problem.target.devices))


def _tensor(array: Any) -> Tensor:
    tensor: Tensor = require_torch().from_numpy(np.ascontiguousarray(array))
    return tensor


def apply_linear(tensors: Tensors, name: str, inputs: Tensor) -> Tensor:
    """Apply a layer to the last dimension."""
    outputs: Tensor = inputs @ tensors[f"{name}.weight"] + tensors[f"{name}.bias"]
    return outputs


def log_shares_of(scores: Tensor, allowed: Tensor) -> Tensor:
    """Return log-probabilities of choices; those that are not allowed get almost none."""
    shares: Tensor = require_torch().log_softmax(scores.masked_fill(~allowed, -1e9), dim=-1)
    return shares


def choose(log_shares: Tensor, generator: Any) -> Tensor:
    """Return the likeliest choice of each row, or one by its share if there is a generator."""
    if generator is None:
        best: Tensor = log_shares.argmax(dim=-1)
        return best
    torch = require_torch()
    draws = torch.rand(log_shares.shape, generator=generator).clamp(min=1e-20)
    # Gumbel's trick: the largest of shifted log-probabilities is a sample.
    chosen: Tensor = (log_shares.detach() - torch.log(-torch.log(draws))).argmax(dim=-1)
    return chosen


def pick(log_shares: Tensor, chosen: Tensor) -> Tensor:
    """Return the log-probability of each choice."""
    picked: Tensor = log_shares.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    return picked


def entropy_of(log_shares: Tensor) -> Tensor:
    """Return the entropy of each choice."""
    entropy: Tensor = -(log_shares.exp() * log_shares.clamp(min=-1e9)).sum(dim=-1)
    return entropy
