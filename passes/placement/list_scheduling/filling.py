"""Fill one device after the other in topological order: what m-TOPO does, for whoever wants such a placement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxplace.graph import Bools, Csr, Ints, Longs, sum_by
from onnxplace.problem import PlacementProblem, out_of_memory_error
from onnxplace.simulation import device_weights


def group_bytes(asked: PlacementProblem) -> Longs:
    """Return, per group, the bytes of weights, each once, of outputs and of workspaces together."""
    graph = asked.graph
    count = len(asked.pinned)
    made = np.flatnonzero(graph.producer >= 0)
    outputs = sum_by(asked.group[graph.producer[made]], graph.value_bytes[made], count)
    workspaces = sum_by(asked.group, graph.workspace_bytes, count)
    return device_weights(graph, asked.group, count) + (outputs + workspaces).astype(np.int64)


def _opening_bytes(asked: PlacementProblem) -> Longs:
    """Return, per group, what has to be free for it to go somewhere: its weights and its largest workspace."""
    largest = np.zeros(len(asked.pinned), dtype=np.int64)
    np.maximum.at(largest, asked.group, asked.graph.workspace_bytes)
    return device_weights(asked.graph, asked.group, len(asked.pinned)) + largest


def fill_devices(asked: PlacementProblem, placer: str = "m-topo") -> Ints:
    """Return the device of each node; raises InfeasibleError in the name of `placer` when the last device is full.

    Nodes are taken in topological order; see the pass `m-topo` for the rule.
    """
    graph, need, opening = asked.graph, group_bytes(asked), _opening_bytes(asked)
    devices = len(asked.target.devices)
    cap = int(need.sum()) // devices + int(need.max(initial=0))
    weights = Csr.grouped(asked.group[graph.weights.rows], graph.weights.items, len(asked.pinned))
    used = np.zeros(devices, dtype=np.int64)
    held = np.zeros((devices, len(graph.weight_bytes)), dtype=bool)
    held_bytes = np.zeros(devices, dtype=np.int64)
    home = asked.pinned.copy()
    for group in np.flatnonzero(home >= 0).tolist():
        used[home[group]] += need[group]
        held[home[group], weights[group]] = True
    held_bytes += held @ graph.weight_bytes
    current = 0
    for group in asked.group[graph.order].tolist():
        if home[group] < 0:
            own = weights[group]
            more = ~held[:, own] @ graph.weight_bytes[own]
            within_limit = held_bytes + more <= asked.limit_bytes
            fits = _fitting(range(current, devices), (used + opening[group] < cap) | (used == 0), within_limit)
            if fits is None:
                raise out_of_memory_error(asked, placer)
            home[group] = current = fits
            used[current] += need[group]
            held_bytes[current] += more[current]
            held[current, own] = True
    return home[asked.group].astype(np.int32)


def _fitting(candidates: Sequence[int], within_cap: Bools, within_limit: Bools) -> int | None:
    return next((index for index in candidates if within_cap[index] and within_limit[index]), None)
