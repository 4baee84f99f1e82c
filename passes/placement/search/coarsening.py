"""Coarser versions of a problem: nodes that are cheaper to move together become one node."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from onnxplace.graph import Ints
from onnxplace.passes.placement.grouping import contract, first_equal, join_light_groups, number_sets
from onnxplace.problem import PlacementProblem

# The most work of a node on each coarser level, as a share of one device's even part of all work.
WORK_SHARES = (0.01, 0.03, 0.1, 0.3)
# A level is kept only if it has at most this share of the groups of the one below.
MAX_SIZE_RATIO = 0.9


@dataclass(frozen=True)
class Level:
    """A problem, and its nodes' origin in the finer one."""

    problem: PlacementProblem
    cluster: Ints
    """The node of this level that each node of the finer level belongs to."""


def finest_level(problem: PlacementProblem) -> Level:
    """Return the problem itself as a level."""
    return Level(problem, np.arange(len(problem.graph), dtype=np.int32))


def coarsen(problem: PlacementProblem) -> list[Level]:
    """Return the problem itself and its coarser versions, the coarsest last."""
    levels = [finest_level(problem)]
    if len(problem.target.devices) < 2:
        return levels
    work = float(problem.seconds.min(axis=0).sum()) / len(problem.target.devices)
    for share in WORK_SHARES:
        coarse = _coarsen_once(levels[-1].problem, share * work)
        if len(coarse.problem.pinned) <= MAX_SIZE_RATIO * len(levels[-1].problem.pinned):
            levels.append(coarse)
    return levels


def _coarsen_once(fine: PlacementProblem, max_seconds: float) -> Level:
    """Join groups along the longest transfers up to `max_seconds` of work each, and contract them.

    The heaviest edges go first, as in Kruskal's algorithm and in multilevel graph partitioning. A transfer is saved
    only if all readers of its value join the producer, so each edge weighs its share of the transfer. Groups need not
    be convex: nodes are contracted only where that makes no cycle.
    """
    graph, count = fine.graph, len(fine.graph)
    pin = fine.pinned[fine.group].astype(np.int32)
    parent, load, nodes = np.arange(count, dtype=np.int32), fine.seconds.min(axis=0), np.arange(count, dtype=np.int32)
    join_light_groups(parent, pin, load, first_equal(fine.group).astype(np.int32), nodes, np.inf)
    inner = graph.producer[graph.inputs.items] >= 0
    value, reader = graph.inputs.items[inner], graph.inputs.rows[inner]
    latency, per_byte = fine.target.link_arrays()
    remote = ~np.eye(len(latency), dtype=bool)
    transfer = latency[remote].mean() + graph.value_bytes[value] * per_byte[remote].mean()
    heaviest = np.lexsort((reader, value, -transfer / np.bincount(value)[value]))
    join_light_groups(parent, pin, load, graph.producer[value[heaviest]], reader[heaviest], max_seconds)
    group, groups = number_sets(parent)
    cluster = contract(group, nodes, graph.producer, graph.inputs.starts, graph.inputs.items)
    pinned = np.full(groups, -1, dtype=np.int32)
    np.maximum.at(pinned, group, fine.pinned[fine.group])
    return Level(replace(fine, group=group, pinned=pinned).contracted(cluster), cluster)
