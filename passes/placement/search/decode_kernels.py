"""Simulate a placement in which each device runs its most urgent ready node first.

It has the model of time of the simulator (docs/architecture.md), in one call on arrays that are allocated once. The
search calls it thousands of times a second.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph.graph_kernels import heap_pop, heap_push
from onnxplace.graph.op_graph import Bools, Floats, Ints, Longs, OpGraph
from onnxplace.simulation.channel_kernels import GAP, book_transfer, open_channels
from onnxplace.target.target import LINK_MODELS, Target
from onnxplace.utils.jit import compiled_part, linear_in_place

# What delayed the start of a node: nothing, the node ahead of it on its device or on a processor of it, an input from
# the same device, or an input from another one.
NOTHING, AHEAD, FROM_HERE, FROM_THERE = range(4)


class Wiring(NamedTuple):
    """A graph, its costs and its links, as compiled loops read them."""

    order: Ints
    """Nodes in topological order."""
    producer: Ints
    value_bytes: Longs
    in_starts: Longs
    ins: Ints
    out_starts: Longs
    outs: Ints
    read_starts: Longs
    readers: Ints
    seconds: Floats
    """[device, node]."""
    latency: Floats
    """[source, destination], seconds."""
    per_byte: Floats
    call_seconds: Floats
    """Per device: the cost of a cut before or after a node."""
    conflicts: Bools
    """[device, device]: whether they have a processor in common."""
    link_model: int


# The state of a device in a simulation. Records are allocated once, since the search simulates very often.
DEVICE = np.dtype(
    [
        ("free", np.float64),
        ("ends", np.float64),  # when its running node finishes, or asks for processors; infinity if it is idle
        ("wake", np.float64),  # when its next node could start; infinity while one runs
        ("sending", np.float64),
        ("receiving", np.float64),
        ("arrival", np.float64),  # when the value `stamp` arrives
        ("running", np.int64),  # node, or -1
        ("last", np.int64),
        ("ready", np.int64),  # number of nodes in its two heaps
        ("future", np.int64),
        ("stamp", np.int64),  # the value last sent to it or read there, or -1
        ("shares", np.int64),  # 1 if a processor of it is also that of another device
        ("asks", np.int64),  # 1 if its running node does not have its processors yet
        ("taken", np.float64),  # when the nodes have finished that asked for its processors
        ("holder", np.int64),  # the last of these nodes
    ],
    align=True,
)


class Scratch(NamedTuple):
    """Arrays that one simulation writes; one entry per node unless noted."""

    bottom: Floats
    """Seconds of the longest path from the start of a node to the end, transfers of cut edges included."""
    key: Floats
    """Urgency, negated: heaps have the smallest key on top."""
    start: Floats
    finish: Floats
    available: Floats
    waiting: Ints
    blame: Ints
    """The node that delayed the start: the producer of the last input, or the node ahead; else -1."""
    blame_kind: Ints
    """`NOTHING`, `AHEAD`, `FROM_HERE` or `FROM_THERE`."""
    last_input: Ints
    sequence: Ints
    """The number of nodes that started before, on any device."""
    ready_heap: Ints
    """[device, node]."""
    future_heap: Ints
    """[device, node]."""
    devices: NDArray[Any]
    """Records of `DEVICE`."""
    gaps: NDArray[Any]
    """Records of `GAP`."""


def build_wiring(graph: OpGraph, seconds: Floats, target: Target) -> Wiring:
    """Return the arrays of a graph on a target."""
    latency, per_byte = target.link_arrays()
    inputs, outputs, readers = graph.inputs, graph.outputs, graph.readers
    return Wiring(
        order=graph.order,
        producer=graph.producer,
        value_bytes=graph.value_bytes,
        in_starts=inputs.starts,
        ins=inputs.items,
        out_starts=outputs.starts,
        outs=outputs.items,
        read_starts=readers.starts,
        readers=readers.items,
        seconds=np.ascontiguousarray(seconds),
        latency=latency,
        per_byte=per_byte,
        call_seconds=np.array([device.segment_seconds for device in target.devices]),
        conflicts=target.conflicts,
        link_model=LINK_MODELS.index(target.link_model),
    )


def new_scratch(wiring: Wiring) -> Scratch:
    """Return arrays for simulations of a graph."""
    nodes, devices = len(wiring.order), len(wiring.latency)
    records = np.zeros(devices, DEVICE)
    records["shares"] = wiring.conflicts.sum(axis=0) > 1
    return Scratch(
        bottom=np.zeros(nodes),
        key=np.zeros(nodes),
        start=np.zeros(nodes),
        finish=np.zeros(nodes),
        available=np.zeros(nodes),
        waiting=np.zeros(nodes, dtype=np.int32),
        blame=np.zeros(nodes, dtype=np.int32),
        blame_kind=np.zeros(nodes, dtype=np.int32),
        last_input=np.zeros(nodes, dtype=np.int32),
        sequence=np.zeros(nodes, dtype=np.int32),
        ready_heap=np.zeros((devices, nodes), dtype=np.int32),
        future_heap=np.zeros((devices, nodes), dtype=np.int32),
        devices=records,
        gaps=np.zeros(devices + len(wiring.readers) + 1, GAP),
    )


def run_order(graph: OpGraph, scratch: Scratch) -> Ints:
    """Return the nodes in the order of their simulated starts.

    Of those that start together on one device, those that take no time ran first, in the sequence of the simulation.
    """
    # Several nodes of one device have the same times only if they take none. Other ties are between devices.
    tie = np.where(scratch.finish > scratch.start, graph.positions, scratch.sequence)
    return np.lexsort((tie, scratch.finish, scratch.start)).astype(np.int32)


@compiled_part
def bottom_levels(wiring, device, bottom):
    """Fill `bottom` for a placement; return its maximum, a lower bound on the makespan of the placement."""
    longest = 0.0
    for position in range(len(wiring.order) - 1, -1, -1):
        node = wiring.order[position]
        home = device[node]
        below = 0.0
        call_seconds = 0.0
        for k in range(wiring.out_starts[node], wiring.out_starts[node + 1]):
            value = wiring.outs[k]
            for j in range(wiring.read_starts[value], wiring.read_starts[value + 1]):
                reader = wiring.readers[j]
                destination = device[reader]
                path = bottom[reader]
                if destination != home:
                    path += (
                        wiring.latency[home, destination]
                        + wiring.value_bytes[value] * wiring.per_byte[home, destination]
                    )
                    # One cut behind the node serves all values that cross it. Cuts before readers are left out: the
                    # level stays a lower bound.
                    call_seconds = wiring.call_seconds[home]
                below = max(below, path)
        bottom[node] = below + call_seconds + wiring.seconds[home, node]
        longest = max(longest, bottom[node])
    return longest


# The simulation goes from event to event. The state is one record per device, and two heaps of nodes per device: those
# that may start now, by urgency, and those whose last input is still on its way, by its arrival. A node enters each
# heap at most once, and every event starts, wakes or ends one, so a simulation takes O(N (D + log N) + E). Devices are
# few: to look at all of them is cheaper than a heap of events.
@linear_in_place
def decode(wiring, device, bias, level_weight, limit, scratch):
    """Simulate a placement; return its makespan and the seconds of all transfers, and fill `scratch`.

    Each free device runs the ready node of largest urgency: `level_weight` times its bottom level, plus its bias. The
    result is infinity as soon as the makespan is certain to exceed `limit`.
    """
    count = len(wiring.order)
    devices = len(wiring.latency)
    # The longest path alone rules most proposals out, before anything is simulated.
    longest = bottom_levels(wiring, device, scratch.bottom)
    if longest > limit:
        return np.inf, 0.0
    for d in range(devices):
        record = scratch.devices[d]
        record.free, record.sending, record.receiving = 0.0, 0.0, 0.0
        record.ends, record.wake = np.inf, np.inf
        record.running, record.last, record.stamp = -1, -1, -1
        record.ready, record.future = 0, 0
        record.asks, record.taken = 0, 0.0
    open_channels(scratch.gaps, devices)
    # Count the inputs that each node waits for, and set its urgency.
    traffic = 0.0
    makespan = 0.0
    for node in range(count):
        scratch.key[node] = -(level_weight * scratch.bottom[node] + bias[node])
        scratch.waiting[node] = 0
        scratch.available[node] = 0.0
        scratch.last_input[node] = -1
        for k in range(wiring.in_starts[node], wiring.in_starts[node + 1]):
            if wiring.producer[wiring.ins[k]] >= 0:
                scratch.waiting[node] += 1
    # Nodes without inputs are ready from the start.
    for position in range(count):
        node = wiring.order[position]
        if scratch.waiting[node] == 0:
            record = scratch.devices[device[node]]
            heap_push(scratch.ready_heap[device[node]], record.ready, node, scratch.key)
            record.ready += 1
    now = 0.0
    started = 0
    while True:
        # Start a node on each idle device, if one is ready.
        for d in range(devices):
            record = scratch.devices[d]
            if record.running >= 0:
                continue
            # Nodes whose last input has arrived by now become ready.
            while record.future > 0 and scratch.available[scratch.future_heap[d, 0]] <= now:
                node = heap_pop(scratch.future_heap[d], record.future, scratch.available)
                record.future -= 1
                heap_push(scratch.ready_heap[d], record.ready, node, scratch.key)
                record.ready += 1
            if record.ready > 0:
                node = heap_pop(scratch.ready_heap[d], record.ready, scratch.key)
                record.ready -= 1
                record.running = node
                record.wake = np.inf
                scratch.sequence[node] = started
                started += 1
                if record.shares > 0:
                    # It asks for its processors at this time, behind nodes that finish then.
                    record.ends, record.asks = now, 1
                # A path from here that ends too late ends the simulation.
                elif _start_node(wiring, device, d, scratch) + scratch.bottom[node] > limit:
                    return np.inf, 0.0
            elif record.future > 0:
                record.wake = scratch.available[scratch.future_heap[d, 0]]
        # Advance to the next event: a node finishes, or an input arrives at an idle device.
        now = np.inf
        for d in range(devices):
            record = scratch.devices[d]
            now = min(now, min(record.ends, record.wake))
        if now == np.inf:
            break
        # Idle devices first start the nodes whose input arrives now: those that take no time may be next to finish.
        woken = False
        for d in range(devices):
            record = scratch.devices[d]
            if record.wake <= now:
                record.wake = np.inf
                woken = True
        if woken:
            continue
        # Finish the node of lowest index that ends now, and send its values. Others follow after its device went on.
        # Once none ends now, the node of lowest index that asks gets its processors.
        home = np.int64(-1)  # not a literal, for which numba would compile the callees once more
        for d in range(devices):
            record = scratch.devices[d]
            if record.ends == now and (
                home < 0 or (record.asks, record.running) < (scratch.devices[home].asks, scratch.devices[home].running)
            ):
                home = d
        sender = scratch.devices[home]
        node = sender.running
        if sender.asks > 0:
            if _start_node(wiring, device, home, scratch) + scratch.bottom[node] > limit:
                return np.inf, 0.0
            continue
        sender.running = -1
        sender.ends = np.inf
        sender.free = now
        makespan = now
        for k in range(wiring.out_starts[node], wiring.out_starts[node + 1]):
            value = wiring.outs[k]
            # A value is sent once to each device, however many nodes read it there; to the next device first.
            for j in range(wiring.read_starts[value], wiring.read_starts[value + 1]):
                scratch.devices[device[wiring.readers[j]]].stamp = value
            sender.arrival = now
            for step in range(1, devices):
                destination = (home + step) % devices
                if scratch.devices[destination].stamp == value:
                    transfer_seconds = (
                        wiring.latency[home, destination]
                        + wiring.value_bytes[value] * wiring.per_byte[home, destination]
                    )
                    traffic += transfer_seconds
                    begin = book_transfer(
                        scratch.devices, scratch.gaps, wiring.link_model, home, destination, now, transfer_seconds
                    )
                    scratch.devices[destination].arrival = begin + transfer_seconds
            for j in range(wiring.read_starts[value], wiring.read_starts[value + 1]):
                reader = wiring.readers[j]
                destination = device[reader]
                receiver = scratch.devices[destination]
                arrival = receiver.arrival
                # Remember the input that arrives last: the reader waits for it.
                if arrival >= scratch.available[reader]:
                    scratch.available[reader] = arrival
                    scratch.last_input[reader] = node
                scratch.waiting[reader] -= 1
                # The last input makes the reader ready, now or when it arrives.
                if scratch.waiting[reader] == 0:
                    if scratch.available[reader] <= now:
                        heap_push(scratch.ready_heap[destination], receiver.ready, reader, scratch.key)
                        receiver.ready += 1
                    else:
                        heap_push(scratch.future_heap[destination], receiver.future, reader, scratch.available)
                        receiver.future += 1
                        if receiver.running < 0:
                            receiver.wake = min(receiver.wake, scratch.available[reader])
    return makespan, traffic


@compiled_part
def _start_node(wiring, device, d, scratch):
    """Start the running node of a device once its processors are free, and return when that is."""
    record = scratch.devices[d]
    node = record.running
    begin = max(max(record.free, scratch.available[node]), record.taken)
    duration = wiring.seconds[d, node]
    if wiring.call_seconds[d] > 0.0:
        duration += _call_seconds(wiring, device, node, d)
    scratch.start[node] = begin
    scratch.finish[node] = begin + duration
    # Note what delayed the start: the search moves nodes along this chain.
    if begin > max(record.free, scratch.available[node]):
        scratch.blame[node] = record.holder
        scratch.blame_kind[node] = AHEAD
    elif record.free > scratch.available[node] or (
        record.free == scratch.available[node] and scratch.last_input[node] < 0
    ):
        scratch.blame[node] = record.last
        scratch.blame_kind[node] = AHEAD if record.last >= 0 else NOTHING
    else:
        scratch.blame[node] = scratch.last_input[node]
        scratch.blame_kind[node] = NOTHING
        if scratch.blame[node] >= 0:
            scratch.blame_kind[node] = FROM_HERE if device[scratch.blame[node]] == d else FROM_THERE
    record.ends = scratch.finish[node]
    record.last = node
    if record.shares > 0:
        record.asks = 0
        for other in range(len(wiring.latency)):
            if wiring.conflicts[d, other] and scratch.devices[other].taken < record.ends:
                scratch.devices[other].taken, scratch.devices[other].holder = record.ends, node
    return begin


@compiled_part
def _call_seconds(wiring, device, node, d):
    """Return the seconds for cuts next to a node: one before it if it receives, one after it if it sends."""
    calls = 0.0
    for k in range(wiring.in_starts[node], wiring.in_starts[node + 1]):
        producer = wiring.producer[wiring.ins[k]]
        if producer >= 0 and device[producer] != d:
            calls = wiring.call_seconds[d]
            break
    for k in range(wiring.out_starts[node], wiring.out_starts[node + 1]):
        value = wiring.outs[k]
        for j in range(wiring.read_starts[value], wiring.read_starts[value + 1]):
            if device[wiring.readers[j]] != d:
                return calls + wiring.call_seconds[d]
    return calls
