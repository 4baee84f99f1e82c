"""Coarser versions of a problem: what is cheaper to move together than apart becomes one node."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from onnxplace.graph import Ints
from onnxplace.passes.placement.grouping import contract, first_equal, join_light_groups, number_sets
from onnxplace.problem import PlacementProblem

# How much of an even share of all work a node may hold on each coarser level.
SHARES = (0.01, 0.03, 0.1, 0.3)
# A level that has more than this part of the groups of the one below is not worth having.
SHRINKS = 0.9


@dataclass(frozen=True)
class Level:
    """A problem, and how it came from the finer one."""

    problem: PlacementProblem
    cluster: Ints
    """The node here of each node of the finer level."""


def coarsen(asked: PlacementProblem) -> list[Level]:
    """Return the problem itself and its coarser versions, the coarsest last."""
    found = [Level(asked, np.arange(len(asked.graph), dtype=np.int32))]
    if len(asked.target.devices) < 2:
        return found
    work = float(asked.seconds.min(axis=0).sum()) / len(asked.target.devices)
    for share in SHARES:
        coarse = _coarser(found[-1].problem, share * work)
        if len(coarse.problem.pinned) <= SHRINKS * len(found[-1].problem.pinned):
            found.append(coarse)
    return found


def _coarser(fine: PlacementProblem, most_seconds: float) -> Level:
    """Join what the longest transfers connect, as long as a group has no more work than that; contract what it can.

    The heaviest edges go first, as in Kruskal's algorithm and in multilevel graph partitioning. All readers of a value
    have to be with it to save its transfer, so that each edge weighs its share of that. Groups need not be convex:
    only what makes no cycle becomes one node.
    """
    graph, count = fine.graph, len(fine.graph)
    pin = fine.pinned[fine.group].astype(np.int32)
    parent, load, every = np.arange(count, dtype=np.int32), fine.seconds.min(axis=0), np.arange(count, dtype=np.int32)
    join_light_groups(parent, pin, load, first_equal(fine.group).astype(np.int32), every, np.inf)
    inner = graph.producer[graph.inputs.items] >= 0
    value, reader = graph.inputs.items[inner], graph.inputs.rows[inner]
    latency, per_byte = fine.target.link_arrays()
    apart = ~np.eye(len(latency), dtype=bool)
    transfer = latency[apart].mean() + graph.value_bytes[value] * per_byte[apart].mean()
    heaviest = np.lexsort((reader, value, -transfer / np.bincount(value)[value]))
    join_light_groups(parent, pin, load, graph.producer[value[heaviest]], reader[heaviest], most_seconds)
    group, groups = number_sets(parent)
    cluster = contract(group, every, graph.producer, graph.inputs.starts, graph.inputs.items)
    pinned = np.full(groups, -1, dtype=np.int32)
    np.maximum.at(pinned, group, fine.pinned[fine.group])
    return Level(replace(fine, group=group, pinned=pinned).contracted(cluster), cluster)
