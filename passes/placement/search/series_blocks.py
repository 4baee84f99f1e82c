"""Decompose a graph into blocks in series: sections of its longest path with the nodes parallel to them.

Deep networks are chains of layers. Any step runs the longest path from its first node to its last, so what lies between
two nodes of the path is a small problem in itself. The least times of such blocks add up to a lower bound, and good
plans for them compose to a good plan. Layers that repeat give equal problems, each of which is solved once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from onnxplace.facts import REFUSED_SECONDS, is_refused
from onnxplace.graph.op_graph import Csr, Floats, Ints, Longs, OpGraph, find_root
from onnxplace.problem import PlacementProblem, interchangeable_devices, sort_by_start

# More memory than any block needs.
AMPLE_BYTES = 1 << 60


BlockPlan = tuple[Ints, Ints]
"""The device of each node, and the order of the nodes."""


@dataclass(frozen=True)
class Block:
    """Nodes that run between the end of one node of the path and the end of a later one."""

    nodes: Ints
    """In topological order; the first is the node at whose end the block begins, unless the path begins here."""
    enters: bool
    """Whether the block begins at the end of its first node."""
    path_seconds: float
    """Lower bound on its section of the path."""
    forks: bool
    """Whether any node is parallel to the path."""


@dataclass(frozen=True)
class BlockChain:
    """Blocks in series, and the distinct placement problems among them."""

    blocks: tuple[Block, ...]
    problems: tuple[PlacementProblem, ...]
    """One for all blocks that are equal."""
    problem_indices: tuple[int, ...]
    """Per block, the index of its problem."""

    @property
    def fork_indices(self) -> list[int]:
        """Return the indices of problems with nodes parallel to the path, small ones first."""
        indices = {index for block, index in zip(self.blocks, self.problem_indices) if block.forks}
        return sorted(indices, key=lambda index: (len(self.problems[index].graph), index))


def decompose_series(problem: PlacementProblem, max_nodes: int) -> BlockChain:
    """Return blocks of at most `max_nodes` nodes; the sum of their times is a lower bound on a step.

    A block without parallel nodes may be longer. The path that takes longest without transfers is cut into sections. A
    node parallel to it can only run between the last node of the path that it needs and the first that needs it. It
    joins itself and all between them into one section, nodes of the shortest span first, as long as there is room. The
    others are in no block. Memory is left out, and so are groups and pins across blocks. O(N log N + E).
    """
    blocks = _find_blocks(problem, max_nodes)
    # Blocks are equal if their arrays are, byte by byte; names do not count.
    index_by_content = dict[tuple[bytes, ...], int]()
    problems, indices = list[PlacementProblem](), list[int]()
    for block in blocks:
        isolated = isolate_block(problem, block)
        graph = isolated.graph
        arrays = (isolated.seconds, isolated.group, isolated.pinned, graph.producer, graph.value_bytes,
                  graph.inputs.starts, graph.inputs.items)  # fmt: skip
        indices.append(index_by_content.setdefault(tuple(array.tobytes() for array in arrays), len(problems)))
        problems += [isolated][: indices[-1] == len(problems)]
    return BlockChain(tuple(blocks), tuple(problems), tuple(indices))


def _find_blocks(problem: PlacementProblem, max_nodes: int) -> list[Block]:
    graph, least = problem.graph, problem.seconds.min(axis=0)
    if not len(graph):
        return []
    path = _longest_path(graph, least)
    # A section is a range of positions; position k stands for the time from the end of path[k - 1] to that of path[k].
    # A parallel node runs after the end of path[first] and before the start of path[last], so it joins the positions
    # from `first` + 1 to `last`. Short spans come first: they leave the most sections apart.
    first, last = _find_spans(graph, path)
    parallel = np.flatnonzero((first < last) & (first >= 0) & (last < len(path)))
    parallel = parallel[np.argsort(last[parallel] - first[parallel], kind="stable")]
    # One node less than the limit: a block also has the node at whose end it begins.
    sections = _PathSections(len(path), max_nodes - 1)
    joined = np.array([n for n in parallel.tolist() if sections.join(int(first[n]) + 1, int(last[n]))], dtype=np.int32)
    section_starts = np.array([find_root(sections.parent, position) for position in range(len(path))])
    forks = np.isin(section_starts, section_starts[first[joined] + 1])
    # Sections with parallel nodes stay apart, since each is its own problem.
    # Neighbouring sections without parallel nodes become one block.
    starts = [k for k in range(len(path)) if section_starts[k] == k and (k == 0 or forks[k] or forks[k - 1])]
    section = np.searchsorted(starts, np.arange(len(path)), side="right") - 1
    blocks = []
    for index, (start, stop) in enumerate(pairwise([*starts, len(path)])):
        members = joined[section[first[joined] + 1] == index]
        nodes = np.concatenate([path[max(start - 1, 0) : stop], members])
        nodes = nodes[np.argsort(graph.positions[nodes])]
        blocks.append(Block(nodes, start > 0, float(least[path[start:stop]].sum()), bool(forks[start])))
    return blocks


def isolate_block(problem: PlacementProblem, block: Block) -> PlacementProblem:
    """Return the problem of a single block: groups and pins are kept, memory is ample.

    Any step of the whole graph contains a step of the block. The node at whose end the block begins takes no time.
    Equal blocks give equal problems, except for names.
    """
    nodes = block.nodes
    seconds = np.ascontiguousarray(problem.seconds[:, nodes])
    if block.enters:
        seconds[:, 0] = np.where(is_refused(seconds[:, 0]), REFUSED_SECONDS, 0.0)
    _, begins, rank = np.unique(problem.group[nodes], return_index=True, return_inverse=True)
    group: Ints = np.argsort(np.argsort(begins))[rank].astype(np.int32)
    pinned = problem.pinned[problem.group[nodes[np.sort(begins)]]]
    target = replace(problem.target, pools=()).limiting({device.id: AMPLE_BYTES for device in problem.target.devices})
    limits = np.full(len(target.devices), AMPLE_BYTES, dtype=np.int64)
    members = np.arange(len(nodes), dtype=np.int32)
    return PlacementProblem(_subgraph(problem.graph, nodes), seconds, target, limits, group, pinned, members)


def compose_blocks(
    problem: PlacementProblem,
    chain: BlockChain,
    plans: Sequence[BlockPlan],
    solve_again: Callable[[PlacementProblem], BlockPlan],
) -> tuple[Ints, Ints]:
    """Compose plans of blocks to device and order of all nodes, each block after the one before.

    Where an earlier block has placed a group elsewhere, the block is solved again with that group pinned. Nodes in no
    block join their readers, or else their producers.

    Args:
        problem: The problem of the whole graph.
        chain: Its blocks.
        plans: One per problem of the chain.
        solve_again: Returns a plan for a block with more pins.
    """
    graph, group_device, interchangeable = problem.graph, problem.pinned.copy(), interchangeable_devices(problem)
    rank = np.full(len(graph), np.inf)
    position = 0
    for block, index in zip(chain.blocks, chain.problem_indices):
        (device, order), groups = plans[index], problem.group[block.nodes]
        path_device, block_device = int(group_device[groups[0]]), int(device[0])
        # Where devices are interchangeable, rename them so that the block begins where the path arrives: no transfer.
        if block.enters and path_device >= 0 and interchangeable[path_device] == interchangeable[block_device]:
            swapped = np.arange(len(interchangeable), dtype=np.int32)
            swapped[[path_device, block_device]] = block_device, path_device
            device = swapped[device]
        # An earlier block may have placed a group that this block wants elsewhere.
        if ((group_device[groups] >= 0) & (group_device[groups] != device)).any():
            device, order = solve_again(isolate_block(replace(problem, pinned=group_device), block))
        group_device[groups] = device
        rank[block.nodes[order]] = position + np.arange(len(order))
        position += len(order)
    # Nodes in no block: readers first, then producers, whose devices spread along the edges.
    for node in graph.order[::-1].tolist():
        _join_neighbours(node, graph.successors[node], problem.group, group_device)
        rank[node] = min(rank[node], rank[graph.successors[node]].min(initial=np.inf))
    for node in graph.order.tolist():
        _join_neighbours(node, graph.predecessors[node], problem.group, group_device)
        rank[node] = max(rank[node], rank[graph.predecessors[node]].max(initial=-np.inf))
    device = np.maximum(group_device, 0)[problem.group].astype(np.int32)
    return problem.avoid_refused(device), sort_by_start(graph, rank)


def _join_neighbours(node: int, neighbours: Ints, group: Ints, group_device: Ints) -> None:
    """Place the group of a node on the device of a neighbour, unless it has a device."""
    if group_device[group[node]] < 0:
        group_device[group[node]] = group_device[group[neighbours]].max(initial=-1)


def _longest_path(graph: OpGraph, seconds: Floats) -> Ints:
    """Return the nodes of the longest path without transfers, first node first; ties go by index."""
    tail = np.zeros(len(graph))
    next_node = np.full(len(graph), -1, dtype=np.int32)
    for node in graph.order[::-1].tolist():
        readers = graph.successors[node]
        if len(readers):
            next_node[node] = readers[tail[readers].argmax()]
            tail[node] = tail[next_node[node]]
        tail[node] += seconds[node]
    path = [int(tail.argmax())]
    while next_node[path[-1]] >= 0:
        path.append(int(next_node[path[-1]]))
    return np.array(path, dtype=np.int32)


def _find_spans(graph: OpGraph, path: Ints) -> tuple[Longs, Longs]:
    """Return, per node, its span on the path: positions of the last node it needs and the first that needs it.

    The span of a node of the path is its own position. -1 and the length of the path stand for none.
    """
    first, last = np.full(len(graph), -1), np.full(len(graph), len(path))
    first[path] = last[path] = np.arange(len(path))
    for node in graph.order.tolist():
        first[node] = max(first[node], first[graph.predecessors[node]].max(initial=-1))
    for node in graph.order[::-1].tolist():
        last[node] = min(last[node], last[graph.successors[node]].min(initial=len(path)))
    return first, last


class _PathSections:
    """Sections of a path with their numbers of nodes: disjoint sets of neighbouring positions."""

    def __init__(self, length: int, max_nodes: int) -> None:
        self.parent, self.max_nodes = list(range(length)), max_nodes
        self.size = [1] * length

    def join(self, start: int, stop: int) -> bool:
        """Join the sections of a span and a node parallel to it; return False if that exceeds the limit."""
        section_starts, position = [], stop
        while position >= start:
            section_starts.append(find_root(self.parent, position))
            position = section_starts[-1] - 1
            if 1 + sum(self.size[begin] for begin in section_starts) > self.max_nodes:
                return False
        for begin in section_starts[:-1]:
            self.parent[begin] = section_starts[-1]
        self.size[section_starts[-1]] = 1 + sum(self.size[begin] for begin in section_starts)
        return True


def _subgraph(graph: OpGraph, nodes: Ints) -> OpGraph:
    """Return the subgraph of some nodes, in their order: no weights, no workspace, only values between them."""
    number = np.full(len(graph) + 1, -1, dtype=np.int32)
    number[nodes] = np.arange(len(nodes), dtype=np.int32)
    reader, producer = number[graph.inputs.rows], number[graph.producer]
    inside = (reader >= 0) & (producer[graph.inputs.items] >= 0)
    values, value = np.unique(graph.inputs.items[inside], return_inverse=True)
    no_weights = Csr(np.zeros(len(nodes) + 1, dtype=np.int64), np.zeros(0, dtype=np.int32))
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
        weights=no_weights,
        workspace_bytes=np.zeros(len(nodes), dtype=np.int64),
    )
