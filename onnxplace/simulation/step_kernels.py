"""Compiled loops of the simulator: times of nodes and transfers, live spans of buffers, memory peaks."""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph.op_graph import Bools, Floats, Ints, Longs
from onnxplace.simulation.channel_kernels import book_transfer, open_channels
from onnxplace.utils.jit import linear_in_place

# The state of a device in `run_events`.
DEVICE = np.dtype(
    [
        ("head", np.int64),  # its position in its queue
        ("running", np.int64),  # node, or -1
        ("stamp", np.int64),  # the value last sent to it or read there, or -1
        ("touched", np.int64),  # 1 if it may be able to start a node
        ("free", np.float64),  # seconds
        ("sending", np.float64),
        ("receiving", np.float64),
        ("arrival", np.float64),  # when the value `stamp` arrives
        ("loaded", np.float64),  # when the last block of weights has arrived
        ("shares", np.int64),  # 1 if a processor of it is also that of another device
        ("asks", np.int64),  # 1 if its running node does not have its processors yet
        ("taken", np.float64),  # when the nodes have finished that asked for its processors
    ],
    align=True,
)


class PlacedGraph(NamedTuple):
    """A graph on its devices, as `run_events` reads it."""

    queue_starts: Longs
    """Where the nodes of each device begin in `queue`."""
    queue: Ints
    """The nodes of each device, in the sequence in which it runs them."""
    device: Ints
    """Per node."""
    seconds: Floats
    """Per node, on its device."""
    value_bytes: Longs
    out_starts: Longs
    outs: Ints
    read_starts: Longs
    readers: Ints
    latency: Floats
    """[source, destination], seconds."""
    per_byte: Floats
    conflicts: Bools
    """[device, device]: whether they have a processor in common."""
    link_model: int
    """0: each device has one outgoing and one incoming channel; 1: no contention; 2: one channel for both directions.
    """


class EventState(NamedTuple):
    """What `run_events` changes."""

    waiting: Longs
    """Per node, the number of inputs that other nodes have yet to produce."""
    available: Floats
    """Per node, its earliest start."""
    devices: NDArray[Any]
    """Records of `DEVICE`."""
    gaps: NDArray[Any]
    """Space for records of `GAP` (`book_transfer`)."""
    blocks: NDArray[Any]
    """A record of `BLOCK` per node, or nothing where no weights stream; their arrivals are filled in."""
    start: Floats
    """Per node; -1 before, and after where the order deadlocks."""
    finish: Floats
    sent_nodes: Ints
    """Per transfer: its value, source and destination."""
    sent_times: Floats
    """Per transfer: when it is ready, starts and finishes."""


class BufferUses(NamedTuple):
    """The values of a graph as `compute_live_spans` reads them, and the copies on devices that did not produce them."""

    producer: Ints
    alias: Ints
    is_output: Bools
    read_starts: Longs
    readers: Ints
    copy_value: Ints
    """Per copy, which is received or an input of the model; sorted."""
    copy_starts: Longs
    """Where the copies of each value begin."""
    copy_device: Ints
    copy_begin: Floats
    copy_end: Floats


class LiveSpans(NamedTuple):
    """The life of each buffer: `v` is value `v` on its producer's device, `V + c` is copy `c`."""

    birth: Floats
    """Seconds; infinity before."""
    death: Floats
    """Seconds; -1 before."""
    birth_rank: Longs
    """A position in the schedule that orders events at one instant; 0 before."""
    death_rank: Longs
    """-1 before."""
    root: Longs
    """The buffer whose memory it shares, itself before."""


@linear_in_place
def run_events(placed, state):
    """Run a placement in simulated time, event by event (docs/architecture.md); return the number of transfers.

    Each device computes its nodes in the sequence of its `queue`, one at a time. When a node finishes, its values are
    sent to every other device that reads them, once each, first to the next one. Transfers are booked when they become
    ready, in that order, so none delays one that was ready before it. A device reads blocks of weights one after the
    other, in the sequence of its nodes, each as soon as its keeper has run; no node starts before its block is there.
    Nodes of devices that share processors take them in the order in which they are ready to start.
    """
    queue_starts, queue, device = placed.queue_starts, placed.queue, placed.device
    out_starts, outs, read_starts, readers = placed.out_starts, placed.outs, placed.read_starts, placed.readers
    waiting, available, devices, gaps, blocks, start, finish, sent_nodes, sent_times = state
    device_count, sent = len(devices), 0
    open_channels(gaps, device_count)
    while True:
        # Start the next node of each idle device, if its inputs are produced.
        for d in range(device_count):
            if devices[d].touched > 0 and devices[d].running < 0 and devices[d].head < queue_starts[d + 1]:
                first = queue[devices[d].head]
                if waiting[first] == 0:
                    devices[d].head += 1
                    devices[d].running = first
                    start[first] = max(devices[d].free, available[first])
                    if len(blocks) > 0 and blocks[first].load > 0:
                        freed = blocks[first].freed
                        if blocks[first].keeper >= 0:  # it ran before: it is earlier in the same queue
                            freed = finish[blocks[first].keeper]
                        devices[d].loaded = max(devices[d].loaded, freed) + blocks[first].load
                        blocks[first].arrival = devices[d].loaded
                        start[first] = max(start[first], devices[d].loaded)
                    # Where processors are shared, it asks for them at that time, as an event of its own.
                    devices[d].asks = devices[d].shares
                    finish[first] = start[first] + (0.0 if devices[d].shares > 0 else placed.seconds[first])
            devices[d].touched = 0
        # Find the next event: a node finishes, else one asks for its processors; of several, the one of least index.
        node, home = -1, np.int64(-1)  # not a literal, for which numba would compile `book_transfer` once more
        for d in range(device_count):
            candidate = devices[d].running
            if candidate >= 0 and (
                node < 0
                or finish[candidate] < finish[node]
                or (
                    finish[candidate] == finish[node]
                    and (devices[d].asks, candidate) < (devices[home].asks, devices[home].running)
                )
            ):
                node, home = candidate, d
        if node < 0:
            break
        now = finish[node]
        if devices[home].asks > 0:
            devices[home].asks = 0
            start[node] = max(now, devices[home].taken)
            finish[node] = start[node] + placed.seconds[node]
            for d in range(device_count):
                if placed.conflicts[home, d]:
                    devices[d].taken = max(devices[d].taken, finish[node])
            continue
        devices[home].running = -1
        devices[home].free = now
        # Only devices that are touched are looked at again: this one, and those that receive something.
        devices[home].touched = 1
        # Send each output once to each device that reads it.
        for k in range(out_starts[node], out_starts[node + 1]):
            value = outs[k]
            for j in range(read_starts[value], read_starts[value + 1]):
                devices[device[readers[j]]].stamp = value
            devices[home].arrival = now
            # The next device comes first: where devices send to each other at one time, each begins with another one.
            for step in range(1, device_count):
                destination = (home + step) % device_count
                if devices[destination].stamp == value:
                    rate = placed.per_byte[home, destination]
                    duration = placed.latency[home, destination] + placed.value_bytes[value] * rate
                    begin = book_transfer(devices, gaps, placed.link_model, home, destination, now, duration)
                    devices[destination].arrival = begin + duration
                    sent_nodes[0, sent], sent_nodes[1, sent], sent_nodes[2, sent] = value, home, destination
                    sent_times[0, sent], sent_times[1, sent], sent_times[2, sent] = now, begin, begin + duration
                    sent += 1
            for j in range(read_starts[value], read_starts[value + 1]):
                reader = readers[j]
                destination = device[reader]
                available[reader] = max(available[reader], devices[destination].arrival)
                waiting[reader] -= 1
                devices[destination].touched = 1
    return sent


@linear_in_place
def compute_live_spans(device, start, finish, rank, uses, end_of_step, spans):
    """Compute birth and death of each buffer; `rank` is the position of each node in the schedule.

    A view shares the buffer of its source, where both are on one device.
    """
    producer, alias, is_output, read_starts, readers, _, copy_starts, copy_device, copy_begin, copy_end = uses
    birth, death, birth_rank, death_rank, root = spans
    values = len(producer)
    for value in range(values):
        producer_node = producer[value]
        home = device[producer_node] if producer_node >= 0 else -1
        if producer_node >= 0:
            birth[value] = start[producer_node]
            birth_rank[value] = 2 * rank[producer_node]
            death[value] = finish[producer_node]
            death_rank[value] = 2 * rank[producer_node] + 1
            if is_output[value]:
                death[value] = end_of_step
                death_rank[value] = 2 * len(rank) + 1  # after all other events at the end
        for c in range(copy_starts[value], copy_starts[value + 1]):
            birth[values + c] = copy_begin[c]
            # An input of the model is there before all events; a copy counts once it starts to arrive.
            birth_rank[values + c] = -2 if producer_node < 0 else 2 * len(rank)
            death[values + c] = copy_end[c]
            if producer_node >= 0 and copy_end[c] > death[value]:
                death[value] = copy_end[c]
                death_rank[value] = -1
        for j in range(read_starts[value], read_starts[value + 1]):
            reader = readers[j]
            buffer = value
            if device[reader] != home:
                for c in range(copy_starts[value], copy_starts[value + 1]):
                    if copy_device[c] == device[reader]:
                        buffer = values + c
            if finish[reader] > death[buffer] or (
                finish[reader] == death[buffer] and 2 * rank[reader] + 1 > death_rank[buffer]
            ):
                death[buffer] = finish[reader]
                death_rank[buffer] = 2 * rank[reader] + 1
    # A buffer lives as long as its views, the last of which have the highest indices.
    for value in range(values - 1, -1, -1):
        if alias[value] >= 0 and producer[value] >= 0:
            home = device[producer[value]]
            source = alias[value]
            buffer = source
            if producer[source] < 0 or device[producer[source]] != home:
                for c in range(copy_starts[source], copy_starts[source + 1]):
                    if copy_device[c] == home:
                        buffer = values + c
            root[value] = buffer
            if death[value] > death[buffer] or (
                death[value] == death[buffer] and death_rank[value] > death_rank[buffer]
            ):
                death[buffer] = death[value]
                death_rank[buffer] = death_rank[value]


@linear_in_place
def device_peaks(events, event_device, change, live, peak):
    """Find the most bytes alive at one time on each device, taking the changes in the order of `events`."""
    for k in range(len(events)):
        d = event_device[events[k]]
        live[d] += change[events[k]]
        peak[d] = max(peak[d], live[d])
