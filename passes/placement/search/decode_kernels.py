"""Simulate a placement, letting each device run first what most of the remaining step waits for.

The same model of time as the simulator (DESIGN section 4), as one call on arrays that are allocated once: the
search calls it thousands of times a second.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph import Floats, Ints, Longs, OpGraph
from onnxplace.target import LINK_MODELS, Target
from onnxplace.utils import compiled_part, in_place

# Why a node could not start before it did: nothing, a node before it on its device, an input made here, or elsewhere.
NOTHING, AHEAD, FROM_HERE, FROM_THERE = range(4)


class Wiring(NamedTuple):
    """What the kernels need to know about a graph, its costs and its links."""

    order: Ints
    """Topological."""
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
    """Per device: what a cut before or after a node costs."""
    link_model: int


# What a simulation knows about a device. The search simulates thousands of times a second: these are made once for all.
DEVICE = np.dtype(
    [
        ("free", np.float64),
        ("ends", np.float64),  # when what it runs is done; infinity if it runs nothing
        ("wake", np.float64),  # when the next node could start; infinity while one runs
        ("sending", np.float64),
        ("receiving", np.float64),
        ("arrival", np.float64),  # when it has the value `stamp`
        ("running", np.int64),  # node, or -1
        ("last", np.int64),
        ("ready", np.int64),  # nodes in its heaps
        ("future", np.int64),
        ("stamp", np.int64),  # the value that was last sent to it, or -1
    ],
    align=True,
)


class Scratch(NamedTuple):
    """Arrays that one simulation writes; of node length unless said otherwise."""

    bottom: Floats
    """Length of the longest path from the start of a node to the end, cut edges with their transfers."""
    key: Floats
    """Urgency."""
    start: Floats
    finish: Floats
    available: Floats
    waiting: Ints
    blame: Ints
    """The node whose end decided when this one could start: made its last input, or ran before it; else -1."""
    blame_kind: Ints
    """`NOTHING`, `AHEAD`, `FROM_HERE` or `FROM_THERE`."""
    last_input: Ints
    ready_heap: Ints
    """[device, node]."""
    future_heap: Ints
    """[device, node]."""
    devices: NDArray[Any]
    """Records of `DEVICE`."""


def wiring(graph: OpGraph, seconds: Floats, target: Target) -> Wiring:
    """Return the arrays of a graph on a target."""
    latency, per_byte = target.link_arrays()
    inputs, outputs, readers = graph.inputs, graph.outputs, graph.readers
    return Wiring(
        graph.order, graph.producer, graph.value_bytes, inputs.starts, inputs.items, outputs.starts, outputs.items,
        readers.starts, readers.items, np.ascontiguousarray(seconds), latency, per_byte,
        np.array([device.segment_seconds for device in target.devices]), LINK_MODELS.index(target.link_model),
    )  # fmt: skip


def scratch(nodes: int, devices: int) -> Scratch:
    """Return arrays for simulations of a graph of so many nodes."""

    def floats() -> Floats:
        return np.zeros(nodes)

    def ints() -> Ints:
        return np.zeros(nodes, dtype=np.int32)

    return Scratch(floats(), floats(), floats(), floats(), floats(), ints(), ints(), ints(), ints(),
                   np.zeros((devices, nodes), dtype=np.int32), np.zeros((devices, nodes), dtype=np.int32),
                   np.zeros(devices, DEVICE))  # fmt: skip


def run_order(graph: OpGraph, s: Scratch) -> Ints:
    """Return the nodes in the order in which a simulation ran them.

    Of those that start together on one device, those that take no time went first.
    """
    return np.lexsort((graph.positions, s.finish, s.start)).astype(np.int32)


@compiled_part
def bottom_levels(w, device, bottom):
    """Fill `bottom` for a placement; returns the largest, which no schedule of that placement can beat."""
    longest = 0.0
    for position in range(len(w.order) - 1, -1, -1):
        node = w.order[position]
        home = device[node]
        below = 0.0
        calls = 0.0
        for k in range(w.out_starts[node], w.out_starts[node + 1]):
            value = w.outs[k]
            for j in range(w.read_starts[value], w.read_starts[value + 1]):
                reader = w.readers[j]
                there = device[reader]
                path = bottom[reader]
                if there != home:
                    path += w.latency[home, there] + w.value_bytes[value] * w.per_byte[home, there]
                    calls = w.call_seconds[home]
                below = max(below, path)
        bottom[node] = below + calls + w.seconds[home, node]
        longest = max(longest, bottom[node])
    return longest


@compiled_part
def _push(heap, size, node, key):
    """Add a node to a heap whose top has the largest key; ties go to the lower index."""
    child = size
    while child > 0:
        parent = (child - 1) // 2
        other = heap[parent]
        if key[other] > key[node] or (key[other] == key[node] and other < node):
            break
        heap[child] = other
        child = parent
    heap[child] = node


@compiled_part
def _pop(heap, size, key):
    """Remove the top of a heap of `size` nodes; the heap is one shorter afterwards."""
    top = heap[0]
    node = heap[size - 1]
    size -= 1
    parent = 0
    while True:
        child = 2 * parent + 1
        if child >= size:
            break
        if child + 1 < size:
            left, right = heap[child], heap[child + 1]
            if key[right] > key[left] or (key[right] == key[left] and right < left):
                child += 1
        other = heap[child]
        if key[node] > key[other] or (key[node] == key[other] and node < other):
            break
        heap[parent] = other
        parent = child
    heap[parent] = node
    return top


@compiled_part
def _push_soonest(heap, size, node, when):
    child = size
    while child > 0:
        parent = (child - 1) // 2
        other = heap[parent]
        if when[other] < when[node] or (when[other] == when[node] and other < node):
            break
        heap[child] = other
        child = parent
    heap[child] = node


@compiled_part
def _pop_soonest(heap, size, when):
    top = heap[0]
    node = heap[size - 1]
    size -= 1
    parent = 0
    while True:
        child = 2 * parent + 1
        if child >= size:
            break
        if child + 1 < size:
            left, right = heap[child], heap[child + 1]
            if when[right] < when[left] or (when[right] == when[left] and right < left):
                child += 1
        other = heap[child]
        if when[node] < when[other] or (when[node] == when[other] and node < other):
            break
        heap[parent] = other
        parent = child
    heap[parent] = node
    return top


@in_place
def decode(w, device, bias, lean, limit, s):
    """Run a placement; returns its makespan, and the time that transfers take in total.

    Each free device runs the ready node of largest urgency: `lean` times its bottom level, plus its bias. Gives up,
    returning infinity, as soon as the makespan is certain to exceed `limit`. Fills `s`.
    """
    count = len(w.order)
    devices = len(w.latency)
    longest = bottom_levels(w, device, s.bottom)
    if longest > limit:
        return np.inf, 0.0
    for d in range(devices):
        it = s.devices[d]
        it.free, it.sending, it.receiving = 0.0, 0.0, 0.0
        it.ends, it.wake = np.inf, np.inf
        it.running, it.last, it.stamp = -1, -1, -1
        it.ready, it.future = 0, 0
    traffic = 0.0
    makespan = 0.0
    for node in range(count):
        s.key[node] = lean * s.bottom[node] + bias[node]
        s.waiting[node] = 0
        s.available[node] = 0.0
        s.last_input[node] = -1
        for k in range(w.in_starts[node], w.in_starts[node + 1]):
            if w.producer[w.ins[k]] >= 0:
                s.waiting[node] += 1
    for position in range(count):
        node = w.order[position]
        if s.waiting[node] == 0:
            d = device[node]
            _push(s.ready_heap[d], s.devices[d].ready, node, s.key)
            s.devices[d].ready += 1
    now = 0.0
    while True:
        for d in range(devices):
            if s.devices[d].running >= 0:
                continue
            while s.devices[d].future > 0 and s.available[s.future_heap[d, 0]] <= now:
                node = _pop_soonest(s.future_heap[d], s.devices[d].future, s.available)
                s.devices[d].future -= 1
                _push(s.ready_heap[d], s.devices[d].ready, node, s.key)
                s.devices[d].ready += 1
            if s.devices[d].ready > 0:
                node = _pop(s.ready_heap[d], s.devices[d].ready, s.key)
                s.devices[d].ready -= 1
                began = max(s.devices[d].free, s.available[node])
                if began + s.bottom[node] > limit:
                    return np.inf, 0.0
                took = w.seconds[d, node]
                if w.call_seconds[d] > 0.0:
                    took += _calls(w, device, node, d)
                s.start[node] = began
                s.finish[node] = began + took
                if s.devices[d].free > s.available[node] or (
                    s.devices[d].free == s.available[node] and s.last_input[node] < 0
                ):
                    s.blame[node] = s.devices[d].last
                    s.blame_kind[node] = AHEAD if s.devices[d].last >= 0 else NOTHING
                else:
                    s.blame[node] = s.last_input[node]
                    s.blame_kind[node] = NOTHING
                    if s.blame[node] >= 0:
                        s.blame_kind[node] = FROM_HERE if device[s.blame[node]] == d else FROM_THERE
                s.devices[d].running = node
                s.devices[d].ends = s.finish[node]
                s.devices[d].wake = np.inf
                s.devices[d].last = node
            elif s.devices[d].future > 0:
                s.devices[d].wake = s.available[s.future_heap[d, 0]]
        now = np.inf
        for d in range(devices):
            now = min(now, min(s.devices[d].ends, s.devices[d].wake))
        if now == np.inf:
            break
        while True:
            home = -1
            for d in range(devices):
                if s.devices[d].ends == now and (home < 0 or s.devices[d].running < s.devices[home].running):
                    home = d
            if home < 0:
                break
            node = s.devices[home].running
            s.devices[home].running = -1
            s.devices[home].ends = np.inf
            s.devices[home].free = now
            makespan = now
            for k in range(w.out_starts[node], w.out_starts[node + 1]):
                value = w.outs[k]
                for j in range(w.read_starts[value], w.read_starts[value + 1]):
                    reader = w.readers[j]
                    there = device[reader]
                    when = now
                    if there != home:
                        if s.devices[there].stamp != value:
                            s.devices[there].stamp = value
                            begin = now
                            if w.link_model == 0:
                                begin = max(now, max(s.devices[home].sending, s.devices[there].receiving))
                            elif w.link_model == 2:
                                begin = max(
                                    now,
                                    max(
                                        max(s.devices[home].sending, s.devices[home].receiving),
                                        max(s.devices[there].sending, s.devices[there].receiving),
                                    ),
                                )
                            lasts = w.latency[home, there] + w.value_bytes[value] * w.per_byte[home, there]
                            traffic += lasts
                            s.devices[home].sending = begin + lasts
                            s.devices[there].receiving = begin + lasts
                            s.devices[there].arrival = begin + lasts
                        when = s.devices[there].arrival
                    if when >= s.available[reader]:
                        s.available[reader] = when
                        s.last_input[reader] = node
                    s.waiting[reader] -= 1
                    if s.waiting[reader] == 0:
                        if s.available[reader] <= now:
                            _push(s.ready_heap[there], s.devices[there].ready, reader, s.key)
                            s.devices[there].ready += 1
                        else:
                            _push_soonest(s.future_heap[there], s.devices[there].future, reader, s.available)
                            s.devices[there].future += 1
                            if s.devices[there].running < 0:
                                s.devices[there].wake = min(s.devices[there].wake, s.available[reader])
        for d in range(devices):
            if s.devices[d].wake <= now:
                s.devices[d].wake = np.inf
    return makespan, traffic


@compiled_part
def _calls(w, device, node, d):
    """Seconds for the cuts that a node makes: one before it if it reads what was sent, one after if it sends."""
    calls = 0.0
    for k in range(w.in_starts[node], w.in_starts[node + 1]):
        maker = w.producer[w.ins[k]]
        if maker >= 0 and device[maker] != d:
            calls = w.call_seconds[d]
            break
    for k in range(w.out_starts[node], w.out_starts[node + 1]):
        value = w.outs[k]
        for j in range(w.read_starts[value], w.read_starts[value + 1]):
            if device[w.readers[j]] != d:
                return calls + w.call_seconds[d]
    return calls
