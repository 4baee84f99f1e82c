"""What is cut into stages, what stages cost, and the best way to cut, by dynamic programming over ideals.

A contiguous split orders its stages so that values only run forward: each is an ideal of the graph less a smaller one.
The dynamic program is that of Tarnawski et al. (NeurIPS 2020): the best split of an ideal, given the devices used, is
its last stage and the best split of what is before it. See `_ideals` for how ideals are enumerated and walked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph import Bools, Csr, Floats, Ints, Longs, OpGraph, sum_by
from onnxplace.passes.placement.stages.component_kernels import inseparable
from onnxplace.passes.placement.stages.ideal_kernels import TRAFFIC, enumerate_ideals, removals, sweep, windows
from onnxplace.problem import PlacementProblem
from onnxplace.utils import budget_clock

# What a crossing counts besides its bytes, so that of splits with equal traffic the one with fewer values wins.
CROSSING_BYTES = 2.0**-16
# Entries of the table of the dynamic program, 13 bytes each.
TABLE_ENTRIES = 40_000_000
# With more sets of devices than this, that is with over eight that all differ, their order is given.
SETS = 256
CHUNK = 256


@dataclass(frozen=True)
class Cutting:
    """A graph to cut into stages: its nodes are in topological order, and cannot be cut further."""

    graph: OpGraph
    node: Ints
    """Per node of the problem's graph, the node of this graph that it is in."""
    kinds: tuple[tuple[int, ...], ...]
    """Devices, those that are interchangeable together."""
    seconds: Floats
    """[kind, node]; infinite where a pin forbids it."""
    send: Floats
    """[kind, value]: what sending it to one other device costs the channel, to the closest if they differ."""
    receive: Floats
    limit_bytes: Longs
    """Per kind."""
    need_bytes: Longs
    """Per node, what its device holds besides weights at some moment, whatever the schedule."""
    rule: int
    """One of those in `_ideals`."""
    exact_receives: bool
    """All links are alike, so that `send` and `receive` are not just lower bounds."""

    @cached_property
    def arrays(self) -> tuple[Any, ...]:
        """Return the graph as `stages_below` takes it."""
        g = self.graph
        return (g.producer, g.outputs.starts, g.outputs.items, g.inputs.starts, g.inputs.items,
                g.weights.starts, g.weights.items, g.weight_bytes)  # fmt: skip

    @cached_property
    def costs(self) -> tuple[Any, ...]:
        """Return the costs as `stages_below` takes them."""
        return self.seconds, self.send, self.receive, self.limit_bytes, self.need_bytes

    @cached_property
    def exhaustive(self) -> bool:
        """Return whether every set of devices is looked at; else they are used in the order of `kinds` only."""
        sets = math.prod(len(kind) + 1 for kind in self.kinds)
        return sets <= min(SETS, TABLE_ENTRIES // (len(self.graph) + 1))

    @cached_property
    def step(self) -> Longs:
        """Return, per kind, by how much the number of a set of devices grows with one more of it."""
        sizes = [len(kind) + 1 if self.exhaustive else 1 for kind in self.kinds]
        return np.cumprod([1, *sizes[:-1]]).astype(np.int64)

    @cached_property
    def has(self) -> Bools:
        """Return whether the last stage may go to a device of this kind: [set, kind]."""
        if self.exhaustive:
            return self._digits > 0
        sequence = np.repeat(np.arange(len(self.kinds)), [len(kind) for kind in self.kinds])
        last: Bools = np.concatenate([[-1], sequence])[:, None] == np.arange(len(self.kinds))
        return last

    @cached_property
    def used(self) -> Longs:
        """Return how many devices each set has."""
        return self._digits.sum(axis=1) if self.exhaustive else np.arange(len(self.has))

    @property
    def _digits(self) -> Longs:
        """Return how many devices of each kind each set has: [set, kind]."""
        sizes = np.array([len(kind) + 1 for kind in self.kinds], dtype=np.int64)
        return (np.arange(int(sizes.prod()))[:, None] // self.step % sizes).astype(np.int64)

    def reordered(self, order: Ints) -> Cutting:
        """Return this with its nodes numbered in another topological order."""
        rank = np.empty(len(order), dtype=np.int32)
        rank[order] = np.arange(len(order), dtype=np.int32)
        g = self.graph
        graph = replace(
            g,
            names=tuple(g.names[node] for node in order),
            ops=tuple(g.ops[node] for node in order),
            producer=np.where(g.producer >= 0, rank[np.maximum(g.producer, 0)], -1).astype(np.int32),
            inputs=_permuted(g.inputs, order),
            weights=_permuted(g.weights, order),
            workspace_bytes=g.workspace_bytes[order],
        )
        return replace(self, graph=graph, node=rank[self.node], seconds=np.ascontiguousarray(self.seconds[:, order]),
                       need_bytes=self.need_bytes[order])  # fmt: skip


def _permuted(lists: Csr, order: Ints) -> Csr:
    sizes = np.diff(lists.starts)[order]
    starts = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(sizes, out=starts[1:])
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], sizes)
    return Csr(starts, lists.items[np.repeat(lists.starts[order], sizes) + within])


def prepare_cuts(
    asked: PlacementProblem, rule: int, limit_bytes: Longs, devices: tuple[int, ...], resident: float = 0.0
) -> Cutting:
    """Return what is to be cut, for some of the devices of a problem, with these limits (per device of the target).

    A share `resident` of all outputs is counted as if it stayed, as weights do; with none, too little is counted.
    """
    unit = inseparable(asked.graph, asked.group)
    graph = _with_resident(asked.graph.contract(unit), asked.graph, unit, resident)
    seconds = unit_seconds(asked, unit)[list(devices)]
    latency, per_byte = (matrix[np.ix_(devices, devices)] for matrix in asked.target.link_arrays())
    limit = limit_bytes[list(devices)]
    kinds = _interchangeable(seconds, limit, latency, per_byte)
    first = [kind[0] for kind in kinds]
    send = np.stack([_closest(graph, latency[d], per_byte[d], d) for d in first])
    receive = np.stack([_closest(graph, latency[:, d], per_byte[:, d], d) for d in first])
    if rule == TRAFFIC:
        seconds = np.where(np.isfinite(seconds), 0.0, np.inf)
        send, receive = np.zeros_like(send), np.broadcast_to(graph.value_bytes + CROSSING_BYTES, send.shape).copy()
    away = ~np.eye(len(devices), dtype=bool)
    alike = len(np.unique(latency[away])) < 2 and len(np.unique(per_byte[away])) < 2
    return Cutting(
        graph,
        unit,
        tuple(tuple(devices[d] for d in kind) for kind in kinds),
        seconds[first],
        send,
        receive,
        limit[first],
        least_held_bytes(asked, unit),
        rule,
        alike or rule == TRAFFIC,
    ).reordered(graph.order)


def _with_resident(graph: OpGraph, fine: OpGraph, unit: Ints, share: float) -> OpGraph:
    """Return the contracted graph with a weight more for each node: a share of all that its nodes put out."""
    if share <= 0:
        return graph
    owned = np.flatnonzero((fine.producer >= 0) & (fine.alias < 0))
    output = sum_by(unit[fine.producer[owned]], fine.value_bytes[owned], len(graph)) * share
    nodes, weights = np.arange(len(graph), dtype=np.int32), len(graph.weight_bytes)
    return replace(
        graph,
        weight_names=(*graph.weight_names, *(f"outputs of {name}" for name in graph.names)),
        weight_bytes=np.concatenate([graph.weight_bytes, output.astype(np.int64)]),
        weights=Csr.grouped(
            np.concatenate([graph.weights.rows, nodes]),
            np.concatenate([graph.weights.items, nodes + np.int32(weights)]),
            len(graph),
        ),
    )


def unit_seconds(asked: PlacementProblem, unit: Ints) -> Floats:
    """Return the seconds of each unit on each device, infinite where a pin keeps it off: [device, unit]."""
    count = int(unit.max(initial=-1)) + 1
    seconds = np.stack([sum_by(unit, row, count) for row in asked.seconds])
    pin = asked.pinned[asked.group]
    for node in np.flatnonzero(pin >= 0):
        elsewhere = np.arange(len(seconds)) != pin[node]
        seconds[elsewhere, unit[node]] = np.inf
    return seconds


def least_held_bytes(asked: PlacementProblem, unit: Ints) -> Longs:
    """Return, per unit, what its device holds besides weights at some moment, however it runs: a lower bound.

    A node holds its workspace and its outputs at one time; of a contracted one, only its largest output is sure.
    """
    graph = asked.graph
    owned = np.flatnonzero((graph.producer >= 0) & (graph.alias < 0))
    output = np.zeros(len(graph), dtype=np.int64)
    if len(asked.members) == len(graph):
        np.add.at(output, graph.producer[owned], graph.value_bytes[owned])
        held = output + graph.workspace_bytes
    else:
        np.maximum.at(output, graph.producer[owned], graph.value_bytes[owned])
        held = np.maximum(output, graph.workspace_bytes)
    most = np.zeros(int(unit.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(most, unit, held)
    return most


def _interchangeable(seconds: Floats, limit: Longs, latency: Floats, per_byte: Floats) -> list[list[int]]:
    """Group devices that can be swapped without changing anything."""
    kinds: list[list[int]] = []
    for d in range(len(limit)):
        for kind in kinds:
            swap = np.arange(len(limit))
            swap[[d, kind[0]]] = kind[0], d
            same_links = all((matrix[np.ix_(swap, swap)] == matrix).all() for matrix in (latency, per_byte))
            if limit[d] == limit[kind[0]] and same_links and (seconds[d] == seconds[kind[0]]).all():
                kind.append(d)
                break
        else:
            kinds.append([d])
    return kinds


def _closest(graph: OpGraph, latency: Floats, per_byte: Floats, device: int) -> Floats:
    """Return, per value, the least seconds of a transfer between `device` and another one."""
    others = [d for d in range(len(latency)) if d != device]
    if not others:
        return np.zeros(len(graph.value_bytes))
    closest: Floats = np.min([latency[d] + graph.value_bytes * per_byte[d] for d in others], axis=0)
    return closest


@dataclass(frozen=True)
class Lattice:
    """Ideals of a graph, numbered so that supersets come later: all of them, or those of one topological order."""

    parent: Ints
    """Per ideal, the one without its last node; -1 for the empty one."""
    last: Ints
    starts: Longs
    """Where the list of each ideal starts: nodes that can be removed, ascending, and the ideals that leaves."""
    node: Ints
    below: Ints
    cut: Bools
    """Whether stages may begin and end there."""
    away: Floats
    """What a stage must at least compute to get from there to where it may begin; filled in by `tabulate`."""

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.starts, self.node, self.below, self.cut, self.away

    def inside(self, ideal: int, nodes: int) -> Bools:
        """Return which nodes an ideal holds."""
        held = np.zeros(nodes, dtype=bool)
        while ideal > 0:
            held[self.last[ideal]] = True
            ideal = int(self.parent[ideal])
        return held


def all_ideals(graph: OpGraph, limit: int) -> Lattice | None:
    """Return all ideals of a graph with topologically numbered nodes, None if there are more than `limit`."""
    if len(graph) >= limit:
        return None
    parent, last, starts, add, leads = enumerate_ideals(
        graph.predecessors.starts, graph.successors.starts, graph.successors.items, limit
    )
    if len(starts) == 1:
        return None
    starts, node, below = removals(starts, add, leads)
    return Lattice(parent, last, starts, node, below, np.ones(len(parent), dtype=bool), np.zeros(len(parent)))


def chain(nodes: int, cuts: int) -> Lattice:
    """Return the ideals of the order 0, 1, 2, ..., with stages ending at about `cuts` positions, evenly spread."""
    position = np.arange(nodes + 1, dtype=np.int32)
    starts = np.maximum(np.arange(-1, nodes + 1, dtype=np.int64), 0)
    cut = np.zeros(nodes + 1, dtype=bool)
    cut[np.linspace(0, nodes, min(cuts, nodes) + 1).round().astype(np.int64)] = True
    return Lattice(position - 1, position - 1, starts, position[:-1], position[:-1], cut, np.zeros(nodes + 1))


@dataclass(frozen=True)
class Table:
    """What the dynamic program found for each ideal and set of devices."""

    best: Floats
    """[ideal, set]: infinite where nothing under the bound is possible."""
    origin: Ints
    by: NDArray[np.int8]
    complete: bool
    """The time did not run out."""

    @property
    def least(self) -> float:
        """Return the best for the whole graph and all devices."""
        return float(self.best[-1, -1])


def tabulate(cut: Cutting, lattice: Lattice, bound: float, deadline: float) -> Table | None:
    """Run the dynamic program for splits that cost less than `bound`; None if its table would be too large.

    `deadline` is on the clock of `onnxplace.utils.clock`.
    """
    sets = len(cut.used)
    if len(lattice) * sets > TABLE_ENTRIES:
        return None
    g = cut.graph
    walked = (g.producer, g.outputs.starts, g.outputs.items, g.inputs.starts, g.inputs.items, g.readers.starts)
    possible = np.ones((len(lattice), sets), dtype=bool)
    if cut.rule != TRAFFIC:
        windows(
            lattice.parent, lattice.last, lattice.cut, walked, cut.rule, bound, cut.seconds.min(axis=0),
            cut.send.min(axis=0), cut.receive.min(axis=0), cut.used, possible,
        )  # fmt: skip
    lattice = replace(lattice, cut=lattice.cut & possible.any(axis=1), away=np.zeros(len(lattice)))
    best = np.full((len(lattice), sets), np.inf)
    best[0] = 0.0
    origin = np.zeros((len(lattice), sets), dtype=np.int32)
    by = np.zeros((len(lattice), sets), dtype=np.int8)
    for first in range(0, len(lattice), CHUNK):
        if budget_clock() > deadline:
            return Table(best, origin, by, False)
        sweep(
            first, min(first + CHUNK, len(lattice)), lattice.parent, lattice.last, lattice.arrays, cut.arrays, walked,
            cut.costs, cut.rule, bound, cut.step, cut.has, possible, cut.seconds.min(axis=0), best, origin, by,
        )  # fmt: skip
    return Table(best, origin, by, True)


def traced(cut: Cutting, lattice: Lattice, table: Table) -> Ints | None:
    """Return the device of each node in the best split, None if there was none under the bound."""
    if not np.isfinite(table.least):
        return None
    stages = []
    ideal, left = len(lattice) - 1, len(cut.used) - 1
    while ideal > 0:
        kind = int(table.by[ideal, left])
        before = int(table.origin[ideal, left])
        stages.append((before, ideal, kind))
        ideal, left = before, left - int(cut.step[kind])
    return assigned(cut, lattice, stages[::-1])


def assigned(cut: Cutting, lattice: Lattice, stages: list[tuple[int, int, int]]) -> Ints:
    """Return the device of each node for stages (ideal before, ideal after, kind of device), the first one first."""
    device = np.zeros(len(cut.graph), dtype=np.int32)
    free = [list(kind) for kind in cut.kinds]
    for before, after, kind in stages:
        nodes = lattice.inside(after, len(device)) & ~lattice.inside(before, len(device))
        device[nodes] = free[kind].pop(0)
    return device
