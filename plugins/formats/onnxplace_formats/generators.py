"""Generate cost graphs from a seed: families of graphs that are hard to place, of any size.

    >>> GENERATORS["layered"](300, 0).name
    'layered_300_0'

All costs are log-normal: operators take tens of microseconds, tensors have bytes to megabytes. The machine has four
devices of 16 GiB, and a transfer takes 134 us + 0.0001754 us per byte, as Baechi (Jeon et al., SoCC 2020) measured it
between GPUs of one host. Node numbers follow a topological order, so that they can break ties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np

from onnxplace.cost_graph.cost_graphs import assemble_cost_graph
from onnxplace.cost_graph.data import CostGraph
from onnxplace.graph.op_graph import Csr, Floats, Ints, Longs, OpGraph

MACHINE = MappingProxyType(
    {
        "devices": [{"id": index, "memory_bytes": 16 << 30} for index in range(4)],
        "comm": {"coef_us_per_byte": 0.0001754, "intercept_us": 134},
    }
)
# Limit of all weights, and of all tensors, of a graph, so that even a million nodes fit on one device. Larger draws are
# scaled down.
MAX_TOTAL_BYTES = 4 << 30
MAX_VALUE_BYTES = 64 << 20
# Share of the nodes that need workspace.
WORKSPACE_SHARE = 0.1
MIN_SECONDS, MAX_SECONDS = 1e-7, 2e-3


@dataclass(frozen=True)
class _Kind:
    """A type of operator, with the medians of its costs."""

    op: str
    microseconds: float
    output_bytes: float
    """Zero for a node that outputs its weights."""
    weight_bytes: float = 0.0
    spread: float = 0.8
    """Standard deviation of the logarithm of its times; sizes vary twice as much."""


_RESHAPE = _Kind("Reshape", 2, 64)
_VARIABLE = _Kind("Variable", 0.5, 0, 32 << 10)
_DENSE = _Kind("MatMul", 40, 32 << 10, 256 << 10)
_POINTWISE = _Kind("Add", 8, 32 << 10)
_KERNEL = _Kind("Conv", 80, 16 << 10, 64 << 10)
_COMPUTE = _Kind("MatMul", 30, 16 << 10, spread=0.7)

_Step = tuple[_Kind, Sequence[tuple[int, int]]]
"""An operator of a repeated block, and its inputs: (blocks back, position in that block) each."""


@dataclass(frozen=True)
class _Draft:
    """A graph without costs; every node produces one value, which has its number."""

    kinds: tuple[_Kind, ...]
    kind: Ints
    """Index into `kinds`, per node."""
    sources: Ints
    """The node that each edge leaves; parallel to `readers`."""
    readers: Ints
    weight: Ints | None = None
    """The weight that each node reads, -1 for none; None: each node whose kind has weights has its own."""
    group: Ints | None = None
    """Per node, -1 for none."""


def layered(nodes: int, seed: int, width: int = 16) -> CostGraph:
    """Return layers of about `width` nodes; each reads one to three tensors, mostly of the layer before.

    A few tensors of each layer have many readers.
    """
    return _draw_layers("layered", nodes, seed, max(1, nodes // width))


def wide(nodes: int, seed: int, levels: int = 4) -> CostGraph:
    """Return few layers with very many nodes each, so that a large part of the graph is ready at one time."""
    return _draw_layers("wide", nodes, seed, min(levels, nodes))


def _draw_layers(family: str, nodes: int, seed: int, levels: int) -> CostGraph:
    """Return at most `levels` layers of equal operators."""
    rng = np.random.default_rng(seed)
    edges = _draw_layer_edges(rng, _draw_levels(rng, nodes, levels))
    return _draw_costs(family, seed, rng, _Draft((_KERNEL,), np.zeros(nodes, dtype=np.int32), *edges))


def tf_like(nodes: int, seed: int) -> CostGraph:
    """Return a graph like those of TensorFlow: a narrow backbone of compute, variables and tiny chains.

    A third of the nodes are variables: cheap sources with weights, each in a group with its first reader. Some have two
    readers. Another third are reshapes and the like, in chains behind a third of the
    compute nodes. Compute takes 1 to 150 us.
    """
    rng = np.random.default_rng(seed)
    variables = tiny = nodes // 3
    count = nodes - variables - tiny
    level = _draw_levels(rng, count, max(1, count // 8))
    sources, readers = _draw_layer_edges(rng, level)
    first = np.flatnonzero(np.diff(level, prepend=-1)).astype(np.int32)
    owner = np.sort(rng.integers(count, size=variables)).astype(np.int32)
    chain_owner = np.sort(rng.integers((count + 2) // 3, size=tiny)).astype(np.int32) * 3
    variable_nodes = count + np.arange(variables, dtype=np.int32)
    chain_nodes = count + variables + np.arange(tiny, dtype=np.int32)
    end = np.arange(count, dtype=np.int32)
    end[chain_owner] = chain_nodes
    shared = rng.random(variables) < 0.2
    second_reader = np.minimum(owner[shared] + rng.integers(1, 9, size=int(shared.sum()), dtype=np.int32), count - 1)
    starts_chain = np.diff(chain_owner, prepend=-1) != 0
    kind = np.repeat(np.arange(3, dtype=np.int32), (count, variables, tiny))
    group = np.full(nodes, -1, dtype=np.int32)
    owner_ids, group[variable_nodes] = np.unique(owner, return_inverse=True)
    group[owner_ids] = np.arange(len(owner_ids))
    draft = _Draft(
        (_COMPUTE, _VARIABLE, _RESHAPE),
        kind,
        np.concatenate([
            np.where(rng.random(len(sources)) < 0.5, end[sources], sources),
            first[:-1], variable_nodes, variable_nodes[shared], np.where(starts_chain, chain_owner, chain_nodes - 1),
        ]),
        np.concatenate([readers, first[1:], owner, second_reader, chain_nodes]),
        group=group,
    )  # fmt: skip
    # Variables come right before their reader, chains right after the node that they start from.
    sort_key = np.concatenate([2 * np.arange(count) + 1, 2 * owner, 2 * chain_owner + 1])
    return _draw_costs("tf_like", seed, rng, _renumber_nodes(draft, np.argsort(sort_key, kind="stable")), 150e-6)


def chains(nodes: int, seed: int, count: int = 8) -> CostGraph:
    """Return `count` independent chains of different lengths, and a last node that reads the end of each."""
    rng = np.random.default_rng(seed)
    chain = np.sort(rng.integers(count, size=nodes - 1))
    inner = np.flatnonzero(np.diff(chain) == 0)
    ends = np.flatnonzero(np.diff(chain, append=count))
    sources = np.concatenate([inner, ends]).astype(np.int32)
    readers = np.concatenate([inner + 1, np.full(len(ends), nodes - 1)]).astype(np.int32)
    return _draw_costs("chains", seed, rng, _Draft((_DENSE,), np.zeros(nodes, dtype=np.int32), sources, readers))


def two_tower(nodes: int, seed: int) -> CostGraph:
    """Return an image tower of residual blocks and a text tower of attention blocks, joined by a last node."""
    rng = np.random.default_rng(seed)
    norm, gelu = _Kind("LayerNormalization", 10, 32 << 10), _Kind("Gelu", 8, 128 << 10)
    image: list[_Step] = [(_KERNEL, [(1, 5)]), (norm, [(0, 0)]), (gelu, [(0, 1)]), (_KERNEL, [(0, 2)]),
                          (norm, [(0, 3)]), (_POINTWISE, [(0, 4), (1, 5)])]  # fmt: skip
    heads: list[_Step] = [(_COMPUTE, [(0, 1), (0, 2), (0, 3)])] * 4
    text: list[_Step] = [(norm, [(1, 11)]), (_DENSE, [(0, 0)]), (_DENSE, [(0, 0)]), (_DENSE, [(0, 0)]), *heads,
                         (_DENSE, [(0, 4), (0, 5), (0, 6), (0, 7)]), (_DENSE, [(0, 8)]), (gelu, [(0, 9)]),
                         (_POINTWISE, [(0, 8), (0, 10)])]  # fmt: skip
    half = nodes // 2
    left, right = _repeat_block(image, half), _repeat_block(text, nodes - half - 1)
    ends = np.unique([max(half - 1, 0), max(nodes - 2, 0)]).astype(np.int32)
    ends = ends[ends < nodes - 1]
    return _draw_costs("two_tower", seed, rng, _Draft(
        (*left.kinds, *right.kinds, _COMPUTE),
        np.concatenate([left.kind, right.kind + len(image), [len(image) + len(text)]]).astype(np.int32),
        np.concatenate([left.sources, right.sources + half, ends]).astype(np.int32),
        np.concatenate([left.readers, right.readers + half, np.full(len(ends), nodes - 1)]).astype(np.int32),
    ))  # fmt: skip


def recurrent(nodes: int, seed: int, layers: int = 4) -> CostGraph:
    """Return an LSTM of `layers` layers, unrolled into primitive operators, with a projection after each step.

    All steps of a layer read the layer's one weight, and its cells are one group, as GNMT's variables make them.
    """
    rng = np.random.default_rng(seed)
    step: list[_Step] = []
    for layer in range(layers):
        first_position = 6 * layer
        below = [(0, first_position - 1)] if layer else []
        step += [
            (_DENSE, [*below, (1, first_position + 5)]),
            (_POINTWISE, [(0, first_position), (1, first_position + 3)]),
            (_POINTWISE, [(0, first_position)]),
            (_POINTWISE, [(0, first_position + 1), (0, first_position + 2)]),
            (_POINTWISE, [(0, first_position)]),
            (_POINTWISE, [(0, first_position + 3), (0, first_position + 4)]),
        ]
    step.append((_DENSE, [(0, 6 * layers - 1)]))
    draft = _repeat_block(step, nodes)
    layer_of = (draft.kind // 6).astype(np.int32)
    weight = np.where(draft.kind % 6 == 0, layer_of, -1).astype(np.int32)
    group = np.where(layer_of < layers, layer_of, -1).astype(np.int32)
    return _draw_costs("recurrent", seed, rng, replace(draft, weight=weight, group=group))


GENERATORS: Mapping[str, Callable[[int, int], CostGraph]] = MappingProxyType(
    {make.__name__: make for make in (layered, wide, tf_like, chains, two_tower, recurrent)}
)
"""Family -> function of a number of nodes and a seed."""


def _draw_levels(rng: np.random.Generator, nodes: int, levels: int) -> Ints:
    """Return the level of each node, ascending from 0 without gaps."""
    _, level = np.unique(np.sort(rng.integers(levels, size=nodes)), return_inverse=True)
    return level.astype(np.int32)


def _draw_layer_edges(rng: np.random.Generator, level: Ints) -> tuple[Ints, Ints]:
    """Return sources and readers of edges: each node reads one of the level before, and up to two of the last four."""
    starts = np.flatnonzero(np.diff(level, prepend=-1))
    sizes = np.diff(starts, append=len(level))
    inner = np.flatnonzero(level > 0)
    reader = np.repeat(inner, 1 + rng.integers(3, size=len(inner)))
    back = np.where(np.diff(reader, prepend=-1) != 0, 1, rng.integers(1, 5, size=len(reader)))
    origin = np.maximum(level[reader] - back, 0)
    # The square favours the first nodes of a level: their tensors have many readers.
    source = starts[origin] + (sizes[origin] * rng.random(len(reader)) ** 2).astype(np.int64)
    return source.astype(np.int32), reader.astype(np.int32)


def _repeat_block(block: Sequence[_Step], nodes: int) -> _Draft:
    """Return `nodes` nodes of a repeated block, the last one perhaps incomplete; `kind` is the position."""
    node = np.arange(nodes, dtype=np.int32)
    position, size = node % len(block), len(block)
    edges = [
        (node[position == index] + (source_position - index - size * back), node[position == index])
        for index, (_, reads) in enumerate(block)
        for back, source_position in reads
    ]
    sources, readers = (np.concatenate(ends).astype(np.int32) for ends in zip(*edges))
    real = sources >= 0
    return _Draft(tuple(kind for kind, _ in block), position, sources[real], readers[real])


def _renumber_nodes(draft: _Draft, order: Longs) -> _Draft:
    """Return a draft without weights with its nodes in another order."""
    number = np.empty(len(order), dtype=np.int32)
    number[order] = np.arange(len(order))
    group = None if draft.group is None else draft.group[order]
    return _Draft(draft.kinds, draft.kind[order], number[draft.sources], number[draft.readers], group=group)


def _draw_costs(
    family: str, seed: int, rng: np.random.Generator, draft: _Draft, longest_seconds: float = MAX_SECONDS
) -> CostGraph:
    """Draw the costs of a draft, and return its cost graph."""
    nodes = len(draft.kind)
    seconds = np.clip(_draw_costs_of(rng, draft, "microseconds", 1) * 1e-6, MIN_SECONDS, longest_seconds)
    weight, owners, weight_bytes = _assign_weights(draft, _draw_costs_of(rng, draft, "weight_bytes", 2))
    output_bytes = _draw_costs_of(rng, draft, "output_bytes", 2)
    weight_outputs = np.flatnonzero(output_bytes == 0)
    value_bytes = _round_to_bytes(output_bytes)
    value_bytes[weight_outputs] = weight_bytes[weight[weight_outputs]]
    ops = tuple(draft.kinds[kind].op for kind in draft.kind.tolist())
    names = tuple(f"{op}_{node}" for node, op in enumerate(ops))
    reads = np.flatnonzero(weight >= 0).astype(np.int32)
    graph = OpGraph(
        names=names,
        ops=ops,
        value_names=tuple(f"{name}:0" for name in names),
        value_bytes=value_bytes,
        producer=np.arange(nodes, dtype=np.int32),
        is_output=np.zeros(nodes, dtype=bool),
        alias=np.full(nodes, -1, dtype=np.int32),
        inputs=Csr.grouped(draft.readers, draft.sources, nodes),
        weight_names=tuple(f"{names[node]}:weight" for node in owners.tolist()),
        weight_bytes=weight_bytes,
        weights=Csr.grouped(reads, weight[reads], nodes),
        workspace_bytes=np.where(rng.random(nodes) < WORKSPACE_SHARE, 2 * value_bytes, 0),
    )
    group = np.full(nodes, -1, dtype=np.int32) if draft.group is None else draft.group
    return assemble_cost_graph(
        f"{family}_{nodes}_{seed}", range(nodes), graph, seconds, MACHINE, group, np.zeros(nodes, dtype=bool)
    )


def _assign_weights(draft: _Draft, drawn_bytes: Floats) -> tuple[Ints, Ints, Longs]:
    """Return the weight of each node (-1: none), and the first reader and the bytes of each weight.

    `drawn_bytes` has one draw per node; the first reader decides the size of a weight.
    """
    if draft.weight is not None:
        reads = np.flatnonzero(draft.weight >= 0)
        owners = reads[np.unique(draft.weight[reads], return_index=True)[1]].astype(np.int32)
        return draft.weight, owners, _round_to_bytes(drawn_bytes[owners])
    owners = np.flatnonzero(drawn_bytes > 0).astype(np.int32)
    weight = np.full(len(drawn_bytes), -1, dtype=np.int32)
    weight[owners] = np.arange(len(owners))
    return weight, owners, _round_to_bytes(drawn_bytes[owners])


def _draw_costs_of(
    rng: np.random.Generator,
    draft: _Draft,
    cost: Literal["microseconds", "weight_bytes", "output_bytes"],
    spread_factor: float,
) -> Floats:
    """Return a log-normal draw per node around the median of its kind, with a scaled spread."""
    medians, spreads = np.array([(getattr(kind, cost), kind.spread) for kind in draft.kinds]).T
    noise = rng.standard_normal(len(draft.kind))
    drawn: Floats = medians[draft.kind] * np.exp(spread_factor * spreads[draft.kind] * noise)
    return drawn


def _round_to_bytes(sizes: Floats) -> Longs:
    """Round sizes to whole bytes, each and in total within the limits."""
    sizes = np.minimum(sizes, MAX_VALUE_BYTES)
    scaled: Longs = np.rint(sizes * min(1.0, MAX_TOTAL_BYTES / max(float(sizes.sum()), 1.0))).astype(np.int64)
    return scaled
