"""Errands that compile the loops of `auto` and `multilevel`, each on a graph of four nodes.

Each runs what placers run, so that numba sees the same types; `onnxplace.driver.first_use` shares them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxplace.cost_graph import parse_cost_graph
from onnxplace.graph import is_acyclic
from onnxplace.passes.placement.grouping import Union, only_readers
from onnxplace.passes.placement.list_scheduling import plan
from onnxplace.passes.placement.search.coarsening import coarsen
from onnxplace.passes.placement.search.heft_kernels import critical_path_plan
from onnxplace.passes.placement.search.search import Budget, SearchSpace, by_urgency, improve
from onnxplace.passes.profiling import find_repeats
from onnxplace.problem import PlacementProblem, placement_problem
from onnxplace.simulation import lower_bound_seconds


def run_errands(names: Sequence[str]) -> None:
    """Run errands by name."""
    small = _small_problem()
    for name in names:
        ERRANDS[name](small)


def _small_problem() -> PlacementProblem:
    """Return a diamond on two devices."""
    nodes: list[dict[str, Any]] = [
        {"id": i, "compute_time_us": 9, "memory_bytes": 8, "temp_bytes": 8} for i in range(4)
    ]
    edges = [{"src": a, "dst": b, "bytes": 8} for a, b in ((0, 1), (0, 2), (1, 3), (2, 3))]
    devices = [{"id": d, "memory_bytes": 1 << 20} for d in range(2)]
    graph = parse_cost_graph({"devices": devices, "nodes": nodes, "edges": edges, "comm": {"intercept_us": 1}})
    return placement_problem(graph.state())


def _groups(small: PlacementProblem) -> None:
    nodes = np.arange(len(small.graph), dtype=np.int32)
    union = Union(np.full(len(nodes), -1, dtype=np.int32))
    union.join(nodes[:0], nodes[:0], "")
    union.groups()


def _layers(small: PlacementProblem) -> None:
    """What is done with models only: find layers, check that what became one node makes no cycle."""
    graph, nodes = small.graph, np.arange(len(small.graph), dtype=np.int32)
    find_repeats(nodes, graph)
    is_acyclic(nodes, len(nodes), graph.producer, graph.inputs.starts, graph.inputs.items)


def _readers(small: PlacementProblem) -> None:
    only_readers(small.graph, small.seconds, small.target, np.ones(len(small.graph), dtype=bool), True)


def _lists(small: PlacementProblem) -> None:
    plan(small, small.limit_bytes, np.full(len(small.graph), -1, dtype=np.int32), False)


def _simulation(small: PlacementProblem) -> None:
    small.simulate(np.zeros(len(small.graph), dtype=np.int32), small.graph.order)


def _paths(small: PlacementProblem) -> None:
    critical_path_plan(small, SearchSpace(small).wiring, 0.5)


def _bounds(small: PlacementProblem) -> None:
    lower_bound_seconds(small.graph, small.seconds, small.target, small.group, small.pinned)


def _levels(small: PlacementProblem) -> None:
    coarsen(small)


def _search(small: PlacementProblem) -> None:
    ground, count = SearchSpace(small), len(small.graph)
    begin = by_urgency(ground, "", np.zeros(count, dtype=np.int32), np.zeros(count), 1.0)
    improve(ground, begin, Budget(0, 1), 0)


ERRANDS: Mapping[str, Callable[[PlacementProblem], None]] = {
    "layers": _layers,
    "groups": _groups,
    "readers": _readers,
    "lists": _lists,
    "simulation": _simulation,
    "paths": _paths,
    "bounds": _bounds,
    "levels": _levels,
    "search": _search,
}
