"""List scheduling by bottom level: what the rest of the step waits for goes first, where it ends soonest.

HEFT (Topcuoglu, Hariri and Wu, 2002) without insertion, on links that serve one transfer at a time.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph import Bools, Csr, Floats, Ints
from onnxplace.passes.placement.search.decode_kernels import Wiring
from onnxplace.problem import PlacementProblem
from onnxplace.utils import compiled_part, in_place


def critical_path_plan(asked: PlacementProblem, w: Wiring, weight: float) -> tuple[Ints, Floats]:
    """Return device and planned start of each node; device -1 for those left when weights fill every device.

    `weight` is what part of a transfer counts in bottom levels: 0 as if all were local, 1 as if all were remote.
    """
    graph = asked.graph
    level = np.zeros(len(graph))
    mean_levels(w, asked.seconds.mean(axis=0), weight, level)
    order = np.lexsort((graph.positions, -level)).astype(np.int32)
    weights = Csr.grouped(asked.group[graph.weights.rows].astype(np.int32), graph.weights.items, len(asked.pinned))
    plan = _empty_plan(asked)
    earliest_finish(
        w, order, asked.group.astype(np.int32), asked.pinned, weights.starts, weights.items, graph.weight_bytes, plan
    )
    return plan.device, plan.start


# What a plan knows about a device.
DEVICE = np.dtype(
    [("room", np.int64), ("free", np.float64), ("sending", np.float64), ("receiving", np.float64)], align=True
)


class Plan(NamedTuple):
    """The plan so far."""

    device: Ints
    """Of each node; -1 until it is placed."""
    start: Floats
    finish: Floats
    home: Ints
    """Device of each group; -1 until its first node is placed."""
    held: Bools
    """[device, weight]."""
    arrival: Floats
    """When a value was sent to a device [value, device]; -1 if it was not."""
    devices: NDArray[Any]
    """Records of `DEVICE`."""


def _empty_plan(asked: PlacementProblem) -> Plan:
    graph, count = asked.graph, len(asked.limit_bytes)
    devices = np.zeros(count, DEVICE)
    devices["room"] = asked.limit_bytes
    return Plan(
        np.full(len(graph), -1, dtype=np.int32),
        np.zeros(len(graph)),
        np.zeros(len(graph)),
        np.full(len(asked.pinned), -1, dtype=np.int32),
        np.zeros((count, len(graph.weight_bytes)), dtype=bool),
        np.full((len(graph.producer), count), -1.0),
        devices,
    )


@in_place
def mean_levels(w, seconds, weight, level):
    """Fill `level`, the bottom level of each node: its edges count `weight` times a transfer over the mean link."""
    devices = len(w.latency)
    latency, per_byte = 0.0, 0.0
    for source in range(devices):
        for there in range(devices):
            if source != there:
                latency += w.latency[source, there] / (devices * (devices - 1))
                per_byte += w.per_byte[source, there] / (devices * (devices - 1))
    for position in range(len(w.order) - 1, -1, -1):
        node = w.order[position]
        below = 0.0
        for k in range(w.out_starts[node], w.out_starts[node + 1]):
            value = w.outs[k]
            transfer = weight * (latency + w.value_bytes[value] * per_byte)
            for j in range(w.read_starts[value], w.read_starts[value + 1]):
                below = max(below, level[w.readers[j]] + transfer)
        level[node] = below + seconds[node]


@in_place
def earliest_finish(w, order, group, pinned, weight_starts, weights, weight_bytes, plan):
    """Put each node, in `order`, where it finishes first; the first node of a group decides for all of it."""
    for g in range(len(pinned)):
        if pinned[g] >= 0:
            _hold(np.int64(pinned[g]), g, weight_starts, weights, weight_bytes, plan)
    for position in range(len(order)):
        node = order[position]
        g = np.int64(group[node])
        best, best_start, best_finish = np.int64(-1), 0.0, np.inf
        for d in range(len(plan.devices)):
            if plan.home[g] >= 0 and plan.home[g] != d:
                continue
            if plan.home[g] < 0:
                need = 0
                for k in range(weight_starts[g], weight_starts[g + 1]):
                    if not plan.held[d, weights[k]]:
                        need += weight_bytes[weights[k]]
                if need > plan.devices[d].room:
                    continue
            began = max(_arrive(w, node, d, plan, np.bool_(False)), plan.devices[d].free)
            if began + w.seconds[d, node] < best_finish:
                best, best_start, best_finish = d, began, began + w.seconds[d, node]
        if best < 0:
            break
        if plan.home[g] < 0:
            _hold(best, g, weight_starts, weights, weight_bytes, plan)
        _arrive(w, node, best, plan, np.bool_(True))
        plan.device[node] = best
        plan.start[node] = best_start
        plan.finish[node] = best_finish
        plan.devices[best].free = best_finish


@compiled_part
def _hold(d, g, weight_starts, weights, weight_bytes, plan):
    """Make `d` the home of group `g`, whose weights take room there."""
    plan.home[g] = d
    for k in range(weight_starts[g], weight_starts[g + 1]):
        if not plan.held[d, weights[k]]:
            plan.held[d, weights[k]] = True
            plan.devices[d].room -= weight_bytes[weights[k]]


@compiled_part
def _arrive(w, node, d, plan, book):
    """When all inputs of `node` can be on device `d`; with `book`, the transfers for that are made."""
    latest = 0.0
    channel = plan.devices[d].receiving
    for k in range(w.in_starts[node], w.in_starts[node + 1]):
        value = w.ins[k]
        maker = w.producer[value]
        if maker < 0:
            continue
        source = plan.device[maker]
        if source == d:
            latest = max(latest, plan.finish[maker])
        elif plan.arrival[value, d] >= 0.0:
            latest = max(latest, plan.arrival[value, d])
        else:
            begin = plan.finish[maker]
            if w.link_model != 1:
                begin = max(begin, max(plan.devices[source].sending, channel))
            channel = begin + w.latency[source, d] + w.value_bytes[value] * w.per_byte[source, d]
            latest = max(latest, channel)
            if book:
                plan.arrival[value, d] = channel
                plan.devices[source].sending = channel
                plan.devices[d].receiving = channel
                if w.link_model == 2:
                    plan.devices[source].receiving = channel
                    plan.devices[d].sending = channel
    return latest
