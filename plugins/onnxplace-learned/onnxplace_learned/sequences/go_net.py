"""The network of GO and GDP, with torch: all devices at once, refined in passes, then priorities."""

from __future__ import annotations

from collections.abc import Sequence
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
from onnxplace_learned.sequences.sequence_policy import ATTENTION_HEADS, ATTENTION_LAYERS, GRAPH_LAYERS

if TYPE_CHECKING:
    from torch import Tensor

# Passes over the graph; each reads the devices that the one before chose.
PASSES = 2
# Items that attend to each other, and to those of the segment before.
SEGMENT = 256


@dataclass(frozen=True)
class Decisions:
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


def sample_decisions(tensors: Tensors, inputs: SequenceInputs, count: int, generator: Any) -> Decisions:
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
    return Decisions(torch.stack(passes), priority)


def score_decisions(tensors: Tensors, inputs: SequenceInputs, decisions: Decisions) -> Likelihood:
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
