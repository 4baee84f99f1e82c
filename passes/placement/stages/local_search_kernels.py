"""Local search over placements for steady-state loads or traffic: move a node, or swap two, and keep the best seen."""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxplace.graph import Floats, Ints, Longs, OpGraph
from onnxplace.passes.placement.stages.ideal_kernels import combined
from onnxplace.utils import compiled_loop, in_place

# The generator of compiled loops takes seeds of 32 bits.
MAX_SEED = (1 << 32) - 1


@dataclass(frozen=True)
class LocalSearch:
    """What may be moved, and what it costs where."""

    graph: OpGraph
    """Contracted; need not be acyclic unless moves keep stages in order."""
    seconds: Floats
    """[device, node]; infinite where a node may not be."""
    latency: Floats
    """[source, destination]."""
    per_byte: Floats
    limit_bytes: Longs
    """Per device; held against weights and the need of the node that moves in."""
    need_bytes: Longs
    """Per node."""
    rule: int
    """One of those in `_ideals`."""

    def improve(self, device: Ints, stage: Ints | None, moves: int, seed: int) -> tuple[Ints, float]:
        """Return a placement at least as good as `device`, and its largest load (or its traffic).

        With `stage`, the position of each device, values keep running from earlier to later stages.
        """
        g = self.graph
        before, after = g.predecessors, g.successors
        order = np.zeros(len(self.limit_bytes), dtype=np.int64) if stage is None else stage.astype(np.int64)
        found, value = anneal(
            device.astype(np.int64), order, stage is not None, before.starts, before.items, after.starts, after.items,
            g.producer, g.value_bytes, g.outputs.starts, g.outputs.items, g.inputs.starts, g.inputs.items,
            g.weights.starts, g.weights.items, g.weight_bytes, self.seconds, self.latency, self.per_byte,
            self.limit_bytes, self.need_bytes, self.rule, moves, seed & MAX_SEED,
        )  # fmt: skip
        return found.astype(np.int32), float(value)


@in_place
def shift(node, a, b, device, state, graph, costs):
    """Move `node` from device `a` to `b`, keeping loads, weights and reader counts up to date."""
    compute, sent, received, bytes_held, reads, holds = state
    producer, value_bytes, out_starts, outs, in_starts, ins, weight_starts, weights, weight_bytes = graph
    seconds, latency, per_byte = costs
    devices = len(compute)
    compute[a] -= seconds[a, node]
    compute[b] += seconds[b, node]
    for k in range(in_starts[node], in_starts[node + 1]):
        v = ins[k]
        if producer[v] < 0:
            continue
        home = device[producer[v]]
        reads[v, a] -= 1
        if reads[v, a] == 0 and home != a:
            took = latency[home, a] + value_bytes[v] * per_byte[home, a]
            sent[home] -= took
            received[a] -= took
        reads[v, b] += 1
        if reads[v, b] == 1 and home != b:
            took = latency[home, b] + value_bytes[v] * per_byte[home, b]
            sent[home] += took
            received[b] += took
    for k in range(out_starts[node], out_starts[node + 1]):
        v = outs[k]
        for d in range(devices):
            if reads[v, d] > 0:
                if d != a:
                    took = latency[a, d] + value_bytes[v] * per_byte[a, d]
                    sent[a] -= took
                    received[d] -= took
                if d != b:
                    took = latency[b, d] + value_bytes[v] * per_byte[b, d]
                    sent[b] += took
                    received[d] += took
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
def judged(state, rule, scale):
    """Return the largest load (or the traffic), and a smooth stand-in for it that also counts what is below."""
    compute, sent, received = state[0], state[1], state[2]
    worst = 0.0
    energy = 0.0
    for d in range(len(compute)):
        worst = worst + received[d] if rule == 4 else max(worst, combined(rule, compute[d], sent[d], received[d]))
        parts = (compute[d], sent[d], received[d])
        if rule == 1:
            parts = (compute[d], sent[d] + received[d], 0.0)
        elif rule == 2:
            parts = (compute[d], 0.0, 0.0)
        elif rule == 3:
            parts = (compute[d] + sent[d] + received[d], 0.0, 0.0)
        for part in parts:
            square = (part / scale) * (part / scale)
            energy += square * square * square * square
    if rule == 4:
        energy = worst / scale
    return worst, energy


@in_place
def allowed(node, b, device, state, stage, ordered, pred_starts, preds, succ_starts, succs, costs, graph, limits):
    """Whether `node` may go to device `b`: pins, memory, and the order of stages."""
    limit, need = limits
    if not np.isfinite(costs[0][b, node]):
        return False
    weight_starts, weights, weight_bytes = graph[6], graph[7], graph[8]
    held = state[3][b] + need[node]
    for k in range(weight_starts[node], weight_starts[node + 1]):
        if state[5][weights[k], b] == 0:
            held += weight_bytes[weights[k]]
    if held > limit[b]:
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
def anneal(
    device, stage, ordered, pred_starts, preds, succ_starts, succs,
    producer, value_bytes, out_starts, outs, in_starts, ins, weight_starts, weights, weight_bytes,
    seconds, latency, per_byte, limit, need, rule, moves, seed,
):  # fmt: skip
    """Simulated annealing from a low temperature; the start is kept unless something better is found."""
    devices, nodes, values = len(limit), len(device), len(producer)
    np.random.seed(seed)
    state = (
        np.zeros(devices), np.zeros(devices), np.zeros(devices), np.zeros(devices, np.int64),
        np.zeros((values, devices), np.int32), np.zeros((len(weight_bytes), devices), np.int32),
    )  # fmt: skip
    graph = (producer, value_bytes, out_starts, outs, in_starts, ins, weight_starts, weights, weight_bytes)
    costs = (seconds, latency, per_byte)
    compute, sent, received, bytes_held, reads, holds = state
    for node in range(nodes):
        d = device[node]
        compute[d] += seconds[d, node]
        for k in range(in_starts[node], in_starts[node + 1]):
            v = ins[k]
            reads[v, d] += 1
            home = device[producer[v]] if producer[v] >= 0 else d
            if reads[v, d] == 1 and home != d:
                took = latency[home, d] + value_bytes[v] * per_byte[home, d]
                sent[home] += took
                received[d] += took
        for k in range(weight_starts[node], weight_starts[node + 1]):
            holds[weights[k], d] += 1
            if holds[weights[k], d] == 1:
                bytes_held[d] += weight_bytes[weights[k]]
    best = device.copy()
    scale = judged(state, rule, 1.0)[0]
    least = scale
    if scale <= 0.0 or devices < 2:
        return best, least
    energy = judged(state, rule, scale)[1]
    hot, cold = (0.02, 1e-6) if rule == 4 else (0.1, 1e-4)
    for move in range(moves):
        temperature = hot * (cold / hot) ** (move / moves)
        node = np.random.randint(nodes)
        a = device[node]
        b = np.random.randint(devices)
        degree = pred_starts[node + 1] - pred_starts[node] + succ_starts[node + 1] - succ_starts[node]
        if degree > 0 and np.random.random() < 0.7:
            k = np.random.randint(degree)
            inward = pred_starts[node + 1] - pred_starts[node]
            other = preds[pred_starts[node] + k] if k < inward else succs[succ_starts[node] + k - inward]
            b = device[other]
        if b == a or not np.isfinite(seconds[b, node]):
            continue
        partner = -1
        if np.random.random() < 0.15:
            partner = np.random.randint(nodes)
            if device[partner] != b or not np.isfinite(seconds[a, partner]):
                continue
            shift(partner, b, a, device, state, graph, costs)
        possible = allowed(
            node, b, device, state, stage, ordered, pred_starts, preds, succ_starts, succs, costs, graph, (limit, need)
        )
        if possible:
            shift(node, a, b, device, state, graph, costs)
            if partner >= 0:
                possible = bytes_held[a] + need[partner] <= limit[a]
                if ordered:
                    for k in range(pred_starts[partner], pred_starts[partner + 1]):
                        possible = possible and stage[device[preds[k]]] <= stage[a]
                    for k in range(succ_starts[partner], succ_starts[partner + 1]):
                        possible = possible and stage[device[succs[k]]] >= stage[a]
            worst, after = judged(state, rule, scale)
            if possible and after - energy <= -temperature * np.log(1.0 - np.random.random()):
                energy = after
                if worst < least * (1.0 - 1e-12):
                    least = worst
                    for each in range(len(best)):  # numba takes seconds to compile a copy from slice to slice
                        best[each] = device[each]
                continue
            shift(node, b, a, device, state, graph, costs)
        if partner >= 0:
            shift(partner, a, b, device, state, graph, costs)
    return best, least
