"""Orders of a graph that free values early.

To order a graph for the least memory is NP-hard (register sufficiency; Sethi, 1975). Two cheap rules are tried
instead, and each result is judged by its exact memory, so that no rule can make it worse.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from onnxplace.graph.op_graph import Bools, Csr, Ints, OpGraph, find_root
from onnxplace.passes.recomputation.clone_choice import held_bytes

# A node belongs to the update of a parameter, or to another branch of its own, if at most this share of all outputs,
# or this many, depend on it.
MAX_BRANCH_SHARE = 0.1
MAX_BRANCH_OUTPUTS = 8


def order_for_memory(graph: OpGraph, order: Ints) -> Ints:
    """Return a topological order that needs no more memory on one device than `order`, and mostly less.

    Two rules are tried, alone and together: branches to few outputs, such as the gradient and update of a parameter,
    run as soon as they can; and nodes whose inputs stay alive anyway run as late as they can.
    """
    return min(order, *_list_candidates(graph, order), key=lambda candidate: _rate(graph, candidate))


def _list_candidates(graph: OpGraph, order: Ints) -> Iterator[Ints]:
    late = delay_nodes(graph, order)
    yield late
    for base in (order, late):
        early = hasten_branches(graph, base, find_branches(graph))
        yield early
        yield delay_nodes(graph, early)


def _rate(graph: OpGraph, order: Ints) -> tuple[int, int]:
    """Return the peak of an order, and as second the bytes held over all positions."""
    held = held_bytes(graph, order)
    return int(held.max(initial=0)), int(held.sum())


def find_branches(graph: OpGraph) -> Bools:
    """Return the nodes on which few outputs depend: gradients and updates of single parameters."""
    outputs = np.flatnonzero(graph.is_output & (graph.producer >= 0))
    # One integer per node has a bit for each output that depends on it.
    reached = [0] * len(graph)
    for bit, value in enumerate(outputs.tolist()):
        reached[int(graph.producer[value])] |= 1 << bit
    predecessors = graph.predecessors
    for node in graph.order[::-1].tolist():
        for predecessor in predecessors[node].tolist():
            reached[predecessor] |= reached[node]
    limit = max(MAX_BRANCH_OUTPUTS, int(MAX_BRANCH_SHARE * len(outputs)))
    return np.array([0 < bits.bit_count() <= min(limit, len(outputs) - 1) for bits in reached], dtype=np.bool_)


def hasten_branches(graph: OpGraph, order: Ints, is_branch: Bools) -> Ints:
    """Return the order in which each connected branch runs as soon as the last of its inputs is there."""
    position = np.argsort(order)
    component = _connect(graph, is_branch)
    ready: dict[int, int] = {}
    for node in order.tolist():
        if is_branch[node]:
            others = [position[p] for p in graph.predecessors[node].tolist() if not is_branch[p]]
            ready[component[node]] = max([ready.get(component[node], -1), *others])
    # Half a position behind its last input, and before the node that follows that.
    key = [ready[component[node]] + 0.5 if is_branch[node] else float(position[node]) for node in range(len(order))]
    hastened = np.lexsort((position, np.array(key, dtype=np.float64))).astype(np.int32)
    # A branch may feed others: then this order need not be valid, and is dropped.
    return hastened if is_topological(graph, hastened) else order


def _connect(graph: OpGraph, is_branch: Bools) -> list[int]:
    """Return, per node, a representative of the connected branch that it belongs to."""
    parent, predecessors = list(range(len(graph))), graph.predecessors
    for node in np.flatnonzero(is_branch).tolist():
        for predecessor in predecessors[node].tolist():
            if is_branch[predecessor]:
                parent[find_root(parent, predecessor)] = find_root(parent, node)
    return [find_root(parent, node) for node in range(len(graph))]


def delay_nodes(graph: OpGraph, order: Ints) -> Ints:
    """Return the order in which nodes run as late as they can without keeping an input for longer.

    The order is built from its end. Of the nodes whose readers are placed, those come first whose inputs are read later
    anyway; then those that are last in `order`. O((N + E) log N).
    """
    return _LateOrder(graph, order).build()


class _LateOrder:
    """An order that is built from its end."""

    def __init__(self, graph: OpGraph, order: Ints) -> None:
        self._graph, self._position = graph, np.argsort(order)
        self._unplaced = np.diff(graph.successors.starts).tolist()
        self._is_placed = [False] * len(graph)
        # Buffers that each node reads, without those of no size; and their readers.
        roots = graph.alias_roots[graph.inputs.items]
        sized = graph.value_bytes[roots] > 0
        self._buffers = Csr.grouped(graph.inputs.rows[sized], roots[sized], len(graph))
        self._readers = Csr.grouped(self._buffers.items, self._buffers.rows, len(graph.value_names))
        # Per node, the buffers that it reads and no node behind it reads yet.
        self._missing = np.diff(self._buffers.starts).tolist()
        self._is_kept = [False] * len(graph.value_names)
        self._free: list[tuple[int, int]] = []
        self._waiting: list[tuple[int, int]] = []

    def build(self) -> Ints:
        """Return the order."""
        graph = self._graph
        for value in np.flatnonzero(graph.is_output).tolist():
            self._keep(int(graph.alias_roots[value]))
        for node in np.flatnonzero(np.array(self._unplaced) == 0).tolist():
            self._offer(node)
        reverse: list[int] = []
        # Nodes in `_free` read nothing that would have to stay for them; the others wait until there is no such node.
        while self._free or self._waiting:
            _, node = heapq.heappop(self._free or self._waiting)
            if self._is_placed[node]:
                continue
            self._is_placed[node] = True
            reverse.append(node)
            for buffer in self._buffers[node].tolist():
                self._keep(buffer)
            for predecessor in graph.predecessors[node].tolist():
                self._unplaced[predecessor] -= 1
                if self._unplaced[predecessor] == 0:
                    self._offer(predecessor)
        return np.array(reverse[::-1], dtype=np.int32)

    def _offer(self, node: int) -> None:
        """Add a node whose readers are placed."""
        entry = (-int(self._position[node]), node)
        heapq.heappush(self._waiting, entry)
        if self._missing[node] == 0:
            heapq.heappush(self._free, entry)

    def _keep(self, buffer: int) -> None:
        """Note that a node behind reads a buffer: the other readers keep it no longer."""
        if self._is_kept[buffer]:
            return
        self._is_kept[buffer] = True
        for reader in self._readers[buffer].tolist():
            self._missing[reader] -= 1
            if self._missing[reader] == 0 and self._unplaced[reader] == 0 and not self._is_placed[reader]:
                heapq.heappush(self._free, (-int(self._position[reader]), reader))


def is_topological(graph: OpGraph, order: Ints) -> bool:
    """Return whether every node is behind those that it reads from."""
    position, predecessors = np.argsort(order), graph.predecessors
    return bool((position[predecessors.items] < position[predecessors.rows]).all())
