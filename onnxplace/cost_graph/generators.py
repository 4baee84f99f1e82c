"""Cost graphs of our own, drawn from a seed: families with the shapes that make placement hard, of any size.

    >>> GENERATORS["layered"](300, 0).name
    'layered_300_0'

All costs are log-normal: operators take tens of microseconds, tensors have bytes to megabytes. The machine has four
devices of 16 GiB, and a transfer takes 134 us + 0.0001754 us per byte, as Baechi (Jeon et al., SoCC 2020) measured it
between GPUs of one host. Node numbers follow a topological order, so that they can break ties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from onnxplace.cost_graph.cost_graphs import assembled
from onnxplace.cost_graph.data import CostGraph
from onnxplace.graph import Csr, Floats, Ints, Longs, OpGraph

MACHINE = MappingProxyType(
    {
        "devices": [{"id": index, "memory_bytes": 16 << 30} for index in range(4)],
        "comm": {"coef_us_per_byte": 0.0001754, "intercept_us": 134},
    }
)
# All weights, and all tensors, of a graph keep within this, so that even a million nodes fit one device; larger draws
# are scaled down.
TOTAL_BYTES = 4 << 30
LARGEST_BYTES = 64 << 20
# The part of the nodes that need memory while they run.
WORKING = 0.1
SHORTEST_SECONDS, LONGEST_SECONDS = 1e-7, 2e-3


@dataclass(frozen=True)
class _Kind:
    """A type of operator: medians of what its nodes cost."""

    op: str
    microseconds: float
    output_bytes: float
    """Zero: as large as its weights, which it hands out."""
    weight_bytes: float = 0.0
    spread: float = 0.8
    """Standard deviation of the logarithm of its times; sizes vary twice as much."""


_TINY = _Kind("Reshape", 2, 64)
_VARIABLE = _Kind("Variable", 0.5, 0, 32 << 10)
_DENSE = _Kind("MatMul", 40, 32 << 10, 256 << 10)
_POINTWISE = _Kind("Add", 8, 32 << 10)
_KERNEL = _Kind("Conv", 80, 16 << 10, 64 << 10)
_COMPUTE = _Kind("MatMul", 30, 16 << 10, spread=0.7)

_Step = tuple[_Kind, Sequence[tuple[int, int]]]
"""An operator of a block that repeats, and what it reads: (blocks back, position in that block) each."""


@dataclass(frozen=True)
class _Draft:
    """A graph without costs. Every node makes one value, which has its number."""

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
    rng = np.random.default_rng(seed)
    level = _levels(rng, nodes, max(1, nodes // width))
    return _costed("layered", seed, rng, _Draft((_KERNEL,), np.zeros(nodes, dtype=np.int32), *_layer_edges(rng, level)))


def wide(nodes: int, seed: int, levels: int = 4) -> CostGraph:
    """Return few layers with very many nodes each, so that a large part of the graph is ready at one time."""
    rng = np.random.default_rng(seed)
    level = _levels(rng, nodes, min(levels, nodes))
    return _costed("wide", seed, rng, _Draft((_KERNEL,), np.zeros(nodes, dtype=np.int32), *_layer_edges(rng, level)))


def tf_like(nodes: int, seed: int) -> CostGraph:
    """Return what TensorFlow graphs look like: a narrow backbone of compute, variables that feed it, tiny chains.

    A third of the nodes are variables: sources that cost next to nothing and hold weights, some read by two nodes,
    each in a group with its first reader. Another third are reshapes and the like, in chains behind a third of the
    compute nodes. Compute takes 1 to 150 us.
    """
    rng = np.random.default_rng(seed)
    variables = tiny = nodes // 3
    count = nodes - variables - tiny
    level = _levels(rng, count, max(1, count // 8))
    sources, readers = _layer_edges(rng, level)
    first = np.flatnonzero(np.diff(level, prepend=-1)).astype(np.int32)
    owner = np.sort(rng.integers(count, size=variables)).astype(np.int32)
    behind = np.sort(rng.integers((count + 2) // 3, size=tiny)).astype(np.int32) * 3
    feeding = count + np.arange(variables, dtype=np.int32)
    links = count + variables + np.arange(tiny, dtype=np.int32)
    end = np.arange(count, dtype=np.int32)
    end[behind] = links
    shared = rng.random(variables) < 0.2
    also = np.minimum(owner[shared] + rng.integers(1, 9, size=int(shared.sum()), dtype=np.int32), count - 1)
    starts_chain = np.diff(behind, prepend=-1) != 0
    kind = np.repeat(np.arange(3, dtype=np.int32), (count, variables, tiny))
    group = np.full(nodes, -1, dtype=np.int32)
    owned, group[feeding] = np.unique(owner, return_inverse=True)
    group[owned] = np.arange(len(owned))
    draft = _Draft(
        (_COMPUTE, _VARIABLE, _TINY),
        kind,
        np.concatenate([
            np.where(rng.random(len(sources)) < 0.5, end[sources], sources),
            first[:-1], feeding, feeding[shared], np.where(starts_chain, behind, links - 1),
        ]),
        np.concatenate([readers, first[1:], owner, also, links]),
        group=group,
    )  # fmt: skip
    # Variables right before the node they feed, chains right behind the node they hang on.
    place = np.concatenate([2 * np.arange(count) + 1, 2 * owner, 2 * behind + 1])
    return _costed("tf_like", seed, rng, _renumbered(draft, np.argsort(place, kind="stable")), 150e-6)


def chains(nodes: int, seed: int, count: int = 8) -> CostGraph:
    """Return `count` independent chains of different lengths, and a last node that reads the end of each."""
    rng = np.random.default_rng(seed)
    chain = np.sort(rng.integers(count, size=nodes - 1))
    inner = np.flatnonzero(np.diff(chain) == 0)
    ends = np.flatnonzero(np.diff(chain, append=count))
    sources = np.concatenate([inner, ends]).astype(np.int32)
    readers = np.concatenate([inner + 1, np.full(len(ends), nodes - 1)]).astype(np.int32)
    return _costed("chains", seed, rng, _Draft((_DENSE,), np.zeros(nodes, dtype=np.int32), sources, readers))


def two_tower(nodes: int, seed: int) -> CostGraph:
    """Return an image tower of residual blocks beside a text tower of attention blocks, joined by a last node."""
    rng = np.random.default_rng(seed)
    norm, gelu = _Kind("LayerNormalization", 10, 32 << 10), _Kind("Gelu", 8, 128 << 10)
    image: list[_Step] = [(_KERNEL, [(1, 5)]), (norm, [(0, 0)]), (gelu, [(0, 1)]), (_KERNEL, [(0, 2)]),
                          (norm, [(0, 3)]), (_POINTWISE, [(0, 4), (1, 5)])]  # fmt: skip
    heads: list[_Step] = [(_COMPUTE, [(0, 1), (0, 2), (0, 3)])] * 4
    text: list[_Step] = [(norm, [(1, 11)]), (_DENSE, [(0, 0)]), (_DENSE, [(0, 0)]), (_DENSE, [(0, 0)]), *heads,
                         (_DENSE, [(0, 4), (0, 5), (0, 6), (0, 7)]), (_DENSE, [(0, 8)]), (gelu, [(0, 9)]),
                         (_POINTWISE, [(0, 8), (0, 10)])]  # fmt: skip
    half = nodes // 2
    left, right = _repeated(image, half), _repeated(text, nodes - half - 1)
    ends = np.unique([max(half - 1, 0), max(nodes - 2, 0)]).astype(np.int32)
    ends = ends[ends < nodes - 1]
    return _costed("two_tower", seed, rng, _Draft(
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
        at = 6 * layer
        below = [(0, at - 1)] if layer else []
        step += [
            (_DENSE, [*below, (1, at + 5)]),
            (_POINTWISE, [(0, at), (1, at + 3)]),
            (_POINTWISE, [(0, at)]),
            (_POINTWISE, [(0, at + 1), (0, at + 2)]),
            (_POINTWISE, [(0, at)]),
            (_POINTWISE, [(0, at + 3), (0, at + 4)]),
        ]
    step.append((_DENSE, [(0, 6 * layers - 1)]))
    draft = _repeated(step, nodes)
    layer_of = (draft.kind // 6).astype(np.int32)
    weight = np.where(draft.kind % 6 == 0, layer_of, -1).astype(np.int32)
    group = np.where(layer_of < layers, layer_of, -1).astype(np.int32)
    return _costed("recurrent", seed, rng, _Draft(draft.kinds, draft.kind, draft.sources, draft.readers, weight, group))


GENERATORS: Mapping[str, Callable[[int, int], CostGraph]] = MappingProxyType(
    {make.__name__: make for make in (layered, wide, tf_like, chains, two_tower, recurrent)}
)
"""Family -> function of a number of nodes and a seed."""


def _levels(rng: np.random.Generator, nodes: int, levels: int) -> Ints:
    """Return the level of each node, ascending from 0 without gaps."""
    _, level = np.unique(np.sort(rng.integers(levels, size=nodes)), return_inverse=True)
    return level.astype(np.int32)


def _layer_edges(rng: np.random.Generator, level: Ints) -> tuple[Ints, Ints]:
    """Return sources and readers of edges: each node reads one of the level before, and up to two of the last four."""
    starts = np.flatnonzero(np.diff(level, prepend=-1))
    sizes = np.diff(starts, append=len(level))
    inner = np.flatnonzero(level > 0)
    reader = np.repeat(inner, 1 + rng.integers(3, size=len(inner)))
    back = np.where(np.diff(reader, prepend=-1) != 0, 1, rng.integers(1, 5, size=len(reader)))
    origin = np.maximum(level[reader] - back, 0)
    # The square makes the first nodes of a level popular: their tensors have many readers.
    source = starts[origin] + (sizes[origin] * rng.random(len(reader)) ** 2).astype(np.int64)
    return source.astype(np.int32), reader.astype(np.int32)


def _repeated(block: Sequence[_Step], nodes: int) -> _Draft:
    """Return `nodes` nodes of a block that repeats, the last one cut off where they end; `kind` is the position."""
    node = np.arange(nodes, dtype=np.int32)
    position, size = node % len(block), len(block)
    edges = [
        (node[position == at] + (there - at - size * back), node[position == at])
        for at, (_, reads) in enumerate(block)
        for back, there in reads
    ]
    sources, readers = (np.concatenate(ends).astype(np.int32) for ends in zip(*edges))
    real = sources >= 0
    return _Draft(tuple(kind for kind, _ in block), position, sources[real], readers[real])


def _renumbered(draft: _Draft, order: Longs) -> _Draft:
    """Return the draft (without weights of its own) with its nodes in this order."""
    number = np.empty(len(order), dtype=np.int32)
    number[order] = np.arange(len(order))
    group = None if draft.group is None else draft.group[order]
    return _Draft(draft.kinds, draft.kind[order], number[draft.sources], number[draft.readers], group=group)


def _costed(
    family: str, seed: int, rng: np.random.Generator, draft: _Draft, longest_seconds: float = LONGEST_SECONDS
) -> CostGraph:
    """Return the cost graph of a draft, with what it costs drawn."""
    nodes = len(draft.kind)
    seconds = np.clip(_drawn(rng, draft, "microseconds", 1) * 1e-6, SHORTEST_SECONDS, longest_seconds)
    weight, owners, weight_bytes = _weights(draft, _drawn(rng, draft, "weight_bytes", 2))
    made = _drawn(rng, draft, "output_bytes", 2)
    hands_out = np.flatnonzero(made == 0)
    value_bytes = _whole(made)
    value_bytes[hands_out] = weight_bytes[weight[hands_out]]
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
        workspace_bytes=np.where(rng.random(nodes) < WORKING, 2 * value_bytes, 0),
    )
    group = np.full(nodes, -1, dtype=np.int32) if draft.group is None else draft.group
    return assembled(
        f"{family}_{nodes}_{seed}", range(nodes), graph, seconds, MACHINE, group, np.zeros(nodes, dtype=bool)
    )


def _weights(draft: _Draft, held: Floats) -> tuple[Ints, Ints, Longs]:
    """Return the weight that each node reads (-1: none), and the first reader and the bytes of each weight.

    `held` is what was drawn per node; a weight is as large as its first reader drew.
    """
    if draft.weight is not None:
        reads = np.flatnonzero(draft.weight >= 0)
        owners = reads[np.unique(draft.weight[reads], return_index=True)[1]].astype(np.int32)
        return draft.weight, owners, _whole(held[owners])
    owners = np.flatnonzero(held > 0).astype(np.int32)
    weight = np.full(len(held), -1, dtype=np.int32)
    weight[owners] = np.arange(len(owners))
    return weight, owners, _whole(held[owners])


def _drawn(
    rng: np.random.Generator, draft: _Draft, cost: Literal["microseconds", "weight_bytes", "output_bytes"], widen: float
) -> Floats:
    """Return a log-normal draw per node around the median of its kind, `widen` times as wide as its times are."""
    medians, spreads = np.array([(getattr(kind, cost), kind.spread) for kind in draft.kinds]).T
    drawn: Floats = medians[draft.kind] * np.exp(widen * spreads[draft.kind] * rng.standard_normal(len(draft.kind)))
    return drawn


def _whole(sizes: Floats) -> Longs:
    """Return sizes in whole bytes, each and together within the limits."""
    sizes = np.minimum(sizes, LARGEST_BYTES)
    scaled: Longs = np.rint(sizes * min(1.0, TOTAL_BYTES / max(float(sizes.sum()), 1.0))).astype(np.int64)
    return scaled
