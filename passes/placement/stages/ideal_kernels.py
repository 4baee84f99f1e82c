"""Where a graph may be cut into stages: its ideals, topological orders, and nodes that must share a stage.

Ideals are sets of nodes with all their predecessors. Nodes are numbered in topological order. An ideal is written as
its nodes in ascending order. Without its last node it is an ideal too, its *parent*. So ideals form a tree, and none is
visited twice if only nodes after the last one are added (or, from an ideal downwards, only nodes before the one removed
last). Ideals are numbered in preorder of that tree, larger nodes first, so each ideal comes after all of its subsets.
Neither bitsets nor a hash table are needed.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from onnxplace.graph.op_graph import Ints, OpGraph
from onnxplace.utils.jit import compiled_loop


def find_inseparable(graph: OpGraph, group: Ints) -> Ints:
    """Return a dense id per node: groups are joined where values run from one to another and back.

    Ids are in order of their first node. Contracting them leaves an acyclic graph. O(N + E).
    """
    import networkx

    edges = graph.predecessors
    links = networkx.DiGraph()
    links.add_nodes_from(group.tolist())
    links.add_edges_from(zip(group[edges.items].tolist(), group[edges.rows].tolist()))
    component = np.zeros(int(group.max(initial=-1)) + 1, dtype=np.int32)
    for number, members in enumerate(networkx.strongly_connected_components(links)):
        component[list(members)] = number
    _, first, dense = np.unique(component[group], return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first)).astype(np.int32)[dense]


def generate_orders(graph: OpGraph, count: int, seed: int) -> Iterator[Ints]:
    """Yield `count` topological orders: the graph's own, depth first, and random ones between the two.

    Where related nodes are close, few values cross a cut.
    """
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


@compiled_loop
def enumerate_ideals(pred_starts, succ_starts, succs, limit):
    """Return parent, last node, and per ideal the nodes that can be added with the ideals they lead to.

    The third array, where the lists start, has length 1 if there are more than `limit` ideals; then the result is of
    no use. An ideal to which w nodes can be added has 2^w ideals above it, so lists are short. O(ideals * width).
    """
    nodes = len(pred_starts) - 1
    max_width = 0
    while 2 ** (max_width + 1) <= limit:
        max_width += 1
    waiting = np.empty(nodes, np.int64)  # predecessors of each node that are outside the ideal
    parent = np.full(limit, -1, np.int32)
    last = np.full(limit, -1, np.int32)
    starts = np.zeros(limit + 1, np.int64)
    add = np.empty(4 * limit + nodes, np.int32)
    leads = np.empty(4 * limit + nodes, np.int32)
    stack = np.empty(nodes + 1, np.int64)
    pointer = np.empty(nodes + 1, np.int64)
    # To the empty ideal, all nodes without predecessors can be added.
    edges = 0
    for node in range(nodes):
        waiting[node] = pred_starts[node + 1] - pred_starts[node]
        if waiting[node] == 0:
            add[edges] = node
            leads[edges] = -1
            edges += 1
    starts[1] = edges
    # Walk the tree of ideals depth first, larger nodes first.
    count = 1
    depth = 0
    stack[0] = 0
    pointer[0] = edges - 1
    while depth >= 0:
        ideal = stack[depth]
        e = pointer[depth]
        # All children are done: remove the last node again.
        if e < starts[ideal] or add[e] < last[ideal]:
            if depth > 0:
                x = last[ideal]
                for k in range(succ_starts[x], succ_starts[x + 1]):
                    waiting[succs[k]] += 1
            depth -= 1
            continue
        pointer[depth] -= 1
        # Too many ideals: return an incomplete result early.
        if count == limit or starts[ideal + 1] - starts[ideal] > max_width:
            return parent, last, starts[:1], add, leads
        # Number the child, and make room for its list.
        x = add[e]
        child = count
        count += 1
        parent[child] = ideal
        last[child] = x
        leads[e] = child
        width = starts[ideal + 1] - starts[ideal]
        if edges + width + succ_starts[x + 1] - succ_starts[x] > len(add):
            larger = np.empty(len(add) + width + nodes, np.int32)
            add = np.concatenate((add, larger))
            leads = np.concatenate((leads, larger))
        # The child's list: the rest of the parent's list, and nodes whose last predecessor was just added.
        for k in range(starts[ideal], starts[ideal + 1]):
            if add[k] != x:
                add[edges] = add[k]
                leads[edges] = -1
                edges += 1
        for k in range(succ_starts[x], succ_starts[x + 1]):
            y = succs[k]
            waiting[y] -= 1
            if waiting[y] == 0:
                slot = edges  # keep the list ascending
                while slot > starts[child] and add[slot - 1] > y:
                    add[slot] = add[slot - 1]
                    slot -= 1
                add[slot] = y
                leads[edges] = -1
                edges += 1
        starts[child + 1] = edges
        depth += 1
        stack[depth] = child
        pointer[depth] = edges - 1
    # Fill in the ideals reached by nodes before the last one, which the walk did not visit from here.
    # I = P + {z} and x < z, x addable to I: then x is addable to P, and I + {x} = (P + {x}) + {z}.
    for ideal in range(1, count):
        z = last[ideal]
        for e in range(starts[ideal], starts[ideal + 1]):
            if add[e] > z:
                break
            k = starts[parent[ideal]]
            while add[k] != add[e]:
                k += 1
            sibling = leads[k]
            k = starts[sibling]
            while add[k] != z:
                k += 1
            leads[e] = leads[k]
    return parent[:count], last[:count], starts[: count + 1], add[:edges], leads[:edges]


@compiled_loop
def invert_additions(starts, add, leads):
    """Turn lists of nodes that can be added to ideals into lists of nodes that can be removed, ascending."""
    count = len(starts) - 1
    down_starts = np.zeros(count + 1, np.int64)
    # Count the entries of each list, then where each begins.
    for e in range(len(leads)):
        down_starts[leads[e] + 1] += 1
    for ideal in range(count):
        down_starts[ideal + 1] += down_starts[ideal]
    ends = down_starts[:-1].copy()
    down_node = np.empty(len(leads), np.int32)
    down_ideal = np.empty(len(leads), np.int32)
    # Insert each entry in ascending order of nodes; lists are short.
    for ideal in range(count):
        for e in range(starts[ideal], starts[ideal + 1]):
            above = leads[e]
            slot = ends[above]
            while slot > down_starts[above] and down_node[slot - 1] > add[e]:
                down_node[slot] = down_node[slot - 1]
                down_ideal[slot] = down_ideal[slot - 1]
                slot -= 1
            down_node[slot] = add[e]
            down_ideal[slot] = ideal
            ends[above] += 1
    return down_starts, down_node, down_ideal
