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

import numpy as np

from onnxplace.graph.op_graph import Csr, Floats, Ints, Longs, OpGraph, sum_by
from onnxplace.passes.placement.stages.ideal_kernels import enumerate_ideals, find_inseparable, invert_additions
from onnxplace.passes.placement.stages.stage_kernels import (
    TRAFFIC,
    Costs,
    DeviceSets,
    Flows,
    Lattice,
    StageTable,
    fill_table,
    mark_possible,
)
from onnxplace.problem import PlacementProblem, find_equal_devices
from onnxplace.utils.jit import budget_clock

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
    def flows(self) -> Flows:
        """Return the graph as compiled loops take it."""
        graph = self.graph
        lists = (*graph.outputs.arrays, *graph.inputs.arrays, *graph.weights.arrays)
        return Flows(graph.producer, *lists, graph.weight_bytes, graph.readers.starts)

    @cached_property
    def costs(self) -> Costs:
        """Return the costs as compiled loops take them."""
        return Costs(self.seconds, self.send, self.receive, self.limit_bytes, self.need_bytes, self.rule)

    @cached_property
    def exhaustive(self) -> bool:
        """Return whether all sets of devices are searched; else devices are used in the order of `kinds`."""
        sets = math.prod(len(kind) + 1 for kind in self.kinds)
        return sets <= min(MAX_DEVICE_SETS, MAX_TABLE_ENTRIES // (len(self.graph) + 1))

    @cached_property
    def sets(self) -> DeviceSets:
        """Return the sets of devices that stages may use."""
        counts = np.array([len(kind) for kind in self.kinds], dtype=np.int64)
        if not self.exhaustive:
            # In a fixed order, set k holds the first k devices, and its last stage goes to the last of them.
            last = np.concatenate([[-1], np.repeat(np.arange(len(counts)), counts)])
            has = last[:, None] == np.arange(len(counts))
            return DeviceSets(np.ones_like(counts), has, np.arange(len(has)))
        # The number of a set has one digit per kind: how many devices of it are used. Interchangeable devices share a
        # kind, which leaves few sets. With two devices of one kind and one of another, sets 0 to 5 use
        # 0 + 0, 1 + 0, 2 + 0, 0 + 1, 1 + 1 and 2 + 1.
        step = np.cumprod([1, *(counts + 1)[:-1]]).astype(np.int64)
        digits = np.arange(int((counts + 1).prod()))[:, None] // step % (counts + 1)
        return DeviceSets(step, digits > 0, digits.sum(axis=1))

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
    # From here on, one device stands for all of its kind.
    kind_of = find_equal_devices(np.column_stack([seconds, limit]), latency, per_byte)
    first = np.unique(kind_of).tolist()
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
        kinds=tuple(tuple(devices[d] for d in np.flatnonzero(kind_of == kind)) for kind in first),
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


def _least_transfer_seconds(graph: OpGraph, latency: Floats, per_byte: Floats, device: int) -> Floats:
    """Return, per value, the least seconds of a transfer between `device` and another one."""
    seconds = [latency[d] + graph.value_bytes * per_byte[d] for d in range(len(latency)) if d != device]
    closest: Floats = np.min(seconds or [np.zeros(len(graph.value_bytes))], axis=0)
    return closest


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
        away=np.zeros(len(parent)),
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
        away=np.zeros(nodes + 1),
    )


def tabulate(cutting: Cutting, lattice: Lattice, bound: float, deadline: float) -> tuple[StageTable | None, bool]:
    """Run the dynamic program for splits that cost less than `bound`; return its table, and whether it is complete.

    There is no table if it would be too large, and a part of one once the time is up. `deadline` is on the clock of
    `onnxplace.utils.clock`.
    """
    ideals, sets = len(lattice.parent), cutting.sets
    shape = ideals, len(sets.used)
    if math.prod(shape) > MAX_TABLE_ENTRIES:
        return None, False
    # First rule out ideals that cannot be a border: the least work before or behind them exceeds the bound.
    possible, fastest = np.ones(shape, dtype=bool), cutting.seconds.min(axis=0)
    if cutting.rule != TRAFFIC:
        send, receive = cutting.send.min(axis=0), cutting.receive.min(axis=0)
        mark_possible(lattice, cutting.flows, cutting.rule, bound, fastest, send, receive, sets.used, possible)
    pruned = lattice._replace(is_cut=lattice.is_cut & possible.any(axis=1), away=np.zeros(ideals))
    table = StageTable(np.full(shape, np.inf), np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int8))
    table.best[0] = 0.0
    # best[ideal, set] = least over the last stages of max(load of the stage, best[ideal before, set before]).
    for first in range(0, ideals, IDEALS_PER_CALL):
        if budget_clock() > deadline:
            return table, False
        end = min(first + IDEALS_PER_CALL, ideals)
        fill_table(first, end, pruned, cutting.flows, cutting.costs, bound, sets, possible, fastest, table)
    return table, True


def trace_devices(cutting: Cutting, lattice: Lattice, table: StageTable) -> Ints | None:
    """Return the device of each node in the best split, None if no split is below the bound."""
    # The last entry is the optimum for the whole graph and all devices.
    ideal, remaining = len(lattice.parent) - 1, len(cutting.sets.used) - 1
    if not np.isfinite(table.best[ideal, remaining]):
        return None
    stages = []
    # From the whole graph back to the empty ideal, stage by stage.
    while ideal > 0:
        kind = int(table.by[ideal, remaining])
        begin = int(table.origin[ideal, remaining])
        stages.append((begin, ideal, kind))
        ideal, remaining = begin, remaining - int(cutting.sets.step[kind])
    return assign_devices(cutting, lattice, stages[::-1])


def assign_devices(cutting: Cutting, lattice: Lattice, stages: list[tuple[int, int, int]]) -> Ints:
    """Return the device of each node for stages (ideal before, ideal after, kind of device), the first one first."""
    device = np.zeros(len(cutting.graph), dtype=np.int32)
    free_devices = [list(kind) for kind in cutting.kinds]
    for begin, end, kind in stages:
        nodes = lattice.inside(end, len(device)) & ~lattice.inside(begin, len(device))
        device[nodes] = free_devices[kind].pop(0)
    return device
