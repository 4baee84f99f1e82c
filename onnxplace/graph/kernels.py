"""The hot loops, on flat arrays.

Kernels know integers and floats only; their callers give them names, units and errors. Ties are broken by index
everywhere, so that results do not depend on anything but the input.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.utils import compiled_loop, compiled_part, in_place


@in_place
def group_items(keys, items, ends, seen_by, starts, kept):
    """Collect `items` into `kept`, one list per key, in order and each once; returns how many there are.

    `starts` and `ends` begin as zeros, one more than there are keys; `seen_by`, per item, as -1.
    """
    count = len(starts) - 1
    for k in range(len(keys)):
        ends[keys[k]] += 1
    total = 0
    for key in range(count):
        total, ends[key] = total + ends[key], total
    for k in range(len(keys)):
        kept[ends[keys[k]]] = items[k]
        ends[keys[k]] += 1
    done, begin = 0, 0
    for key in range(count):
        for k in range(begin, ends[key]):
            if seen_by[kept[k]] != key:
                seen_by[kept[k]] = key
                kept[done] = kept[k]
                done += 1
        begin = ends[key]
        starts[key + 1] = done
    return done


@compiled_part
def push_least(heap, size, item):
    """Add an item to a heap of `size` items whose top is the least."""
    slot = size
    while slot > 0:
        above = (slot - 1) // 2
        if heap[above] <= item:
            break
        heap[slot] = heap[above]
        slot = above
    heap[slot] = item


@compiled_part
def pop_least(heap, size):
    """Remove and return the least of a heap of `size` items, which is one shorter afterwards."""
    least, item, slot = heap[0], heap[size - 1], 0
    while 2 * slot + 1 < size - 1:
        below = 2 * slot + 1
        if below + 1 < size - 1 and heap[below + 1] < heap[below]:
            below += 1
        if item <= heap[below]:
            break
        heap[slot] = heap[below]
        slot = below
    heap[slot] = item
    return least


@in_place
def topological_order(waiting, succ_starts, succs, heap, order):
    """Kahn's algorithm with a heap: the ready node of lowest index first. Returns how many; fewer if there is a cycle.

    `waiting` is the number of predecessors of each node.
    """
    height, done = 0, 0
    for node in range(len(waiting)):
        if waiting[node] == 0:
            heap[height] = node  # ascending, which is a heap already
            height += 1
    while height > 0:
        node = pop_least(heap, height)
        height -= 1
        order[done] = node
        done += 1
        for k in range(succ_starts[node], succ_starts[node + 1]):
            waiting[succs[k]] -= 1
            if waiting[succs[k]] == 0:
                push_least(heap, height, succs[k])
                height += 1
    return done


@in_place
def inner_peak(
    order,
    cluster,
    inner,
    roots,
    value_bytes,
    out_starts,
    outs,
    in_starts,
    ins,
    workspace,
    left,
    live,
    peak,
):
    """Find the most bytes of inner values plus workspace alive at one time in each cluster, running it in `order`.

    `left` (per value), `live` and `peak` (per cluster) begin as zeros; `peak` is the result.
    """
    for k in range(len(ins)):
        left[roots[ins[k]]] += 1
    for position in range(len(order)):
        node = order[position]
        home = cluster[node]
        for k in range(out_starts[node], out_starts[node + 1]):
            if inner[outs[k]] and roots[outs[k]] == outs[k]:
                live[home] += value_bytes[outs[k]]
        peak[home] = max(peak[home], live[home] + workspace[node])
        for k in range(in_starts[node], in_starts[node + 1]):
            root = roots[ins[k]]
            left[root] -= 1
            if left[root] == 0 and inner[root]:
                live[home] -= value_bytes[root]
        for k in range(out_starts[node], out_starts[node + 1]):
            if inner[outs[k]] and roots[outs[k]] == outs[k] and left[outs[k]] == 0:
                live[home] -= value_bytes[outs[k]]


@compiled_loop
def cluster_edges(cluster, count, producer, in_starts, ins):
    """How many edges lead into each of `count` clusters, and those that lead out: starts and readers, with repeats."""
    waiting = np.zeros(count, np.int64)
    starts = np.zeros(count + 1, np.int64)
    for node in range(len(cluster)):
        for k in range(in_starts[node], in_starts[node + 1]):
            maker = producer[ins[k]]
            if maker >= 0 and cluster[maker] != cluster[node]:
                waiting[cluster[node]] += 1
                starts[cluster[maker] + 1] += 1
    for index in range(count):
        starts[index + 1] += starts[index]
    readers = np.empty(starts[count], np.int32)
    filled = starts[:-1].copy()
    for node in range(len(cluster)):
        for k in range(in_starts[node], in_starts[node + 1]):
            maker = producer[ins[k]]
            if maker >= 0 and cluster[maker] != cluster[node]:
                readers[filled[cluster[maker]]] = cluster[node]
                filled[cluster[maker]] += 1
    return waiting, starts, readers


@compiled_loop
def is_acyclic(cluster, count, producer, in_starts, ins):
    """Whether the graph of clusters, each one node, has no cycle."""
    waiting, starts, readers = cluster_edges(cluster, count, producer, in_starts, ins)
    ready = np.empty(count, np.int64)
    height = 0
    for index in range(count):
        if waiting[index] == 0:
            ready[height] = index
            height += 1
    done = 0
    while height > 0:
        height -= 1
        done += 1
        index = ready[height]
        for k in range(starts[index], starts[index + 1]):
            waiting[readers[k]] -= 1
            if waiting[readers[k]] == 0:
                ready[height] = readers[k]
                height += 1
    return done == count
