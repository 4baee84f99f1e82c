"""Contract groups into single nodes for the placer."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxplace.facts import Clusters, Groups, Profile
from onnxplace.graph import Ints, OpGraph
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class Fuse(Pass):
    """Merge neighbours of one group as long as the graph stays acyclic.

    An edge u -> v is contracted when v is the only successor of u or u the only predecessor of v, for then no
    second path leads from u to v (Baechi, SoCC 2020, section 4); edges are looked at again when merges nearby
    lower those degrees. Inner values stay in the memory account as workspace. Near-linear.
    """

    name: ClassVar[str] = "fuse"
    requires: ClassVar[tuple[type, ...]] = (Profile, Groups)
    provides: ClassVar[tuple[type, ...]] = (Clusters,)

    def run(self, state: State) -> State:
        return state.having(Clusters(contract_groups(state[Profile].graph, state[Groups].group)))


def contract_groups(graph: OpGraph, group: Ints) -> Ints:
    """Return a dense cluster id per node: connected pieces of groups whose contraction is acyclic."""
    count = len(graph)
    before = [dict.fromkeys(graph.predecessors[node].tolist()) for node in range(count)]
    after = [dict.fromkeys(graph.successors[node].tolist()) for node in range(count)]
    into = list(range(count))
    color = group.tolist()
    queue = deque((u, v) for u in range(count) for v in after[u] if color[u] == color[v])
    while queue:
        u, v = (_root(into, node) for node in queue.popleft())
        if u == v or v not in after[u] or not (len(after[u]) == 1 or len(before[v]) == 1):
            continue
        kept = _merge(u, v, before, after, into)
        queue.extend((kept, w) for w in after[kept] if color[w] == color[kept])
        queue.extend((w, kept) for w in before[kept] if color[w] == color[kept])
    roots = [_root(into, node) for node in range(count)]
    dense = {root: index for index, root in enumerate(dict.fromkeys(roots))}
    return np.array([dense[root] for root in roots], dtype=np.int32)


def _root(into: list[int], node: int) -> int:
    while into[node] != node:
        into[node] = into[into[node]]
        node = into[node]
    return node


def _merge(u: int, v: int, before: list[dict[int, None]], after: list[dict[int, None]], into: list[int]) -> int:
    """Make u and v one node, moving the edges of the one with fewer; returns the one that is kept."""
    del after[u][v], before[v][u]
    kept, gone = (u, v) if len(before[u]) + len(after[u]) >= len(before[v]) + len(after[v]) else (v, u)
    into[gone] = kept
    for neighbour in before[gone]:
        del after[neighbour][gone]
        after[neighbour][kept] = None
        before[kept][neighbour] = None
    for neighbour in after[gone]:
        del before[neighbour][gone]
        before[neighbour][kept] = None
        after[kept][neighbour] = None
    return kept
