"""The best contiguous split into stages, by dynamic programming over ideals.

A contiguous split orders its stages so that values only run forward: each stage is an ideal of the graph less a smaller
one. The dynamic program is that of Tarnawski et al. (NeurIPS 2020): the best split of an ideal, given the devices used,
is its last stage and the best split of the ideal before it. `ideal_kernels` enumerates ideals, `stage_kernels` walks
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph import Bools, Csr, Floats, Ints, Longs, OpGraph, sum_by
from onnxplace.passes.placement.stages.ideal_kernels import enumerate_ideals, find_inseparable, invert_additions
from onnxplace.passes.placement.stages.stage_kernels import TRAFFIC, fill_table, mark_possible
from onnxplace.problem import PlacementProblem
from onnxplace.utils import budget_clock

# Added to the bytes of each crossing value: of splits with equal traffic, the one with fewer values wins.
CROSSING_BYTES = 2.0**-16
# Limit on entries of the table of the dynamic program, 13 bytes each: half a gigabyte.
MAX_TABLE_ENTRIES = 40_000_000
# With more sets of devices, that is with over eight different devices, the order of devices is fixed.
MAX_DEVICE_SETS = 256
# Ideals that one call of the compiled loop fills in, between two looks at the clock.
IDEALS_PER_CALL = 256


@dataclass(frozen=True)
class Cutting:
    """A graph to cut into stages, with its costs; nodes are indivisible and in topological order."""

    graph: OpGraph
    node: Ints
    """Per node of the problem's graph, the node of this graph that contains it."""
    kinds: tuple[tuple[int, ...], ...]
    """Groups of interchangeable devices."""
    seconds: Floats
    """[kind, node]; infinite where a pin forbids it, or the device refuses it."""
    send: Floats
    """[kind, value]: seconds of the channel for sending it to one other device, the closest if links differ."""
    receive: Floats
    limit_bytes: Longs
    """Per kind."""
    need_bytes: Longs
    """Per node, bytes next to weights that its device holds at some moment in any schedule."""
    rule: int
    """`DUPLEX`, `SEQUENTIAL`, `PARALLEL`, `SUM` or `TRAFFIC`."""
    exact_receives: bool
    """All links are alike, so `send` and `receive` are exact, not just lower bounds."""

    @cached_property
    def arrays(self) -> tuple[Any, ...]:
        """Return the graph as compiled loops take it."""
        graph = self.graph
        return (graph.producer, *graph.outputs.arrays, *graph.inputs.arrays, *graph.weights.arrays, graph.weight_bytes,
                graph.readers.starts)  # fmt: skip

    @cached_property
    def costs(self) -> tuple[Any, ...]:
        """Return the costs as `list_stages` takes them."""
        return self.seconds, self.send, self.receive, self.limit_bytes, self.need_bytes

    @cached_property
    def exhaustive(self) -> bool:
        """Return whether all sets of devices are searched; else devices are used in the order of `kinds`."""
        sets = math.prod(len(kind) + 1 for kind in self.kinds)
        return sets <= min(MAX_DEVICE_SETS, MAX_TABLE_ENTRIES // (len(self.graph) + 1))

    @cached_property
    def step(self) -> Longs:
        """Return, per kind, how much one more device of it adds to the number of a set."""
        # The number of a set has one digit per kind: how many devices of it are used. Interchangeable devices share a
        # kind, which leaves few sets.
        sizes = [len(kind) + 1 if self.exhaustive else 1 for kind in self.kinds]
        return np.cumprod([1, *sizes[:-1]]).astype(np.int64)

    @cached_property
    def has(self) -> Bools:
        """Return [set, kind]: whether the last stage may go to a device of this kind."""
        if self.exhaustive:
            return self._digits > 0
        # In a fixed order, set k holds the first k devices, and its last stage goes to the last of them.
        sequence = np.repeat(np.arange(len(self.kinds)), [len(kind) for kind in self.kinds])
        last: Bools = np.concatenate([[-1], sequence])[:, None] == np.arange(len(self.kinds))
        return last

    @cached_property
    def used(self) -> Longs:
        """Return the number of devices in each set."""
        return self._digits.sum(axis=1) if self.exhaustive else np.arange(len(self.has))

    @property
    def _digits(self) -> Longs:
        """Return [set, kind]: the number of devices of each kind."""
        sizes = np.array([len(kind) + 1 for kind in self.kinds], dtype=np.int64)
        return (np.arange(int(sizes.prod()))[:, None] // self.step % sizes).astype(np.int64)

    def reordered(self, order: Ints) -> Cutting:
        """Return a copy with nodes numbered in another topological order."""
        rank, g = np.argsort(order).astype(np.int32), self.graph
        graph = replace(
            g,
            names=tuple(g.names[node] for node in order),
            ops=tuple(g.ops[node] for node in order),
            producer=np.where(g.producer >= 0, rank[np.maximum(g.producer, 0)], -1).astype(np.int32),
            inputs=Csr.grouped(rank[g.inputs.rows], g.inputs.items, len(order)),
            weights=Csr.grouped(rank[g.weights.rows], g.weights.items, len(order)),
            workspace_bytes=g.workspace_bytes[order],
        )
        return replace(self, graph=graph, node=rank[self.node], seconds=np.ascontiguousarray(self.seconds[:, order]),
                       need_bytes=self.need_bytes[order])  # fmt: skip


def prepare_cuts(
    problem: PlacementProblem, rule: int, limit_bytes: Longs, devices: tuple[int, ...], resident: float = 0.0
) -> Cutting:
    """Prepare a problem for cutting into stages on some of its devices.

    Args:
        problem: The problem to cut.
        rule: How the load of a stage follows from its parts, such as `DUPLEX`.
        limit_bytes: Per device of the target.
        devices: Indices into the target.
        resident: Share of all outputs that is counted as staying, as weights do; 0 counts too little.
    """
    # Groups that values pass to and fro cannot be in different stages: contract them, so that the graph is acyclic.
    unit = find_inseparable(problem.graph, problem.group)
    graph = _add_resident_weights(problem.graph.contract(unit), problem.graph, unit, resident)
    seconds = unit_seconds(problem, unit)[list(devices)]
    latency, per_byte = (matrix[np.ix_(devices, devices)] for matrix in problem.target.link_arrays())
    limit = limit_bytes[list(devices)]
    kinds = _group_interchangeable(seconds, limit, latency, per_byte)
    # From here on, one device stands for all of its kind.
    first = [kind[0] for kind in kinds]
    send = np.stack([_least_transfer_seconds(graph, latency[d], per_byte[d], d) for d in first])
    receive = np.stack([_least_transfer_seconds(graph, latency[:, d], per_byte[:, d], d) for d in first])
    # Traffic counts bytes instead of seconds; the compute of a node is only allowed or forbidden.
    if rule == TRAFFIC:
        seconds = np.where(np.isfinite(seconds), 0.0, np.inf)
        send, receive = np.zeros_like(send), np.broadcast_to(graph.value_bytes + CROSSING_BYTES, send.shape).copy()
    off_diagonal = ~np.eye(len(devices), dtype=bool)
    equal_links = len(np.unique(latency[off_diagonal])) < 2 and len(np.unique(per_byte[off_diagonal])) < 2
    return Cutting(
        graph=graph,
        node=unit,
        kinds=tuple(tuple(devices[d] for d in kind) for kind in kinds),
        seconds=seconds[first],
        send=send,
        receive=receive,
        limit_bytes=limit[first],
        need_bytes=least_held_bytes(problem, unit),
        rule=rule,
        exact_receives=equal_links or rule == TRAFFIC,
    ).reordered(graph.order)


def _add_resident_weights(graph: OpGraph, fine: OpGraph, unit: Ints, share: float) -> OpGraph:
    """Return the contracted graph with one more weight per node: a share of the outputs in it."""
    if share <= 0:
        return graph
    # Weights are what stays on a device, so outputs that stay are counted as weights of their own nodes.
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


def unit_seconds(problem: PlacementProblem, unit: Ints) -> Floats:
    """Return [device, unit]: seconds of each unit, infinite where a pin forbids the device, or it refuses a node."""
    count = int(unit.max(initial=-1)) + 1
    seconds = np.stack([sum_by(unit, row, count) for row in problem.seconds])
    seconds[np.stack([sum_by(unit, row, count) for row in problem.refused]) > 0] = np.inf
    pin = problem.pinned[problem.group]
    for node in np.flatnonzero(pin >= 0):
        seconds[np.arange(len(seconds)) != pin[node], unit[node]] = np.inf
    return seconds


def least_held_bytes(problem: PlacementProblem, unit: Ints) -> Longs:
    """Return, per unit, a lower bound on the bytes next to weights that its device holds at some moment.

    A node holds its workspace and its outputs at one time; of a contracted node, only the largest output is certain.
    """
    graph = problem.graph
    owned = np.flatnonzero((graph.producer >= 0) & (graph.alias < 0))
    # In a contracted graph, outputs of one node need not exist at the same time.
    combine = np.add if len(problem.members) == len(graph) else np.maximum
    output_bytes = np.zeros(len(graph), dtype=np.int64)
    most_bytes = np.zeros(int(unit.max(initial=-1)) + 1, dtype=np.int64)
    combine.at(output_bytes, graph.producer[owned], graph.value_bytes[owned])
    np.maximum.at(most_bytes, unit, combine(output_bytes, graph.workspace_bytes))
    return most_bytes


def _group_interchangeable(seconds: Floats, limit: Longs, latency: Floats, per_byte: Floats) -> list[list[int]]:
    """Group devices that can be swapped without any effect."""
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


def _least_transfer_seconds(graph: OpGraph, latency: Floats, per_byte: Floats, device: int) -> Floats:
    """Return, per value, the least seconds of a transfer between `device` and another one."""
    seconds = [latency[d] + graph.value_bytes * per_byte[d] for d in range(len(latency)) if d != device]
    closest: Floats = np.min(seconds or [np.zeros(len(graph.value_bytes))], axis=0)
    return closest


@dataclass(frozen=True)
class Lattice:
    """Ideals of a graph, all or those of one topological order; supersets have higher numbers."""

    parent: Ints
    """Per ideal, the one without its last node; -1 for the empty one."""
    last: Ints
    starts: Longs
    """Where the lists of each ideal start: removable nodes, ascending, and the ideals that remain."""
    node: Ints
    below: Ints
    is_cut: Bools
    """Whether stages may begin and end at an ideal."""

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Return the lattice as compiled loops take it.

        Behind its fields is, per ideal, a lower bound on the seconds from there down to one where a stage may begin:
        0 until `fill_table` computes it.
        """
        return self.parent, self.last, self.starts, self.node, self.below, self.is_cut, np.zeros(len(self))

    def inside(self, ideal: int, nodes: int) -> Bools:
        """Return whether each node is in an ideal."""
        is_inside = np.zeros(nodes, dtype=bool)
        while ideal > 0:
            is_inside[self.last[ideal]] = True
            ideal = int(self.parent[ideal])
        return is_inside


def enumerate_lattice(graph: OpGraph, limit: int) -> Lattice | None:
    """Return all ideals of a graph with topologically numbered nodes, None if there are more than `limit`."""
    if len(graph) >= limit:
        return None
    parent, last, starts, add, leads = enumerate_ideals(graph.predecessors.starts, *graph.successors.arrays, limit)
    if len(starts) == 1:
        return None
    starts, node, below = invert_additions(starts, add, leads)
    return Lattice(
        parent=parent,
        last=last,
        starts=starts,
        node=node,
        below=below,
        is_cut=np.ones(len(parent), dtype=bool),
    )


def build_chain_lattice(nodes: int, cuts: int) -> Lattice:
    """Return the ideals of the order 0, 1, 2, ..., with about `cuts` evenly spread positions to cut."""
    # Ideal k holds the first k nodes. Only node k - 1 can be removed, which leaves ideal k - 1.
    position = np.arange(nodes + 1, dtype=np.int32)
    starts = np.maximum(np.arange(-1, nodes + 1, dtype=np.int64), 0)
    is_cut = np.zeros(nodes + 1, dtype=bool)
    is_cut[np.linspace(0, nodes, min(cuts, nodes) + 1).round().astype(np.int64)] = True
    return Lattice(
        parent=position - 1,
        last=position - 1,
        starts=starts,
        node=position[:-1],
        below=position[:-1],
        is_cut=is_cut,
    )


@dataclass(frozen=True)
class StageTable:
    """The result of the dynamic program for each ideal and set of devices."""

    best: Floats
    """[ideal, set]: the least largest load; infinite where no split is below the bound."""
    origin: Ints
    """[ideal, set]: the ideal where the last stage begins."""
    by: NDArray[np.int8]
    """[ideal, set]: the kind of device of the last stage."""
    complete: bool
    """Whether the table was completed within the time."""

    @property
    def least(self) -> float:
        """Return the optimum for the whole graph and all devices."""
        return float(self.best[-1, -1])


def tabulate(cutting: Cutting, lattice: Lattice, bound: float, deadline: float) -> StageTable | None:
    """Run the dynamic program for splits that cost less than `bound`; None if its table would be too large.

    `deadline` is on the clock of `onnxplace.utils.clock`.
    """
    sets = len(cutting.used)
    if len(lattice) * sets > MAX_TABLE_ENTRIES:
        return None
    # First rule out ideals that cannot be a border: the least work before or behind them exceeds the bound.
    possible = np.ones((len(lattice), sets), dtype=bool)
    if cutting.rule != TRAFFIC:
        mark_possible(
            lattice.arrays, cutting.arrays, cutting.rule, bound, cutting.seconds.min(axis=0), cutting.send.min(axis=0),
            cutting.receive.min(axis=0), cutting.used, possible,
        )  # fmt: skip
    arrays = replace(lattice, is_cut=lattice.is_cut & possible.any(axis=1)).arrays
    best = np.full((len(lattice), sets), np.inf)
    best[0] = 0.0
    origin = np.zeros((len(lattice), sets), dtype=np.int32)
    by = np.zeros((len(lattice), sets), dtype=np.int8)
    # best[ideal, set] = least over the last stages of max(load of the stage, best[ideal before, set before]).
    for first in range(0, len(lattice), IDEALS_PER_CALL):
        if budget_clock() > deadline:
            return StageTable(best, origin, by, False)
        fill_table(
            first, min(first + IDEALS_PER_CALL, len(lattice)), arrays, cutting.arrays, cutting.costs, cutting.rule,
            bound, cutting.step, cutting.has, possible, cutting.seconds.min(axis=0), best, origin, by,
        )  # fmt: skip
    return StageTable(best, origin, by, True)


def trace_devices(cutting: Cutting, lattice: Lattice, table: StageTable) -> Ints | None:
    """Return the device of each node in the best split, None if no split is below the bound."""
    if not np.isfinite(table.least):
        return None
    stages = []
    ideal, remaining = len(lattice) - 1, len(cutting.used) - 1
    # From the whole graph back to the empty ideal, stage by stage.
    while ideal > 0:
        kind = int(table.by[ideal, remaining])
        begin = int(table.origin[ideal, remaining])
        stages.append((begin, ideal, kind))
        ideal, remaining = begin, remaining - int(cutting.step[kind])
    return assign_devices(cutting, lattice, stages[::-1])


def assign_devices(cutting: Cutting, lattice: Lattice, stages: list[tuple[int, int, int]]) -> Ints:
    """Return the device of each node for stages (ideal before, ideal after, kind of device), the first one first."""
    device = np.zeros(len(cutting.graph), dtype=np.int32)
    free_devices = [list(kind) for kind in cutting.kinds]
    for begin, end, kind in stages:
        nodes = lattice.inside(end, len(device)) & ~lattice.inside(begin, len(device))
        device[nodes] = free_devices[kind].pop(0)
    return device
