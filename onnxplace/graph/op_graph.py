"""The operator graph as flat arrays, for placers, the simulator and the splitter.

Nodes, values and weights are dense integers. A *value* has one producer (or none, if it is an input of the graph) and
any number of readers. A *weight* has no producer and is stored on each device that reads it.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class ListArrays(NamedTuple):
    """Lists of integers as compiled loops take them (`Csr`)."""

    starts: Longs
    items: Ints


@dataclass(frozen=True)
class Csr:
    """Lists of integers, one after the other: list `i` is `items[starts[i]:starts[i + 1]]`."""

    starts: Longs
    items: Ints

    def __getitem__(self, index: int) -> Ints:
        return self.items[self.starts[index] : self.starts[index + 1]]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def arrays(self) -> ListArrays:
        """Return both arrays, as compiled loops take them."""
        return ListArrays(self.starts, self.items)

    @cached_property
    def rows(self) -> Ints:
        """Return, for each item, the index of its list."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.starts))

    @staticmethod
    def of(lists: Iterable[Sequence[int]]) -> Csr:
        """Pack lists into one.

        >>> Csr.of([[1, 2], [], [3]])[2].tolist()
        [3]
        """
        arrays = [np.asarray(array, dtype=np.int32) for array in lists]
        starts = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(array) for array in arrays], out=starts[1:])
        return Csr(starts, np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int32))

    @staticmethod
    def grouped(keys: Ints, items: Ints, count: int) -> Csr:
        """Collect `items` (0 and up) by their `keys` into `count` lists, in order and without repeats within a list.

        Linear in all three.

        Raises:
            ValueError: A key is not from 0 to `count` - 1.
        """
        from onnxplace.graph.graph_kernels import group_items

        if len(keys) and not 0 <= keys.min() <= keys.max() < count:
            raise ValueError(f"expected keys from 0 to {count - 1}, got {keys.min()} to {keys.max()}")
        keys, items = np.ascontiguousarray(keys, dtype=np.int32), np.ascontiguousarray(items, dtype=np.int32)
        seen_by = np.full(int(items.max(initial=-1)) + 1, -1, dtype=np.int64)
        starts, unique_items = np.zeros(count + 1, dtype=np.int64), np.empty(len(items), dtype=np.int32)
        unique_count = group_items(keys, items, np.zeros(count + 1, dtype=np.int64), seen_by, starts, unique_items)
        return Csr(starts, unique_items[:unique_count].copy())


def number_densely(keys: Iterable[Hashable]) -> Ints:
    """Replace keys by numbers from 0, in the order of their first occurrence.

    >>> number_densely("abac").tolist()
    [0, 1, 0, 2]
    """
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int32)


def find_root(parent: list[int], item: int) -> int:
    """Return the representative of an item's set, where each item names its parent; shortens the path to it.

    >>> find_root([0, 0, 1], 2)
    0
    """
    while parent[item] != item:
        parent[item] = parent[parent[item]]
        item = parent[item]
    return item


def order_items(readers: Sequence[Sequence[int]], missing: list[int]) -> list[int]:
    """Return items, each after those that it reads, and of those that are ready the lowest first; O(E log N).

    Items on a cycle, and all that depend on them, are left out: their counts of `missing` stay above zero.

    Args:
        readers: Per item, those that read it, once for each read.
        missing: Per item, the number of its reads; counted down.
    """
    ready, order = [item for item, count in enumerate(missing) if count == 0], list[int]()
    while ready:
        order.append(heapq.heappop(ready))
        for reader in readers[order[-1]]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, reader)
    return order


def sum_by(keys: Ints, amounts: Floats | Longs, count: int) -> Floats:
    """Return, per key below `count`, the sum of its amounts."""
    return np.bincount(keys, amounts, count).astype(np.float64)


@dataclass(frozen=True)
class OpGraph:
    """A directed acyclic graph of operators, their values and their weights; immutable."""

    names: tuple[str, ...]
    """Unique name of each node."""
    ops: tuple[str, ...]
    """Operator type of each node."""
    value_names: tuple[str, ...]
    value_bytes: Longs
    producer: Ints
    """Producing node of each value, -1 for inputs of the graph."""
    is_output: Bools
    """Whether the graph returns the value; such values live to the end."""
    alias: Ints
    """The value whose memory this one shares when both are on one device (a view), else -1.

    A view has a higher index than its source, and its producer reads the source.
    """
    inputs: Csr
    """Values that each node reads, each once."""
    weight_names: tuple[str, ...]
    weight_bytes: Longs
    weights: Csr
    """Weights that each node reads, each once."""
    workspace_bytes: Longs
    """Memory that each node needs only while it runs; of a contracted node, its internal peak."""

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def outputs(self) -> Csr:
        """Return the values each node produces."""
        produced = np.flatnonzero(self.producer >= 0).astype(np.int32)
        return Csr.grouped(self.producer[produced], produced, len(self))

    @cached_property
    def readers(self) -> Csr:
        """Return the nodes that read each value."""
        return Csr.grouped(self.inputs.items, self.inputs.rows, len(self.value_names))

    @cached_property
    def predecessors(self) -> Csr:
        """Return the nodes whose values each node reads, each once."""
        producers = self.producer[self.inputs.items]
        inner = producers >= 0
        return Csr.grouped(self.inputs.rows[inner], producers[inner], len(self))

    @cached_property
    def successors(self) -> Csr:
        """Return the nodes that read a value of each node, each once."""
        predecessors = self.predecessors
        return Csr.grouped(predecessors.items, predecessors.rows, len(self))

    @cached_property
    def order(self) -> Ints:
        """Return the nodes in topological order, lower index first; raise ValueError for a cycle."""
        from onnxplace.graph.graph_kernels import topological_order

        waiting, successors = np.diff(self.predecessors.starts), self.successors
        key, heap, order = np.zeros((3, len(self)), dtype=np.int32)
        done = topological_order(waiting, *successors.arrays, key, heap, order)
        if done < len(self):
            blocked = np.setdiff1d(np.arange(len(self)), order[:done])
            raise ValueError(f"the graph has a cycle through {', '.join(self._find_cycle(blocked))}")
        return order

    @cached_property
    def positions(self) -> Longs:
        """Return the position of each node in `order`."""
        positions = np.empty(len(self), dtype=np.int64)
        positions[self.order] = np.arange(len(self))
        return positions

    def _find_cycle(self, blocked: NDArray[np.int64]) -> list[str]:
        """Walk back from a node that never became ready until a node repeats; return the names on that cycle."""
        is_blocked, node, path = set(blocked.tolist()), int(blocked[0]), list[int]()
        while node not in path:
            path.append(node)
            node = next(int(p) for p in self.predecessors[node] if int(p) in is_blocked)
        return [self.names[n] for n in reversed(path[path.index(node) :])]

    @cached_property
    def total_weight_bytes(self) -> int:
        """Return the bytes of all weights that some node reads, each once."""
        return int(self.weight_bytes[np.unique(self.weights.items)].sum())

    def contract(self, cluster: Ints) -> OpGraph:
        """Return the graph in which the nodes of each cluster are one node.

        `cluster` holds a dense cluster id per node. Values that are read only inside their cluster vanish from the
        graph; their memory becomes part of the cluster's workspace. If a cluster is not convex, the result may have
        cycles; its `order` then raises ValueError.
        """
        if not len(self):
            return self
        count = int(cluster.max()) + 1
        inner = self._inner_values(cluster)
        kept = np.flatnonzero(~inner).astype(np.int32)
        renumbered = np.full(len(self.value_names), -1, dtype=np.int32)
        renumbered[kept] = np.arange(len(kept), dtype=np.int32)
        reads = cluster[self.inputs.rows]
        producer_of_read = self.producer[self.inputs.items]
        crossing = (producer_of_read < 0) | (cluster[np.maximum(producer_of_read, 0)] != reads)
        producer = self.producer[kept]
        alias = self._alias_of_kept(inner)[kept]
        first = np.full(count, -1, dtype=np.int64)
        first[cluster[::-1]] = np.arange(len(cluster))[::-1]
        heads = list(zip(first.tolist(), np.bincount(cluster, minlength=count).tolist()))
        return OpGraph(
            names=tuple(self.names[f] if size == 1 else f"{self.names[f]}(+{size - 1})" for f, size in heads),
            ops=tuple(self.ops[f] if size == 1 else "fused" for f, size in heads),
            value_names=tuple(self.value_names[v] for v in kept.tolist()),
            value_bytes=self.value_bytes[kept],
            producer=np.where(producer >= 0, cluster[np.maximum(producer, 0)], -1).astype(np.int32),
            is_output=self.is_output[kept],
            alias=np.where(alias >= 0, renumbered[np.maximum(alias, 0)], -1).astype(np.int32),
            inputs=Csr.grouped(reads[crossing].astype(np.int32), renumbered[self.inputs.items[crossing]], count),
            weight_names=self.weight_names,
            weight_bytes=self.weight_bytes,
            weights=Csr.grouped(cluster[self.weights.rows].astype(np.int32), self.weights.items, count),
            workspace_bytes=self._inner_peak(cluster, inner, count),
        )

    def _inner_values(self, cluster: Ints) -> Bools:
        """Return which values are produced in a cluster, read nowhere else, and not outputs of the graph."""
        own_cluster = cluster[np.maximum(self.producer, 0)]
        is_visible = self.is_output | (self.producer < 0)
        readers = self.readers
        is_visible[readers.rows[cluster[readers.items] != own_cluster[readers.rows]]] = True
        return ~is_visible

    def _alias_of_kept(self, inner: Bools) -> Ints:
        """Return, per value, the value that owns or lends its memory once inner values have vanished, or -1.

        Of several views of one vanished value, the first becomes the owner.
        """
        alias, new_owners = np.full(len(inner), -1, dtype=np.int32), dict[int, int]()
        for value in np.flatnonzero((self.alias >= 0) & ~inner).tolist():
            vanished, source = -1, int(self.alias[value])
            while source >= 0 and inner[source]:
                vanished, source = source, int(self.alias[source])
            if source < 0:
                source = new_owners.setdefault(vanished, value)
            alias[value] = source if source != value else -1
        return alias

    def _inner_peak(self, cluster: Ints, inner: Bools, count: int) -> Longs:
        """Return the most memory that inner values and workspaces of each cluster need at one time."""
        from onnxplace.graph.graph_kernels import inner_peak

        roots = self.alias_roots
        # A buffer that leaves its cluster as a view is counted there, not inside.
        is_inner = inner.copy()
        is_inner[roots[~inner]] = False
        unread, live, peak = (np.zeros(length, dtype=np.int64) for length in (len(inner), count, count))
        values = roots, self.value_bytes, self.outputs.arrays, self.inputs.arrays
        inner_peak(self.order, cluster, is_inner, *values, self.workspace_bytes, unread, live, peak)
        return peak

    @cached_property
    def alias_roots(self) -> Ints:
        """Return, for each value, the value that owns its memory (itself unless it is a view)."""
        roots = np.arange(len(self.value_names), dtype=np.int32)
        for value in np.flatnonzero(self.alias >= 0):
            root = int(value)
            while self.alias[root] >= 0:
                root = int(self.alias[root])
            roots[value] = root
        return roots
