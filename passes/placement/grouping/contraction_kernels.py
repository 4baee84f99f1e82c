"""Compiled loops of `fuse`: merge linked clusters within groups, and keep the graph acyclic.

A merge of two linked clusters makes a cycle if and only if a second path leads from one to the other. There is none if
the edge is the only one out of its source or the only one into its destination, which is easy to see. `contract` merges
by this rule; `merge_runs` then finds what is consecutive in one order, which covers more.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import heapq

import numpy as np

from onnxplace.graph.graph_kernels import cluster_edges
from onnxplace.passes.placement.grouping.group_kernels import find_root, number_sets
from onnxplace.utils.jit import compiled_part, linear_loop


@compiled_part
def _find_only_neighbour(node, parent, ends, head, tail, following, size):
    """Return the only cluster that edges of `node` on one side lead to, else -1; `ends` are their other ends.

    Edges within the cluster are dropped, and so are repeated edges to the first neighbour. Clusters only grow, so these
    are never needed again. Each edge is visited once or is one of the first two.
    """
    # Drop edges at the front that have become internal.
    first = head[node]
    while first >= 0 and find_root(parent, np.int64(ends[first])) == node:
        first = following[first]
        size[node] -= 1
    head[node] = first
    if first < 0:
        tail[node] = -1
        return -1
    # Drop edges behind the first one until one leads to another cluster.
    other = find_root(parent, np.int64(ends[first]))
    second = following[first]
    while second >= 0:
        end = find_root(parent, np.int64(ends[second]))
        if end != node and end != other:
            break
        second = following[second]
        size[node] -= 1
    following[first] = second
    if second >= 0:
        return -1
    tail[node] = first
    return other


@compiled_part
def _append_edges(kept, absorbed, head, tail, following, size):
    """Append the edges of `absorbed` to those of `kept`, in constant time."""
    if head[absorbed] < 0:
        return
    if head[kept] < 0:
        head[kept] = head[absorbed]
    else:
        following[tail[kept]] = head[absorbed]
    tail[kept] = tail[absorbed]
    size[kept] += size[absorbed]


@compiled_part
def _push_once(stack, count, is_waiting, node):
    """Push `node` on the stack unless it is there; return the new height."""
    if is_waiting[node]:
        return count
    is_waiting[node] = True
    stack[count] = node
    return count + 1


@linear_loop
def contract(group, cluster, producer, in_starts, ins):
    """Merge clusters u and v of one group while v alone follows u, or u alone precedes v; O(E log E).

    `cluster` holds a dense id per node, in order of first nodes, of the clusters to begin with.

    Clusters keep their edges in linked lists that are joined in constant time. A merge can leave a neighbour with a
    single neighbour only if it was adjacent to both, so it is found on the shorter of the two lists. Successors are
    tried first: a node and its only reader lose nothing by merging. Returns a dense cluster id per node.
    """
    # The first node of each cluster is its root.
    count = len(group)
    parent = np.empty(count, np.int32)
    first_node = np.empty(count, np.int32)
    clusters = 0
    for node in range(count):
        if cluster[node] == clusters:
            first_node[clusters] = node
            clusters += 1
        parent[node] = first_node[cluster[node]]
    # Linked lists of edges: out of and into each cluster.
    edges = 0
    for k in range(in_starts[count]):
        edges += producer[ins[k]] >= 0
    source = np.empty(edges, np.int32)
    target = np.empty(edges, np.int32)
    after = np.full(edges, -1, np.int32)
    before = np.full(edges, -1, np.int32)
    out_head = np.full(count, -1, np.int32)
    out_tail = np.full(count, -1, np.int32)
    out_size = np.zeros(count, np.int32)
    in_head = np.full(count, -1, np.int32)
    in_tail = np.full(count, -1, np.int32)
    in_size = np.zeros(count, np.int32)
    edge = 0
    for node in range(count):
        for k in range(in_starts[node], in_starts[node + 1]):
            source_node = producer[ins[k]]
            if source_node < 0:
                continue
            u, v = parent[source_node], parent[node]
            source[edge] = u
            target[edge] = v
            if out_tail[u] >= 0:
                after[out_tail[u]] = edge
            else:
                out_head[u] = edge
            if in_tail[v] >= 0:
                before[in_tail[v]] = edge
            else:
                in_head[v] = edge
            out_tail[u] = edge
            in_tail[v] = edge
            out_size[u] += 1
            in_size[v] += 1
            edge += 1

    # Two stacks of clusters to check: for a single successor, for a single predecessor.
    out_stack = np.arange(count).astype(np.int32)
    in_stack = np.arange(count)[::-1].astype(np.int32)
    out_waits = np.ones(count, np.bool_)
    in_waits = np.ones(count, np.bool_)
    out_count = count
    in_count = count
    while out_count + in_count > 0:
        if out_count > 0:
            out_count -= 1
            node = out_stack[out_count]
            out_waits[node] = False
            if parent[node] != node:
                continue
            other = _find_only_neighbour(node, parent, target, out_head, out_tail, after, out_size)
        else:
            in_count -= 1
            node = in_stack[in_count]
            in_waits[node] = False
            if parent[node] != node:
                continue
            other = _find_only_neighbour(node, parent, source, in_head, in_tail, before, in_size)
        if other < 0 or group[other] != group[node]:
            continue
        # Neighbours of both clusters may now have a single neighbour: check them again.
        shorter = node if in_size[node] < in_size[other] else other
        edge = in_head[shorter]
        while edge >= 0:
            out_count = _push_once(out_stack, out_count, out_waits, find_root(parent, np.int64(source[edge])))
            edge = before[edge]
        shorter = node if out_size[node] < out_size[other] else other
        edge = out_head[shorter]
        while edge >= 0:
            in_count = _push_once(in_stack, in_count, in_waits, find_root(parent, np.int64(target[edge])))
            edge = after[edge]
        # The cluster with more edges keeps its lists, which bounds the work of all merges.
        kept, absorbed = node, other
        if in_size[absorbed] + out_size[absorbed] > in_size[kept] + out_size[kept]:
            kept, absorbed = absorbed, kept
        parent[absorbed] = kept
        _append_edges(kept, absorbed, out_head, out_tail, after, out_size)
        _append_edges(kept, absorbed, in_head, in_tail, before, in_size)
        out_count = _push_once(out_stack, out_count, out_waits, kept)
        in_count = _push_once(in_stack, in_count, in_waits, kept)
    return number_sets(parent)[0]


@linear_loop
def merge_runs(group, cluster, producer, in_starts, ins):
    """Merge clusters of one group that are linked and can run one after the other; O(E + N log N).

    Clusters are taken in a topological order that stays in a group as long as one of its clusters is ready, then goes
    on with the ready one of lowest number. Whatever is consecutive in such an order can be one node, and so can each
    linked part of it. Takes and returns a dense cluster id per node, in order of first nodes.
    """
    count = 0
    for node in range(len(group)):
        count = max(count, cluster[node] + 1)
    color = np.empty(count, np.int32)
    for node in range(len(group)):
        color[cluster[node]] = group[node]
    # Predecessors that each cluster waits for, and its readers.
    waiting, starts, readers = cluster_edges(cluster, count, producer, in_starts, ins)

    next_mate = np.full(count, -1, np.int32)  # the next cluster of its group that is ready too
    first_mate = np.full(color.max() + 1 if count else 0, -1, np.int32)
    ready = [np.int64(0) for _ in range(0)]
    for index in range(count - 1, -1, -1):
        if waiting[index] == 0:
            heapq.heappush(ready, np.int64(index))
            next_mate[index] = first_mate[color[index]]
            first_mate[color[index]] = index
    # Kahn's algorithm that stays in a group for as long as it has ready clusters: each stay is a run.
    run = np.full(count, -1, np.int32)
    runs = 0
    while len(ready) > 0:
        current_color = color[heapq.heappop(ready)]
        while first_mate[current_color] >= 0:
            index = first_mate[current_color]
            first_mate[current_color] = next_mate[index]
            run[index] = runs
            for k in range(starts[index], starts[index + 1]):
                reader = readers[k]
                waiting[reader] -= 1
                if waiting[reader] == 0:
                    next_mate[reader] = first_mate[color[reader]]
                    first_mate[color[reader]] = reader
                    heapq.heappush(ready, np.int64(reader))
        runs += 1

    # Within a run, clusters merge along edges.
    parent = np.arange(count).astype(np.int32)
    for index in range(count):
        for k in range(starts[index], starts[index + 1]):
            if run[readers[k]] == run[index]:
                a, b = find_root(parent, index), find_root(parent, np.int64(readers[k]))
                parent[max(a, b)] = min(a, b)
    merged = number_sets(parent)[0]
    result = np.empty(len(group), np.int32)
    for node in range(len(group)):
        result[node] = merged[cluster[node]]
    return result
