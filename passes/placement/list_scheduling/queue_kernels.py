"""Small loops of the list scheduler: heaps, arrival of inputs, memory, and the effects of placing a node.

They are compiled into `list_schedule`, which is cached on disk. Arguments are never literals, nor of several types:
numba would compile once more for each.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.utils import compiled_part


@compiled_part
def push(q, rank, key, queues):
    """Push the node at position `rank` into heap `q`, or change its key there."""
    # A new node starts at the end of the heap; either way it moves up first, then down. `slot` tells where each node
    # is, so that its key is changed in O(log N), without a search.
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
def pop(q, queues):
    """Pop the first position of heap `q`."""
    # The last node of the heap fills the gap.
    first = np.int64(queues.heap[q, 0])
    queues.slot[q, first] = 0
    queues.size[q] -= 1
    if queues.size[q] > 0:
        sink(q, np.int64(queues.heap[q, queues.size[q]]), np.int64(0), queues)
    return first


@compiled_part
def settle_group(g, d, work):
    """Place group `g` on device `d` and reserve its memory there."""
    # A weight that another group has brought along costs nothing.
    work.groups[g].home = d
    work.devices[d].used += work.groups[g].extra
    for k in range(work.groups[g].weights, work.groups[g + 1].weights):
        weight = work.items[k]
        if not work.stored[d, weight]:
            work.stored[d, weight] = True
            work.devices[d].used += work.weight_bytes[weight]


@compiled_part
def transfer_ticks(value, source, d, work):
    """Return the ticks of sending a value."""
    return np.int64(np.rint(work.latency[source, d] + work.values[value].bytes * work.per_byte[source, d]))


@compiled_part
def inputs_arrival(node, d, work):
    """Return when all inputs of `node` can be on device `d`, with missing ones sent one after the other."""
    earliest = np.int64(0)
    channel = work.devices[d].receiving
    for k in range(work.nodes[node].inputs, work.nodes[node + 1].inputs):
        value = work.items[k]
        producer = work.values[value].producer
        if producer < 0:
            continue
        source = work.nodes[producer].device
        if source == d:
            earliest = max(earliest, work.nodes[producer].finish)
        elif work.arrival[value, d] >= 0:
            earliest = max(earliest, work.arrival[value, d])
        else:
            # Transfers queue for both channels, unless links serve any number at a time.
            begin = work.nodes[producer].finish
            if work.link_model != 1:
                begin = max(begin, max(work.devices[source].sending, channel))
            channel = begin + transfer_ticks(value, source, d, work)
            earliest = max(earliest, channel)
    return earliest


@compiled_part
def need_bytes(node, d, work):
    """Return the bytes that `node` would add on device `d`; with its group's weights, if that has no device yet."""
    # Views share the memory of their root; inputs count unless they are there already.
    needed = work.nodes[node].workspace
    for k in range(work.nodes[node].outputs, work.nodes[node + 1].outputs):
        if work.values[work.items[k]].root == work.items[k]:
            needed += work.values[work.items[k]].bytes
    for k in range(work.nodes[node].inputs, work.nodes[node + 1].inputs):
        value = work.items[k]
        if work.arrival[value, d] < 0:
            producer = work.values[value].producer
            if producer < 0 or work.nodes[producer].device != d:
                needed += work.values[value].bytes
    g = work.nodes[node].group
    if work.groups[g].home < 0:
        needed += work.groups[g].extra
        for k in range(work.groups[g].weights, work.groups[g + 1].weights):
            if not work.stored[d, work.items[k]]:
                needed += work.weight_bytes[work.items[k]]
    return needed


@compiled_part
def room_left(node, d, nodes, groups, devices):
    """Return the bytes that `node` may still take on device `d`; less if it brings a group of several nodes."""
    g = nodes[node].group
    opens = groups[g].home < 0 and groups[g + 1].members - groups[g].members > 1
    # A group of several nodes must leave room for what its first nodes produce for its later ones.
    return (devices[d].admit if opens else devices[d].limit) - devices[d].used


@compiled_part
def may_run(node, d, nodes, groups, duration):
    """Return whether `node` is unplaced, device `d` takes it, and its group allows the device."""
    home = groups[nodes[node].group].home
    return nodes[node].device < 0 and (home == d or (home < 0 and duration[d, node] >= 0))


@compiled_part
def book_transfers(node, d, work, queues):
    """Book the transfers of inputs of `node` to device `d`; other readers may start sooner there."""
    devices = len(work.devices)
    for k in range(work.nodes[node].inputs, work.nodes[node + 1].inputs):
        value = work.items[k]
        producer = work.values[value].producer
        if work.arrival[value, d] >= 0 or (producer >= 0 and work.nodes[producer].device == d):
            continue
        work.devices[d].used += work.values[value].bytes
        work.arrival[value, d] = 0
        if producer < 0:
            continue
        source = work.nodes[producer].device
        begin = work.nodes[producer].finish
        if work.link_model != 1:
            begin = max(begin, max(work.devices[source].sending, work.devices[d].receiving))
        end = begin + transfer_ticks(value, source, d, work)
        work.devices[source].sending = end
        work.devices[d].receiving = end
        # Sequential links: a device sends or receives, never both at a time.
        if work.link_model == 2:
            work.devices[source].receiving = end
            work.devices[d].sending = end
        work.arrival[value, d] = end
        # Other readers of the value move forward in the heaps of this device.
        for j in range(work.values[value].readers, work.values[value + 1].readers):
            reader = work.items[j]
            rank = work.nodes[reader].position
            if reader != node and queues.slot[d, rank] > 0:
                push(d, rank, inputs_arrival(reader, d, work), queues)
            if reader != node and len(queues.size) > 3 * devices:
                home = work.groups[work.nodes[reader].group].home
                late = 3 * devices + (home if home >= 0 else devices)
                if queues.slot[late, rank] > 0:
                    push(late, rank, np.int64(0), queues)  # its time is computed again when it comes up


@compiled_part
def release_inputs(node, work, queues):
    """Free values that `node` was the last to read, and requeue nodes that now fit."""
    devices = len(work.devices)
    for k in range(work.nodes[node].inputs, work.nodes[node + 1].inputs):
        value = work.items[k]
        # A view keeps its root alive: count both down.
        while value >= 0:
            work.values[value].unread -= 1
            if work.values[value].unread == 0:
                for d in range(devices):
                    producer = work.values[value].producer
                    is_produced = (
                        producer >= 0 and work.nodes[producer].device == d and work.values[value].root == value
                    )
                    if is_produced or work.arrival[value, d] >= 0:
                        work.devices[d].used -= work.values[value].bytes
                        # Nodes that were set aside for want of memory may fit now.
                        blocked = 2 * devices + d
                        while (
                            queues.size[blocked] > 0
                            and work.devices[d].used + queues.key[blocked, queues.heap[blocked, 0]]
                            <= work.devices[d].limit
                        ):
                            push(d, pop(blocked, queues), np.int64(0), queues)
            value = work.values[value].root if work.values[value].root != value else -1
