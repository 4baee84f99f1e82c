"""The favourite child of each node: SCT's linear program, relaxed, solved by HiGHS and rounded.

Hanen and Munier 1995; Baechi (SoCC 2020, section 3.3). On infinitely many devices without memory limits or
contention, at most one successor of a node can follow it without a transfer, and each node can follow at most one
predecessor so. The program decides for which edge that is worth most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxplace.errors import ExecutionError
from onnxplace.graph import Floats, Ints


@dataclass(frozen=True)
class Edges:
    """The edges between nodes, with what a transfer along each costs in seconds."""

    source: Ints
    destination: Ints
    seconds: Floats


def favourite_children(node_seconds: Floats, edges: Edges, threshold: float) -> Ints:
    """Return the favourite child of each node, -1 for none.

    Minimise W subject to `s_i + w_i + c_e x_e <= s_j`, `s_i + w_i <= W`, at most one edge out of each node and one
    into each node with `x_e = 0`; `0 <= x_e <= 1`. An edge is favourite if `x_e <= threshold`; where two at one node
    are (possible from 0.5 on), the one of lower x, then of lower index, is. Deterministic: one thread, dual simplex.
    """
    favourite = np.full(len(node_seconds), -1, dtype=np.int32)
    if not len(edges.source):
        return favourite
    share = solve_relaxation(node_seconds, edges)
    taken = np.zeros(len(node_seconds), dtype=bool)
    for edge in np.lexsort((np.arange(len(share)), share)).tolist():
        if share[edge] > threshold + 1e-9:
            break
        i, j = int(edges.source[edge]), int(edges.destination[edge])
        if favourite[i] < 0 and not taken[j]:
            favourite[i] = j
            taken[j] = True
    return favourite


def solve_relaxation(node_seconds: Floats, edges: Edges) -> Floats:
    """Return x per edge of the relaxed program: 0 where the edge wants to be local, 1 where a transfer is fine."""
    import highspy

    nodes, count = len(node_seconds), len(edges.source)
    scale = max(float(node_seconds.max()), float(edges.seconds.max()), 1e-12)
    weight, cost = node_seconds / scale, edges.seconds / scale
    program = highspy.HighsLp()
    program.num_col_ = count + nodes + 1
    program.col_cost_ = np.r_[np.zeros(count + nodes), 1.0]
    program.col_lower_ = np.zeros(count + nodes + 1)
    program.col_upper_ = np.r_[np.ones(count), np.full(nodes + 1, highspy.kHighsInf)]
    rows = _rows(weight, cost, edges, highspy.kHighsInf)
    program.num_row_ = len(rows.lower)
    program.row_lower_, program.row_upper_ = rows.lower, rows.upper
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_, program.a_matrix_.index_, program.a_matrix_.value_ = rows.starts, rows.index, rows.value
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, value in (("output_flag", False), ("threads", 1), ("random_seed", 0), ("solver", "simplex")):
        solver.setOptionValue(option, value)
    solver.passModel(program)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        status = solver.modelStatusToString(solver.getModelStatus())
        raise ExecutionError("P020", f"the linear program of m-SCT was not solved: {status}", where="m-sct")
    return np.asarray(solver.getSolution().col_value, dtype=np.float64)[:count]


@dataclass(frozen=True)
class _Rows:
    """Constraints `lower <= A v <= upper`, A by rows."""

    lower: Floats
    upper: Floats
    starts: Ints
    index: Ints
    value: Floats


def _rows(weight: Floats, cost: Floats, edges: Edges, infinity: float) -> _Rows:
    nodes, count = len(weight), len(cost)
    source, destination = edges.source.astype(np.int64), edges.destination.astype(np.int64)
    each = np.arange(count)
    # s_j - s_i - c_e x_e >= w_i
    order_index = np.stack([each, count + source, count + destination], axis=1).ravel()
    order_value = np.stack([-cost, -np.ones(count), np.ones(count)], axis=1).ravel()
    # W - s_i >= w_i, for nodes without successors; the others follow from them
    sinks = np.setdiff1d(np.arange(nodes), source)
    end_index = np.stack([count + sinks, np.full(len(sinks), count + nodes)], axis=1).ravel()
    end_value = np.tile([-1.0, 1.0], len(sinks))
    # sum of x over the edges out of a node >= its out-degree - 1; likewise into a node
    parts, degrees = [], []
    for end in (source, destination):
        by_node = np.argsort(end, kind="stable")
        degree = np.bincount(end, minlength=nodes)
        several = degree > 1
        parts.append(by_node[several[end[by_node]]])
        degrees.append(degree[several])
    lengths = np.concatenate([np.full(count, 3), np.full(len(sinks), 2), *degrees])
    lower = np.concatenate([weight[source], weight[sinks], *[degree - 1.0 for degree in degrees]])
    index = np.concatenate([order_index, end_index, *parts])
    value = np.concatenate([order_value, end_value, np.ones(sum(len(part) for part in parts))])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return _Rows(lower, np.full(len(lower), infinity), starts.astype(np.int32), index.astype(np.int32), value)
