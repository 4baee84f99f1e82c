"""The gradient of Placeto's policy, with torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from onnxplace.graph.op_graph import Bools, Floats, Ints
from onnxplace_learned.policies.placeto_kernels import (
    ANCESTOR,
    ANCESTORS,
    BACKWARD,
    CHOOSE,
    ENCODE,
    FIXED_FEATURES,
    FORWARD,
    GraphTensors,
    Network,
    Singles,
)
from onnxplace_learned.pytorch import require_torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PlacetoDecisions:
    """Steps of episodes in one graph, from which the policy learns."""

    features: Singles
    """[step, feature, node]."""
    speaker: Ints
    """Per step: the node that was placed."""
    allowed: Bools
    """[step, device], of all devices that the policy knows."""
    weight: Floats
    """[step, device]: how much likelier the choice is to become."""


def policy_gradient(
    network: Network, wires: GraphTensors, decisions: PlacetoDecisions, entropy_bonus: float
) -> Singles:
    """Return the gradient of the loss, summed over the decisions.

    The loss of a decision is the sum of the negative log-probabilities of the devices times their weights, minus the
    entropy bonus. With the advantage of a sampled device as its weight, and none of others, that is the loss of
    REINFORCE; with shares as weights, it is the cross-entropy with them.
    """
    torch = require_torch()
    parameters = torch.from_numpy(network.theta.copy()).requires_grad_()
    scores = score_with_torch(network, parameters, wires, decisions.features, decisions.speaker)
    scores = scores.masked_fill(~torch.from_numpy(decisions.allowed), -torch.inf)
    log_shares = torch.log_softmax(scores, dim=1)
    finite = log_shares.masked_fill(log_shares == -torch.inf, 0.0)
    entropy = -(log_shares.exp() * finite).sum(dim=1)
    weighted = (finite * torch.from_numpy(decisions.weight.astype(np.float32))).sum(dim=1)
    (-weighted - entropy_bonus * entropy).sum().backward()
    gradient: Singles = parameters.grad.numpy()
    return gradient


def score_with_torch(network: Network, theta: Tensor, wires: GraphTensors, features: Singles, speaker: Ints) -> Tensor:
    """Return the scores of devices [step, device], as `score_devices` of the compiled policy computes them.

    The parameters are `theta`, not those of the network.
    """
    torch = require_torch()
    layers = [
        (theta[start : start + inputs * outputs].view(inputs, outputs), theta[start + inputs * outputs :][:outputs])
        for start, inputs, outputs in network.layers.tolist()
    ]
    sources = torch.from_numpy(wires.sources.astype(np.int64))
    readers = torch.from_numpy(wires.readers.astype(np.int64))
    nodes = torch.from_numpy(np.ascontiguousarray(features.transpose(2, 0, 1)))  # [node, step, feature]
    first = _apply(layers[ENCODE : ENCODE + 2], nodes)
    both = torch.cat(
        [
            _pass_messages(layers[FORWARD : FORWARD + 4], first, sources, readers, network.rounds),
            _pass_messages(layers[BACKWARD : BACKWARD + 4], first, readers, sources, network.rounds),
        ],
        dim=2,
    )
    relation = torch.from_numpy(wires.relation[speaker].T.copy())  # [node, step]
    steps = torch.arange(len(speaker))
    parts = [both[torch.from_numpy(speaker.astype(np.int64)), steps]]
    for kind in range(3):
        send, receive = (layers[ANCESTORS + 4 * kind + 2 * part :][:2] for part in range(2))
        related = (relation == ANCESTOR + kind).unsqueeze(2)
        parts.append(_apply(receive, (_apply(send, both) * related).mean(dim=0)))
    last_weights, last_bias = layers[CHOOSE + 2]
    scores: Tensor = _apply(layers[CHOOSE : CHOOSE + 2], torch.cat(parts, dim=1)) @ last_weights + last_bias
    own = features[np.arange(len(speaker)), network.devices + FIXED_FEATURES :, speaker]
    return scores + network.stay * torch.from_numpy(np.ascontiguousarray(own))


def _apply(layers: Sequence[tuple[Tensor, Tensor]], inputs: Tensor) -> Tensor:
    """Apply layers with rectifiers to the last dimension."""
    for weights, bias in layers:
        inputs = (inputs @ weights + bias).relu()
    return inputs


def _pass_messages(
    layers: Sequence[tuple[Tensor, Tensor]],
    first: Tensor,
    sources: Tensor,
    readers: Tensor,
    rounds: int,
) -> Tensor:
    """Return embeddings [node, step, feature] after so many rounds of messages along the edges."""
    current = first
    for _ in range(rounds):
        messages = _apply(layers[:2], current)
        received = first.new_zeros(first.shape).index_add(0, readers, messages.index_select(0, sources))
        current = first + _apply(layers[2:], received)
    return current
