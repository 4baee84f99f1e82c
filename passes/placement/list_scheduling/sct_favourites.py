"""The favourite child of each node, from the relaxed linear program of SCT.

Hanen and Munier 1995; Baechi (SoCC 2020, section 3.3). On infinitely many devices without memory limits or
contention, at most one successor of a node can follow it without a transfer, and likewise at most one predecessor
can precede it. The program decides for which edges that is worth most; HiGHS solves it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxplace.errors import ExecutionError
from onnxplace.graph.op_graph import Floats, Ints, sum_by
from onnxplace.problem import PlacementProblem
from onnxplace.utils.linear_programs import LinearProgram

# Tolerance of the solver around 0 and 1.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Edges:
    """Edges between nodes, with the seconds of a transfer along each."""

    source: Ints
    destination: Ints
    seconds: Floats


def transfer_edges(problem: PlacementProblem) -> Edges:
    """Return the edges between nodes, with the seconds to send all their values over the mean link."""
    graph = problem.graph
    links = problem.target.remote_link_arrays()
    mean_latency, mean_byte = (float(array.mean()) if array.size else 0.0 for array in links)
    inner = graph.producer[graph.inputs.items] >= 0
    values, readers = graph.inputs.items[inner], graph.inputs.rows[inner]
    count = max(len(graph), 1)
    key, index = np.unique(graph.producer[values].astype(np.int64) * count + readers, return_inverse=True)
    seconds: Floats = mean_latency + graph.value_bytes[values] * np.float64(mean_byte)
    total = sum_by(index.astype(np.int32), seconds, len(key))
    return Edges((key // count).astype(np.int32), (key % count).astype(np.int32), total)


def favourite_children(node_seconds: Floats, edges: Edges, threshold: float) -> Ints:
    """Return the favourite child of each node, -1 for none.

    Minimise W subject to `s_i + w_i + c_e x_e <= s_j`, `s_i + w_i <= W`, at most one edge out of each node and one into
    each node with `x_e = 0`; `0 <= x_e <= 1`. An edge is favourite if `x_e <= threshold`. Where two edges of one node
    are (possible from 0.5 on), the one of lower x, then of lower index, is. Deterministic: one thread, dual simplex.

    The program has many optima, which differ in edges off the critical path. A maximal one is chosen: edges between
    nodes without any favourite edge are added, longest first.
    """
    favourite = np.full(len(node_seconds), -1, dtype=np.int32)
    if not len(edges.source):
        return favourite
    remote_share = solve_relaxation(node_seconds, edges)
    nodes, source, destination = len(node_seconds), edges.source, edges.destination
    # Nodes whose edges out of them, or into them, are all transfers in the program's optimum.
    may_stay_source = sum_by(source, 1.0 - remote_share, nodes) < TOLERANCE
    idle_destination = sum_by(destination, 1.0 - remote_share, nodes) < TOLERANCE
    chosen = np.flatnonzero(remote_share <= threshold + TOLERANCE)
    candidates = np.flatnonzero(may_stay_source[source] & idle_destination[destination])
    chosen = chosen[np.lexsort((chosen, remote_share[chosen]))]
    candidates = candidates[np.lexsort((candidates, -edges.seconds[candidates]))]
    has_parent = np.zeros(nodes, dtype=bool)
    for edge in [*chosen.tolist(), *candidates.tolist()]:
        i, j = int(source[edge]), int(destination[edge])
        if favourite[i] < 0 and not has_parent[j]:
            favourite[i] = j
            has_parent[j] = True
    return favourite


def solve_relaxation(node_seconds: Floats, edges: Edges) -> Floats:
    """Return x per edge of the relaxed program: 0 for a local edge, 1 for a transfer."""
    import highspy

    nodes, count = len(node_seconds), len(edges.source)
    source, destination = edges.source.astype(np.int64), edges.destination.astype(np.int64)
    # Times near 1 suit the solver's tolerances, which are absolute.
    scale = max(float(node_seconds.max()), float(edges.seconds.max()), 1e-12)
    weight, cost = node_seconds / scale, edges.seconds / scale
    program = LinearProgram()
    # Columns: x per edge, the start of each node, and the end of all.
    is_remote = program.add_columns(count, upper=1.0)
    start = program.add_columns(nodes)
    (end,) = program.add_columns(1, cost=1.0)
    # s_j - s_i - c_e x_e >= w_i
    columns = np.stack([is_remote, start[source], start[destination]], axis=1)
    program.add_rows(columns, np.stack([-cost, -np.ones(count), np.ones(count)], axis=1), lower=weight[source])
    # W - s_i >= w_i, for nodes without successors; the others follow from them
    sinks = np.setdiff1d(np.arange(nodes), source)
    program.add_rows(np.stack([start[sinks], np.full(len(sinks), end)], axis=1), [-1.0, 1.0], lower=weight[sinks])
    # sum of x over the edges out of a node >= its out-degree - 1; likewise into a node
    for ends in (source, destination):
        by_node = np.split(np.argsort(ends, kind="stable"), np.cumsum(np.bincount(ends, minlength=nodes))[:-1])
        for own in by_node:
            if len(own) > 1:
                program.add_rows(is_remote[own], 1.0, lower=len(own) - 1.0)
    solver = program.solve({"random_seed": 0, "solver": "simplex"})
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        status = solver.modelStatusToString(solver.getModelStatus())
        raise ExecutionError("P020", f"the linear program of m-SCT was not solved: {status}", where="m-sct")
    return np.asarray(solver.getSolution().col_value, dtype=np.float64)[:count]
