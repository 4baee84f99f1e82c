"""The loss of the policy of `guided`, with torch: it imitates placements, or reinforces schedules of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph.op_graph import Bools, Ints, Longs
from onnxplace_learned.policies.guided_kernels import ScheduleTrace
from onnxplace_learned.policies.guided_policy import GuidedGraph
from onnxplace_learned.policies.placeto_kernels import Singles
from onnxplace_learned.pytorch import require_torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Example:
    """The decisions of one list schedule; arrays have a row per decision."""

    graph: GuidedGraph
    decided: Longs
    """The groups."""
    features: Singles
    """[decision, device, feature]."""
    allowed: Bools
    """[decision, device]."""
    right: Bools
    """[decision, device]: the devices to choose; several where they are interchangeable and empty."""
    decided_neighbours: Longs
    """Pairs whose neighbour had a device."""
    neighbour_row: Longs
    """The decision of each of these pairs."""
    neighbour_device: Longs
    """The device of the neighbour in each of these pairs."""
    weight: float = 1.0
    """Positive to make the choices likelier, negative to make them less likely."""


def make_example(graph: GuidedGraph, device: Ints, trace: ScheduleTrace, weight: float = 1.0) -> Example:
    """Return the decisions that led to a placement."""
    group_device = np.zeros(len(graph.problem.pinned), dtype=np.int64)
    group_device[graph.problem.group] = device
    decided = np.flatnonzero(trace.rank >= 0)
    row_of = np.full(len(group_device), -1, dtype=np.int64)
    row_of[decided] = np.arange(len(decided))
    pairs = graph.pairs
    # Pinned groups have a device from the start: their rank is -1.
    decided_neighbours = np.flatnonzero(
        (trace.rank[pairs.groups] >= 0) & (trace.rank[pairs.neighbours] < trace.rank[pairs.groups])
    )
    return Example(
        graph=graph,
        decided=decided,
        features=trace.features[decided],
        allowed=trace.allowed[decided],
        right=_mark_right_devices(graph, group_device[decided], trace.rank[decided]) & trace.allowed[decided],
        decided_neighbours=decided_neighbours,
        neighbour_row=row_of[pairs.groups[decided_neighbours]],
        neighbour_device=group_device[pairs.neighbours[decided_neighbours]],
        weight=weight,
    )


def _mark_right_devices(graph: GuidedGraph, chosen: Longs, rank: Ints) -> Bools:
    """Return, per decision, its device and all that are interchangeable with it and as empty: [decision, device]."""
    kind = graph.interchangeable
    devices = np.arange(len(kind))
    right: Bools = chosen[:, None] == devices[None, :]
    # The first decision for each device, before which it is empty.
    first = np.full(len(kind), len(rank) + 1)
    np.minimum.at(first, chosen, rank)
    was_empty = first[None, :] >= rank[:, None]
    starts = (first[chosen] == rank)[:, None]
    right |= starts & was_empty & (kind[chosen][:, None] == kind[None, :])
    return right


def imitation_loss(tensors: dict[str, Tensor], rounds: int, examples: Sequence[Example]) -> tuple[Tensor, float]:
    """Return the mean negative log-likelihood of the right devices, weighted, and the share of right choices."""
    torch = require_torch()
    log_shares, right = score_examples(tensors, rounds, examples)
    likelihood = torch.logsumexp(log_shares.masked_fill(~right, -torch.inf), dim=1)
    counts = [len(example.decided) for example in examples]
    weights = np.repeat([example.weight / max(count, 1) for example, count in zip(examples, counts)], counts)
    loss = -(likelihood * torch.from_numpy(weights.astype(np.float32))).sum() / len(examples)
    best = log_shares.argmax(dim=1)
    share = float(right.gather(1, best[:, None]).float().mean()) if len(right) else 1.0
    return loss, share


def score_examples(tensors: dict[str, Tensor], rounds: int, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [decision, device] of all examples, as the compiled loops score them, and `right`.

    Devices that an example does not have, or that had no room, have probability 0.
    """
    torch = require_torch()
    graphs = list({id(example.graph): example.graph for example in examples}.values())
    node_start, group_start, pair_start = (
        dict(zip(map(id, graphs), np.concatenate([[0], np.cumsum(counts)]).tolist()))
        for counts in (
            [len(graph.problem.graph) for graph in graphs],
            [len(graph.problem.pinned) for graph in graphs],
            [len(graph.pairs.groups) for graph in graphs],
        )
    )
    embedding = _embed(tensors, rounds, graphs, node_start)
    group = _join([graph.problem.group.astype(np.int64) + group_start[id(graph)] for graph in graphs])
    sizes = torch.from_numpy(np.concatenate([graph.group_sizes for graph in graphs]).astype(np.float32))
    pooled = embedding.new_zeros((len(sizes), embedding.shape[1])).index_add(0, group, embedding)
    pooled = pooled / sizes.clamp(min=1)[:, None]
    group_features = torch.from_numpy(np.concatenate([graph.group_features for graph in graphs]))
    hidden = pooled @ tensors["group.embedding"] + group_features @ tensors["group.features"] + tensors["group.bias"]
    messages = _message(tensors, pooled, graphs, group_start)
    # Decisions of all examples, one after the other.
    decisions = np.concatenate([[0], np.cumsum([len(example.decided) for example in examples])])
    devices = max(example.allowed.shape[1] for example in examples)
    decided = _join([example.decided + group_start[id(example.graph)] for example in examples])
    heard = _join([example.decided_neighbours + pair_start[id(example.graph)] for example in examples])
    slot = _join(
        [
            (example.neighbour_row + start) * devices + example.neighbour_device
            for example, start in zip(examples, decisions.tolist())
        ]
    )
    own = messages.new_zeros((int(decisions[-1]) * devices, messages.shape[1])).index_add(0, slot, messages[heard])
    own = own.view(-1, devices, messages.shape[1])
    features, allowed, right = (
        torch.from_numpy(np.concatenate([_pad(array, devices) for array in arrays]))
        for arrays in (
            [example.features for example in examples],
            [example.allowed for example in examples],
            [example.right for example in examples],
        )
    )
    before_score = hidden[decided][:, None, :] + own @ tensors["device.own"] + features @ tensors["device.features"]
    before_score = before_score + (own.sum(dim=1) @ tensors["device.all"])[:, None, :]
    scores = before_score.relu() @ tensors["device.output"]
    return torch.log_softmax(scores.masked_fill(~allowed, -1e9), dim=1), right


def _embed(tensors: dict[str, Tensor], rounds: int, graphs: Sequence[GuidedGraph], starts: dict[int, int]) -> Tensor:
    """Return the embeddings of the nodes of all graphs."""
    torch = require_torch()
    features = torch.from_numpy(np.concatenate([graph.node_features for graph in graphs]))
    edges = [graph.problem.graph.predecessors for graph in graphs]
    sources, readers = (
        _join([array.astype(np.int64) + starts[id(graph)] for graph, array in zip(graphs, arrays)])
        for arrays in ([edge.items for edge in edges], [edge.rows for edge in edges])
    )
    current: Tensor = (features @ tensors["encode.weight"] + tensors["encode.bias"]).relu()
    counts = [torch.bincount(nodes, minlength=len(features)).clamp(min=1)[:, None] for nodes in (readers, sources)]
    for index in range(rounds):
        before = torch.zeros_like(current).index_add(0, readers, current[sources]) / counts[0]
        after = torch.zeros_like(current).index_add(0, sources, current[readers]) / counts[1]
        heard = current @ tensors[f"round{index}.own"] + before @ tensors[f"round{index}.before"]
        heard = heard + after @ tensors[f"round{index}.after"] + tensors[f"round{index}.bias"]
        current = current + heard.relu()
    return current


def _message(
    tensors: dict[str, Tensor], pooled: Tensor, graphs: Sequence[GuidedGraph], starts: dict[int, int]
) -> Tensor:
    """Return what each group hears of each neighbour, of all graphs."""
    torch = require_torch()
    own, neighbours = (
        _join([array.astype(np.int64) + starts[id(graph)] for graph, array in zip(graphs, arrays)])
        for arrays in ([graph.pairs.groups for graph in graphs], [graph.pairs.neighbours for graph in graphs])
    )
    features = torch.from_numpy(np.concatenate([graph.pairs.features for graph in graphs]))
    counts = torch.bincount(own, minlength=len(pooled)).clamp(min=1)
    messages = (pooled @ tensors["message.own"])[own] + (pooled @ tensors["message.neighbour"])[neighbours]
    messages = messages + features @ tensors["message.pair"] + tensors["message.bias"]
    heard: Tensor = messages.relu() / counts[own][:, None]
    return heard


def _join(arrays: Sequence[Longs]) -> Tensor:
    tensor: Tensor = require_torch().from_numpy(np.concatenate(arrays).astype(np.int64))
    return tensor


def _pad(array: Singles | Bools, devices: int) -> NDArray[Any]:
    """Return an array [decision, device, ...] with zeros for further devices."""
    widths = [(0, 0), (0, devices - array.shape[1]), *[(0, 0)] * (array.ndim - 2)]
    return np.pad(array, widths)
