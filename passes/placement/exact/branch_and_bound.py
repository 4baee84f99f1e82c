"""Breadth-first branch and bound over partial steps, with dominance and layers of limited width.

A state is a part of a step: the nodes that have started, where, and when devices and channels are free. An action
starts one node on a device or sends one value. Layer k has the best states after k actions: children whose lower bound
exceeds the threshold are cut off, and so are those that another state with the same nodes dominates. If all children
fit into the width of each layer, the least bound of what was cut off is a proof; otherwise the least bound of what was
dropped limits it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np

from onnxplace.graph.op_graph import Bools, Csr, Floats, Ints, Longs, OpGraph
from onnxplace.passes.placement.exact.bound_kernels import compute_distances, compute_far_tails, fill_level
from onnxplace.passes.placement.exact.branch_kernels import (
    Children,
    ProblemTables,
    StateLayer,
    expand_states,
    select_states,
)
from onnxplace.passes.placement.exact.state_kernels import NEVER
from onnxplace.problem import PlacementProblem, interchangeable_devices
from onnxplace.simulation.lower_bounds import heads_and_tails, node_bytes

# A set of nodes is the bits of one integer of 64 bits; all tuples of destinations are enumerated.
MAX_NODES, MAX_DEVICES = 62, 4
# States expanded between two looks at the clock.
STATES_PER_CALL = 500
# Weight of the guide next to the bound when states are ranked.
# The guide only ranks states, so the proof does not depend on it.
GUIDE_WEIGHT = 1.0
# Joins that bound every state: those with the largest bounds at the start; each costs a pass over the nodes before it.
MAX_JOINS = 6
# Complete steps per layer that are simulated; more of them until one fits.
MAX_SIMULATED, MAX_SIMULATED_FIRST = 16, 500


def held_bytes(graph: OpGraph, group: Ints, before: Bools) -> Floats:
    """Return [node, group]: bytes on the group's device while the node runs, in any schedule.

    These values are produced by a member of the group that must run before the node, and read by one that must run
    after it. Inputs of the node itself are left out, and so are views. `before` is that of `reachable`. O(N V).
    """
    held = np.zeros((len(graph), int(group.max(initial=-1)) + 1))
    values = np.flatnonzero((graph.producer >= 0) & (graph.alias < 0) & (graph.value_bytes > 0))
    for value in values.tolist():
        producer, readers = int(graph.producer[value]), graph.readers[value]
        group_of_producer = int(group[producer])
        readers_in_group = readers[group[readers] == group_of_producer]
        if len(readers_in_group):
            between = before[:, producer] & before[readers_in_group].any(axis=0)
            between[readers] = False
            held[between, group_of_producer] += graph.value_bytes[value]
    return held


def reachable(order: Ints, predecessors: Csr) -> Bools:
    """Return [node, predecessor]: whether a path leads from the predecessor to the node."""
    before = np.zeros((len(order), len(order)), dtype=bool)
    for node in order.tolist():
        for predecessor in predecessors[node].tolist():
            before[node] |= before[predecessor]
            before[node, predecessor] = True
    return before


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    bound_seconds: float
    """Lower bound on all steps, within the model of the search."""
    makespan_seconds: float
    """Simulated, of the best step; infinite if none was shorter than the known one."""
    device: Ints
    order: Ints
    complete: bool
    """Whether no state was dropped for want of width or time."""


def build_tables(problem: PlacementProblem) -> ProblemTables:
    """Return the tables of a problem of at most MAX_NODES nodes and MAX_DEVICES devices."""
    graph, devices = problem.graph, len(problem.target.devices)
    # Only values with a producer and a reader are sent; others are left out of the tables.
    inner = np.flatnonzero((graph.producer >= 0) & (np.diff(graph.readers.starts) > 0))
    number = np.full(len(graph.value_names), -1, dtype=np.int32)
    number[inner] = np.arange(len(inner), dtype=np.int32)
    latency, per_byte = problem.target.link_arrays()
    send = latency[None] + graph.value_bytes[inner][:, None, None] * per_byte[None]
    send[:, np.arange(devices), np.arange(devices)] = 0.0
    inputs, outputs = (
        Csr.of([number[row][number[row] >= 0].tolist() for row in (part[node] for node in range(len(graph)))])
        for part in (graph.inputs, graph.outputs)
    )
    readers = Csr.of([graph.readers[int(value)].tolist() for value in inner])
    bits = np.int64(1) << np.arange(len(graph), dtype=np.int64)
    group_mask = np.zeros(len(problem.pinned), dtype=np.int64)
    np.bitwise_or.at(group_mask, problem.group, bits)
    weight_bytes, needed_bytes = _own_weight_bytes(problem), _needed_bytes(problem)
    reach = heads_and_tails(graph, problem.seconds, problem.target)
    crossing = _crossing_seconds(problem, send, inner)
    tail: Floats = compute_far_tails(graph.order, *graph.successors.arrays, crossing, reach.least, reach.tail)
    interchangeable = interchangeable_devices(problem)
    # Permutations that only exchange interchangeable devices, and ordered choices of destinations for one value.
    all_shuffles = np.array(list(permutations(range(devices))), dtype=np.int32)
    shuffles = all_shuffles[(interchangeable[all_shuffles] == interchangeable).all(axis=1)]
    uses = problem.target.processors.astype(np.int64)
    tuples = [[*p, *[-1] * (devices - k)] for k in range(devices) for p in permutations(range(devices), k)]
    return ProblemTables(
        devices=devices, group=problem.group.astype(np.int32), group_mask=group_mask, group_bytes=weight_bytes,
        node_bytes=needed_bytes, value_bytes=graph.value_bytes[inner].astype(np.float64),
        limit=problem.limit_bytes.astype(np.float64), allowed=_allowed(problem, weight_bytes, needed_bytes),
        alike=interchangeable, conflicts=problem.target.conflicts, uses=uses @ (1 << np.arange(uses.shape[1])),
        seconds=problem.seconds, least=problem.seconds.min(axis=0), send=send,
        least_work=(problem.seconds * uses.sum(axis=1, keepdims=True)).min(axis=0),
        order=graph.order, by_tail=np.argsort(-tail, kind="stable").astype(np.int32), tail=tail,
        in_starts=inputs.starts, ins=inputs.items, out_starts=outputs.starts, outs=outputs.items,
        read_starts=readers.starts, readers=readers.items, read_mask=_build_masks(readers, bits),
        before_mask=_build_masks(graph.predecessors, bits), **_choose_joins(problem, crossing, reach.least, tail),
        tuples=np.array(tuples, dtype=np.int32), shuffles=shuffles,
        free_links=problem.target.link_model == "parallel" or devices == 1,
        one_channel=problem.target.link_model == "sequential",
        receives=False, delays=False, in_turn=0, careful=False, patient=False,
    )  # fmt: skip


def _needed_bytes(problem: PlacementProblem) -> Floats:
    """Return, per node, the bytes next to weights that its device certainly holds while it runs."""
    graph = problem.graph
    waiting = held_bytes(graph, problem.group, reachable(graph.order, graph.predecessors))
    needed: Floats = node_bytes(graph).astype(np.float64) + waiting[np.arange(len(graph)), problem.group]
    return needed


def _allowed(problem: PlacementProblem, weight_bytes: Floats, needed_bytes: Floats) -> Bools:
    """Return [group, device]: whether the device takes the group, and pins and memory allow it there."""
    largest = np.zeros(len(problem.pinned))
    np.maximum.at(largest, problem.group, needed_bytes)
    allowed: Bools = weight_bytes[:, None] + largest[:, None] <= problem.limit_bytes[None]
    allowed &= ~problem.refused_groups.T
    allowed &= (problem.pinned[:, None] < 0) | (problem.pinned[:, None] == np.arange(len(problem.limit_bytes)))
    return allowed


def _build_masks(lists: Csr, bits: Longs) -> Longs:
    masks = np.zeros(len(lists), dtype=np.int64)
    np.bitwise_or.at(masks, lists.rows, bits[lists.items])
    return masks


def _own_weight_bytes(problem: PlacementProblem) -> Floats:
    """Return, per group, the bytes of weights that no other group reads."""
    weights, count = problem.graph.weights, len(problem.graph.weight_names)
    readers = Csr.grouped(weights.items, problem.group[weights.rows].astype(np.int32), count)
    # A weight that several groups read may be stored anyway, so it is not counted: the account stays a lower bound.
    own = np.flatnonzero(np.diff(readers.starts) == 1)
    first = readers.items[readers.starts[own]]
    return np.bincount(first, problem.graph.weight_bytes[own], len(problem.pinned)).astype(np.float64)


def _crossing_seconds(problem: PlacementProblem, send: Floats, inner: Longs) -> Floats:
    """Return, per edge of `successors`, the least seconds of a transfer, NEVER where both ends share a device.

    `send` is [inner value, source, destination].
    """
    graph, after = problem.graph, problem.graph.successors
    off_diagonal = ~np.eye(len(problem.target.devices), dtype=bool)
    least = np.zeros(len(graph.value_names))
    least[inner] = send[:, off_diagonal].min(axis=1, initial=NEVER)
    crossing = np.full(len(after.items), NEVER)
    for edge, (node, reader) in enumerate(zip(after.rows, after.items)):
        if problem.group[node] != problem.group[reader]:
            sent_values = np.intersect1d(graph.outputs[int(node)], graph.inputs[int(reader)])
            crossing[edge] = least[sent_values].max()
    return crossing


def _choose_joins(problem: PlacementProblem, crossing: Floats, least: Floats, tail: Floats) -> dict[str, Any]:
    """Return the fields of `ProblemTables` about the joins that bound the step best."""
    graph, after = problem.graph, problem.graph.successors
    distance, remote = compute_distances(graph.order, after.starts, after.items, crossing, least)
    # Rank joins by the bound that they give at the start, where every device is open at time 0.
    opening, bounds = np.zeros(len(problem.target.devices)), np.zeros(len(graph))
    nodes_before = [np.flatnonzero(distance[:, join] >= 0).astype(np.int32) for join in range(len(graph))]
    nodes_before = [nodes[np.argsort(-remote[nodes, join], kind="stable")] for join, nodes in enumerate(nodes_before)]
    for join, nodes in enumerate(nodes_before):
        nearest = np.minimum.accumulate(distance[nodes, join])
        later_opening, totals = remote[nodes, join] - nearest, np.cumsum(least[nodes])
        levels = [fill_level(opening, 0, 0.0, *pair) for pair in zip(later_opening.tolist(), totals.tolist())]
        bounds[join] = (np.array(levels) + nearest).max(initial=0.0) + least[join] + tail[join]
    joins = np.argsort(-bounds, kind="stable")[:MAX_JOINS].astype(np.int32)
    join_lists = Csr.of([nodes_before[join] for join in joins.tolist()])
    ends = joins[join_lists.rows]
    return {
        "joins": joins,
        "join_starts": join_lists.starts,
        "join_nodes": join_lists.items,
        "join_distance": distance[join_lists.items, ends],
        "join_remote": remote[join_lists.items, ends],
    }


def branch_and_bound_search(
    problem: PlacementProblem, tables: ProblemTables, upper_seconds: float, gap: float, width: int, deadline: float
) -> SearchResult:
    """Search for a step that is shorter than `upper_seconds` by the share `gap`.

    Layer k holds the best `width` states after k actions. `deadline` is a time of `time.perf_counter`.
    """
    # A layer keeps whole states. Earlier layers keep only parents and actions, from which `_replay_actions` derives the
    # placement of a complete state.
    layer = _root_layer(tables)
    history: list[tuple[Ints, Ints]] = []
    empty = np.zeros(0, dtype=np.int32)
    result = SearchResult(upper_seconds, np.inf, empty, empty, True)
    # Invariant: no step is shorter than the least of `result.bound_seconds` and the bounds of the layer.
    while len(layer.masks):
        threshold = min(upper_seconds, result.makespan_seconds) * (1 - gap)
        children = _GrowingChildren(4096)
        cut = NEVER
        for first in range(0, len(layer.masks), STATES_PER_CALL):
            cut = min(cut, children.add(layer, first, threshold, tables))
            # Out of time. Children are never bounded lower than their parents, so the bounds of this layer hold for
            # all that was not expanded.
            if time.perf_counter() > deadline:
                open_bound = min(cut, float(layer.bounds.min()))
                return replace(result, bound_seconds=min(result.bound_seconds, open_bound), complete=False)
        layer, parents, actions, dropped = _next_layer(layer, children, width, tables)
        history.append((parents, actions))
        is_complete = layer.masks == np.int64((1 << len(tables.group)) - 1)
        bound = min(result.bound_seconds, cut, dropped)
        # Complete states leave the layer: sends are actions too, so not all steps complete in one layer. The best by
        # their own account are simulated, which also checks memory.
        if is_complete.any():
            ends = layer.reals[:, 1 : 1 + tables.devices].max(axis=1)
            bound = min(bound, float(ends[is_complete].min()))
            ranked = np.flatnonzero(is_complete)[np.argsort(ends[is_complete], kind="stable")]
            max_simulated = MAX_SIMULATED if np.isfinite(threshold) else MAX_SIMULATED_FIRST
            result = _simulate_complete(problem, result, history, ranked[:max_simulated])
            layer = layer.select(~is_complete)
            history[-1] = (parents[~is_complete], actions[~is_complete])
        result = replace(result, bound_seconds=bound, complete=result.complete and dropped >= NEVER)
    return result


def _root_layer(tables: ProblemTables) -> StateLayer:
    devices, groups, values = tables.devices, len(tables.group_mask), len(tables.read_mask)
    reals = np.zeros((1, 1 + 7 * devices + values * devices))
    # No value is anywhere yet; no group has a device, and no device waits to send.
    reals[:, 1 + 7 * devices :] = NEVER
    ints = np.zeros((1, groups + 2 * devices + 1 + values), dtype=np.int32)
    ints[:, : groups + devices] = -1
    return StateLayer(reals, ints, np.zeros(1, dtype=np.int64), np.zeros(1))


class _GrowingChildren:
    """The children of a layer, in arrays that grow."""

    def __init__(self, capacity: int) -> None:
        integers = np.empty((2, capacity), dtype=np.int32)
        self.arrays, self.filled = Children(*integers, *np.empty((2, capacity))), 0

    def add(self, layer: StateLayer, begin: int, threshold: float, tables: ProblemTables) -> float:
        """Add the children of STATES_PER_CALL states; return the least bound of those cut off."""
        end, cut = min(begin + STATES_PER_CALL, len(layer.masks)), NEVER
        while begin < end:
            self.filled, least, begin = expand_states(layer, begin, end, threshold, tables, self.arrays, self.filled)
            cut = min(cut, least)
            # The output was full before the last state: double it and go on from there.
            if begin < end:
                self.arrays = Children._make(np.concatenate([part, np.empty_like(part)]) for part in self.arrays)
        return cut


def _next_layer(
    layer: StateLayer, children: _GrowingChildren, width: int, tables: ProblemTables
) -> tuple[StateLayer, Ints, Ints, float]:
    """Return the best undominated children, their parents and actions, and the least bound of dropped ones."""
    arrays = Children._make(part[: children.filled] for part in children.arrays)
    capacity = min(width, children.filled)
    ranked = np.argsort(arrays.bounds + GUIDE_WEIGHT * arrays.guides, kind="stable")
    reals, ints = np.empty((capacity, layer.reals.shape[1])), np.empty((capacity, layer.ints.shape[1]), dtype=np.int32)
    masks, chosen = np.empty((2, capacity), dtype=np.int64)
    selected = StateLayer(reals, ints, masks, np.empty(capacity))
    kept, looked_at = select_states(ranked, arrays, layer, tables, selected, chosen)
    # Dominated children need no bound: another state of the layer is at least as good. Dropped ones do.
    dropped = float(arrays.bounds[ranked[looked_at:]].min(initial=NEVER))
    chosen = chosen[:kept]
    next_layer = selected._replace(bounds=arrays.bounds[chosen]).select(np.s_[:kept])
    return next_layer, arrays.parents[chosen], arrays.actions[chosen], dropped


def _simulate_complete(
    problem: PlacementProblem, result: SearchResult, history: list[tuple[Ints, Ints]], candidates: Longs
) -> SearchResult:
    """Simulate complete states and keep the best one that fits."""
    for index in candidates.tolist():
        device, order = _replay_actions(history, index, len(problem.graph), len(problem.target.devices))
        step = problem.simulate(device, order)
        if step.makespan_seconds < result.makespan_seconds and not problem.excess_bytes(step).any():
            result = replace(result, makespan_seconds=step.makespan_seconds, device=device, order=order)
    return result


def _replay_actions(history: list[tuple[Ints, Ints]], index: int, nodes: int, devices: int) -> tuple[Ints, Ints]:
    """Return device and order of the nodes from the actions that led to a state."""
    codes = list[int]()
    for parents, actions in reversed(history):
        codes.append(int(actions[index]))
        index = int(parents[index])
    starts = np.array([code for code in reversed(codes) if code < nodes * devices], dtype=np.int32)
    device, order = np.empty(nodes, dtype=np.int32), starts // devices
    device[order] = starts % devices
    return device, order
