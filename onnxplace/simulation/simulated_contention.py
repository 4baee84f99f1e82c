"""Simulated time where devices share memory: work takes longer while other devices use it."""

from __future__ import annotations

import numpy as np

from onnxplace.graph.lifetimes import sum_alive
from onnxplace.graph.op_graph import Floats, Ints, OpGraph, sum_by
from onnxplace.simulation.simulator import Simulation, simulate
from onnxplace.simulation.weight_streams import WeightStream
from onnxplace.target.target import Shared, Target

# Rounds end when times change by less than this share of the step. Each round leaves less than 1 - 1 / slowdown of the
# error.
RELATIVE_TOLERANCE, MAX_ROUNDS = 1e-4, 50


def simulate_with_contention(
    graph: OpGraph,
    seconds: Floats,
    target: Target,
    device: Ints,
    order: Ints,
    stream: WeightStream | None = None,
) -> Simulation:
    """Simulate a step as `simulate` does, with contention between devices in `target.shared`.

    Arguments are those of `simulate`; `seconds` are the times of nodes that run alone. While k other devices of one
    memory are busy, a node runs at 1 / (1 + k (s - 1)) of its speed. s lies between the slowdowns of work that does not
    wait for memory and of work that does, by the share of its time in which the node moves bytes (`memory_share`).
    Start and finish of all nodes depend on each other: they are a fixed point, iterated from the times without
    contention. Returns the last simulation, whose `compute_seconds` include contention.
    """
    simulation = simulate(graph, seconds, target, device, order, stream=stream)
    own_seconds = seconds[device, np.arange(len(graph))]
    if not target.shared or not len(graph):
        return simulation
    entries = [(_member_devices(target, item), _slowdown_factors(graph, own_seconds, item)) for item in target.shared]
    node_seconds = own_seconds
    for _ in range(MAX_ROUNDS):
        lost_seconds = sum((_lost_seconds(simulation, device, *entry) for entry in entries), np.zeros(len(graph)))
        previous, node_seconds = node_seconds, own_seconds + lost_seconds
        if np.abs(node_seconds - previous).max() <= RELATIVE_TOLERANCE * max(simulation.makespan_seconds, 1e-12):
            break
        table = np.broadcast_to(node_seconds, seconds.shape)
        simulation = simulate(graph, table, target, device, order, stream=stream)
    return simulation


def busy_slowdowns(graph: OpGraph, seconds: Floats, target: Target, busy: Floats) -> Floats:
    """Return factors [device, node] for times of nodes, where each device is busy for a share of its time.

    The others of a shared memory count by the sum of their shares, as `simulate_with_contention` counts those that
    compute at the same time. Devices with a common processor do not.
    """
    factors = np.ones_like(seconds)
    for entry in target.shared:
        members = _member_devices(target, entry)
        for member in members.tolist():
            others = float(busy[members].sum() - busy[members[target.conflicts[member, members]]].sum())
            factors[member] += others * (_slowdown_factors(graph, seconds[member], entry) - 1)
    return factors


def memory_share(graph: OpGraph, own_seconds: Floats, bytes_per_second: float) -> Floats:
    """Return, per node, the share of its time that its weights, inputs and outputs take at this rate; at most 1.

    A rate of 0 is unknown: all work then counts as waiting for memory.
    """
    if bytes_per_second <= 0:
        return np.ones(len(graph))
    count = len(graph)
    passed_bytes = sum_by(graph.weights.rows, graph.weight_bytes[graph.weights.items], count)
    for values in (graph.inputs, graph.outputs):
        passed_bytes = passed_bytes + sum_by(values.rows, graph.value_bytes[values.items], count)
    share: Floats = np.minimum(passed_bytes / bytes_per_second / np.maximum(own_seconds, 1e-12), 1.0)
    return share


def _member_devices(target: Target, entry: Shared) -> Ints:
    return np.array([target.position(name) for name in entry.devices], dtype=np.int32)


def _slowdown_factors(graph: OpGraph, own_seconds: Floats, entry: Shared) -> Floats:
    """Return, per node, the factor by which one other busy device slows it down."""
    share = memory_share(graph, own_seconds, entry.memory_bytes_per_second)
    factor: Floats = entry.compute_slowdown + share * (entry.memory_slowdown - entry.compute_slowdown)
    return factor


def _lost_seconds(simulation: Simulation, device: Ints, members: Ints, factor: Floats) -> Floats:
    """Return, per node, the seconds that it loses while other members compute."""
    start, finish = simulation.start_seconds, simulation.finish_seconds
    is_member = np.isin(device, members)
    if not is_member.any():  # all nodes are on devices with their own memory
        return np.zeros(len(device))
    times = np.unique(np.concatenate([start[is_member], finish[is_member]]))
    busy = np.zeros((len(members), max(len(times) - 1, 0)), dtype=np.int64)
    nodes = [np.flatnonzero(device == member) for member in members]
    for row, own_nodes in enumerate(nodes):
        begin, end = np.searchsorted(times, start[own_nodes]), np.searchsorted(times, finish[own_nodes])
        busy[row] = sum_alive(begin, end, np.ones(len(own_nodes)), busy.shape[1]) > 0
    lost_seconds = np.zeros(len(device))
    for row, own_nodes in enumerate(nodes):
        busy_others = busy.sum(axis=0) - busy[row]
        for count in range(1, len(members)):
            busy_seconds = np.concatenate([[0.0], np.cumsum(np.diff(times) * (busy_others == count))])
            before, after = (np.interp(ends[own_nodes], times, busy_seconds) for ends in (start, finish))
            lost_seconds[own_nodes] += (after - before) * (1 - 1 / (1 + count * (factor[own_nodes] - 1)))
    return lost_seconds
