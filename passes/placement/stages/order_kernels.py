"""Topological orders to cut into stages: where related nodes are close, few values cross a cut."""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from onnxplace.graph import Ints, OpGraph
from onnxplace.utils import compiled_loop


def generate_orders(graph: OpGraph, count: int, seed: int) -> Iterator[Ints]:
    """Yield `count` topological orders: the graph's own, depth first, and random ones between the two."""
    predecessors, successors = graph.predecessors, graph.successors
    random = np.random.default_rng(seed)
    for number in range(count):
        depth_first = number % 2 == 1
        priority = graph.positions.astype(np.float64)
        if number > 1:
            priority = random.random(len(graph)) + (0.0 if depth_first else 10.0 * priority / len(graph))
        yield topological_order(predecessors.starts, successors.starts, successors.items, priority, depth_first)


@compiled_loop
def topological_order(pred_starts, succ_starts, succs, priority, depth_first):
    """Order nodes by Kahn's algorithm: the ready node of lowest priority first, or the one ready last (depth first)."""
    count = len(pred_starts) - 1
    waiting = np.empty(count, np.int64)
    # An empty list of a known type: numba takes the type from the tuple.
    heap = [(0.0, 0.0, np.int64(0)) for _ in range(0)]
    for node in range(count):
        waiting[node] = pred_starts[node + 1] - pred_starts[node]
        if waiting[node] == 0:
            heapq.heappush(heap, (0.0, priority[node], np.int64(node)))
    order = np.empty(count, np.int32)
    done = 0
    # Take ready nodes from the heap; each makes successors ready.
    while len(heap) > 0:
        node = heapq.heappop(heap)[2]  # ties of time and priority go to the lower index
        order[done] = node
        done += 1
        for k in range(succ_starts[node], succ_starts[node + 1]):
            waiting[succs[k]] -= 1
            if waiting[succs[k]] == 0:
                time = -float(done) if depth_first else 0.0
                heapq.heappush(heap, (time, priority[succs[k]], np.int64(succs[k])))
    return order
