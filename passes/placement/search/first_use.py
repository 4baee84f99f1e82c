"""Warm-ups that compile the loops of `auto` and `multilevel`, each on a graph of four nodes.

Each calls the functions that placers call, so that numba sees the same types. `onnxplace.driver.first_use` distributes
them to processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxplace.cost_graph import parse_cost_graph
from onnxplace.graph import is_acyclic
from onnxplace.passes.placement.grouping import Union, only_readers
from onnxplace.passes.placement.list_scheduling import plan
from onnxplace.passes.placement.search.heft_kernels import critical_path_plan
from onnxplace.passes.placement.search.placement_search import Budget, SearchSpace, coarsen, decode_candidate, improve
from onnxplace.passes.profiling import find_repeats
from onnxplace.problem import PlacementProblem, placement_problem
from onnxplace.simulation import lower_bound_seconds


def run_warm_ups(names: Sequence[str]) -> None:
    """Run warm-ups by name."""
    problem = _small_problem()
    for name in names:
        WARM_UPS[name](problem)


def _small_problem() -> PlacementProblem:
    """Return a diamond on two devices."""
    nodes: list[dict[str, Any]] = [
        {"id": i, "compute_time_us": 9, "memory_bytes": 8, "temp_bytes": 8} for i in range(4)
    ]
    edges = [{"src": a, "dst": b, "bytes": 8} for a, b in ((0, 1), (0, 2), (1, 3), (2, 3))]
    devices = [{"id": d, "memory_bytes": 1 << 20} for d in range(2)]
    graph = parse_cost_graph({"devices": devices, "nodes": nodes, "edges": edges, "comm": {"intercept_us": 1}})
    return placement_problem(graph.state())


def _compile_groups(problem: PlacementProblem) -> None:
    nodes = np.arange(len(problem.graph), dtype=np.int32)
    union = Union(np.full(len(nodes), -1, dtype=np.int32))
    union.join(nodes[:0], nodes[:0], "")
    union.groups()


def _compile_layers(problem: PlacementProblem) -> None:
    """Compile the loops for models only: find repeated layers, check that contracted kernels make no cycle."""
    graph, nodes = problem.graph, np.arange(len(problem.graph), dtype=np.int32)
    find_repeats(nodes, graph)
    is_acyclic(nodes, len(nodes), graph.producer, graph.inputs.starts, graph.inputs.items)


def _compile_readers(problem: PlacementProblem) -> None:
    only_readers(problem.graph, problem.seconds, problem.target, np.ones(len(problem.graph), dtype=bool), True)


def _compile_lists(problem: PlacementProblem) -> None:
    plan(problem, problem.limit_bytes, np.full(len(problem.graph), -1, dtype=np.int32), False)


def _compile_simulation(problem: PlacementProblem) -> None:
    problem.simulate(np.zeros(len(problem.graph), dtype=np.int32), problem.graph.order)


def _compile_paths(problem: PlacementProblem) -> None:
    critical_path_plan(problem, SearchSpace(problem).wiring, 0.5)


def _compile_bounds(problem: PlacementProblem) -> None:
    lower_bound_seconds(problem.graph, problem.seconds, problem.target, problem.group, problem.pinned)


def _compile_levels(problem: PlacementProblem) -> None:
    coarsen(problem)


def _compile_search(problem: PlacementProblem) -> None:
    space, count = SearchSpace(problem), len(problem.graph)
    start = decode_candidate(space, "", np.zeros(count, dtype=np.int32), np.zeros(count), 1.0)
    improve(space, start, Budget(0, 1), 0)


WARM_UPS: Mapping[str, Callable[[PlacementProblem], None]] = {
    "layers": _compile_layers,
    "groups": _compile_groups,
    "readers": _compile_readers,
    "lists": _compile_lists,
    "simulation": _compile_simulation,
    "paths": _compile_paths,
    "bounds": _compile_bounds,
    "levels": _compile_levels,
    "search": _compile_search,
}
