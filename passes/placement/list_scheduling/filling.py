"""Fill one device after the other in topological order: the rule of m-TOPO."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxplace.graph import Bools, Csr, Ints, Longs, sum_by
from onnxplace.problem import PlacementProblem, out_of_memory_error
from onnxplace.simulation import device_weights


def group_bytes(problem: PlacementProblem) -> Longs:
    """Return, per group, the total bytes of its weights (each once), outputs and workspaces."""
    graph = problem.graph
    count = len(problem.pinned)
    produced = np.flatnonzero(graph.producer >= 0)
    outputs = sum_by(problem.group[graph.producer[produced]], graph.value_bytes[produced], count)
    workspaces = sum_by(problem.group, graph.workspace_bytes, count)
    return device_weights(graph, problem.group, count) + (outputs + workspaces).astype(np.int64)


def _reserved_bytes(problem: PlacementProblem) -> Longs:
    """Return, per group, the bytes that must be free where it goes: its weights and its largest workspace."""
    largest = np.zeros(len(problem.pinned), dtype=np.int64)
    np.maximum.at(largest, problem.group, problem.graph.workspace_bytes)
    return device_weights(problem.graph, problem.group, len(problem.pinned)) + largest


def fill_devices(problem: PlacementProblem, placer: str = "m-topo") -> Ints:
    """Fill devices with nodes in topological order; return the device of each node.

    The pass `m-topo` states the rule.

    Raises:
        InfeasibleError: The last device is full; the error names `placer`.
    """
    graph, need_bytes, reserved = problem.graph, group_bytes(problem), _reserved_bytes(problem)
    devices = len(problem.target.devices)
    fill_bytes = int(need_bytes.sum()) // devices + int(need_bytes.max(initial=0))
    weights = Csr.grouped(problem.group[graph.weights.rows], graph.weights.items, len(problem.pinned))
    used = np.zeros(devices, dtype=np.int64)
    stored = np.zeros((devices, len(graph.weight_bytes)), dtype=bool)
    stored_bytes = np.zeros(devices, dtype=np.int64)
    group_device = problem.pinned.copy()
    for group in np.flatnonzero(group_device >= 0).tolist():
        used[group_device[group]] += need_bytes[group]
        stored[group_device[group], weights[group]] = True
    stored_bytes += stored @ graph.weight_bytes
    current = 0
    for group in problem.group[graph.order].tolist():
        if group_device[group] < 0:
            group_weights = weights[group]
            added_bytes = ~stored[:, group_weights] @ graph.weight_bytes[group_weights]
            within_limit = stored_bytes + added_bytes <= problem.limit_bytes
            destination = _first_fitting(
                range(current, devices), (used + reserved[group] < fill_bytes) | (used == 0), within_limit
            )
            if destination is None:
                raise out_of_memory_error(problem, placer)
            group_device[group] = current = destination
            used[current] += need_bytes[group]
            stored_bytes[current] += added_bytes[current]
            stored[current, group_weights] = True
    return group_device[problem.group].astype(np.int32)


def _first_fitting(candidates: Sequence[int], within_cap: Bools, within_limit: Bools) -> int | None:
    return next((index for index in candidates if within_cap[index] and within_limit[index]), None)
