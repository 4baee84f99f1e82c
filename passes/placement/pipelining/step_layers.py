"""The depth of each node of a training step: how much of the forward pass comes before its layer.

Nodes that belong together form one unit: groups, the parts of one node of the undivided step, and what reaches only one
unit's new states (its gradient, moments and update). A unit with forward nodes has the depth of their middle. Backward
nodes without a unit of that kind have the depth of the activations that they read, or of their neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxplace.graph import Bools, Floats, Ints, OpGraph, sum_by

UNKNOWN = -1.0


@dataclass(frozen=True)
class StepLayers:
    """Units of a training step, with their depths."""

    unit: Ints
    """Dense id per node."""
    depth: Floats
    """Per unit, the seconds of the forward pass before its middle."""
    seconds: Floats
    """Per unit, what all its nodes take."""
    is_backward: Bools
    """Per node: part of the backward pass or the update."""


def find_layers(graph: OpGraph, seconds: Floats, group: Ints, source: Ints, is_backward: Bools) -> StepLayers:
    """Return the units of a training step and their depths. Near-linear.

    Args:
        graph: The step.
        seconds: Per node.
        group: Per node; nodes of one group share a device.
        source: Per node, its node in the undivided step, whose order is that of the layers; -1 for none.
        is_backward: Per node.
    """
    unit = _join(group, source)
    unit = _join_owned(graph, unit, is_backward)
    depth = _forward_depths(seconds, source, unit, is_backward)
    _spread_from_reads(graph, unit, depth, is_backward)
    _spread_from_neighbours(graph, unit, depth)
    depth[depth == UNKNOWN] = 0.0
    return StepLayers(unit, depth, sum_by(unit, seconds, len(depth)), is_backward)


def _join(group: Ints, source: Ints) -> Ints:
    """Return dense ids of the finest units that keep groups, and nodes of one source, together."""
    parent = list(range(int(group.max(initial=-1)) + 1))

    def root(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    first: dict[int, int] = {}
    for node_group, node_source in zip(group.tolist(), source.tolist()):
        if node_source >= 0:
            one, other = root(node_group), root(first.setdefault(node_source, node_group))
            parent[max(one, other)] = min(one, other)
    roots = np.array([root(item) for item in range(len(parent))], dtype=np.int32)
    return np.unique(roots[group], return_inverse=True)[1].astype(np.int32)


def _join_owned(graph: OpGraph, unit: Ints, is_backward: Bools) -> Ints:
    """Return units that also hold the backward nodes that only they use: gradients, moments and updates.

    A node that several units use, such as a bias correction or the norm of all gradients, keeps a unit of its own.
    """
    count = int(unit.max(initial=-1)) + 1
    has_forward = np.zeros(count, dtype=bool)
    has_forward[unit[~is_backward]] = True
    owner = np.where(has_forward, np.arange(count), -1).tolist()
    shared = -2
    order, units = graph.order.tolist(), unit.tolist()
    successors = graph.successors
    # Units are small, except those of states: their members are visited in reverse, so that readers come first.
    targets: dict[int, set[int]] = {}
    for node in reversed(order):
        own = units[node]
        if owner[own] >= 0 or not is_backward[node]:
            continue
        reached = targets.setdefault(own, set())
        for successor in successors[node].tolist():
            other = units[successor]
            if other == own:
                continue
            if owner[other] >= 0:
                reached.add(owner[other] if is_backward[successor] else shared)
            else:
                reached |= targets.get(other, {shared})
            if len(reached) > 1:
                targets[own] = reached = {shared, *reached}
    joined = np.arange(count)
    for own, reached in targets.items():
        if len(reached) == 1 and (target := next(iter(reached))) >= 0:
            joined[own] = target
    return np.unique(joined[unit], return_inverse=True)[1].astype(np.int32)


def _forward_depths(seconds: Floats, source: Ints, unit: Ints, is_backward: Bools) -> Floats:
    """Return the depth of each unit with forward nodes: their middle, weighted by time."""
    sources = int(source.max(initial=-1)) + 1
    is_forward = ~is_backward & (source >= 0)
    per_source = np.bincount(source[is_forward], seconds[is_forward], sources)
    before = np.cumsum(per_source) - per_source / 2
    count = int(unit.max(initial=-1)) + 1
    weight = np.bincount(unit[is_forward], seconds[is_forward] + 1e-12, count)
    total = np.bincount(unit[is_forward], (seconds[is_forward] + 1e-12) * before[source[is_forward]], count)
    return np.where(weight > 0, total / np.where(weight > 0, weight, 1.0), UNKNOWN)


def _spread_from_reads(graph: OpGraph, unit: Ints, depth: Floats, is_backward: Bools) -> None:
    """Give units without a depth that of the deepest unit whose forward values they read."""
    edges = graph.predecessors
    rows, items = edges.rows, edges.items
    known = ~is_backward[items] & (depth[unit[items]] != UNKNOWN) & (depth[unit[rows]] == UNKNOWN)
    deepest = np.full(len(depth), UNKNOWN)
    np.maximum.at(deepest, unit[rows[known]], depth[unit[items[known]]])
    depth[:] = np.where(depth == UNKNOWN, deepest, depth)


def _spread_from_neighbours(graph: OpGraph, unit: Ints, depth: Floats) -> None:
    """Give units without a depth the least of their producers, since gradients flow to lesser depths, or of readers."""
    for order, edges in ((graph.order, graph.predecessors), (graph.order[::-1], graph.successors)):
        for node in order.tolist():
            if depth[unit[node]] == UNKNOWN:
                depths = depth[unit[edges[node]]]
                depths = depths[depths != UNKNOWN]
                if len(depths):
                    depth[unit[node]] = depths.min()
