"""The hot loops, on flat arrays.

Kernels know integers and floats only; their callers give them names, units and errors. Ties are broken by index
everywhere, so that results do not depend on anything but the input.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import heapq

import numpy as np

from onnxplace.utils import compiled_loop, compiled_part


@compiled_loop
def group_items(keys, items, count, item_count):
    """Collect `items` (below `item_count`) into one list per key, in order and each once; returns starts and items."""
    ends = np.zeros(count + 1, np.int64)
    for k in range(len(keys)):
        ends[keys[k]] += 1
    total = 0
    for key in range(count):
        total, ends[key] = total + ends[key], total
    kept = np.empty(len(items), np.int32)
    for k in range(len(keys)):
        kept[ends[keys[k]]] = items[k]
        ends[keys[k]] += 1
    starts = np.zeros(count + 1, np.int64)
    seen_by = np.full(item_count, -1, np.int64)
    done, begin = 0, 0
    for key in range(count):
        for k in range(begin, ends[key]):
            if seen_by[kept[k]] != key:
                seen_by[kept[k]] = key
                kept[done] = kept[k]
                done += 1
        begin = ends[key]
        starts[key + 1] = done
    return starts, kept[:done].copy()


@compiled_loop
def topological_order(pred_starts, preds, succ_starts, succs):
    """Kahn's algorithm with a heap: the ready node of lowest index first. Short if there is a cycle."""
    count = len(pred_starts) - 1
    waiting = np.empty(count, np.int64)
    heap = [np.int64(0) for _ in range(0)]
    for node in range(count):
        waiting[node] = pred_starts[node + 1] - pred_starts[node]
        if waiting[node] == 0:
            heap.append(np.int64(node))  # ascending, which is a heap already
    order = np.empty(count, np.int32)
    done = 0
    while len(heap) > 0:
        node = heapq.heappop(heap)
        order[done] = node
        done += 1
        for k in range(succ_starts[node], succ_starts[node + 1]):
            waiting[succs[k]] -= 1
            if waiting[succs[k]] == 0:
                heapq.heappush(heap, np.int64(succs[k]))
    return order[:done]


@compiled_loop
def inner_peak(
    order,
    cluster,
    count,
    inner,
    roots,
    value_bytes,
    out_starts,
    outs,
    in_starts,
    ins,
    workspace,
):
    """Most bytes of inner values plus workspace alive at one time in each cluster, running it in `order`."""
    left = np.zeros(len(value_bytes), np.int64)
    for k in range(len(ins)):
        left[roots[ins[k]]] += 1
    live = np.zeros(count, np.int64)
    peak = np.zeros(count, np.int64)
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
    return peak


@compiled_part
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
