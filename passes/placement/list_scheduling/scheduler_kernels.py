"""List scheduling, the compiled loop of m-ETF and m-SCT: choose the next node and its device.

For each device, ready nodes wait in two heaps: those whose inputs arrive later, by that time, and those whose inputs
can arrive when the device is next free, by topological position. A node moves from the first to the second as time goes
on. Its time is computed again when it comes up, since channels may have become busier. A transfer for another node may
bring it an input and move it forward. So a decision costs O(D log N) for any number of ready nodes.

Arguments of the smaller loops are never literals, nor of several types: numba would compile once more for each.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.utils.jit import compiled_part, linear_in_place

# After any tick.
NEVER = 1 << 62


# The heaps of `Queues` by number, for device d of D: d has the nodes whose inputs arrive later, D + d those that can
# start now, and 2 D + d those that do not fit. With favourite children, 3 D + g has the nodes that become urgent later,
# and 4 D + 1 + g those that are; g is the device that the group of a node is bound to, or D.
@linear_in_place
def list_schedule(work, queues):
    """Place nodes one by one: of all ready nodes and devices, the pair that can start first.

    Ties go to the node that is first in topological order, then to the first device. With favourite children (m-SCT),
    a device whose last node has a ready favourite waits for it, unless another node is urgent: it could have started on
    any device by then.

    Memory is counted as the schedule grows: a weight once per device; a value where it is produced and where it is
    sent, until all its readers, and those of its views, are placed; an output for good; a view not at all. The first
    node of a group decides for the group. Its weights are reserved there, and `extra` until its last node is placed. A
    group is only accepted while the device stays within `admit`, so that there is room for its later nodes.

    The plan is left in `work.nodes`; the device of a node is -1 if no device had room. Times are ticks.
    """
    count, devices = len(work.nodes) - 1, len(work.devices)
    # Heaps for favourite children exist only if there are some.
    has_favourites = len(queues.size) > 3 * devices  # some nodes have favourite children
    # Pinned groups take their memory first.
    for g in range(len(work.groups) - 1):
        if work.groups[g].pinned >= 0:
            settle_group(g, work.groups[g].pinned, work)
    queued, ready = np.int64(0), np.int64(0)
    # Nodes without inputs are ready from the start.
    for node in range(count):
        if work.nodes[node].waiting == 0:
            queues.fresh[ready] = node
            ready += 1
    clock = np.int64(0)  # not a literal, for which numba would compile the callees once more
    for _ in range(count):
        while queued < ready:
            enqueue(np.int64(queues.fresh[queued]), work, queues, has_favourites)
            queued += 1
        node, d, time = choose_node(clock, work, queues)
        # If nothing fits, memory freed since then may admit nodes that were set aside.
        if node < 0 and unblock_nodes(work, queues):
            node, d, time = choose_node(clock, work, queues)
        if node < 0:
            break
        # Place the node: its group first, then its transfers, itself, and the values that it frees.
        clock = time
        work.devices[d].last = node
        if work.groups[work.nodes[node].group].home < 0:
            settle_group(work.nodes[node].group, d, work)
            if has_favourites:
                bind_group(node, d, work, queues)
        book_transfers(node, d, work, queues)
        work.nodes[node].device = d
        work.nodes[node].start = time
        work.nodes[node].finish = time + work.duration[d, node]
        for e in range(devices):
            if work.conflicts[d, e]:
                work.devices[e].free = max(work.devices[e].free, work.nodes[node].finish)
        ready = complete_node(node, d, ready, work, queues)
        release_inputs(node, work, queues)


@compiled_part
def enqueue(node, work, queues, has_favourites):
    """Queue a ready node for each device that it may run on."""
    devices = len(work.devices)
    home, rank, latest = work.groups[work.nodes[node].group].home, work.nodes[node].position, 0
    for d in range(devices):
        if may_run(node, d, work.nodes, work.groups, work.duration):
            ready = inputs_arrival(node, d, work)
            latest = max(latest, ready)
            at_once = ready <= work.devices[d].free
            push(devices + d if at_once else d, rank, 0 if at_once else ready, queues)
    if has_favourites:
        push(3 * devices + (home if home >= 0 else devices), rank, latest, queues)


@compiled_part
def bind_group(node, d, work, queues):
    """Requeue the ready nodes of a group that has just been bound to device `d`: they can be late only there."""
    devices = len(work.devices)
    g = work.nodes[node].group
    for k in range(work.groups[g].members, work.groups[g + 1].members):
        member = work.items[k]
        if member != node and work.nodes[member].device < 0 and work.nodes[member].waiting == 0:
            push(3 * devices + d, work.nodes[member].position, inputs_arrival(member, d, work), queues)


@compiled_part
def complete_node(node, d, ready, work, queues):
    """Count the outputs of `node` on device `d`, and collect the nodes that become ready."""
    g = work.nodes[node].group
    work.groups[g].unplaced -= 1
    if work.groups[g].unplaced == 0:
        work.devices[d].used -= work.groups[g].extra
    for k in range(work.nodes[node].outputs, work.nodes[node + 1].outputs):
        value = work.items[k]
        if work.values[value].root == value and work.values[value].unread > 0:
            work.devices[d].used += work.values[value].bytes
        for j in range(work.values[value].readers, work.values[value + 1].readers):
            reader = work.items[j]
            work.nodes[reader].parents_done = max(work.nodes[reader].parents_done, work.nodes[node].finish)
            work.nodes[reader].waiting -= 1
            if work.nodes[reader].waiting == 0:
                queues.fresh[ready] = reader
                ready += 1
    return ready


@compiled_part
def choose_node(clock, work, queues):
    """Return the node to place next, its device and its start; node -1 if none fits anywhere."""
    best_node, best_device, best_start = -1, -1, NEVER
    for d in range(len(work.devices)):
        # A device that is free later cannot start anything sooner than what was found.
        if work.devices[d].free > best_start:
            continue
        node, time = find_earliest(d, clock, work, queues)
        if work.devices[d].last >= 0:
            # The favourite child of the last node may take precedence.
            child = work.nodes[work.devices[d].last].favourite
            is_ready = child >= 0 and work.nodes[child].waiting == 0
            if is_ready and may_run(child, d, work.nodes, work.groups, work.duration):
                node, time = choose_for_favourite(d, child, node, time, clock, work, queues)
        if node >= 0 and (
            time < best_start or (time == best_start and work.nodes[node].position < work.nodes[best_node].position)
        ):
            best_node, best_device, best_start = node, d, time
    return best_node, best_device, best_start


@compiled_part
def find_earliest(d, clock, work, queues):
    """Return the node that could start first on device `d`, and when; -1 if none fits. Others are set aside."""
    free = max(work.devices[d].free, clock)
    later, now, blocked = d, len(work.devices) + d, 2 * len(work.devices) + d
    while True:
        while queues.size[later] > 0 and queues.key[later, queues.heap[later, 0]] <= free:
            rank = pop(later, queues)
            push(now, rank, np.int64(0), queues)
        # Take the first node that may run, whose time still holds and that fits.
        q = now if queues.size[now] > 0 else later
        if queues.size[q] == 0:
            return -1, NEVER
        rank = np.int64(queues.heap[q, 0])
        node = work.nodes[rank].in_order
        if not may_run(node, d, work.nodes, work.groups, work.duration):
            pop(q, queues)
            continue
        ready = inputs_arrival(node, d, work)
        # Channels have become busier since it was queued: queue it again by its new time.
        if ready > (free if q == now else queues.key[q, rank]):
            pop(q, queues)
            push(later, rank, ready, queues)
            continue
        need = need_bytes(node, d, work)
        if need <= free_bytes(node, d, work.nodes, work.groups, work.devices):
            return node, max(ready, free)
        pop(q, queues)
        push(blocked, rank, need, queues)


@compiled_part
def choose_for_favourite(d, child, node, time, clock, work, queues):
    """Return the next node of device `d` and its start, where `child` is the favourite of its last node.

    `node` is the choice of m-ETF. The device waits for the child once that is ready, if no device can start it earlier.
    """
    devices = len(work.devices)
    since = max(max(clock, work.devices[d].free), work.nodes[child].parents_done)
    needed = need_bytes(child, d, work)
    if time < since or needed > free_bytes(child, d, work.nodes, work.groups, work.devices):
        return node, time
    chosen, start = child, max(since, inputs_arrival(child, d, work))
    for e in range(devices):
        if e != d and may_run(child, e, work.nodes, work.groups, work.duration):
            elsewhere = max(max(since, work.devices[e].free), inputs_arrival(child, e, work))
            if elsewhere < start:
                return node, time
    # Urgent nodes go before the child: those bound to this device, then those that are not bound.
    # Two rounds, `d` and `devices`: the second number stands for nodes that are bound to no device.
    for bound_to in range(d, devices + 1, devices - d):
        busy = max(clock, work.devices[d].free)
        if bound_to == devices:
            for e in range(devices):
                busy = max(busy, work.devices[e].free)
        urgent, deadline = find_most_urgent(bound_to, busy, work, queues)
        deadline = max(deadline, since)
        if urgent >= 0 and deadline <= start and may_run(urgent, d, work.nodes, work.groups, work.duration):
            first = chosen == child or deadline < start or work.nodes[urgent].position < work.nodes[chosen].position
            needed = need_bytes(urgent, d, work)
            if first and needed <= free_bytes(urgent, d, work.nodes, work.groups, work.devices):
                chosen, start = urgent, deadline
    return chosen, start


@compiled_part
def find_most_urgent(bound_to, busy, work, queues):
    """Return the node that is late first, and when: any device could start it by then; -1 for none.

    Only nodes bound to device `bound_to` count, or unbound ones if that is one past the last device. None of them is
    late before `busy`.
    """
    devices = len(work.devices)
    later, now = 3 * devices + bound_to, 4 * devices + 1 + bound_to
    while True:
        while queues.size[later] > 0 and queues.key[later, queues.heap[later, 0]] <= busy:
            rank = pop(later, queues)
            push(now, rank, np.int64(0), queues)
        q = now if queues.size[now] > 0 else later
        if queues.size[q] == 0:
            return -1, NEVER
        rank = np.int64(queues.heap[q, 0])
        node = work.nodes[rank].in_order
        home = work.groups[work.nodes[node].group].home
        # Placed meanwhile, or bound to a device since it was queued: it is in another heap, or needs none.
        if work.nodes[node].device >= 0 or (home < 0) != (bound_to == devices):
            pop(q, queues)
            continue
        latest = 0
        for d in range(devices):
            if may_run(node, d, work.nodes, work.groups, work.duration):
                latest = max(latest, inputs_arrival(node, d, work))
        if latest <= (busy if q == now else queues.key[q, rank]):
            return node, max(latest, busy)
        pop(q, queues)
        push(later, rank, latest, queues)


@compiled_part
def unblock_nodes(work, queues):
    """Requeue the nodes that fit by now, since weights placed meanwhile may be shared; return whether any does."""
    devices, any_fits = len(work.devices), False
    for d in range(devices):
        blocked = 2 * devices + d
        count = queues.size[blocked]
        # Take all nodes of the heap out before any is pushed again.
        for _ in range(count):
            rank = pop(blocked, queues)
            queues.heap[blocked, queues.size[blocked]] = rank
        for slot in range(count):
            rank = np.int64(queues.heap[blocked, slot])
            node = work.nodes[rank].in_order
            if may_run(node, d, work.nodes, work.groups, work.duration):
                need = need_bytes(node, d, work)
                fits = need <= free_bytes(node, d, work.nodes, work.groups, work.devices)
                any_fits = any_fits or fits
                push(d if fits else blocked, rank, 0 if fits else need, queues)
    return any_fits


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
def free_bytes(node, d, nodes, groups, devices):
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
