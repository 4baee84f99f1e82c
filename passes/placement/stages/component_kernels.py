"""Which nodes must be in one piece if pieces are to follow one another: strongly connected components of groups."""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.graph import Csr, Ints, OpGraph
from onnxplace.utils import compiled_loop


def inseparable(graph: OpGraph, group: Ints) -> Ints:
    """Return a dense id per node: groups, joined where values run from one to another and back.

    Ids are in order of their first node. Contracting them leaves an acyclic graph. O(N + E).
    """
    if not len(graph):
        return group
    edges = graph.predecessors
    source, reader = group[edges.items], group[edges.rows]
    between = source != reader
    after = Csr.grouped(source[between], reader[between], int(group.max()) + 1)
    component = strong_components(after.starts, after.items)[group]
    _, first, dense = np.unique(component, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int32)
    rank[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    return rank[dense]


@compiled_loop
def strong_components(starts, successors):
    """Tarjan's algorithm (SIAM J. Comput. 1972) without recursion: the component of each node."""
    count = len(starts) - 1
    index = np.full(count, -1, np.int64)
    low = np.zeros(count, np.int64)
    component = np.full(count, -1, np.int32)
    pending = np.empty(count, np.int64)
    path = np.empty(count, np.int64)
    pointer = starts[:-1].copy()
    waiting = 0
    seen = 0
    found = 0
    for root in range(count):
        if index[root] >= 0:
            continue
        depth = 0
        path[0] = root
        index[root] = low[root] = seen
        seen += 1
        pending[waiting] = root
        waiting += 1
        while depth >= 0:
            node = path[depth]
            if pointer[node] < starts[node + 1]:
                other = successors[pointer[node]]
                pointer[node] += 1
                if index[other] < 0:
                    index[other] = low[other] = seen
                    seen += 1
                    pending[waiting] = other
                    waiting += 1
                    depth += 1
                    path[depth] = other
                elif component[other] < 0:
                    low[node] = min(low[node], index[other])
                continue
            if low[node] == index[node]:
                while True:
                    waiting -= 1
                    component[pending[waiting]] = found
                    if pending[waiting] == node:
                        break
                found += 1
            depth -= 1
            if depth >= 0:
                low[path[depth]] = min(low[path[depth]], low[node])
    return component
