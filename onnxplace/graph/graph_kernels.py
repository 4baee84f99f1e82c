"""Compiled loops on flat arrays of a graph.

They know integers and floats only; callers add names, units and errors. Ties go to the lower index everywhere, so that
results depend on the input alone.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnxplace.utils.jit import compiled_part, linear_in_place, linear_loop


@linear_in_place
def group_items(keys, items, ends, seen_by, starts, grouped):
    """Collect `items` into `grouped`, one list per key, in order and each once; return their number.

    `starts` and `ends` are zeros at first, one more than there are keys; `seen_by`, per item, -1.
    """
    # Count the items of each key, then turn counts into the starts of lists.
    count = len(starts) - 1
    for k in range(len(keys)):
        ends[keys[k]] += 1
    total = 0
    for key in range(count):
        total, ends[key] = total + ends[key], total
    # Fill the lists; `ends` moves to the end of each.
    for k in range(len(keys)):
        grouped[ends[keys[k]]] = items[k]
        ends[keys[k]] += 1
    # Remove repeats within each list, and close the gaps.
    done, begin = 0, 0
    for key in range(count):
        for k in range(begin, ends[key]):
            if seen_by[grouped[k]] != key:
                seen_by[grouped[k]] = key
                grouped[done] = grouped[k]
                done += 1
        begin = ends[key]
        starts[key + 1] = done
    return done


@compiled_part
def heap_push(heap, size, node, key):
    """Add a node to a heap of `size` nodes; ties go to the lower index."""
    # Move the ancestors that come after the node down, and put it where they end.
    child = size
    while child > 0:
        parent = (child - 1) // 2
        other = heap[parent]
        if key[other] < key[node] or (key[other] == key[node] and other < node):
            break
        heap[child] = other
        child = parent
    heap[child] = node


@compiled_part
def heap_pop(heap, size, key):
    """Remove and return the node of smallest key from a heap of `size` nodes."""
    top = heap[0]
    node = heap[size - 1]
    size -= 1
    # The last node fills the gap at the top: move the first of the two children up until it fits.
    parent = 0
    while True:
        child = 2 * parent + 1
        if child >= size:
            break
        if child + 1 < size:
            left, right = heap[child], heap[child + 1]
            if key[right] < key[left] or (key[right] == key[left] and right < left):
                child += 1
        other = heap[child]
        if key[node] < key[other] or (key[node] == key[other] and node < other):
            break
        heap[parent] = other
        parent = child
    heap[parent] = node
    return top


@linear_in_place
def topological_order(waiting, succ_starts, succs, key, heap, order):
    """Order nodes by Kahn's algorithm, the ready node of lowest index first; return their number.

    `waiting` is the number of predecessors of each node, `key` zeros. Nodes on or after a cycle are left out.
    """
    height, done = 0, 0
    for node in range(len(waiting)):
        if waiting[node] == 0:
            heap[height] = node  # ascending, so it is a heap already
            height += 1
    while height > 0:
        node = heap_pop(heap, height, key)
        height -= 1
        order[done] = node
        done += 1
        for k in range(succ_starts[node], succ_starts[node + 1]):
            waiting[succs[k]] -= 1
            if waiting[succs[k]] == 0:
                heap_push(heap, height, succs[k], key)
                height += 1
    return done


@linear_in_place
def inner_peak(order, cluster, inner, roots, value_bytes, outputs, inputs, workspace, unread, live, peak):
    """Find the peak bytes of inner values and workspace in each cluster when it runs in `order`.

    `unread` (per value), `live` and `peak` (per cluster) are zeros at first; `peak` is the result.
    """
    (out_starts, outs), (in_starts, ins) = outputs, inputs
    # Count the readers of each buffer, those of its views included.
    for k in range(len(ins)):
        unread[roots[ins[k]]] += 1
    # Run the nodes: outputs are allocated, and inputs freed after their last reader.
    for position in range(len(order)):
        node = order[position]
        home = cluster[node]
        for k in range(out_starts[node], out_starts[node + 1]):
            if inner[outs[k]] and roots[outs[k]] == outs[k]:
                live[home] += value_bytes[outs[k]]
        peak[home] = max(peak[home], live[home] + workspace[node])
        for k in range(in_starts[node], in_starts[node + 1]):
            root = roots[ins[k]]
            unread[root] -= 1
            if unread[root] == 0 and inner[root]:
                live[home] -= value_bytes[root]
        for k in range(out_starts[node], out_starts[node + 1]):
            if inner[outs[k]] and roots[outs[k]] == outs[k] and unread[outs[k]] == 0:
                live[home] -= value_bytes[outs[k]]


@linear_loop
def cluster_edges(cluster, count, producer, in_starts, ins):
    """Return, per cluster, the number of edges into it, and the edges out of it: starts and readers, with repeats."""
    # Count first, then fill.
    waiting = np.zeros(count, np.int64)
    starts = np.zeros(count + 1, np.int64)
    for node in range(len(cluster)):
        for k in range(in_starts[node], in_starts[node + 1]):
            source = producer[ins[k]]
            if source >= 0 and cluster[source] != cluster[node]:
                waiting[cluster[node]] += 1
                starts[cluster[source] + 1] += 1
    for index in range(count):
        starts[index + 1] += starts[index]
    readers = np.empty(starts[count], np.int32)
    filled = starts[:-1].copy()
    for node in range(len(cluster)):
        for k in range(in_starts[node], in_starts[node + 1]):
            source = producer[ins[k]]
            if source >= 0 and cluster[source] != cluster[node]:
                readers[filled[cluster[source]]] = cluster[node]
                filled[cluster[source]] += 1
    return waiting, starts, readers


def is_acyclic(cluster: NDArray[np.int32], count: int, *edges: NDArray[np.integer]) -> bool:
    """Return whether the graph of clusters has no cycle: all have a place in a topological order (`cluster_edges`)."""
    order = topological_order(*cluster_edges(cluster, count, *edges), *np.zeros((3, count), dtype=np.int32))
    return bool(order == count)
