"""List scheduling by bottom level: the most urgent node goes first, to the device where it finishes first.

HEFT (Topcuoglu, Hariri and Wu, 2002) without insertion, on links that serve one transfer at a time. Nodes are placed in
the order of their bottom levels. No level is below that of a reader, and ties go by topological position, so producers
come first. The plan keeps when processors and channels are next free. Gaps before that stay empty: the plan is only the
start of a search, whose simulation fills them. O(D (N + E) + N log N).
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph.op_graph import Bools, Csr, Floats, Ints
from onnxplace.passes.placement.search.decode_kernels import Wiring
from onnxplace.problem import PlacementProblem
from onnxplace.utils.jit import compiled_part, linear_in_place


def critical_path_plan(problem: PlacementProblem, wiring: Wiring, weight: float) -> tuple[Ints, Floats]:
    """Return device and planned start of each node; device -1 where weights fill every device.

    `weight` is the share of a transfer that counts in bottom levels: 0 if all edges are local, 1 if all are remote.
    """
    graph = problem.graph
    bottom_level = np.zeros(len(graph))
    mean_levels(wiring, problem.seconds.mean(axis=0, where=~problem.refused), weight, bottom_level)
    order = np.lexsort((graph.positions, -bottom_level)).astype(np.int32)
    weights = Csr.grouped(problem.group[graph.weights.rows].astype(np.int32), graph.weights.items, len(problem.pinned))
    plan = empty_plan(problem)
    earliest_finish(
        wiring, order, problem.group.astype(np.int32), problem.pinned, *weights.arrays, graph.weight_bytes, plan
    )
    return plan.device, plan.start


# The state of a device in a plan: free bytes for weights, and when its processors and its channels are free.
DEVICE = np.dtype(
    [("free_bytes", np.int64), ("free", np.float64), ("sending", np.float64), ("receiving", np.float64)], align=True
)


class PartialPlan(NamedTuple):
    """A plan that grows node by node."""

    device: Ints
    """Of each node; -1 until it is placed."""
    start: Floats
    finish: Floats
    home: Ints
    """Device of each group; -1 until its first node is placed."""
    stored: Bools
    """[device, weight]: whether the device stores the weight."""
    arrival: Floats
    """[value, device]: when the value arrives there, -1 if it is not sent there."""
    devices: NDArray[Any]
    """Records of `DEVICE`."""


def empty_plan(problem: PlacementProblem) -> PartialPlan:
    """Return a plan without any node."""
    graph, count = problem.graph, len(problem.limit_bytes)
    devices = np.zeros(count, DEVICE)
    devices["free_bytes"] = problem.limit_bytes
    return PartialPlan(
        device=np.full(len(graph), -1, dtype=np.int32),
        start=np.zeros(len(graph)),
        finish=np.zeros(len(graph)),
        home=np.full(len(problem.pinned), -1, dtype=np.int32),
        stored=np.zeros((count, len(graph.weight_bytes)), dtype=bool),
        arrival=np.full((len(graph.producer), count), -1.0),
        devices=devices,
    )


@linear_in_place
def mean_levels(wiring, seconds, weight, bottom_level):
    """Fill the bottom level of each node: its edges count `weight` times a transfer over the mean link."""
    devices = len(wiring.latency)
    # The mean link between two devices.
    latency, per_byte = 0.0, 0.0
    for source in range(devices):
        for destination in range(devices):
            if source != destination:
                latency += wiring.latency[source, destination] / (devices * (devices - 1))
                per_byte += wiring.per_byte[source, destination] / (devices * (devices - 1))
    # Longest paths to the end, from the last node backwards.
    for position in range(len(wiring.order) - 1, -1, -1):
        node = wiring.order[position]
        below = 0.0
        for k in range(wiring.out_starts[node], wiring.out_starts[node + 1]):
            value = wiring.outs[k]
            transfer = weight * (latency + wiring.value_bytes[value] * per_byte)
            for j in range(wiring.read_starts[value], wiring.read_starts[value + 1]):
                below = max(below, bottom_level[wiring.readers[j]] + transfer)
        bottom_level[node] = below + seconds[node]


@linear_in_place
def earliest_finish(wiring, order, group, pinned, weight_starts, weights, weight_bytes, plan):
    """Place each node, in `order`, where it finishes first; the first node of a group decides for all of it."""
    # Pinned groups take their memory first.
    for g in range(len(pinned)):
        if pinned[g] >= 0:
            settle_group(np.int64(pinned[g]), g, weight_starts, weights, weight_bytes, plan)
    for position in range(len(order)):
        node = order[position]
        g = np.int64(group[node])
        # Try each device that the group allows and that has memory for its weights.
        best, best_start, best_finish = np.int64(-1), 0.0, np.inf
        for d in range(len(plan.devices)):
            if plan.home[g] >= 0 and plan.home[g] != d:
                continue
            if plan.home[g] < 0:
                needed_bytes = 0
                for k in range(weight_starts[g], weight_starts[g + 1]):
                    if not plan.stored[d, weights[k]]:
                        needed_bytes += weight_bytes[weights[k]]
                if needed_bytes > plan.devices[d].free_bytes:
                    continue
            # Only a trial: nothing is booked until the device is chosen.
            begin = max(arrival_time(wiring, node, d, plan, np.bool_(False)), plan.devices[d].free)
            if begin + wiring.seconds[d, node] < best_finish:
                best, best_start, best_finish = d, begin, begin + wiring.seconds[d, node]
        if best < 0:
            break  # no device has memory for the group: the plan stays incomplete
        if plan.home[g] < 0:
            settle_group(best, g, weight_starts, weights, weight_bytes, plan)
        # Book the transfers to the device, which other nodes then wait for.
        arrival_time(wiring, node, best, plan, np.bool_(True))
        plan.device[node] = best
        plan.start[node] = best_start
        plan.finish[node] = best_finish
        take_processors(wiring, best, best_finish, plan)


@compiled_part
def settle_group(d, g, weight_starts, weights, weight_bytes, plan):
    """Place group `g` on device `d`, and its weights in the memory there."""
    plan.home[g] = d
    for k in range(weight_starts[g], weight_starts[g + 1]):
        if not plan.stored[d, weights[k]]:
            plan.stored[d, weights[k]] = True
            plan.devices[d].free_bytes -= weight_bytes[weights[k]]


@compiled_part
def take_processors(wiring, d, finish, plan):
    """Take the processors of device `d` until a node finishes there."""
    for other in range(len(plan.devices)):
        if wiring.conflicts[d, other]:
            plan.devices[other].free = max(plan.devices[other].free, finish)


@compiled_part
def arrival_time(wiring, node, d, plan, book):
    """Return when all inputs of `node` can be on device `d`; with `book`, reserve channels for their transfers."""
    latest = 0.0
    # The inputs of one node queue behind each other, also where nothing is booked.
    channel = plan.devices[d].receiving
    for k in range(wiring.in_starts[node], wiring.in_starts[node + 1]):
        value = wiring.ins[k]
        producer = wiring.producer[value]
        if producer < 0:
            continue
        source = plan.device[producer]
        if source == d:
            latest = max(latest, plan.finish[producer])
        elif plan.arrival[value, d] >= 0.0:
            latest = max(latest, plan.arrival[value, d])
        else:
            # A transfer waits for both channels, unless links serve any number at a time.
            begin = plan.finish[producer]
            if wiring.link_model != 1:
                begin = max(begin, max(plan.devices[source].sending, channel))
            channel = begin + wiring.latency[source, d] + wiring.value_bytes[value] * wiring.per_byte[source, d]
            latest = max(latest, channel)
            if book:
                plan.arrival[value, d] = channel
                plan.devices[source].sending = channel
                plan.devices[d].receiving = channel
                if wiring.link_model == 2:
                    plan.devices[source].receiving = channel
                    plan.devices[d].sending = channel
    return latest
