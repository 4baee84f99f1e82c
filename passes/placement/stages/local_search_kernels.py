"""Local search over placements for steady-state loads or traffic, by moving a node or swapping two.

Unlike the length of a step, a load is a sum over nodes and transfers. So a move updates the loads by its own neighbours
alone, in time of its degree, and is taken back by the opposite move.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onnxplace.graph.op_graph import Floats, Ints, Longs, OpGraph
from onnxplace.passes.placement.stages.stage_kernels import PARALLEL, SEQUENTIAL, SUM, TRAFFIC, combine_loads
from onnxplace.utils.jit import compiled_loop, compiled_part, in_place

# The generator of compiled loops takes seeds of 32 bits.
MAX_SEED = (1 << 32) - 1


class MoveGraph(NamedTuple):
    """A graph as moves of its nodes read it."""

    producer: Ints
    value_bytes: Longs
    out_starts: Longs
    outs: Ints
    in_starts: Longs
    ins: Ints
    weight_starts: Longs
    weights: Ints
    weight_bytes: Longs
    pred_starts: Longs
    preds: Ints
    succ_starts: Longs
    succs: Ints


class MoveCosts(NamedTuple):
    """What placements cost, and what they must keep to."""

    seconds: Floats
    """[device, node]; infinite where a node may not go."""
    latency: Floats
    """[source, destination]."""
    per_byte: Floats
    limit_bytes: Longs
    """Per device: limit of weights plus the need of the node that moves in."""
    need_bytes: Longs
    """Per node."""
    rule: int
    """`DUPLEX`, `SEQUENTIAL`, `PARALLEL`, `SUM` or `TRAFFIC`."""


class Loads(NamedTuple):
    """What devices do and hold with a placement; every move updates it."""

    compute: Floats
    """Per device, seconds."""
    sent: Floats
    received: Floats
    bytes_held: Longs
    """Per device, of weights."""
    reads: Ints
    """[value, device]: nodes there that read the value."""
    holds: Ints
    """[weight, device]: nodes there that read the weight."""


@dataclass(frozen=True)
class LocalSearch:
    """A local search over placements of a graph, which must be acyclic only if stages stay in order."""

    graph: OpGraph
    costs: MoveCosts

    def improve(self, device: Ints, stage: Ints | None, moves: int, seed: int) -> tuple[Ints, float]:
        """Return a placement at least as good as `device`, and its largest load (or its traffic).

        With `stage`, the position of each device, values run from earlier to later stages only.
        """
        graph = self.graph
        move_graph = MoveGraph(
            graph.producer, graph.value_bytes, *graph.outputs.arrays, *graph.inputs.arrays, *graph.weights.arrays,
            graph.weight_bytes, *graph.predecessors.arrays, *graph.successors.arrays,
        )  # fmt: skip
        # Without an order, no device is before another one.
        position = np.zeros(len(self.costs.limit_bytes), dtype=np.int64) if stage is None else stage.astype(np.int64)
        best, value = anneal(device.astype(np.int64), position, move_graph, self.costs, moves, seed & MAX_SEED)
        return best.astype(np.int32), float(value)


@compiled_part
def transfer_seconds(value, source, destination, graph, costs):
    """Return the seconds of sending a value."""
    return costs.latency[source, destination] + graph.value_bytes[value] * costs.per_byte[source, destination]


@in_place
def move_node(node, a, b, device, loads, graph, costs):
    """Move `node` from device `a` to `b`, updating the loads."""
    compute, sent, received, bytes_held, reads, holds = loads
    producer, weight_bytes = graph.producer, graph.weight_bytes
    out_starts, outs, in_starts, ins = graph.out_starts, graph.outs, graph.in_starts, graph.ins
    weight_starts, weights = graph.weight_starts, graph.weights
    devices = len(compute)
    compute[a] -= costs.seconds[a, node]
    compute[b] += costs.seconds[b, node]
    # An input leaves `a` with its last reader there, and is sent to `b` for its first one.
    for k in range(in_starts[node], in_starts[node + 1]):
        v = ins[k]
        if producer[v] < 0:
            continue
        home = device[producer[v]]
        reads[v, a] -= 1
        if reads[v, a] == 0 and home != a:
            transfer = transfer_seconds(v, home, a, graph, costs)
            sent[home] -= transfer
            received[a] -= transfer
        reads[v, b] += 1
        if reads[v, b] == 1 and home != b:
            transfer = transfer_seconds(v, home, b, graph, costs)
            sent[home] += transfer
            received[b] += transfer
    # Outputs are now sent by `b` to each device that reads them.
    for k in range(out_starts[node], out_starts[node + 1]):
        v = outs[k]
        for d in range(devices):
            if reads[v, d] > 0:
                if d != a:
                    transfer = transfer_seconds(v, a, d, graph, costs)
                    sent[a] -= transfer
                    received[d] -= transfer
                if d != b:
                    transfer = transfer_seconds(v, b, d, graph, costs)
                    sent[b] += transfer
                    received[d] += transfer
    # A device stores each weight once, for as long as a node there reads it.
    for k in range(weight_starts[node], weight_starts[node + 1]):
        w = weights[k]
        holds[w, a] -= 1
        if holds[w, a] == 0:
            bytes_held[a] -= weight_bytes[w]
        holds[w, b] += 1
        if holds[w, b] == 1:
            bytes_held[b] += weight_bytes[w]
    device[node] = b


@in_place
def evaluate_loads(loads, rule, scale):
    """Return the largest load (or the traffic), and a smooth energy that smaller loads count in too."""
    compute, sent, received = loads.compute, loads.sent, loads.received
    largest_load = 0.0
    energy = 0.0
    for d in range(len(compute)):
        largest_load = (
            largest_load + received[d]
            if rule == TRAFFIC
            else max(largest_load, combine_loads(rule, compute[d], sent[d], received[d]))
        )
        parts = (compute[d], sent[d], received[d])
        if rule == SEQUENTIAL:
            parts = (compute[d], sent[d] + received[d], 0.0)
        elif rule == PARALLEL:
            parts = (compute[d], 0.0, 0.0)
        elif rule == SUM:
            parts = (compute[d] + sent[d] + received[d], 0.0, 0.0)
        # The eighth power makes the largest load dominate, and still rewards smaller ones.
        for part in parts:
            square = (part / scale) * (part / scale)
            energy += square * square * square * square
    if rule == TRAFFIC:
        energy = largest_load / scale
    return largest_load, energy


@in_place
def may_move(node, b, device, position, loads, graph, costs):
    """Return whether `node` may go to device `b`: pins, memory, and the order of stages."""
    if not np.isfinite(costs.seconds[b, node]):
        return False
    total_bytes = loads.bytes_held[b] + costs.need_bytes[node]
    for k in range(graph.weight_starts[node], graph.weight_starts[node + 1]):
        if loads.holds[graph.weights[k], b] == 0:
            total_bytes += graph.weight_bytes[graph.weights[k]]
    if total_bytes > costs.limit_bytes[b]:
        return False
    for k in range(graph.pred_starts[node], graph.pred_starts[node + 1]):
        if position[device[graph.preds[k]]] > position[b]:
            return False
    for k in range(graph.succ_starts[node], graph.succ_starts[node + 1]):
        if position[device[graph.succs[k]]] < position[b]:
            return False
    return True


@compiled_loop
def anneal(device, position, graph, costs, moves, seed):
    """Anneal from a low temperature; return the best placement, at least as good as the start, and its load.

    `position` is that of each device's stage: no value may run to a lower one.
    """
    devices, nodes, values, rule = len(costs.latency), len(device), len(graph.producer), costs.rule
    np.random.seed(seed)
    loads = Loads(
        np.zeros(devices), np.zeros(devices), np.zeros(devices), np.zeros(devices, np.int64),
        np.zeros((values, devices), np.int32), np.zeros((len(graph.weight_bytes), devices), np.int32),
    )  # fmt: skip
    # Loads, weights and reader counts of the start.
    for node in range(nodes):
        d = device[node]
        loads.compute[d] += costs.seconds[d, node]
        for k in range(graph.in_starts[node], graph.in_starts[node + 1]):
            v = graph.ins[k]
            loads.reads[v, d] += 1
            home = device[graph.producer[v]] if graph.producer[v] >= 0 else d
            if loads.reads[v, d] == 1 and home != d:
                transfer = transfer_seconds(v, home, d, graph, costs)
                loads.sent[home] += transfer
                loads.received[d] += transfer
        for k in range(graph.weight_starts[node], graph.weight_starts[node + 1]):
            loads.holds[graph.weights[k], d] += 1
            if loads.holds[graph.weights[k], d] == 1:
                loads.bytes_held[d] += graph.weight_bytes[graph.weights[k]]
    best = device.copy()
    # Loads are measured in units of the first largest one, so that temperatures have no unit.
    scale = evaluate_loads(loads, rule, 1.0)[0]
    best_load = scale
    if scale <= 0.0 or devices < 2:
        return best, best_load
    energy = evaluate_loads(loads, rule, scale)[1]
    # Traffic enters the energy as it is, other loads by their eighth power, which reacts more strongly.
    start_temperature, end_temperature = (0.02, 1e-6) if rule == TRAFFIC else (0.1, 1e-4)
    # The temperature falls geometrically.
    for move in range(moves):
        temperature = start_temperature * (end_temperature / start_temperature) ** (move / moves)
        # Propose a node and a device, most often that of a neighbour.
        node = np.random.randint(nodes)
        a = device[node]
        b = np.random.randint(devices)
        first_pred, first_succ = graph.pred_starts[node], graph.succ_starts[node]
        pred_count = graph.pred_starts[node + 1] - first_pred
        degree = pred_count + graph.succ_starts[node + 1] - first_succ
        if degree > 0 and np.random.random() < 0.7:
            k = np.random.randint(degree)
            is_pred = k < pred_count
            b = device[graph.preds[first_pred + k] if is_pred else graph.succs[first_succ + k - pred_count]]
        if b == a or not np.isfinite(costs.seconds[b, node]):
            continue
        # Some moves swap the node with one of that device, which helps where memory is tight.
        partner = -1
        if np.random.random() < 0.15:
            # The partner leaves first, so that the node finds its memory free.
            partner = np.random.randint(nodes)
            if device[partner] != b or not np.isfinite(costs.seconds[a, partner]):
                continue
            move_node(partner, b, a, device, loads, graph, costs)
        if may_move(node, b, device, position, loads, graph, costs):
            move_node(node, a, b, device, loads, graph, costs)
            possible = partner < 0 or may_move(partner, a, device, position, loads, graph, costs)
            # Accept by the Metropolis rule; else take the move back.
            largest_load, new_energy = evaluate_loads(loads, rule, scale)
            if possible and new_energy - energy <= -temperature * np.log(1.0 - np.random.random()):
                energy = new_energy
                if largest_load < best_load * (1.0 - 1e-12):
                    best_load = largest_load
                    for index in range(len(best)):  # numba takes seconds to compile a copy of slices
                        best[index] = device[index]
                continue
            move_node(node, b, a, device, loads, graph, costs)
        if partner >= 0:
            move_node(partner, a, b, device, loads, graph, costs)
    return best, best_load
