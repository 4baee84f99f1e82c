"""Nodes that must share a pipeline stage: strongly connected components of groups."""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.graph import Csr, Ints, OpGraph
from onnxplace.utils import compiled_loop


def find_inseparable(graph: OpGraph, group: Ints) -> Ints:
    """Return a dense id per node: groups are joined where values run from one to another and back.

    Ids are in order of their first node. Contracting them leaves an acyclic graph. O(N + E).
    """
    if not len(graph):
        return group
    edges = graph.predecessors
    source, reader = group[edges.items], group[edges.rows]
    between = source != reader
    successors = Csr.grouped(source[between], reader[between], int(group.max()) + 1)
    component = find_strong_components(successors.starts, successors.items)[group]
    _, first, dense = np.unique(component, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int32)
    rank[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    return rank[dense]


@compiled_loop
def find_strong_components(starts, successors):
    """Return the component of each node by Tarjan's algorithm (SIAM J. Comput. 1972), without recursion."""
    count = len(starts) - 1
    index = np.full(count, -1, np.int64)
    low = np.zeros(count, np.int64)
    component = np.full(count, -1, np.int32)
    pending = np.empty(count, np.int64)
    path = np.empty(count, np.int64)
    pointer = starts[:-1].copy()
    pending_count = 0
    visited = 0
    components = 0
    # Start a depth-first search at each node that no earlier one has visited.
    for root in range(count):
        if index[root] >= 0:
            continue
        depth = 0
        path[0] = root
        index[root] = low[root] = visited
        visited += 1
        pending[pending_count] = root
        pending_count += 1
        while depth >= 0:
            node = path[depth]
            # Descend into the next successor, or take its index if it belongs to no component yet.
            if pointer[node] < starts[node + 1]:
                successor = successors[pointer[node]]
                pointer[node] += 1
                if index[successor] < 0:
                    index[successor] = low[successor] = visited
                    visited += 1
                    pending[pending_count] = successor
                    pending_count += 1
                    depth += 1
                    path[depth] = successor
                elif component[successor] < 0:
                    low[node] = min(low[node], index[successor])
                continue
            # The node reaches nothing older: it is the root of a component, which is all that is pending above it.
            if low[node] == index[node]:
                while True:
                    pending_count -= 1
                    component[pending[pending_count]] = components
                    if pending[pending_count] == node:
                        break
                components += 1
            # Return to the parent, which reaches all that the node reaches.
            depth -= 1
            if depth >= 0:
                low[path[depth]] = min(low[path[depth]], low[node])
    return component
