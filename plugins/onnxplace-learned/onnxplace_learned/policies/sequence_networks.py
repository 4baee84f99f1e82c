"""The networks of sequence policies, with torch: those of the hierarchical planner (HDP), and that of GO and GDP.

HDP has two: a grouper, which samples a group for each node, and a placer, which reads the groups with a bidirectional
LSTM and emits their devices one by one with another LSTM and attention. GO has one: GraphSAGE, then attention over
segments of nodes. It chooses the devices of all nodes at once, refines them in a second pass, and then gives
priorities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxplace_learned.policies.sequence_graph import SequenceGraph
from onnxplace_learned.policies.sequence_policy import ATTENTION_HEADS, ATTENTION_LAYERS, GRAPH_LAYERS, SequenceShape
from onnxplace_learned.pytorch import require_torch

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


# Passes over the graph; each reads the devices that the one before chose.
PASSES = 2
# Items that attend to each other, and to those of the segment before.
SEGMENT = 256


@dataclass(frozen=True)
class SequenceDecisions:
    """Choices of all passes."""

    device: Tensor
    """[pass, placement, item]."""
    priority: Tensor | None
    """[placement, item]; None without a head for it."""


@dataclass(frozen=True)
class Likelihood:
    """How likely choices are."""

    log_shares: Sequence[Tensor]
    """Log-probabilities of devices [pass, placement, item], and of priorities [placement, item]."""
    entropy: Tensor
    """Mean of all choices."""
    device_entropy: Tensor
    """Mean of the devices of the last pass."""


def sample_decisions(tensors: Tensors, inputs: SequenceInputs, count: int, generator: Any) -> SequenceDecisions:
    """Sample placements; without a generator, take the likeliest choices."""
    torch = require_torch()
    trunk = _read_graph(tensors, inputs, None)
    passes: list[Tensor] = []
    for number in range(PASSES):
        if number:
            trunk = _read_graph(tensors, inputs, passes[-1])
        shares = log_shares_of(apply_linear(tensors, "choose", trunk), inputs.allowed)
        passes.append(choose(shares.expand(count, -1, -1), generator))
    priority = None
    if inputs.shape.variant == "placement+schedule":
        priority = choose(_priority_shares(tensors, inputs, trunk, passes[-1]), generator)
    return SequenceDecisions(torch.stack(passes), priority)


def score_decisions(tensors: Tensors, inputs: SequenceInputs, decisions: SequenceDecisions) -> Likelihood:
    """Return the log-probabilities of choices; with gradients, if the tensors have them."""
    torch = require_torch()
    passes, count, items = decisions.device.shape
    first = _read_graph(tensors, inputs, None).expand(count, -1, -1)
    rest = _read_graph(tensors, inputs, decisions.device[:-1].reshape(-1, items))
    trunk = torch.cat([first, rest]).view(passes, count, items, -1)
    shares = log_shares_of(apply_linear(tensors, "choose", trunk), inputs.allowed)
    log_shares = [pick(shares, decisions.device)]
    entropies = entropy_of(shares)
    entropy = entropies.mean()
    if decisions.priority is not None:
        priority_shares = _priority_shares(tensors, inputs, trunk[-1], decisions.device[-1])
        log_shares.append(pick(priority_shares, decisions.priority))
        entropy = entropy + entropy_of(priority_shares).mean()
    return Likelihood(log_shares, entropy, entropies[-1].mean())


def _priority_shares(tensors: Tensors, inputs: SequenceInputs, trunk: Tensor, device: Tensor) -> Tensor:
    """Return the log-probabilities of priorities, given the devices."""
    torch = require_torch()
    placed = torch.nn.functional.one_hot(device, inputs.shape.devices).to(trunk.dtype)
    # No gradient passes into the trunk: the noise of the priorities would drown what it learns about devices.
    heard = torch.cat([trunk.detach().expand(len(device), -1, -1), placed], dim=2)
    scores = apply_linear(tensors, "priority.choose", apply_linear(tensors, "priority.hidden", heard).relu())
    shares: Tensor = torch.log_softmax(scores, dim=2)
    return shares


def _read_graph(tensors: Tensors, inputs: SequenceInputs, device: Tensor | None) -> Tensor:
    """Return embeddings [placement, item, feature] of a graph whose items are on devices [placement, item], if any."""
    torch = require_torch()
    own = torch.cat([inputs.bags @ tensors["operators"], inputs.features], dim=1)
    if device is None:
        placed = own.new_zeros(1, len(own), inputs.shape.devices)
    else:
        placed = torch.nn.functional.one_hot(device, inputs.shape.devices).to(own.dtype)
    nodes = apply_linear(tensors, "encode", torch.cat([own.expand(len(placed), -1, -1), placed], dim=2)).relu()
    for layer in range(GRAPH_LAYERS):
        nodes = _aggregate(tensors, inputs, layer, nodes)
    modulation = nodes.mean(dim=1, keepdim=True)
    for layer in range(ATTENTION_LAYERS):
        nodes = _attend(tensors, f"attention{layer}", nodes, modulation)
    return nodes


def _aggregate(tensors: Tensors, inputs: SequenceInputs, layer: int, nodes: Tensor) -> Tensor:
    """Return embeddings after a layer of GraphSAGE: the maximum of what sources, and of what readers, say."""
    torch = require_torch()
    said = torch.sigmoid(apply_linear(tensors, f"graph{layer}.send", nodes)).split(nodes.shape[2], dim=2)
    heard = [nodes]
    for message, (speaker, listener) in zip(said, (inputs.edges, inputs.edges[::-1])):
        slots = listener[None, :, None].expand(len(nodes), -1, nodes.shape[2])
        heard.append(torch.zeros_like(nodes).scatter_reduce(1, slots, message[:, speaker], "amax"))
    received: Tensor = apply_linear(tensors, f"graph{layer}.receive", torch.cat(heard, dim=2)).relu()
    return received


def _attend(tensors: Tensors, name: str, nodes: Tensor, modulation: Tensor) -> Tensor:
    """Return embeddings after a layer of a transformer over segments (Dai et al. 2019), modulated by the graph."""
    torch = require_torch()

    def dense(part: str, rows: Tensor) -> Tensor:
        gate = torch.sigmoid(apply_linear(tensors, f"{name}.{part}.modulate", modulation))
        return apply_linear(tensors, f"{name}.{part}", rows * gate)

    placements, items, width = nodes.shape
    segments = max(1, -(-items // SEGMENT))
    length = SEGMENT if segments > 1 else items
    padding = segments * length - items
    padded = torch.nn.functional.pad(nodes, (0, 0, 0, padding))
    pairs = dense("pair", padded).view(placements, segments, length, 2 * width)
    is_item = (torch.arange(segments * length) < items).view(segments, length)
    if segments > 1:
        # The segment before is only remembered: no gradient passes into it.
        before = dense("pair", padded.detach()).view(placements, segments, length, 2 * width)[:, :-1]
        before = torch.nn.functional.pad(before, (0, 0, 0, 0, 1, 0))
        pairs = torch.cat([before, pairs], dim=2)
        remembered = torch.nn.functional.pad(is_item[:-1], (0, 0, 1, 0), value=False)
        is_item = torch.cat([remembered, is_item], dim=1)
    keys, values = (_split_heads(part) for part in pairs.split(width, dim=3))
    queries = _split_heads(dense("query", padded).view(placements, segments, length, width))
    scores = (queries / (width / ATTENTION_HEADS) ** 0.5) @ keys.transpose(3, 4)
    if segments > 1:
        scores = scores.masked_fill(~is_item[None, :, None, None, :], -1e9)
    shares = torch.softmax(scores, dim=4)
    joined = (shares @ values).transpose(2, 3).reshape(placements, segments * length, width)[:, :items]
    nodes = torch.nn.functional.layer_norm(nodes + dense("join", joined), (width,))
    wide = dense("widen", nodes).relu()
    normal: Tensor = torch.nn.functional.layer_norm(nodes + dense("narrow", wide), (width,))
    return normal


def _split_heads(rows: Tensor) -> Tensor:
    """Return [placement, segment, head, item, feature]."""
    heads: Tensor = rows.unflatten(3, (ATTENTION_HEADS, -1)).transpose(2, 3)
    return heads
