"""Simulated time where devices share memory: work takes longer while others that share it are busy."""

from __future__ import annotations

import numpy as np

from onnxplace.graph import Floats, Ints, OpGraph, sum_by
from onnxplace.simulation.simulator import Simulation, simulate
from onnxplace.target import Shared, Target

# Times that change by less than this from one round to the next are found. Each round leaves a part of the error that
# is below 1 - 1 / slowdown.
SETTLED, ROUNDS = 1e-4, 50


def simulate_with_contention(graph: OpGraph, seconds: Floats, target: Target, device: Ints, order: Ints) -> Simulation:
    """Simulate a step as `simulate` does, with what devices in `target.shared` do to each other.

    `seconds` [device, node] is what each node takes alone. While k others that share with its device are busy, a node
    runs at 1 / (1 + k (s - 1)) of its speed. s lies between the slowdowns of work that does not wait for memory and of
    work that does, by the share of the node's time in which its bytes pass (`memory_share`). Start and finish depend on
    each other over all nodes: a fixed point, from the times without. Returns the last simulation, whose
    `compute_seconds` are the longer ones.
    """
    simulation = simulate(graph, seconds, target, device, order)
    own = seconds[device, np.arange(len(graph))]
    if not target.shared or not len(graph):
        return simulation
    entries = [(entry, _members(target, entry), _slowdown(graph, own, entry)) for entry in target.shared]
    taken = own
    for _ in range(ROUNDS):
        lost = sum((_lost(simulation, device, members, slower) for _, members, slower in entries), np.zeros(len(graph)))
        before, taken = taken, own + lost
        if np.abs(taken - before).max() <= SETTLED * max(simulation.makespan_seconds, 1e-12):
            break
        simulation = simulate(graph, np.broadcast_to(taken, seconds.shape), target, device, order)
    return simulation


def memory_share(graph: OpGraph, own_seconds: Floats, bytes_per_second: float) -> Floats:
    """Return, per node, the share of its time in which its weights, inputs and outputs pass at this rate; at most 1.

    A rate of 0 is one that nobody measured: all work counts as waiting for memory then.
    """
    if bytes_per_second <= 0:
        return np.ones(len(graph))
    count = len(graph)
    passed = sum_by(graph.weights.rows, graph.weight_bytes[graph.weights.items], count)
    for values in (graph.inputs, graph.outputs):
        passed = passed + sum_by(values.rows, graph.value_bytes[values.items], count)
    share: Floats = np.minimum(passed / bytes_per_second / np.maximum(own_seconds, 1e-12), 1.0)
    return share


def _members(target: Target, entry: Shared) -> Ints:
    return np.array([target.position(name) for name in entry.devices], dtype=np.int32)


def _slowdown(graph: OpGraph, own: Floats, entry: Shared) -> Floats:
    """Return, per node, by how much one other busy device slows it down."""
    share = memory_share(graph, own, entry.memory_bytes_per_second)
    slower: Floats = entry.compute_slowdown + share * (entry.memory_slowdown - entry.compute_slowdown)
    return slower


def _lost(simulation: Simulation, device: Ints, members: Ints, slower: Floats) -> Floats:
    """Return, per node, the seconds it loses to the other members that compute while it runs."""
    start, finish = simulation.start_seconds, simulation.finish_seconds
    shares = np.isin(device, members)
    times = np.unique(np.concatenate([start[shares], finish[shares]]))
    busy = np.zeros((len(members), max(len(times) - 1, 0)), dtype=np.int64)
    for row, member in enumerate(members):
        mine = np.flatnonzero(device == member)
        change = np.zeros(len(times), dtype=np.int64)
        np.add.at(change, np.searchsorted(times, start[mine]), 1)
        np.add.at(change, np.searchsorted(times, finish[mine]), -1)
        busy[row] = np.cumsum(change)[:-1] > 0
    lost = np.zeros(len(device))
    for row, member in enumerate(members):
        mine = np.flatnonzero(device == member)
        others = busy.sum(axis=0) - busy[row]
        for count in range(1, len(members)):
            passed = np.concatenate([[0.0], np.cumsum(np.diff(times) * (others == count))])
            together = np.interp(finish[mine], times, passed) - np.interp(start[mine], times, passed)
            lost[mine] += together * (1 - 1 / (1 + count * (slower[mine] - 1)))
    return lost
