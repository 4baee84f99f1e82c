"""Breadth-first branch and bound over partial steps, with dominance; wider and wider until nothing is left out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from onnxplace.graph import Bools, Csr, Floats, Ints, Longs
from onnxplace.passes.placement.exact.branch_kernels import (
    NEVER,
    ProblemTables,
    distances,
    expand,
    far_tails,
    level,
    select,
)
from onnxplace.passes.placement.exact.residency import held_bytes, reachable
from onnxplace.passes.placement.search import interchangeable_devices
from onnxplace.problem import PlacementProblem
from onnxplace.simulation import heads_and_tails, node_bytes

# Sets of nodes are the bits of one integer; tuples of destinations are listed.
MAX_NODES, MAX_DEVICES = 62, 4
# States expanded between two looks at the clock.
STRIDE = 500
# How much the guide counts against the bound when states are ranked.
GUIDED = 1.0
# Joins that are looked at in every state.
JOINS = 6
# Complete steps per layer that are simulated, and as long as none is known that fits.
TRIED, TRIED_FIRST = 16, 500


@dataclass(frozen=True)
class SearchResult:
    """What a search found out."""

    bound_seconds: float
    """No step is shorter, as far as the search models it."""
    makespan_seconds: float
    """Simulated, of the best step found; infinite if none was better than what was known."""
    device: Ints
    order: Ints
    complete: bool
    """Nothing was left out for want of room or time."""


def build_tables(asked: PlacementProblem) -> ProblemTables:
    """Return the tables of a problem of at most MAX_NODES nodes and MAX_DEVICES devices."""
    graph, devices = asked.graph, len(asked.target.devices)
    inner = np.flatnonzero((graph.producer >= 0) & (np.diff(graph.readers.starts) > 0))
    number = np.full(len(graph.value_names), -1, dtype=np.int32)
    number[inner] = np.arange(len(inner), dtype=np.int32)
    latency, per_byte = asked.target.link_arrays()
    send = latency[None] + graph.value_bytes[inner][:, None, None] * per_byte[None]
    send[:, np.arange(devices), np.arange(devices)] = 0.0
    ins, outs = (
        Csr.of([number[row][number[row] >= 0].tolist() for row in (part[node] for node in range(len(graph)))])
        for part in (graph.inputs, graph.outputs)
    )
    readers = Csr.of([graph.readers[int(value)].tolist() for value in inner])
    bits = np.int64(1) << np.arange(len(graph), dtype=np.int64)
    group_mask = np.zeros(len(asked.pinned), dtype=np.int64)
    np.bitwise_or.at(group_mask, asked.group, bits)
    held, needed = _own_weights(asked), node_bytes(graph).astype(np.float64)
    waiting = held_bytes(graph, asked.group, reachable(graph.order, graph.predecessors))
    needed += waiting[np.arange(len(graph)), asked.group]
    largest = np.zeros(len(group_mask))
    np.maximum.at(largest, asked.group, needed)
    allowed = held[:, None] + largest[:, None] <= asked.limit_bytes[None]
    allowed &= (asked.pinned[:, None] < 0) | (asked.pinned[:, None] == np.arange(devices))
    around, crossing = heads_and_tails(graph, asked.seconds, asked.target), _crossing(asked, send, inner)
    after = graph.successors
    tail: Floats = far_tails(graph.order, after.starts, after.items, crossing, around.least, around.tail)
    like = interchangeable_devices(asked)
    shuffles = [p for p in permutations(range(devices)) if all(like[p[d]] == like[d] for d in range(devices))]
    choices = [[*p, *[-1] * (devices - k)] for k in range(devices) for p in permutations(range(devices), k)]
    return ProblemTables(
        devices, asked.group.astype(np.int32), group_mask, held, needed, graph.value_bytes[inner].astype(np.float64),
        asked.limit_bytes.astype(np.float64), allowed, like, asked.seconds, asked.seconds.min(axis=0), send,
        graph.order, np.argsort(-tail, kind="stable").astype(np.int32), tail, ins.starts, ins.items, outs.starts,
        outs.items, readers.starts, readers.items, _masks(readers, bits), _masks(graph.predecessors, bits),
        *_joins(asked, crossing, around.least, tail),
        np.array(choices, dtype=np.int32), np.array(shuffles, dtype=np.int32),
        asked.target.link_model == "parallel" or devices == 1, asked.target.link_model == "sequential",
        False, False, False, False,
    )  # fmt: skip


def _masks(lists: Csr, bits: Longs) -> Longs:
    masks = np.zeros(len(lists), dtype=np.int64)
    np.bitwise_or.at(masks, lists.rows, bits[lists.items])
    return masks


def _own_weights(asked: PlacementProblem) -> Floats:
    """Return, per group, the bytes of weights that it alone reads."""
    weights, count = asked.graph.weights, len(asked.graph.weight_names)
    readers = Csr.grouped(weights.items, asked.group[weights.rows].astype(np.int32), count)
    own = np.flatnonzero(np.diff(readers.starts) == 1)
    first = readers.items[readers.starts[own]]
    return np.bincount(first, asked.graph.weight_bytes[own], len(asked.pinned)).astype(np.float64)


def _crossing(asked: PlacementProblem, send: Floats, inner: Longs) -> Floats:
    """Return, per edge of `successors`, the least time of a transfer; never where both ends share a device.

    `send` is [inner value, source, destination].
    """
    graph, after = asked.graph, asked.graph.successors
    apart = ~np.eye(len(asked.target.devices), dtype=bool)
    least = np.zeros(len(graph.value_names))
    least[inner] = send[:, apart].min(axis=1, initial=NEVER)
    crossing = np.full(len(after.items), NEVER)
    for edge, (node, reader) in enumerate(zip(after.rows, after.items)):
        if asked.group[node] != asked.group[reader]:
            carried = np.intersect1d(graph.outputs[int(node)], graph.inputs[int(reader)])
            crossing[edge] = least[carried].max()
    return crossing


def _joins(
    asked: PlacementProblem, crossing: Floats, least: Floats, tail: Floats
) -> tuple[Ints, Longs, Ints, Floats, Floats]:
    """Return the joins that bound the step best, what comes before each, and how far from it."""
    graph, after = asked.graph, asked.graph.successors
    distance, remote = distances(graph.order, after.starts, after.items, crossing, least)
    opening, bounds = np.zeros(len(asked.target.devices)), np.zeros(len(graph))
    before = [np.flatnonzero(distance[:, join] >= 0).astype(np.int32) for join in range(len(graph))]
    before = [nodes[np.argsort(-remote[nodes, join], kind="stable")] for join, nodes in enumerate(before)]
    for join, nodes in enumerate(before):
        nearest = np.minimum.accumulate(distance[nodes, join])
        later, totals = remote[nodes, join] - nearest, np.cumsum(least[nodes])
        done = [level(opening, 0, 0.0, *each) for each in zip(later.tolist(), totals.tolist())]
        bounds[join] = (np.array(done) + nearest).max(initial=0.0) + least[join] + tail[join]
    joins = np.argsort(-bounds, kind="stable")[:JOINS].astype(np.int32)
    listed = Csr.of([before[join] for join in joins.tolist()])
    ends = joins[listed.rows]
    return joins, listed.starts, listed.items, distance[listed.items, ends], remote[listed.items, ends]


def branch_and_bound_search(
    asked: PlacementProblem, known: ProblemTables, upper_seconds: float, gap: float, width: int, deadline: float
) -> SearchResult:
    """Search for a step that is shorter than `upper_seconds` by the part `gap`, keeping `width` states per layer.

    Layer k holds states after k actions. `deadline` is a time of `time.perf_counter`.
    """
    layer = _first_layer(known)
    history: list[tuple[Ints, Ints]] = []
    nobody = np.zeros(0, dtype=np.int32)
    found = SearchResult(upper_seconds, np.inf, nobody, nobody, True)
    while len(layer.masks):
        threshold = min(upper_seconds, found.makespan_seconds) * (1 - gap)
        children = _Children(4096)
        cut = NEVER
        for begin in range(0, len(layer.masks), STRIDE):
            cut = min(cut, children.add(layer, begin, threshold, known))
            if time.perf_counter() > deadline:
                open_bound = min(cut, float(layer.bounds.min()))
                return SearchResult(
                    min(found.bound_seconds, open_bound), found.makespan_seconds, found.device, found.order,
                             False)  # fmt: skip
        layer, parents, actions, dropped = _next_layer(layer, children, width, known)
        history.append((parents, actions))
        done = layer.masks == np.int64((1 << len(known.group)) - 1)
        bound = min(found.bound_seconds, cut, dropped)
        if done.any():
            ends = layer.reals[:, 1 : 1 + known.devices].max(axis=1)
            bound = min(bound, float(ends[done].min()))
            ranked = np.flatnonzero(done)[np.argsort(ends[done], kind="stable")]
            most = TRIED if np.isfinite(threshold) else TRIED_FIRST
            found = _better(asked, found, history, ranked[:most])
            layer = layer.where(~done)
            history[-1] = (parents[~done], actions[~done])
        found = SearchResult(
            bound, found.makespan_seconds, found.device, found.order, found.complete and dropped >= NEVER
        )
    return found


@dataclass(frozen=True)
class _Layer:
    reals: Floats
    ints: Ints
    masks: Longs
    bounds: Floats

    def where(self, kept: Bools) -> _Layer:
        return _Layer(self.reals[kept], self.ints[kept], self.masks[kept], self.bounds[kept])


def _first_layer(known: ProblemTables) -> _Layer:
    devices, groups, values = known.devices, len(known.group_mask), len(known.read_mask)
    reals = np.zeros((1, 1 + 4 * devices + values * devices))
    reals[:, 1 + 4 * devices :] = NEVER
    ints = np.zeros((1, groups + 2 * devices + 1 + values), dtype=np.int32)
    ints[:, : groups + devices] = -1
    return _Layer(reals, ints, np.zeros(1, dtype=np.int64), np.zeros(1))


class _Children:
    """What the states of a layer lead to: parent, action and bound of each, in arrays that grow."""

    def __init__(self, room: int) -> None:
        self.parents = np.empty(room, dtype=np.int32)
        self.actions = np.empty(room, dtype=np.int32)
        self.bounds = np.empty(room)
        self.guides = np.empty(room)
        self.filled = 0

    def add(self, layer: _Layer, begin: int, threshold: float, known: ProblemTables) -> float:
        """Add the children of STRIDE states; returns the least bound of those that were cut off."""
        end, cut = min(begin + STRIDE, len(layer.masks)), NEVER
        while begin < end:
            self.filled, least, begin = expand(
                layer.reals, layer.ints, layer.masks, layer.bounds, begin, end, threshold, known, self.parents,
                self.actions, self.bounds, self.guides, self.filled,
            )  # fmt: skip
            cut = min(cut, least)
            if begin < end:
                self.parents, self.actions, self.bounds, self.guides = (
                    np.concatenate([part, np.empty_like(part)])
                    for part in (self.parents, self.actions, self.bounds, self.guides)
                )
        return cut


def _next_layer(
    layer: _Layer, children: _Children, width: int, known: ProblemTables
) -> tuple[_Layer, Ints, Ints, float]:
    """Return the best children that none dominates, their parents and actions, and the least bound of those dropped."""
    bounds = children.bounds[: children.filled]
    room = min(width, len(bounds))
    ranked = np.argsort(bounds + GUIDED * children.guides[: children.filled], kind="stable")
    reals, ints = np.empty((room, layer.reals.shape[1])), np.empty((room, layer.ints.shape[1]), dtype=np.int32)
    masks, chosen = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64)
    kept, looked_at = select(
        ranked, children.parents, children.actions, layer.reals, layer.ints, layer.masks, known, reals, ints, masks,
        chosen,
    )  # fmt: skip
    dropped = float(bounds[ranked[looked_at:]].min(initial=NEVER))
    chosen = chosen[:kept]
    made = _Layer(reals[:kept], ints[:kept], masks[:kept], bounds[chosen])
    return made, children.parents[chosen], children.actions[chosen], dropped


def _better(
    asked: PlacementProblem, found: SearchResult, history: list[tuple[Ints, Ints]], candidates: Longs
) -> SearchResult:
    """Simulate complete states; keep the best that fits."""
    for index in candidates.tolist():
        device, order = _replay(history, index, len(asked.graph), len(asked.target.devices))
        step = asked.simulate(device, order)
        if step.makespan_seconds < found.makespan_seconds and not asked.excess_bytes(step).any():
            found = SearchResult(found.bound_seconds, step.makespan_seconds, device, order, found.complete)
    return found


def _replay(history: list[tuple[Ints, Ints]], index: int, nodes: int, devices: int) -> tuple[Ints, Ints]:
    """Return device and order of the nodes, following the parents of a state back."""
    started = list(_starts(history, index, nodes * devices))[::-1]
    device, order = np.empty(nodes, dtype=np.int32), np.array([code // devices for code in started], dtype=np.int32)
    device[order] = [code % devices for code in started]
    return device, order


def _starts(history: list[tuple[Ints, Ints]], index: int, below: int) -> Iterator[int]:
    for parents, actions in reversed(history):
        if actions[index] < below:
            yield int(actions[index])
        index = int(parents[index])
