"""List scheduling: which ready node goes next, and where. The kernel behind m-ETF and m-SCT.

For each device, ready nodes wait in two heaps: those whose inputs will be there later, by that time, and those whose
inputs can be there when the device is next free, by topological position. A node moves from the first to the second
as time goes on, and is looked at again when it comes up, since channels may have become busier; where a transfer for
another node brings it an input, it moves forward. So a decision costs O(D log N), however many nodes are ready.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.passes.placement.list_scheduling.queue_kernels import (
    fetch,
    input_ready,
    let_go,
    may_run,
    need_bytes,
    put,
    room_left,
    settle,
    take,
)
from onnxplace.utils import compiled_part, in_place

NEVER = 1 << 62


@in_place
def list_schedule(work, queues):
    """Place nodes one by one: of all ready nodes and devices, the pair that can start first.

    Ties go to the node that is first in topological order, then to the first device. With favourite children (m-SCT),
    a device whose last node has a ready favourite keeps itself for it, unless a node is urgent: it could have started
    on any device by then.

    Memory is accounted as the schedule grows: weights once per device, a value where it is made and where it was sent
    until all its readers, and those of its views, are placed; an output for good; a view takes none. The first node
    of a group decides for the group, whose weights, and `extra` until its last node is placed, are reserved there; a
    group is only taken on while the device stays within `admit`, so that there is room for its later nodes.

    The plan is left in `work.nodes`; the device of a node is -1 if nothing fitted any more. Times are ticks.
    """
    count, devices = len(work.nodes) - 1, len(work.devices)
    guided = len(queues.size) > 3 * devices  # some nodes have favourite children
    for g in range(len(work.groups) - 1):
        if work.groups[g].pinned >= 0:
            settle(g, work.groups[g].pinned, work)
    entered, ready = np.int64(0), np.int64(0)
    for node in range(count):
        if work.nodes[node].waiting == 0:
            queues.fresh[ready] = node
            ready += 1
    clock = np.int64(0)  # not a literal, for which numba would compile what it is passed to once more
    for _ in range(count):
        while entered < ready:
            enter(np.int64(queues.fresh[entered]), work, queues, guided)
            entered += 1
        node, d, when = choose(clock, work, queues)
        if node < 0 and unblock(work, queues):
            node, d, when = choose(clock, work, queues)
        if node < 0:
            break
        clock = when
        work.devices[d].last = node
        if work.groups[work.nodes[node].group].home < 0:
            settle(work.nodes[node].group, d, work)
            if guided:
                bind(node, d, work, queues)
        fetch(node, d, work, queues)
        work.nodes[node].device = d
        work.nodes[node].start = when
        work.nodes[node].finish = when + work.duration[d, node]
        work.devices[d].free = work.nodes[node].finish
        ready = make(node, d, ready, work, queues)
        let_go(node, work, queues)


@compiled_part
def enter(node, work, queues, guided):
    """Let a node whose predecessors are all placed wait for each device it may run on."""
    devices = len(work.devices)
    home, rank, worst = work.groups[work.nodes[node].group].home, work.nodes[node].position, 0
    for d in range(devices):
        if home < 0 or home == d:
            ready = input_ready(node, d, work)
            worst = max(worst, ready)
            at_once = ready <= work.devices[d].free
            put(devices + d if at_once else d, rank, 0 if at_once else ready, queues)
    if guided:
        put(3 * devices + (home if home >= 0 else devices), rank, worst, queues)


@compiled_part
def bind(node, d, work, queues):
    """Let the waiting nodes of the group of `node`, which has just been bound to device `d`, be late there only."""
    devices = len(work.devices)
    g = work.nodes[node].group
    for k in range(work.groups[g].members, work.groups[g + 1].members):
        member = work.items[k]
        if member != node and work.nodes[member].device < 0 and work.nodes[member].waiting == 0:
            put(3 * devices + d, work.nodes[member].position, input_ready(member, d, work), queues)


@compiled_part
def make(node, d, ready, work, queues):
    """Count what `node` makes on device `d`, and note the nodes that it was the last to be waited for by."""
    g = work.nodes[node].group
    work.groups[g].left -= 1
    if work.groups[g].left == 0:
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
def choose(clock, work, queues):
    """The node to place next, its device and its start; node -1 if none fits anywhere."""
    best_node, best_device, best_start = -1, -1, NEVER
    for d in range(len(work.devices)):
        if work.devices[d].free > best_start:
            continue
        node, when = earliest(d, clock, work, queues)
        if work.devices[d].last >= 0:
            child = work.nodes[work.devices[d].last].favourite
            if child >= 0 and work.nodes[child].waiting == 0 and may_run(child, d, work.nodes, work.groups):
                node, when = awake(d, child, node, when, clock, work, queues)
        if node >= 0 and (
            when < best_start or (when == best_start and work.nodes[node].position < work.nodes[best_node].position)
        ):
            best_node, best_device, best_start = node, d, when
    return best_node, best_device, best_start


@compiled_part
def earliest(d, clock, work, queues):
    """The node that could start first on device `d`, and when; -1 if none fits. Those that do not are set aside."""
    free = max(work.devices[d].free, clock)
    later, now, blocked = d, len(work.devices) + d, 2 * len(work.devices) + d
    while True:
        while queues.size[later] > 0 and queues.key[later, queues.heap[later, 0]] <= free:
            rank = take(later, queues)
            put(now, rank, np.int64(0), queues)
        q = now if queues.size[now] > 0 else later
        if queues.size[q] == 0:
            return -1, NEVER
        rank = np.int64(queues.heap[q, 0])
        node = work.nodes[rank].in_order
        if not may_run(node, d, work.nodes, work.groups):
            take(q, queues)
            continue
        ready = input_ready(node, d, work)
        if ready > (free if q == now else queues.key[q, rank]):
            take(q, queues)
            put(later, rank, ready, queues)
            continue
        need = need_bytes(node, d, work)
        if need <= room_left(node, d, work.nodes, work.groups, work.devices):
            return node, max(ready, free)
        take(q, queues)
        put(blocked, rank, need, queues)


@compiled_part
def awake(d, child, node, when, clock, work, queues):
    """What device `d` runs next, and when, if `child` is the favourite of what it ran last; `node` is m-ETF's choice.

    The device keeps itself for the child once that is ready, if the child can start nowhere earlier.
    """
    devices = len(work.devices)
    since = max(max(clock, work.devices[d].free), work.nodes[child].parents_done)
    need = need_bytes(child, d, work)
    if when < since or need > room_left(child, d, work.nodes, work.groups, work.devices):
        return node, when
    found, start = child, max(since, input_ready(child, d, work))
    for e in range(devices):
        if e != d and may_run(child, e, work.nodes, work.groups):
            there = max(max(since, work.devices[e].free), input_ready(child, e, work))
            if there < start:
                return node, when
    for which in range(d, devices + 1, devices - d):
        busy = max(clock, work.devices[d].free)
        if which == devices:
            for e in range(devices):
                busy = max(busy, work.devices[e].free)
        urgent, deadline = most_urgent(which, busy, work, queues)
        deadline = max(deadline, since)
        if urgent >= 0 and deadline <= start:
            first = found == child or deadline < start or work.nodes[urgent].position < work.nodes[found].position
            need = need_bytes(urgent, d, work)
            if first and need <= room_left(urgent, d, work.nodes, work.groups, work.devices):
                found, start = urgent, deadline
    return found, start


@compiled_part
def most_urgent(which, busy, work, queues):
    """The node that is first to be late, and when that is: no device could start it later than then; -1 for none.

    `which` is the device that the nodes asked for are bound to, or one past the last for those that are not; until
    `busy` none of them is late.
    """
    devices = len(work.devices)
    later, now = 3 * devices + which, 4 * devices + 1 + which
    while True:
        while queues.size[later] > 0 and queues.key[later, queues.heap[later, 0]] <= busy:
            rank = take(later, queues)
            put(now, rank, np.int64(0), queues)
        q = now if queues.size[now] > 0 else later
        if queues.size[q] == 0:
            return -1, NEVER
        rank = np.int64(queues.heap[q, 0])
        node = work.nodes[rank].in_order
        home = work.groups[work.nodes[node].group].home
        if work.nodes[node].device >= 0 or (home < 0) != (which == devices):
            take(q, queues)
            continue
        worst = 0
        for d in range(devices):
            if home < 0 or home == d:
                worst = max(worst, input_ready(node, d, work))
        if worst <= (busy if q == now else queues.key[q, rank]):
            return node, max(worst, busy)
        take(q, queues)
        put(later, rank, worst, queues)


@compiled_part
def unblock(work, queues):
    """Let the nodes wait again that fit by now: weights placed since may have made room. False if there are none."""
    devices, found = len(work.devices), False
    for d in range(devices):
        blocked = 2 * devices + d
        count = queues.size[blocked]
        for _ in range(count):
            rank = take(blocked, queues)
            queues.heap[blocked, queues.size[blocked]] = rank
        for slot in range(count):
            rank = np.int64(queues.heap[blocked, slot])
            node = work.nodes[rank].in_order
            if may_run(node, d, work.nodes, work.groups):
                need = need_bytes(node, d, work)
                fits = need <= room_left(node, d, work.nodes, work.groups, work.devices)
                found = found or fits
                put(d if fits else blocked, rank, 0 if fits else need, queues)
    return found
