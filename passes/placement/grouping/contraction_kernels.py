"""The hot loops of `fuse`: merge what is linked within groups, and keep the graph acyclic."""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import heapq

import numpy as np

from onnxplace.graph import cluster_edges
from onnxplace.passes.placement.grouping.group_kernels import find, number_sets
from onnxplace.utils import compiled_loop, compiled_part


@compiled_part
def _only_neighbour(node, parent, ends, head, tail, following, size):
    """The one cluster that all edges of `node` on one side lead to, else -1; `ends` is the other end of each edge.

    Drops edges within the cluster, and those beside the first one that lead to the same cluster: clusters only grow,
    so they are never needed again, and each edge is looked at once or is one of the first two.
    """
    first = head[node]
    while first >= 0 and find(parent, ends[first]) == node:
        first = following[first]
        size[node] -= 1
    head[node] = first
    if first < 0:
        tail[node] = -1
        return -1
    other = find(parent, ends[first])
    second = following[first]
    while second >= 0:
        end = find(parent, ends[second])
        if end not in (node, other):
            break
        second = following[second]
        size[node] -= 1
    following[first] = second
    if second >= 0:
        return -1
    tail[node] = first
    return other


@compiled_part
def _append(kept, gone, head, tail, following, size):
    """Append the edges of `gone` to those of `kept`."""
    if head[gone] < 0:
        return
    if head[kept] < 0:
        head[kept] = head[gone]
    else:
        following[tail[kept]] = head[gone]
    tail[kept] = tail[gone]
    size[kept] += size[gone]


@compiled_part
def _push(stack, count, waiting, node):
    """Put `node` on the stack unless it is there; returns the new height."""
    if waiting[node]:
        return count
    waiting[node] = True
    stack[count] = node
    return count + 1


@compiled_loop
def contract(group, cluster, producer, in_starts, ins):
    """Merge clusters u and v of one group while v is all that follows u, or u all that precedes v; O(E log E).

    `cluster` holds a dense id per node, in order of first nodes, of what is one already.

    Clusters keep their edges in linked lists that are joined in constant time. A merge can give a neighbour a single
    neighbour in turn only if it was adjacent to both, so it is found on the shorter of the two lists. What follows is
    tried first: a node and its only reader lose nothing by being one. Returns a dense cluster id per node.
    """
    count = len(group)
    parent = np.empty(count, np.int32)
    first = np.empty(count, np.int32)
    clusters = 0
    for node in range(count):
        if cluster[node] == clusters:
            first[clusters] = node
            clusters += 1
        parent[node] = first[cluster[node]]
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
            maker = producer[ins[k]]
            if maker < 0:
                continue
            u, v = parent[maker], parent[node]
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
            other = _only_neighbour(node, parent, target, out_head, out_tail, after, out_size)
        else:
            in_count -= 1
            node = in_stack[in_count]
            in_waits[node] = False
            if parent[node] != node:
                continue
            other = _only_neighbour(node, parent, source, in_head, in_tail, before, in_size)
        if other < 0 or group[other] != group[node]:
            continue
        fewer = node if in_size[node] < in_size[other] else other
        edge = in_head[fewer]
        while edge >= 0:
            out_count = _push(out_stack, out_count, out_waits, np.int64(find(parent, source[edge])))
            edge = before[edge]
        fewer = node if out_size[node] < out_size[other] else other
        edge = out_head[fewer]
        while edge >= 0:
            in_count = _push(in_stack, in_count, in_waits, np.int64(find(parent, target[edge])))
            edge = after[edge]
        kept, gone = node, other
        if in_size[gone] + out_size[gone] > in_size[kept] + out_size[kept]:
            kept, gone = gone, kept
        parent[gone] = kept
        _append(kept, gone, out_head, out_tail, after, out_size)
        _append(kept, gone, in_head, in_tail, before, in_size)
        out_count = _push(out_stack, out_count, out_waits, kept)
        in_count = _push(in_stack, in_count, in_waits, kept)
    return number_sets(parent)[0]


@compiled_loop
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
    waiting, starts, readers = cluster_edges(cluster, count, producer, in_starts, ins)

    mates = np.full(count, -1, np.int32)  # the next cluster of its group that is ready too
    first_mate = np.full(color.max() + 1 if count else 0, -1, np.int32)
    ready = [np.int64(0) for _ in range(0)]
    for index in range(count - 1, -1, -1):
        if waiting[index] == 0:
            heapq.heappush(ready, np.int64(index))
            mates[index] = first_mate[color[index]]
            first_mate[color[index]] = index
    run = np.full(count, -1, np.int32)
    runs = 0
    while len(ready) > 0:
        here = color[heapq.heappop(ready)]
        while first_mate[here] >= 0:
            index = first_mate[here]
            first_mate[here] = mates[index]
            run[index] = runs
            for k in range(starts[index], starts[index + 1]):
                reader = readers[k]
                waiting[reader] -= 1
                if waiting[reader] == 0:
                    mates[reader] = first_mate[color[reader]]
                    first_mate[color[reader]] = reader
                    heapq.heappush(ready, np.int64(reader))
        runs += 1

    parent = np.arange(count).astype(np.int32)
    for index in range(count):
        for k in range(starts[index], starts[index + 1]):
            if run[readers[k]] == run[index]:
                a, b = find(parent, index), find(parent, readers[k])
                parent[max(a, b)] = min(a, b)
    merged = number_sets(parent)[0]
    result = np.empty(len(group), np.int32)
    for node in range(len(group)):
        result[node] = merged[cluster[node]]
    return result
