"""Local search over placements for steady-state loads or traffic, by moving a node or swapping two.

Unlike the length of a step, a load is a sum over nodes and transfers. So a move updates the loads by its own neighbours
alone, in time of its degree, and is taken back by the opposite move.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxplace.graph import Floats, Ints, Longs, OpGraph
from onnxplace.passes.placement.stages.stage_kernels import PARALLEL, SEQUENTIAL, SUM, TRAFFIC, combine_loads
from onnxplace.utils import compiled_loop, in_place

# The generator of compiled loops takes seeds of 32 bits.
MAX_SEED = (1 << 32) - 1


@dataclass(frozen=True)
class LocalSearch:
    """A local search: the graph, its costs on each device, and the limits of devices."""

    graph: OpGraph
    """The contracted graph; it must be acyclic only if stages stay in order."""
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

    def improve(self, device: Ints, stage: Ints | None, moves: int, seed: int) -> tuple[Ints, float]:
        """Return a placement at least as good as `device`, and its largest load (or its traffic).

        With `stage`, the position of each device, values run from earlier to later stages only.
        """
        graph = self.graph
        predecessors, successors = graph.predecessors, graph.successors
        stage_position = np.zeros(len(self.limit_bytes), dtype=np.int64) if stage is None else stage.astype(np.int64)
        best, value = anneal(
            device.astype(np.int64), (stage_position, stage is not None, *predecessors.arrays, *successors.arrays),
            (graph.producer, graph.value_bytes, *graph.outputs.arrays, *graph.inputs.arrays, *graph.weights.arrays,
             graph.weight_bytes), (self.seconds, self.latency, self.per_byte), (self.limit_bytes, self.need_bytes),
            self.rule, moves, seed & MAX_SEED,
        )  # fmt: skip
        return best.astype(np.int32), float(value)


@in_place
def move_node(node, a, b, device, state, graph, costs):
    """Move `node` from device `a` to `b`, updating loads, weights and reader counts."""
    compute, sent, received, bytes_held, reads, holds = state
    producer, value_bytes, out_starts, outs, in_starts, ins, weight_starts, weights, weight_bytes = graph
    seconds, latency, per_byte = costs
    devices = len(compute)
    compute[a] -= seconds[a, node]
    compute[b] += seconds[b, node]
    # An input leaves `a` with its last reader there, and is sent to `b` for its first one.
    for k in range(in_starts[node], in_starts[node + 1]):
        v = ins[k]
        if producer[v] < 0:
            continue
        home = device[producer[v]]
        reads[v, a] -= 1
        if reads[v, a] == 0 and home != a:
            transfer = latency[home, a] + value_bytes[v] * per_byte[home, a]
            sent[home] -= transfer
            received[a] -= transfer
        reads[v, b] += 1
        if reads[v, b] == 1 and home != b:
            transfer = latency[home, b] + value_bytes[v] * per_byte[home, b]
            sent[home] += transfer
            received[b] += transfer
    # Outputs are now sent by `b` to each device that reads them.
    for k in range(out_starts[node], out_starts[node + 1]):
        v = outs[k]
        for d in range(devices):
            if reads[v, d] > 0:
                if d != a:
                    transfer = latency[a, d] + value_bytes[v] * per_byte[a, d]
                    sent[a] -= transfer
                    received[d] -= transfer
                if d != b:
                    transfer = latency[b, d] + value_bytes[v] * per_byte[b, d]
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
def evaluate_loads(state, rule, scale):
    """Return the largest load (or the traffic), and a smooth energy that smaller loads count in too."""
    compute, sent, received = state[0], state[1], state[2]
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
def may_move(node, b, device, state, stages, costs, graph, limits):
    """Return whether `node` may go to device `b`: pins, memory, and the order of stages."""
    stage, ordered, pred_starts, preds, succ_starts, succs = stages
    limit, need = limits
    if not np.isfinite(costs[0][b, node]):
        return False
    weight_starts, weights, weight_bytes = graph[6], graph[7], graph[8]
    weight_total_bytes = state[3][b] + need[node]
    for k in range(weight_starts[node], weight_starts[node + 1]):
        if state[5][weights[k], b] == 0:
            weight_total_bytes += weight_bytes[weights[k]]
    if weight_total_bytes > limit[b]:
        return False
    if ordered:
        for k in range(pred_starts[node], pred_starts[node + 1]):
            if stage[device[preds[k]]] > stage[b]:
                return False
        for k in range(succ_starts[node], succ_starts[node + 1]):
            if stage[device[succs[k]]] < stage[b]:
                return False
    return True


@compiled_loop
def anneal(device, stages, graph, costs, limits, rule, moves, seed):
    """Anneal from a low temperature; return the best placement, at least as good as the start, and its load."""
    _, _, pred_starts, preds, succ_starts, succs = stages
    producer, value_bytes, _, _, in_starts, ins, weight_starts, weights, weight_bytes = graph
    seconds, latency, per_byte = costs
    devices, nodes, values = len(latency), len(device), len(producer)
    np.random.seed(seed)
    state = (
        np.zeros(devices), np.zeros(devices), np.zeros(devices), np.zeros(devices, np.int64),
        np.zeros((values, devices), np.int32), np.zeros((len(weight_bytes), devices), np.int32),
    )  # fmt: skip
    compute, sent, received, bytes_held, reads, holds = state
    # Loads, weights and reader counts of the start.
    for node in range(nodes):
        d = device[node]
        compute[d] += seconds[d, node]
        for k in range(in_starts[node], in_starts[node + 1]):
            v = ins[k]
            reads[v, d] += 1
            home = device[producer[v]] if producer[v] >= 0 else d
            if reads[v, d] == 1 and home != d:
                transfer = latency[home, d] + value_bytes[v] * per_byte[home, d]
                sent[home] += transfer
                received[d] += transfer
        for k in range(weight_starts[node], weight_starts[node + 1]):
            holds[weights[k], d] += 1
            if holds[weights[k], d] == 1:
                bytes_held[d] += weight_bytes[weights[k]]
    best = device.copy()
    # Loads are measured in units of the first largest one, so that temperatures have no unit.
    scale = evaluate_loads(state, rule, 1.0)[0]
    best_load = scale
    if scale <= 0.0 or devices < 2:
        return best, best_load
    energy = evaluate_loads(state, rule, scale)[1]
    # Traffic enters the energy as it is, other loads by their eighth power, which reacts more strongly.
    start_temperature, end_temperature = (0.02, 1e-6) if rule == TRAFFIC else (0.1, 1e-4)
    # The temperature falls geometrically.
    for move in range(moves):
        temperature = start_temperature * (end_temperature / start_temperature) ** (move / moves)
        # Propose a node and a device, most often that of a neighbour.
        node = np.random.randint(nodes)
        a = device[node]
        b = np.random.randint(devices)
        degree = pred_starts[node + 1] - pred_starts[node] + succ_starts[node + 1] - succ_starts[node]
        if degree > 0 and np.random.random() < 0.7:
            k = np.random.randint(degree)
            inward = pred_starts[node + 1] - pred_starts[node]
            neighbour = preds[pred_starts[node] + k] if k < inward else succs[succ_starts[node] + k - inward]
            b = device[neighbour]
        if b == a or not np.isfinite(seconds[b, node]):
            continue
        # Some moves swap the node with one of that device, which helps where memory is tight.
        partner = -1
        if np.random.random() < 0.15:
            # The partner leaves first, so that the node finds its memory free.
            partner = np.random.randint(nodes)
            if device[partner] != b or not np.isfinite(seconds[a, partner]):
                continue
            move_node(partner, b, a, device, state, graph, costs)
        if may_move(node, b, device, state, stages, costs, graph, limits):
            move_node(node, a, b, device, state, graph, costs)
            possible = partner < 0 or may_move(partner, a, device, state, stages, costs, graph, limits)
            # Accept by the Metropolis rule; else take the move back.
            largest_load, new_energy = evaluate_loads(state, rule, scale)
            if possible and new_energy - energy <= -temperature * np.log(1.0 - np.random.random()):
                energy = new_energy
                if largest_load < best_load * (1.0 - 1e-12):
                    best_load = largest_load
                    for index in range(len(best)):  # numba takes seconds to compile a copy of slices
                        best[index] = device[index]
                continue
            move_node(node, b, a, device, state, graph, costs)
        if partner >= 0:
            move_node(partner, a, b, device, state, graph, costs)
    return best, best_load
