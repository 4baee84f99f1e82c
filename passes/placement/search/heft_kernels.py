"""List scheduling by bottom level: what the rest of the step waits for goes first, where it ends soonest.

HEFT (Topcuoglu, Hariri and Wu, 2002) without insertion, on links that serve one transfer at a time.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.graph import Csr, Floats, Ints
from onnxplace.passes.placement.search.decode_kernels import Wiring
from onnxplace.problem import PlacementProblem
from onnxplace.utils import compiled_loop, compiled_part


def critical_path_plan(asked: PlacementProblem, w: Wiring, weight: float) -> tuple[Ints, Floats]:
    """Return device and planned start of each node; device -1 for those left when weights fill every device.

    `weight` is what part of a transfer counts in bottom levels: 0 as if all were local, 1 as if all were remote.
    """
    graph = asked.graph
    level = mean_levels(w, asked.seconds.mean(axis=0), weight)
    order = np.lexsort((graph.positions, -level)).astype(np.int32)
    weights = Csr.grouped(asked.group[graph.weights.rows].astype(np.int32), graph.weights.items, len(asked.pinned))
    device, start = earliest_finish(
        w, order, asked.group.astype(np.int32), asked.pinned.astype(np.int32), asked.limit_bytes, weights.starts,
        weights.items, graph.weight_bytes,
    )  # fmt: skip
    return device, start


@compiled_loop
def mean_levels(w, seconds, weight):
    """Bottom level of each node, its edges counting with `weight` times a transfer over the mean link."""
    devices = len(w.latency)
    latency, per_byte = 0.0, 0.0
    for source in range(devices):
        for there in range(devices):
            if source != there:
                latency += w.latency[source, there] / (devices * (devices - 1))
                per_byte += w.per_byte[source, there] / (devices * (devices - 1))
    level = np.zeros(len(seconds))
    for position in range(len(w.order) - 1, -1, -1):
        node = w.order[position]
        below = 0.0
        for k in range(w.out_starts[node], w.out_starts[node + 1]):
            value = w.outs[k]
            transfer = weight * (latency + w.value_bytes[value] * per_byte)
            for j in range(w.read_starts[value], w.read_starts[value + 1]):
                below = max(below, level[w.readers[j]] + transfer)
        level[node] = below + seconds[node]
    return level


@compiled_loop
def earliest_finish(w, order, group, pinned, limit, weight_starts, weights, weight_bytes):
    """Put each node, in `order`, where it finishes first; the first node of a group decides for all of it."""
    devices = len(w.latency)
    home = pinned.copy()
    held = np.zeros((devices, len(weight_bytes)), np.bool_)
    room = limit.copy()
    for g in range(len(home)):
        if home[g] >= 0:
            _hold(home[g], g, held, room, weight_starts, weights, weight_bytes)
    free = np.zeros(devices)
    sending = np.zeros(devices)
    receiving = np.zeros(devices)
    arrival = np.full((len(w.producer), devices), -1.0)
    device = np.full(len(order), -1, np.int32)
    start = np.zeros(len(order))
    finish = np.zeros(len(order))
    for position in range(len(order)):
        node = order[position]
        g = group[node]
        best, best_start, best_finish = -1, 0.0, np.inf
        for d in range(devices):
            if home[g] >= 0 and home[g] != d:
                continue
            if home[g] < 0:
                need = 0
                for k in range(weight_starts[g], weight_starts[g + 1]):
                    if not held[d, weights[k]]:
                        need += weight_bytes[weights[k]]
                if need > room[d]:
                    continue
            ready = _arrive(w, node, d, device, finish, arrival, sending, receiving, False)
            began = max(ready, free[d])
            if began + w.seconds[d, node] < best_finish:
                best, best_start, best_finish = d, began, began + w.seconds[d, node]
        if best < 0:
            break
        if home[g] < 0:
            home[g] = best
            _hold(best, g, held, room, weight_starts, weights, weight_bytes)
        _arrive(w, node, best, device, finish, arrival, sending, receiving, True)
        device[node] = best
        start[node] = best_start
        finish[node] = best_finish
        free[best] = best_finish
    return device, start


@compiled_part
def _hold(d, g, held, room, weight_starts, weights, weight_bytes):
    for k in range(weight_starts[g], weight_starts[g + 1]):
        if not held[d, weights[k]]:
            held[d, weights[k]] = True
            room[d] -= weight_bytes[weights[k]]


@compiled_part
def _arrive(w, node, d, device, finish, arrival, sending, receiving, book):
    """When all inputs of `node` can be on device `d`; with `book`, the transfers for that are made."""
    latest = 0.0
    channel = receiving[d]
    for k in range(w.in_starts[node], w.in_starts[node + 1]):
        value = w.ins[k]
        maker = w.producer[value]
        if maker < 0:
            continue
        source = device[maker]
        if source == d:
            latest = max(latest, finish[maker])
        elif arrival[value, d] >= 0.0:
            latest = max(latest, arrival[value, d])
        else:
            begin = finish[maker]
            if w.link_model != 1:
                begin = max(begin, max(sending[source], channel))
            channel = begin + w.latency[source, d] + w.value_bytes[value] * w.per_byte[source, d]
            latest = max(latest, channel)
            if book:
                arrival[value, d] = channel
                sending[source] = channel
                receiving[d] = channel
                if w.link_model == 2:
                    receiving[source] = channel
                    sending[d] = channel
    return latest
