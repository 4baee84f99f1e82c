"""Compiled loops of lower bounds: heads, tails and thresholds of work."""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onnxplace.graph import op_graph
from onnxplace.graph.graph_kernels import heap_pop, heap_push
from onnxplace.graph.op_graph import Floats, Longs
from onnxplace.utils.jit import compiled_part, linear_in_place, linear_loop

find_root = linear_in_place(op_graph.find_root)


class Neighbourhood(NamedTuple):
    """Scratch for the neighbours of one node; each array has one entry per node, of which the first few are used."""

    place: Longs
    """Per node of the graph, its index as a neighbour, else -1."""
    node_of: Longs
    work: Floats
    beyond: Floats
    """Seconds from the end of a neighbour to the end of the step (or from the start)."""
    far: Floats
    """Seconds that a neighbour on another device waits for its inputs."""
    alone: Floats
    remote: Floats
    by_remote: Longs
    by_beyond: Longs
    rank: Longs
    key: Floats
    heap: Longs


def new_neighbourhood(nodes: int) -> Neighbourhood:
    """Return scratch for a graph with this number of nodes."""
    place, node_of, by_remote, by_beyond, rank, heap = np.full((6, nodes), -1, dtype=np.int64)
    work, beyond, far, alone, remote, key = np.zeros((6, nodes))
    return Neighbourhood(place, node_of, work, beyond, far, alone, remote, by_remote, by_beyond, rank, key, heap)


@compiled_part
def _sort_descending(keys, count, key, heap, ranked):
    """Write the indices of the first `count` keys to `ranked`, largest key first, ties by index; a heap sort.

    numpy's own sort takes numba five seconds to compile.
    """
    for i in range(count):
        key[i] = -keys[i]
        heap_push(heap, i, i, key)
    for i in range(count):
        ranked[i] = heap_pop(heap, count - i, key)


@compiled_part
def _bound_star(count, alone, has_channels, neighbourhood):
    """Return the least time from the end of a node to the end of its last neighbour, with the path beyond.

    Neighbours on the node's device run one after the other; the others wait `far` seconds for what they read. With the
    longest ways first, the first few must be on the device for the rest to be no later. Where channels are shared
    (`has_channels`), `alone` is what a neighbour's own transfers take of the node's channel: each neighbour takes time
    on the device or on the channel, and the longer of the two is at least any weighted mean of them.
    """
    work, beyond, far, _, remote, by_remote, by_beyond, rank, key, heap = neighbourhood[2:]
    # The longest path over one neighbour.
    longest = 0.0
    for i in range(count):
        longest = max(longest, work[i] + beyond[i])
    if count < 2:
        return longest
    # Rank neighbours by their end if they are remote, and by the path beyond.
    for i in range(count):
        remote[i] = far[i] + work[i] + beyond[i]
    _sort_descending(remote, count, key, heap, by_remote)
    _sort_descending(beyond, count, key, heap, by_beyond)
    for i in range(count):
        rank[by_remote[i]] = i
    # Binary search for the number of local neighbours where both kinds end at the same time.
    low, high = 1, count
    split_bound = 0.0
    while low <= high:
        local_count = (low + high) // 2
        total = 0.0
        local_end = 0.0
        for i in range(count):
            if rank[by_beyond[i]] < local_count:
                total += work[by_beyond[i]]
                local_end = max(local_end, total + beyond[by_beyond[i]])
        remote_end = remote[by_remote[local_count - 1]]
        # With `local_count` or more local neighbours it takes `local_end`, with fewer at least `remote_end`.
        split_bound = max(split_bound, min(local_end, remote_end))
        if local_end >= remote_end:
            high = local_count - 1
        else:
            low = local_count + 1
    longest = max(longest, split_bound)
    if has_channels:
        # Weigh the device against its channel, by three shares.
        nearest = beyond[by_beyond[count - 1]]
        for quarter in range(1, 4):
            share = 0.25 * quarter
            total = nearest
            for i in range(count):
                # max(device, channel) >= share * device + (1 - share) * channel; each neighbour is on one of them.
                total += min(share * work[i], (1.0 - share) * alone[i])
            longest = max(longest, total)
    return longest


@linear_in_place
def compute_tails(order, out_starts, outs, read_starts, readers, least, send, has_channels, neighbourhood, tail):
    """Fill `tail`: least seconds from the end of each node to the end of the step."""
    place, node_of, work, beyond, far, alone = neighbourhood[:6]
    for position in range(len(order) - 1, -1, -1):
        node = order[position]
        # Collect the readers, each once, with what it waits for if it is remote.
        count = np.int64(0)
        for k in range(out_starts[node], out_starts[node + 1]):
            value = outs[k]
            has_one_reader = read_starts[value + 1] - read_starts[value] == 1
            for j in range(read_starts[value], read_starts[value + 1]):
                reader = readers[j]
                slot = place[reader]
                if slot < 0:
                    slot = count
                    place[reader] = slot
                    node_of[slot] = reader
                    work[slot], beyond[slot], far[slot], alone[slot] = least[reader], tail[reader], 0.0, 0.0
                    count += 1
                far[slot] = far[slot] + send[value] if has_channels else max(far[slot], send[value])
                if has_one_reader:
                    alone[slot] += send[value]
        tail[node] = _bound_star(count, alone, has_channels, neighbourhood)
        for i in range(count):
            place[node_of[i]] = -1


@linear_in_place
def compute_heads(order, producer, in_starts, ins, least, send, has_channels, neighbourhood, head):
    """Fill `head`: least seconds from the start of the step to the start of each node."""
    place, node_of, work, beyond, far = neighbourhood[:5]
    for position in range(len(order)):
        node = order[position]
        # Collect the producers, each once, with what the node waits for if they are remote.
        count = np.int64(0)
        for k in range(in_starts[node], in_starts[node + 1]):
            value = ins[k]
            source = producer[value]
            if source < 0:
                continue
            slot = place[source]
            if slot < 0:
                slot = count
                place[source] = slot
                node_of[slot] = source
                work[slot], beyond[slot], far[slot] = least[source], head[source], 0.0
                count += 1
            far[slot] = far[slot] + send[value] if has_channels else max(far[slot], send[value])
        head[node] = _bound_star(count, far, has_channels, neighbourhood)
        for i in range(count):
            place[node_of[i]] = -1


@linear_in_place
def best_threshold(by_tail, levels, head, tail, work, processors):
    """Return the largest head level + work / processors + tail, over nodes with at least that head and that tail."""
    # Nodes come by falling tail, so that `total` is the work with at least the tail of the current one.
    best = 0.0
    for k in range(len(levels)):
        total = 0.0
        for i in range(len(by_tail)):
            node = by_tail[i]
            if head[node] >= levels[k]:
                total += work[node]
                best = max(best, levels[k] + total / processors + tail[node])
    return best


@linear_loop
def is_connected(producer, in_starts, ins):
    """Return whether the graph is connected by values between nodes."""
    # Disjoint sets; each edge joins two or closes a loop.
    count = len(in_starts) - 1
    parent, pieces = np.arange(count), count
    for node in range(count):
        for k in range(in_starts[node], in_starts[node + 1]):
            source = producer[ins[k]]
            if source < 0:
                continue
            a, b = find_root(parent, node), find_root(parent, np.int64(source))
            pieces -= a != b
            parent[a] = b
    return pieces == 1
