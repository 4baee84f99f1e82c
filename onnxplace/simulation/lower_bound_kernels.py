"""The loops behind `bounds`, compiled by numba."""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxplace.utils import compiled_loop, compiled_part, in_place

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]


class Near(NamedTuple):
    """Scratch: the neighbours of a node, the first few of each array, which has the length of the nodes."""

    place: Longs
    """Of each node of the graph, its index as a neighbour; else -1."""
    node_of: Longs
    work: Floats
    beyond: Floats
    """Seconds that lie beyond a neighbour."""
    far: Floats
    """What a neighbour on another device waits for what it reads."""
    alone: Floats
    remote: Floats
    by_remote: Longs
    by_beyond: Longs
    rank: Longs


def new_near(nodes: int) -> Near:
    """Return scratch for a graph of so many nodes."""
    place, node_of, by_remote, by_beyond, rank = np.full((5, nodes), -1, dtype=np.int64)
    work, beyond, far, alone, remote = np.zeros((5, nodes))
    return Near(place, node_of, work, beyond, far, alone, remote, by_remote, by_beyond, rank)


@compiled_part
def _descending(keys, count, ranked):
    """Write the indices of the first `count` keys to `ranked`, largest key first, ties by index; a heap sort.

    numpy's own sort takes numba five seconds to compile.
    """
    for i in range(count):
        ranked[i] = i
    for turn in range(count // 2 + count - 1, 0, -1):  # the first half of the turns make the heap
        slot, end = turn - count, count
        if slot < 0:
            slot, end = 0, turn
            ranked[0], ranked[end] = ranked[end], ranked[0]
        moved = ranked[slot]
        while 2 * slot + 1 < end:
            below = 2 * slot + 1
            if below + 1 < end and _after(keys, ranked[below + 1], ranked[below]):
                below += 1
            if not _after(keys, ranked[below], moved):
                break
            ranked[slot] = ranked[below]
            slot = below
        ranked[slot] = moved


@compiled_part
def _after(keys, one, other):
    """Whether `one` comes after `other` in descending order."""
    return keys[one] < keys[other] or (keys[one] == keys[other] and one > other)


@compiled_part
def _star(count, alone, queues, near):
    """Least time from when a node is done to when the last of its `count` neighbours, and what lies beyond, is done.

    Neighbours on the node's device run one after the other; the others wait `far` seconds for what they read. With
    the longest ways first, the first few must be on the device for the rest to be no later. Where channels are shared
    (`queues`), `alone` is what a neighbour's own transfers take of the node's channel: each neighbour takes time on
    the device or on the channel, and the longer of the two is at least any weighted mean of them.
    """
    work, beyond, far, remote, rank = near.work, near.beyond, near.far, near.remote, near.rank
    by_remote, by_beyond = near.by_remote, near.by_beyond
    longest = 0.0
    for i in range(count):
        longest = max(longest, work[i] + beyond[i])
    if count < 2:
        return longest
    for i in range(count):
        remote[i] = far[i] + work[i] + beyond[i]
    _descending(remote, count, by_remote)
    _descending(beyond, count, by_beyond)
    for i in range(count):
        rank[by_remote[i]] = i
    low, high = 1, count
    reached = 0.0
    while low <= high:
        local = (low + high) // 2
        total = 0.0
        needed = 0.0
        for i in range(count):
            if rank[by_beyond[i]] < local:
                total += work[by_beyond[i]]
                needed = max(needed, total + beyond[by_beyond[i]])
        here = remote[by_remote[local - 1]]
        # With `local` neighbours or more on the device it takes `needed`, with fewer at least `here`.
        reached = max(reached, min(needed, here))
        if needed >= here:
            high = local - 1
        else:
            low = local + 1
    longest = max(longest, reached)
    if queues:
        nearest = beyond[by_beyond[count - 1]]
        for quarter in range(1, 4):
            share = 0.25 * quarter
            total = nearest
            for i in range(count):
                total += min(share * work[i], (1.0 - share) * alone[i])
            longest = max(longest, total)
    return longest


@in_place
def tails_of(order, out_starts, outs, read_starts, readers, least, send, queues, near, tail):
    """Fill `tail`: seconds from the end of each node to the end of the step, at least."""
    place, node_of, work, beyond, far, alone = near.place, near.node_of, near.work, near.beyond, near.far, near.alone
    for position in range(len(order) - 1, -1, -1):
        node = order[position]
        found = np.int64(0)
        for k in range(out_starts[node], out_starts[node + 1]):
            value = outs[k]
            single = read_starts[value + 1] - read_starts[value] == 1
            for j in range(read_starts[value], read_starts[value + 1]):
                reader = readers[j]
                at = place[reader]
                if at < 0:
                    at = found
                    place[reader] = at
                    node_of[at] = reader
                    work[at], beyond[at], far[at], alone[at] = least[reader], tail[reader], 0.0, 0.0
                    found += 1
                far[at] = far[at] + send[value] if queues else max(far[at], send[value])
                if single:
                    alone[at] += send[value]
        tail[node] = _star(found, alone, queues, near)
        for i in range(found):
            place[node_of[i]] = -1


@in_place
def heads_of(order, producer, in_starts, ins, least, send, queues, near, head):
    """Fill `head`: seconds before the start of each node, at least."""
    place, node_of, work, beyond, far = near.place, near.node_of, near.work, near.beyond, near.far
    for position in range(len(order)):
        node = order[position]
        found = np.int64(0)
        for k in range(in_starts[node], in_starts[node + 1]):
            value = ins[k]
            source = producer[value]
            if source < 0:
                continue
            at = place[source]
            if at < 0:
                at = found
                place[source] = at
                node_of[at] = source
                work[at], beyond[at], far[at] = least[source], head[source], 0.0
                found += 1
            far[at] = far[at] + send[value] if queues else max(far[at], send[value])
        head[node] = _star(found, far, queues, near)
        for i in range(found):
            place[node_of[i]] = -1


@in_place
def best_threshold(by_tail, levels, head, tail, work, devices):
    """Largest head level + work / devices + tail over the nodes with at least that head and at least that tail."""
    best = 0.0
    for k in range(len(levels)):
        total = 0.0
        for i in range(len(by_tail)):
            node = by_tail[i]
            if head[node] >= levels[k]:
                total += work[node]
                best = max(best, levels[k] + total / devices + tail[node])
    return best


@compiled_loop
def connected(producer, in_starts, ins):
    """Whether all nodes hang together by values that one of them makes and another reads."""
    count = len(in_starts) - 1
    root = np.arange(count)
    pieces = count
    for node in range(count):
        for k in range(in_starts[node], in_starts[node + 1]):
            source = producer[ins[k]]
            if source < 0:
                continue
            a, b = node, np.int64(source)
            while root[a] != a:
                root[a] = root[root[a]]
                a = root[a]
            while root[b] != b:
                root[b] = root[root[b]]
                b = root[b]
            if a != b:
                root[a] = b
                pieces -= 1
    return pieces == 1
