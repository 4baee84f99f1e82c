"""Blocks that a step goes through one after the other: pieces of its longest path with what runs beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from onnxplace.graph import Csr, Floats, Ints, Longs, OpGraph
from onnxplace.problem import PlacementProblem, sort_by_start

# More than a block needs.
ENOUGH_BYTES = 1 << 60


BlockPlan = tuple[Ints, Ints]
"""The device of each node, and the order of the nodes."""


@dataclass(frozen=True)
class Block:
    """What runs between the end of one node of the path and the end of a later one."""

    nodes: Ints
    """In topological order; the first is the node at whose end it begins, unless the path begins here."""
    enters: bool
    """Whether it is."""
    path_seconds: float
    """What its piece of the path takes at least."""
    forks: bool
    """Whether anything runs beside the path."""


@dataclass(frozen=True)
class BlockChain:
    """Blocks in the order they run, and the problems that they are by themselves."""

    blocks: tuple[Block, ...]
    problems: tuple[PlacementProblem, ...]
    """Each once, however many blocks are equal."""
    which: tuple[int, ...]
    """Of each block, the index of its problem."""

    @property
    def forks(self) -> list[int]:
        """Return the problems in which anything runs beside the path, by index, small ones first."""
        found = {index for block, index in zip(self.blocks, self.which) if block.forks}
        return sorted(found, key=lambda index: (len(self.problems[index].graph), index))


def decompose_series(asked: PlacementProblem, most: int) -> BlockChain:
    """Return blocks of at most `most` nodes, unless they are chains: no step is shorter than what they take in sum.

    The path that takes longest without transfers is cut into pieces. A node beside it can only run between the last
    node of the path that it needs and the first that needs it: it joins all between them, and itself, into one piece,
    nodes that span least first, as long as there is room. The others are in no block. Memory is left out, and what
    groups and pins ask of nodes in different blocks. O(N log N + E).
    """
    blocks = _blocks(asked, most)
    known = dict[tuple[bytes, ...], int]()
    problems, which = list[PlacementProblem](), list[int]()
    for block in blocks:
        part = alone(asked, block)
        arrays = (part.seconds, part.group, part.pinned, part.graph.producer, part.graph.value_bytes,
                  part.graph.inputs.starts, part.graph.inputs.items)  # fmt: skip
        which.append(known.setdefault(tuple(array.tobytes() for array in arrays), len(problems)))
        problems += [part][: which[-1] == len(problems)]
    return BlockChain(tuple(blocks), tuple(problems), tuple(which))


def _blocks(asked: PlacementProblem, most: int) -> list[Block]:
    graph, least = asked.graph, asked.seconds.min(axis=0)
    if not len(graph):
        return []
    path = _longest_path(graph, least)
    first, last = _spans(graph, path)
    beside = np.flatnonzero((first < last) & (first >= 0) & (last < len(path)))
    beside = beside[np.argsort(last[beside] - first[beside], kind="stable")]
    pieces = _Pieces(len(path), most - 1)
    joined = np.array([n for n in beside.tolist() if pieces.join(int(first[n]) + 1, int(last[n]))], dtype=np.int32)
    begins = np.array([pieces.begin(place) for place in range(len(path))])
    forks = np.isin(begins, begins[first[joined] + 1])
    # What has nothing beside it is one piece with its like.
    starts = [k for k in range(len(path)) if begins[k] == k and (k == 0 or forks[k] or forks[k - 1])]
    piece = np.searchsorted(starts, np.arange(len(path)), side="right") - 1
    blocks = []
    for index, (start, stop) in enumerate(pairwise([*starts, len(path)])):
        own = joined[piece[first[joined] + 1] == index]
        nodes = np.concatenate([path[max(start - 1, 0) : stop], own])
        nodes = nodes[np.argsort(graph.positions[nodes])]
        blocks.append(Block(nodes, start > 0, float(least[path[start:stop]].sum()), bool(forks[start])))
    return blocks


def alone(asked: PlacementProblem, block: Block) -> PlacementProblem:
    """Return the problem of a block by itself, groups and pins kept, memory ample; any step of the whole contains it.

    The node it enters by has no time of its own. Equal blocks give equal problems, but for names.
    """
    nodes = block.nodes
    seconds = np.ascontiguousarray(asked.seconds[:, nodes])
    if block.enters:
        seconds[:, 0] = 0.0
    _, begins, rank = np.unique(asked.group[nodes], return_index=True, return_inverse=True)
    group: Ints = np.argsort(np.argsort(begins))[rank].astype(np.int32)
    pinned = asked.pinned[asked.group[nodes[np.sort(begins)]]]
    target = asked.target.limiting({device.id: ENOUGH_BYTES for device in asked.target.devices})
    limits = np.full(len(target.devices), ENOUGH_BYTES, dtype=np.int64)
    members = np.arange(len(nodes), dtype=np.int32)
    return PlacementProblem(_within(asked.graph, nodes), seconds, target, limits, group, pinned, members)


def compose_blocks(
    asked: PlacementProblem, row: BlockChain, steps: Sequence[BlockPlan], again: Callable[[PlacementProblem], BlockPlan]
) -> tuple[Ints, Ints]:
    """Return device and order of all nodes: the blocks one after the other, each begun where the last one ended.

    `steps` holds a step per problem of the row. Where an earlier block has put a group elsewhere, the block is solved
    `again` with that pinned. What is in no block joins what reads it, or else what it reads.
    """
    graph, home, like = asked.graph, asked.pinned.copy(), interchangeable_devices(asked)
    rank = np.full(len(graph), np.inf)
    begin = 0
    for block, index in zip(row.blocks, row.which):
        (device, order), groups = steps[index], asked.group[block.nodes]
        there, here = int(home[groups[0]]), int(device[0])
        if block.enters and there >= 0 and like[there] == like[here]:
            swapped = np.arange(len(like), dtype=np.int32)
            swapped[[there, here]] = here, there
            device = swapped[device]
        if ((home[groups] >= 0) & (home[groups] != device)).any():
            device, order = again(alone(replace(asked, pinned=home), block))
        home[groups] = device
        rank[block.nodes[order]] = begin + np.arange(len(order))
        begin += len(order)
    for node in graph.order[::-1].tolist():
        _follow(node, graph.successors[node], asked.group, home)
        rank[node] = min(rank[node], rank[graph.successors[node]].min(initial=np.inf))
    for node in graph.order.tolist():
        _follow(node, graph.predecessors[node], asked.group, home)
        rank[node] = max(rank[node], rank[graph.predecessors[node]].max(initial=-np.inf))
    return np.maximum(home, 0)[asked.group].astype(np.int32), sort_by_start(graph, rank)


def _follow(node: int, others: Ints, group: Ints, home: Ints) -> None:
    """Put the group of a node where one of some others is, unless it is somewhere."""
    if home[group[node]] < 0:
        home[group[node]] = home[group[others]].max(initial=-1)


def interchangeable_devices(asked: PlacementProblem) -> Ints:
    """Return, per device, the first one that it can be exchanged with."""
    latency, per_byte = asked.target.link_arrays()
    count = len(latency)
    first = np.arange(count, dtype=np.int32)
    for b in range(count):
        for a in range(b):
            swapped = np.arange(count)
            swapped[[a, b]] = b, a
            if (
                not np.isin(asked.pinned, (a, b)).any()
                and (asked.seconds[a] == asked.seconds[b]).all()
                and asked.limit_bytes[a] == asked.limit_bytes[b]
                and all((links[np.ix_(swapped, swapped)] == links).all() for links in (latency, per_byte))
            ):
                first[b] = first[a]
                break
    return first


def _longest_path(graph: OpGraph, seconds: Floats) -> Ints:
    """Return the nodes of the path that takes longest without transfers, first node first; ties by index."""
    tail = np.zeros(len(graph))
    following = np.full(len(graph), -1, dtype=np.int32)
    for node in graph.order[::-1].tolist():
        after = graph.successors[node]
        if len(after):
            following[node] = after[tail[after].argmax()]
            tail[node] = tail[following[node]]
        tail[node] += seconds[node]
    path = [int(tail.argmax())]
    while following[path[-1]] >= 0:
        path.append(int(following[path[-1]]))
    return np.array(path, dtype=np.int32)


def _spans(graph: OpGraph, path: Ints) -> tuple[Longs, Longs]:
    """Return, per node, the place on the path of the last node that it needs and of the first that needs it.

    A node of the path counts as its own; -1 and the length of the path where there is none.
    """
    first, last = np.full(len(graph), -1), np.full(len(graph), len(path))
    first[path] = last[path] = np.arange(len(path))
    for node in graph.order.tolist():
        first[node] = max(first[node], first[graph.predecessors[node]].max(initial=-1))
    for node in graph.order[::-1].tolist():
        last[node] = min(last[node], last[graph.successors[node]].min(initial=len(path)))
    return first, last


class _Pieces:
    """A path in pieces, each of so many nodes on it and beside it."""

    def __init__(self, length: int, most: int) -> None:
        self.before, self.most = list(range(length)), most
        self.size = [1] * length

    def begin(self, place: int) -> int:
        """Return where the piece begins that holds a place of the path."""
        while self.before[place] != place:
            self.before[place] = self.before[self.before[place]]
            place = self.before[place]
        return place

    def join(self, start: int, stop: int) -> bool:
        """Join the pieces from one place to another and a node beside them, or return False for want of room."""
        begins, place = [], stop
        while place >= start:
            begins.append(self.begin(place))
            place = begins[-1] - 1
            if 1 + sum(self.size[begin] for begin in begins) > self.most:
                return False
        for begin in begins[:-1]:
            self.before[begin] = begins[-1]
        self.size[begins[-1]] = 1 + sum(self.size[begin] for begin in begins)
        return True


def _within(graph: OpGraph, nodes: Ints) -> OpGraph:
    """Return the graph of some nodes, in their order: no weights, no workspace, values between them only."""
    number = np.full(len(graph) + 1, -1, dtype=np.int32)
    number[nodes] = np.arange(len(nodes), dtype=np.int32)
    reader, producer = number[graph.inputs.rows], number[graph.producer]
    inside = (reader >= 0) & (producer[graph.inputs.items] >= 0)
    values, value = np.unique(graph.inputs.items[inside], return_inverse=True)
    nothing = Csr(np.zeros(len(nodes) + 1, dtype=np.int64), np.zeros(0, dtype=np.int32))
    return OpGraph(
        names=tuple(graph.names[node] for node in nodes.tolist()),
        ops=tuple(graph.ops[node] for node in nodes.tolist()),
        value_names=tuple(graph.value_names[v] for v in values.tolist()),
        value_bytes=graph.value_bytes[values],
        producer=producer[values],
        is_output=np.zeros(len(values), dtype=bool),
        alias=np.full(len(values), -1, dtype=np.int32),
        inputs=Csr.grouped(reader[inside], value.astype(np.int32), len(nodes)),
        weight_names=(),
        weight_bytes=np.zeros(0, dtype=np.int64),
        weights=nothing,
        workspace_bytes=np.zeros(len(nodes), dtype=np.int64),
    )
