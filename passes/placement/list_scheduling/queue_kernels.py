"""The list scheduler's small kernels: heaps, when inputs can be there, what fits, and what placing a node changes.

They are compiled into `list_schedule`, which is what is kept on disk. Arguments are never literals, nor of several
types: numba compiles once more for each.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.utils import compiled_part


@compiled_part
def put(q, rank, key, queues):
    """Enter the node at position `rank` into heap `q`, or give it another key there."""
    slot = np.int64(queues.slot[q, rank]) - 1
    if slot < 0:
        slot = queues.size[q]
        queues.size[q] += 1
    queues.key[q, rank] = key
    while slot > 0:
        above = (slot - 1) >> 1
        other = np.int64(queues.heap[q, above])
        if queues.key[q, other] < key or (queues.key[q, other] == key and other < rank):
            break
        queues.heap[q, slot] = other
        queues.slot[q, other] = slot + 1
        slot = above
    sink(q, rank, slot, queues)


@compiled_part
def sink(q, rank, slot, queues):
    """Move a node down in its heap from `slot` to where it belongs."""
    key = queues.key[q, rank]
    while True:
        below = 2 * slot + 1
        if below >= queues.size[q]:
            break
        other = np.int64(queues.heap[q, below])
        if below + 1 < queues.size[q]:
            second = queues.heap[q, below + 1]
            if queues.key[q, second] < queues.key[q, other] or (
                queues.key[q, second] == queues.key[q, other] and second < other
            ):
                below, other = below + 1, second
        if key < queues.key[q, other] or (key == queues.key[q, other] and rank < other):
            break
        queues.heap[q, slot] = other
        queues.slot[q, other] = slot + 1
        slot = below
    queues.heap[q, slot] = rank
    queues.slot[q, rank] = slot + 1


@compiled_part
def take(q, queues):
    """Remove and return the first position of heap `q`."""
    first = np.int64(queues.heap[q, 0])
    queues.slot[q, first] = 0
    queues.size[q] -= 1
    if queues.size[q] > 0:
        sink(q, np.int64(queues.heap[q, queues.size[q]]), np.int64(0), queues)
    return first


@compiled_part
def settle(g, d, work):
    """Make `d` the home of group `g` and reserve there what it needs."""
    work.groups[g].home = d
    work.devices[d].used += work.groups[g].extra
    for k in range(work.groups[g].weights, work.groups[g + 1].weights):
        weight = work.items[k]
        if not work.held[d, weight]:
            work.held[d, weight] = True
            work.devices[d].used += work.weight_bytes[weight]


@compiled_part
def crossing(value, source, d, work):
    """Ticks that sending a value takes."""
    return np.int64(np.rint(work.latency[source, d] + work.values[value].bytes * work.per_byte[source, d]))


@compiled_part
def input_ready(node, d, work):
    """When all inputs of `node` can be on device `d`, sending what is not there yet one after the other."""
    earliest = np.int64(0)
    channel = work.devices[d].receiving
    for k in range(work.nodes[node].inputs, work.nodes[node + 1].inputs):
        value = work.items[k]
        maker = work.values[value].producer
        if maker < 0:
            continue
        source = work.nodes[maker].device
        if source == d:
            earliest = max(earliest, work.nodes[maker].finish)
        elif work.arrival[value, d] >= 0:
            earliest = max(earliest, work.arrival[value, d])
        else:
            begin = work.nodes[maker].finish
            if work.link_model != 1:
                begin = max(begin, max(work.devices[source].sending, channel))
            channel = begin + crossing(value, source, d, work)
            earliest = max(earliest, channel)
    return earliest


@compiled_part
def need_bytes(node, d, work):
    """Bytes that running `node` on device `d` would add there now; the weights of its whole group if it decides."""
    need = work.nodes[node].workspace
    for k in range(work.nodes[node].outputs, work.nodes[node + 1].outputs):
        if work.values[work.items[k]].root == work.items[k]:
            need += work.values[work.items[k]].bytes
    for k in range(work.nodes[node].inputs, work.nodes[node + 1].inputs):
        value = work.items[k]
        if work.arrival[value, d] < 0:
            maker = work.values[value].producer
            if maker < 0 or work.nodes[maker].device != d:
                need += work.values[value].bytes
    g = work.nodes[node].group
    if work.groups[g].home < 0:
        need += work.groups[g].extra
        for k in range(work.groups[g].weights, work.groups[g + 1].weights):
            if not work.held[d, work.items[k]]:
                need += work.weight_bytes[work.items[k]]
    return need


@compiled_part
def room_left(node, d, nodes, groups, devices):
    """Bytes that `node` may still take on device `d`: less if it would bring a group of several nodes with it."""
    g = nodes[node].group
    opens = groups[g].home < 0 and groups[g + 1].members - groups[g].members > 1
    return (devices[d].admit if opens else devices[d].limit) - devices[d].used


@compiled_part
def may_run(node, d, nodes, groups):
    """Whether `node` is still to be placed and its group does not keep it from `d`."""
    home = groups[nodes[node].group].home
    return nodes[node].device < 0 and (home < 0 or home == d)


@compiled_part
def fetch(node, d, work, queues):
    """Book the transfers that bring the inputs of `node` to device `d`, which other nodes may then start sooner on."""
    devices = len(work.devices)
    for k in range(work.nodes[node].inputs, work.nodes[node + 1].inputs):
        value = work.items[k]
        maker = work.values[value].producer
        if work.arrival[value, d] >= 0 or (maker >= 0 and work.nodes[maker].device == d):
            continue
        work.devices[d].used += work.values[value].bytes
        work.arrival[value, d] = 0
        if maker < 0:
            continue
        source = work.nodes[maker].device
        begin = work.nodes[maker].finish
        if work.link_model != 1:
            begin = max(begin, max(work.devices[source].sending, work.devices[d].receiving))
        end = begin + crossing(value, source, d, work)
        work.devices[source].sending = end
        work.devices[d].receiving = end
        if work.link_model == 2:
            work.devices[source].receiving = end
            work.devices[d].sending = end
        work.arrival[value, d] = end
        for j in range(work.values[value].readers, work.values[value + 1].readers):
            reader = work.items[j]
            rank = work.nodes[reader].position
            if reader != node and queues.slot[d, rank] > 0:
                put(d, rank, input_ready(reader, d, work), queues)
            if reader != node and len(queues.size) > 3 * devices:
                home = work.groups[work.nodes[reader].group].home
                late = 3 * devices + (home if home >= 0 else devices)
                if queues.slot[late, rank] > 0:
                    put(late, rank, np.int64(0), queues)  # to be looked at again when it comes up


@compiled_part
def let_go(node, work, queues):
    """Free what `node` was the last to read; nodes that did not fit before are looked at again."""
    devices = len(work.devices)
    for k in range(work.nodes[node].inputs, work.nodes[node + 1].inputs):
        value = work.items[k]
        while value >= 0:
            work.values[value].unread -= 1
            if work.values[value].unread == 0:
                for d in range(devices):
                    maker = work.values[value].producer
                    made_here = maker >= 0 and work.nodes[maker].device == d and work.values[value].root == value
                    if made_here or work.arrival[value, d] >= 0:
                        work.devices[d].used -= work.values[value].bytes
                        blocked = 2 * devices + d
                        while (
                            queues.size[blocked] > 0
                            and work.devices[d].used + queues.key[blocked, queues.heap[blocked, 0]]
                            <= work.devices[d].limit
                        ):
                            put(d, take(blocked, queues), np.int64(0), queues)
            value = work.values[value].root if work.values[value].root != value else -1
