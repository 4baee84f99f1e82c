"""Compiled loops that simulate many placements of one graph with the loops of the simulator.

One call simulates a whole batch: nothing is allocated for a placement, and the interpreter's lock is free meanwhile.
Times and peaks come from the same loops as those of a single simulation, so both agree.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph.op_graph import Bools, Floats, Ints, Longs
from onnxplace.simulation.step_kernels import (
    BufferUses,
    EventState,
    LiveSpans,
    PlacedGraph,
    compute_live_spans,
    device_peaks,
    run_events,
)
from onnxplace.utils.jit import compiled_part, in_place


class BatchGraph(NamedTuple):
    """A graph, its costs and its links, as the loops below read them."""

    seconds: Floats
    """[device, node]."""
    producer: Ints
    value_bytes: Longs
    out_starts: Longs
    outs: Ints
    read_starts: Longs
    readers: Ints
    alias: Ints
    is_output: Bools
    weight_bytes: Longs
    weight_starts: Longs
    weights: Ints
    workspace_bytes: Longs
    latency: Floats
    per_byte: Floats
    conflicts: Bools
    """[device, device]: whether they have a processor in common."""
    link_model: int
    waiting: Longs
    """Per node: the inputs that other nodes produce."""


class BatchScratch(NamedTuple):
    """Arrays that one simulation writes, allocated once."""

    queue: Ints
    queue_starts: Longs
    own_seconds: Floats
    """Of each node on its device."""
    waiting: Longs
    available: Floats
    devices: NDArray[Any]
    gaps: NDArray[Any]
    blocks: NDArray[Any]
    """Empty: no weights stream."""
    sent_nodes: Ints
    """[3, transfer]."""
    sent_times: Floats


class MemoryScratch(NamedTuple):
    """Further arrays, for memory peaks. A buffer is a value, or a copy of one on another device."""

    rank: Longs
    copy_starts: Longs
    copy_value: Ints
    copy_device: Ints
    copy_begin: Floats
    copy_end: Floats
    birth: Floats
    death: Floats
    birth_rank: Longs
    death_rank: Longs
    root: Longs
    stored: Ints
    """[device, weight]: the placement for which it was counted last."""
    event_time: Floats
    event_rank: Longs
    event_device: Ints
    change: Longs
    events: Longs
    live: Longs


@compiled_part
def simulate_one(graph, device, order, scratch, start, finish):
    """Simulate one placement; return its number of transfers and its makespan, or -1 if the order deadlocks."""
    count, devices = len(device), len(scratch.devices)
    # Sort the nodes of each device by their position in the order.
    for d in range(devices + 1):
        scratch.queue_starts[d] = 0
    for node in range(count):
        scratch.queue_starts[device[node] + 1] += 1
    for d in range(devices):
        scratch.queue_starts[d + 1] += scratch.queue_starts[d]
        record = scratch.devices[d]
        # Counting sort by device: `head` is where the next node goes, until the queues are full.
        record.head, record.running, record.stamp, record.touched = scratch.queue_starts[d], -1, -1, 1
        record.asks = 0
        record.free, record.sending, record.receiving, record.arrival, record.taken = 0.0, 0.0, 0.0, 0.0, 0.0
    for position in range(count):
        node = order[position]
        d = device[node]
        scratch.queue[scratch.devices[d].head] = node
        scratch.devices[d].head += 1
    for d in range(devices):
        scratch.devices[d].head = scratch.queue_starts[d]
    for node in range(count):
        scratch.own_seconds[node] = graph.seconds[device[node], node]
        scratch.waiting[node] = graph.waiting[node]
        scratch.available[node] = 0.0
        start[node], finish[node] = -1.0, -1.0
    placed = PlacedGraph(
        scratch.queue_starts, scratch.queue, device, scratch.own_seconds, graph.value_bytes, graph.out_starts,
        graph.outs, graph.read_starts, graph.readers, graph.latency, graph.per_byte, graph.conflicts,
        graph.link_model,
    )  # fmt: skip
    state = EventState(
        scratch.waiting, scratch.available, scratch.devices, scratch.gaps, scratch.blocks, start, finish,
        scratch.sent_nodes, scratch.sent_times,
    )  # fmt: skip
    sent = run_events(placed, state)
    end = 0.0
    for node in range(count):
        if finish[node] < 0.0:
            return sent, -1.0
        end = max(end, finish[node])
    # A step ends with its last transfer, if that is later than the last node.
    for transfer in range(sent):
        end = max(end, scratch.sent_times[2, transfer])
    return sent, end


@compiled_part
def peak_bytes_of_one(graph, device, order, sent, end, number, scratch, memory, start, finish, peaks):
    """Fill the peaks of the devices for the placement that `simulate_one` ran last; `number` is unique to it."""
    count, values, devices = len(device), len(graph.producer), len(peaks)
    for position in range(count):
        memory.rank[order[position]] = position
    # Buffers: the value on its producer's device has its own index, copies on other devices come behind all values.
    copies = _collect_copies(graph, device, sent, scratch, memory)
    buffers = values + copies
    for buffer in range(buffers):
        memory.birth[buffer], memory.death[buffer] = np.inf, -1.0
        memory.birth_rank[buffer], memory.death_rank[buffer] = 0, -1
        memory.root[buffer] = buffer
    uses = BufferUses(
        graph.producer, graph.alias, graph.is_output, graph.read_starts, graph.readers, memory.copy_value,
        memory.copy_starts, memory.copy_device, memory.copy_begin, memory.copy_end,
    )  # fmt: skip
    spans = LiveSpans(memory.birth, memory.death, memory.birth_rank, memory.death_rank, memory.root)
    compute_live_spans(device, start, finish, memory.rank, uses, end, spans)
    # Buffers and workspaces are allocated and freed; views own nothing.
    events = 0
    for buffer in range(buffers):
        # Views share the buffer of their root; infinite birth: no buffer, as for inputs, which only have copies.
        if memory.root[buffer] != buffer or memory.birth[buffer] == np.inf:
            continue
        value = buffer if buffer < values else memory.copy_value[buffer - values]
        home = device[graph.producer[value]] if buffer < values else memory.copy_device[buffer - values]
        size = graph.value_bytes[value]
        events = _add_event(memory, events, memory.birth[buffer], memory.birth_rank[buffer], home, size)
        events = _add_event(memory, events, memory.death[buffer], memory.death_rank[buffer], home, -size)
    for node in range(count):
        size = graph.workspace_bytes[node]
        if size > 0:
            events = _add_event(memory, events, start[node], 2 * memory.rank[node], device[node], size)
            events = _add_event(memory, events, finish[node], 2 * memory.rank[node] + 1, device[node], -size)
    # At one instant, ranks put an allocation behind what is freed before it in the schedule.
    _sort_events(memory, events)
    for d in range(devices):
        memory.live[d], peaks[d] = 0, 0
    device_peaks(memory.events[:events], memory.event_device, memory.change, memory.live, peaks)
    # Each weight counts once on each device that reads it.
    for node in range(count):
        d = device[node]
        for k in range(graph.weight_starts[node], graph.weight_starts[node + 1]):
            weight = graph.weights[k]
            # The number of the placement marks what was counted, so that nothing has to be cleared.
            if memory.stored[d, weight] != number:
                memory.stored[d, weight] = number
                peaks[d] += graph.weight_bytes[weight]


@compiled_part
def _collect_copies(graph, device, sent, scratch, memory):
    """Collect copies by value: those that were sent, and inputs of the graph on each device that reads them."""
    values = len(graph.producer)
    for value in range(values + 1):
        memory.copy_starts[value] = 0
    for transfer in range(sent):
        memory.copy_starts[scratch.sent_nodes[0, transfer] + 1] += 1
    # An input has at most one copy per reader; places that stay empty are closed below.
    for value in range(values):
        if graph.producer[value] < 0:
            memory.copy_starts[value + 1] += graph.read_starts[value + 1] - graph.read_starts[value]
        memory.copy_starts[value + 1] += memory.copy_starts[value]
    total = memory.copy_starts[values]
    for copy in range(total):
        memory.copy_device[copy] = -1
    for transfer in range(sent):
        value = scratch.sent_nodes[0, transfer]
        copy = memory.copy_starts[value]
        while memory.copy_device[copy] >= 0:
            copy += 1
        memory.copy_value[copy], memory.copy_device[copy] = value, scratch.sent_nodes[2, transfer]
        memory.copy_begin[copy], memory.copy_end[copy] = (
            scratch.sent_times[1, transfer],
            scratch.sent_times[2, transfer],
        )
    for value in range(values):
        if graph.producer[value] >= 0:
            continue
        for j in range(graph.read_starts[value], graph.read_starts[value + 1]):
            destination = device[graph.readers[j]]
            copy = memory.copy_starts[value]
            while memory.copy_device[copy] >= 0 and memory.copy_device[copy] != destination:
                copy += 1
            memory.copy_value[copy], memory.copy_device[copy] = value, destination
            # An input is there from the start.
            memory.copy_begin[copy], memory.copy_end[copy] = 0.0, 0.0
    # Close the gaps behind inputs.
    kept, first = 0, 0
    for value in range(values):
        last = memory.copy_starts[value + 1]
        memory.copy_starts[value] = kept
        for copy in range(first, last):
            if memory.copy_device[copy] >= 0:
                memory.copy_value[kept], memory.copy_device[kept] = value, memory.copy_device[copy]
                memory.copy_begin[kept], memory.copy_end[kept] = memory.copy_begin[copy], memory.copy_end[copy]
                kept += 1
        first = last
    memory.copy_starts[values] = kept
    return kept


@compiled_part
def _add_event(memory, events, time, rank, device, change):
    memory.event_time[events], memory.event_rank[events] = time, rank
    memory.event_device[events], memory.change[events] = device, change
    memory.events[events] = events
    return events + 1


@compiled_part
def _is_later(memory, first, second):
    """Return whether an event comes after another, by time and then by rank."""
    time, other_time = memory.event_time[first], memory.event_time[second]
    return time > other_time or (time == other_time and memory.event_rank[first] > memory.event_rank[second])


@compiled_part
def _sort_events(memory, count):
    """Sort events by time and rank with a heap, in place; events that are equal in both may come in any order."""
    events = memory.events
    for root in range(count // 2 - 1, -1, -1):
        _sift_down(memory, root, count)
    for end in range(count - 1, 0, -1):
        events[0], events[end] = events[end], events[0]
        _sift_down(memory, 0, end)


@compiled_part
def _sift_down(memory, root, count):
    events = memory.events
    item = events[root]
    while 2 * root + 1 < count:
        child = 2 * root + 1
        if child + 1 < count and _is_later(memory, events[child + 1], events[child]):
            child += 1
        if not _is_later(memory, events[child], item):
            break
        events[root] = events[child]
        root = child
    events[root] = item


@in_place
def simulate_many(graph, devices, orders, scratch, start, finish, makespan):
    """Simulate placements [batch, node] one after the other; `orders` has one row, or one per placement."""
    for item in range(len(devices)):
        order = orders[item if len(orders) > 1 else 0]
        _, makespan[item] = simulate_one(graph, devices[item], order, scratch, start[item], finish[item])


@in_place
def simulate_many_with_peaks(graph, devices, orders, scratch, memory, start, finish, makespan, peaks):
    """Simulate placements as `simulate_many`, and fill the peaks of the devices [batch, device]."""
    for item in range(len(devices)):
        order = orders[item if len(orders) > 1 else 0]
        sent, makespan[item] = simulate_one(graph, devices[item], order, scratch, start[item], finish[item])
        if makespan[item] >= 0.0:
            peak_bytes_of_one(
                graph, devices[item], order, sent, makespan[item], item, scratch, memory, start[item], finish[item],
                peaks[item],
            )  # fmt: skip
