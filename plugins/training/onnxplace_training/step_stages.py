"""Cut a training step into consecutive stages: how deep each node lies in the forward pass, and cuts by depth.

Nodes that belong together form one unit: groups, the parts of one node of the undivided step, and what reaches only one
unit's new states (its gradient, moments and update). A unit with forward nodes has the depth of their middle. Backward
nodes without a unit of that kind have the depth of the activations that they read, or of their neighbours. A cut
between two depths puts all units before it on earlier stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from onnxplace.facts import MicroBatches, Profile
from onnxplace.graph.lifetimes import sum_alive
from onnxplace.graph.op_graph import Bools, Floats, Ints, OpGraph, find_root, sum_by
from onnxplace.model_metadata import Phase
from onnxplace.state import State

UNKNOWN = -1.0

# How far a cut may be from where stages are of equal time, in shares of the step; and the window around each of these
# places in which the cut with the fewest bytes is taken.
_SHIFTS = (0.0, -0.03, 0.03, -0.07, 0.07)
_WINDOW = 0.015
# With more cuts, each one stays where stages are of equal time.
_MAX_SHIFTED_CUTS = 2


def find_backward_nodes(state: State) -> Bools:
    """Return, per node of the profile's graph, whether it is not part of the forward pass.

    The profile of a training step knows; a cost graph may mark its backward nodes. In other graphs, all are forward.
    """
    profile = state[Profile]
    if profile.training is not None:
        backward = profile.training.phase != Phase.FORWARD
    elif profile.backward is not None:
        backward = profile.backward.copy()
    else:
        backward = np.zeros(len(profile.graph), dtype=bool)
    return _mark_exchanges(state, backward)


def _mark_exchanges(state: State, backward: Bools) -> Bools:
    """Mark nodes that cut, join or add up parts as the nodes whose values they take."""
    if MicroBatches not in state:
        return backward
    graph, source = state[Profile].graph, state[MicroBatches].source
    for node in graph.order.tolist():
        if source[node] < 0:
            before = graph.predecessors[node]
            backward[node] = bool(len(before)) and bool(backward[before].any())
    return backward


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
    first: dict[int, int] = {}
    for node_group, node_source in zip(group.tolist(), source.tolist()):
        if node_source >= 0:
            one, other = find_root(parent, node_group), find_root(parent, first.setdefault(node_source, node_group))
            parent[max(one, other)] = min(one, other)
    roots = np.array([find_root(parent, item) for item in range(len(parent))], dtype=np.int32)
    return np.unique(roots[group], return_inverse=True)[1].astype(np.int32)


def _join_owned(graph: OpGraph, unit: Ints, is_backward: Bools) -> Ints:
    """Return units that also hold the backward nodes that only they use: gradients, moments and updates.

    A node that several units use, such as a bias correction or the norm of all gradients, keeps its own unit.
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


def list_stage_cuts(graph: OpGraph, layers: StepLayers, shares: Sequence[float]) -> Iterator[Ints]:
    """Yield the stage of each node, for cuts without repeats, first the one that balances times the best.

    Args:
        graph: The training step.
        layers: Its units.
        shares: Share of the time, by stage.
    """
    order = np.argsort(layers.depth, kind="stable").astype(np.int32)
    elapsed = np.cumsum(layers.seconds[order])
    total = max(float(elapsed[-1]), 1e-30) if len(elapsed) else 1e-30
    crossing = _crossing_bytes(graph, layers, order)
    goals = np.cumsum(shares)[:-1] / sum(shares)
    shifts = _SHIFTS if len(goals) <= _MAX_SHIFTED_CUTS else (0.0,)
    seen: set[tuple[int, ...]] = set()
    # Balanced cuts first, then those that are shifted a little, where fewer bytes may cross.
    for offsets in sorted(product(shifts, repeat=len(goals)), key=lambda item: sum(map(abs, item))):
        places = tuple(_place_cut(elapsed / total, crossing, goal + shift) for goal, shift in zip(goals, offsets))
        if places in seen or list(places) != sorted(places):
            continue
        seen.add(places)
        stage = np.searchsorted(np.array(places), np.argsort(order), side="right").astype(np.int32)
        yield stage[layers.unit]


def _crossing_bytes(graph: OpGraph, layers: StepLayers, order: Ints) -> Floats:
    """Return, per rank of a unit, the bytes that cross a cut before it."""
    position = np.argsort(order)[layers.unit]
    produced = np.flatnonzero(graph.producer >= 0)
    first = np.zeros(len(graph.producer), dtype=np.int64)
    first[produced] = position[graph.producer[produced]]
    last = first.copy()
    # A value crosses all cuts between its producer and its farthest reader, in whichever direction.
    np.minimum.at(first, graph.inputs.items, position[graph.inputs.rows])
    np.maximum.at(last, graph.inputs.items, position[graph.inputs.rows])
    return sum_alive(first[produced] + 1, last[produced] + 1, graph.value_bytes[produced], len(order))


def _place_cut(elapsed: Floats, crossing: Floats, goal: float) -> int:
    """Return the rank of the first unit behind a cut: near a share of the time, with the fewest bytes across."""
    before = np.concatenate([[0.0], elapsed[:-1]])
    near = np.flatnonzero(np.abs(before - goal) <= _WINDOW)
    if not len(near):
        return int(np.abs(before - goal).argmin())
    return int(near[crossing[near].argmin()])
