"""The networks of the hierarchical planner (HDP), with torch: a grouper, and a placer of its groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnxplace_learned.policies.gradients import require_torch
from onnxplace_learned.sequences.sequence_inputs import (
    SequenceInputs,
    Tensors,
    apply_linear,
    choose,
    entropy_of,
    log_shares_of,
    pick,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Placements:
    """Sampled placements."""

    device: Tensor
    """[placement, item]."""
    log_share: Tensor
    """Per placement: the log-probability of all choices that led to it."""
    entropy: Tensor
    """Mean, of the choices of devices."""
    steps: int
    """How many devices are chosen for each placement."""


@dataclass(frozen=True)
class Grouping:
    """The groups of a graph, as sequences for the placer."""

    group: Tensor
    """[placement, item]."""
    features: Tensor
    """[placement, group, feature]; one row where all placements have the same groups."""
    allowed: Tensor
    """[group, device]."""
    log_share: Tensor
    """Per placement."""


def sample_placements(
    tensors: Tensors, inputs: SequenceInputs, count: int, generator: Any, noise: float = 0.0
) -> Placements:
    """Sample placements; without a generator, take the likeliest groups and devices.

    `noise` is the deviation of what is added to the scores of groups and devices, to explore.
    """
    grouping = _learn_groups(tensors, inputs, count, generator, noise)
    device, log_share, entropy = _place_groups(tensors, grouping, count, generator, noise)
    return Placements(device.gather(1, grouping.group), grouping.log_share + log_share, entropy, device.shape[1])


def _learn_groups(tensors: Tensors, inputs: SequenceInputs, count: int, generator: Any, noise: float) -> Grouping:
    """Return the groups that the grouper samples, or each item as a group of its own."""
    torch = require_torch()
    items, operators = len(inputs.graph), inputs.bags @ tensors["operators"]
    if inputs.shape.variant != "learned":
        group = torch.arange(items).expand(count, items)
        alone = torch.cat([operators, inputs.features, inputs.features.new_ones(items, 1)], dim=1)
        adjacency = _group_adjacency(inputs, group[:1], items, inputs.shape.groups)
        features = torch.cat([alone.unsqueeze(0), adjacency], dim=2)
        return Grouping(group, features, inputs.allowed, torch.zeros(count))
    hidden = apply_linear(tensors, "grouper.hidden", torch.cat([operators, inputs.features, inputs.neighbours], dim=1))
    scores = apply_linear(tensors, "grouper.choose", hidden.relu())
    log_shares = torch.log_softmax(_add_noise(scores.expand(count, -1, -1), noise, generator), dim=2)
    group, groups = choose(log_shares, generator), inputs.shape.groups
    member = torch.nn.functional.one_hot(group, groups).to(inputs.features.dtype).transpose(1, 2)
    sizes = member.sum(dim=2, keepdim=True)
    # Sums as in the paper, relative to those of groups of equal size, so that graphs of any size look alike.
    sums = torch.cat([member @ inputs.features, sizes], dim=2) * (groups / max(items, 1))
    means = (member @ operators) / sizes.clamp(min=1)
    features = torch.cat([means, sums, _group_adjacency(inputs, group, groups, groups)], dim=2)
    allowed = inputs.present.expand(groups, -1)
    return Grouping(group, features, allowed, pick(log_shares, group).sum(dim=1))


def _group_adjacency(inputs: SequenceInputs, group: Tensor, groups: int, columns: int) -> Tensor:
    """Return [placement, group, column]: 1 where an edge leads from a group to another one of that column.

    Where there are more groups than columns, groups share them.
    """
    sources, readers = (group[:, side] for side in inputs.edges)
    slots = sources * columns + readers % columns
    adjacency = inputs.features.new_zeros(len(group), groups * columns)
    return adjacency.scatter_(1, slots, (sources != readers).to(adjacency.dtype)).view(len(group), groups, columns)


def _place_groups(
    tensors: Tensors, grouping: Grouping, count: int, generator: Any, noise: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the device of each group [placement, group], the log-probabilities, and the mean entropy."""
    torch = require_torch()
    encoded, state = _encode(tensors, apply_linear(tensors, "group", grouping.features).tanh())
    encoded, cell = encoded.expand(count, -1, -1), state.expand(count, -1)
    keys, hidden = (encoded @ tensors["attention"]).transpose(1, 2), cell.tanh()
    weights = [tensors[f"decoder.{part}"] for part in ("input", "hidden", "bias")]
    no_bias = torch.zeros_like(weights[2])
    # The first group follows no device: the last row of the table stands for that.
    previous = torch.full((count,), len(tensors["device"]) - 1)
    log_share, entropy, chosen = torch.zeros(count), torch.zeros(()), []
    for step in range(encoded.shape[1]):
        heard = torch.cat([tensors["device"][previous], encoded[:, step]], dim=1)
        hidden, cell = torch.lstm_cell(heard, (hidden, cell), *weights, no_bias)
        attention = torch.softmax(torch.bmm(hidden.unsqueeze(1), keys), dim=2)
        context = torch.bmm(attention, encoded).squeeze(1)
        scores = apply_linear(tensors, "choose", torch.cat([hidden, context], dim=1))
        log_shares = log_shares_of(_add_noise(scores, noise, generator), grouping.allowed[step])
        previous = choose(log_shares, generator)
        log_share = log_share + pick(log_shares, previous)
        entropy = entropy + entropy_of(log_shares).mean()
        chosen.append(previous)
    return torch.stack(chosen, dim=1), log_share, entropy / max(len(chosen), 1)


def _encode(tensors: Tensors, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a bidirectional LSTM says of each group, and of the whole sequence."""
    torch = require_torch()
    weights = []
    for direction in ("forward", "backward"):
        own = [tensors[f"encoder.{direction}.{part}"] for part in ("input", "hidden", "bias")]
        weights += [*own, torch.zeros_like(own[2])]
    start = sequence.new_zeros(2, len(sequence), weights[1].shape[1])
    outputs, last, _ = torch.lstm(sequence, (start, start), weights, True, 1, 0.0, False, True, True)
    return outputs, torch.cat([last[0], last[1]], dim=1)


def _add_noise(scores: Tensor, noise: float, generator: Any) -> Tensor:
    if generator is None or noise <= 0:
        return scores
    noisy: Tensor = scores + noise * require_torch().randn(scores.shape, generator=generator)
    return noisy
