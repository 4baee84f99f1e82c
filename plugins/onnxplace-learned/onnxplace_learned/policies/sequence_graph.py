"""A placement problem as a sequence of groups: what the policies read, and what their placements cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal
from zlib import crc32

import numpy as np

from onnxplace.graph.op_graph import Bools, Csr, Floats, Ints, Longs, sum_by
from onnxplace.passes.placement.search.decode_kernels import decode, new_scratch, run_order
from onnxplace.passes.placement.search.placement_search import coarsen
from onnxplace.problem import PlacementProblem
from onnxplace.simulation.lower_bounds import heads_and_tails
from onnxplace_learned.policies.environment import Environment
from onnxplace_learned.policies.placeto_kernels import MAX_COST, Singles
from onnxplace_learned.policies.placing import coarsen_to

# Types of operators share so many rows of a table, by the checksum of their name.
OP_BUCKETS = 32
# Neighbours on each side whose positions are features, as HDP has them.
NEIGHBOURS = 6
# Features of a group besides those for each device: see `features`.
FIXED_FEATURES = 10

ListOrder = Literal["criticality", "topological"]
"""The ready node that a device runs first, of those with equal priority: the one with the longest path to the end, or
the first in topological order."""


@dataclass(frozen=True)
class Scores:
    """What placements cost."""

    cost: Floats
    """Per placement: its step, as a share of all work on the fastest device; 10 where it does not fit."""
    fits: Bools
    order: Longs
    """[placement, node]: nodes of the coarse problem in the order of their starts."""


@dataclass(frozen=True)
class SequenceGraph:
    """A problem, and its groups in topological order of their first nodes: the items of a sequence."""

    problem: PlacementProblem
    """Coarsened, if it was too large."""
    cluster: Ints
    """The node of `problem` that each node of the original problem belongs to."""
    operators: Floats
    """[node, bucket]: types of operators in each node of `problem`, counted."""
    ungrouped: PlacementProblem
    """The same as `problem`, before nodes were joined into groups."""

    @staticmethod
    def of(problem: PlacementProblem, max_nodes: int, max_groups: int = 0) -> SequenceGraph:
        """Return the sequence of a problem, which is coarsened first if it has more nodes.

        With `max_groups`, nodes are also joined into at most so many groups, or as few as there can be.
        """
        coarse, cluster = coarsen_to(problem, max_nodes)
        grouped = _join_groups(coarse, max_groups) if max_groups else coarse
        buckets = np.array([crc32(name.encode()) % OP_BUCKETS for name in problem.graph.ops], dtype=np.int64)
        operators = np.bincount(cluster * OP_BUCKETS + buckets, minlength=len(coarse.graph) * OP_BUCKETS)
        return SequenceGraph(grouped, cluster, operators.reshape(-1, OP_BUCKETS).astype(np.float64), coarse)

    def __len__(self) -> int:
        return len(self.problem.pinned)

    @cached_property
    def environment(self) -> Environment:
        return Environment(self.problem)

    @cached_property
    def fallback_cost(self) -> float:
        """Return the cost of the better of m-ETF's placement and one device; 10 where neither fits."""
        environment = Environment(self.ungrouped)
        best = environment.evaluate(environment.start)
        return min(best.seconds / environment.rules.scale_seconds, MAX_COST) if best else MAX_COST

    @cached_property
    def groups(self) -> Longs:
        """Return the groups in the order of the sequence."""
        first = np.full(len(self), len(self.problem.graph), dtype=np.int64)
        np.minimum.at(first, self.problem.group, self.problem.graph.positions)
        return np.argsort(first, kind="stable")

    @cached_property
    def item(self) -> Longs:
        """Return the position in the sequence of the group of each node."""
        position = np.empty(len(self), dtype=np.int64)
        position[self.groups] = np.arange(len(self))
        return position[self.problem.group]

    @cached_property
    def pinned(self) -> Ints:
        """Return the device of each item, -1 where it is free."""
        return self.problem.pinned[self.groups]

    @cached_property
    def allowed(self) -> Bools:
        """Return [item, device]: where it may be; devices without room for its weights are left out."""
        allowed = self.environment.visits.allowed[self.groups].copy()
        fixed = np.flatnonzero(self.pinned >= 0)
        allowed[fixed] = False
        allowed[fixed, self.pinned[fixed]] = True
        return allowed

    @cached_property
    def edges(self) -> tuple[Longs, Longs]:
        """Return sources and readers of all pairs of items between which values pass, each pair once."""
        before = self.problem.graph.predecessors
        pairs = self.item[before.items] * len(self) + self.item[before.rows]
        pairs = np.unique(pairs[self.item[before.items] != self.item[before.rows]])
        return pairs // max(len(self), 1), pairs % max(len(self), 1)

    @cached_property
    def bags(self) -> Singles:
        """Return [item, bucket]: shares of types of operators."""
        bags = np.stack([self._sum(column) for column in self.operators.T], axis=1)
        shares: Singles = (bags / np.maximum(bags.sum(axis=1, keepdims=True), 1)).astype(np.float32)
        return shares

    def features(self, devices: int) -> Singles:
        """Return features [item, feature], from 0 to 1, for a policy that knows so many devices.

        First the time on each device and whether the item is pinned there, each device in a column; then the time to
        send its outputs and to receive its inputs, its nodes, inputs and outputs, its share of all weights, the room
        that they need, the longest paths from the start and to the end, and its position.
        """
        problem, graph = self.problem, self.problem.graph
        own = len(problem.target.devices)
        seconds = np.stack([self._sum(row) for row in problem.seconds], axis=1)
        columns = np.zeros((len(self), 2 * devices))
        columns[:, :own] = _squash(seconds)
        columns[:, devices : devices + own] = self.pinned[:, None] == np.arange(own)
        sources, readers = self.edges
        sent = self._sum(self.environment.transfer_seconds)
        reach = heads_and_tails(graph, problem.seconds)
        longest = max(float((reach.head + reach.least + reach.tail).max(initial=0.0)), 1e-30)
        earliest, latest = np.full(len(self), np.inf), np.zeros(len(self))
        np.minimum.at(earliest, self.item, reach.head)
        np.maximum.at(latest, self.item, reach.tail)
        weights = self._weight_bytes()
        fixed = [
            _squash(sent),
            _squash(sum_by(readers.astype(np.int32), sent[sources], len(self))),
            _squash(self._sum(np.ones(len(graph)))),
            np.minimum(np.bincount(readers, minlength=len(self)) / 8, 1),
            np.minimum(np.bincount(sources, minlength=len(self)) / 8, 1),
            weights / max(weights.sum(), 1),
            np.minimum(weights / max(int(problem.limit_bytes.min()), 1), 1),
            earliest / longest,
            latest / longest,
            np.arange(len(self)) / max(len(self) - 1, 1),
        ]
        return np.column_stack([columns, *fixed]).astype(np.float32)

    def neighbour_positions(self) -> Singles:
        """Return [item, 12]: positions from 0 to 1 of its first sources and readers, -1 where there are fewer."""
        sources, readers = (np.asarray(side, dtype=np.int32) for side in self.edges)
        positions = np.full((len(self), 2 * NEIGHBOURS), -1.0)
        for side, (own, other) in enumerate(((readers, sources), (sources, readers))):
            lists = Csr.grouped(own, other, len(self))
            for item in range(len(self)):
                nearest = lists[item][:NEIGHBOURS] / max(len(self) - 1, 1)
                positions[item, side * NEIGHBOURS : side * NEIGHBOURS + len(nearest)] = nearest
        return positions.astype(np.float32)

    def _sum(self, per_node: Floats) -> Floats:
        """Return the sum of a number of the nodes, per item."""
        return np.bincount(self.item, per_node, len(self)).astype(np.float64)

    def _weight_bytes(self) -> Floats:
        graph = self.problem.graph
        return self._sum(sum_by(graph.weights.rows, graph.weight_bytes[graph.weights.items], len(graph)))

    def expand(self, device: Longs) -> Ints:
        """Return the device of each node of placements [..., item]; pinned items stay where they have to be."""
        placed = np.where(self.pinned >= 0, self.pinned, device)
        return np.ascontiguousarray(placed[..., self.item], dtype=np.int32)

    def score(self, device: Longs, priority: Longs | None = None, list_order: ListOrder = "criticality") -> Scores:
        """Simulate placements [placement, item].

        A device runs the ready node of highest `priority` [placement, item] first; see `ListOrder` for equal ones.
        """
        problem, placements = self.problem, self.expand(device)
        count, space = len(problem.graph), self.environment.space
        scratch = new_scratch(space.wiring)
        # More than any difference of the urgencies to which the priority is added.
        step = float(count) if list_order == "topological" else self._longest_seconds
        weight = 0.0 if list_order == "topological" else 1.0
        seconds, order = np.zeros(len(placements)), np.zeros((len(placements), count), dtype=np.int64)
        for number, placement in enumerate(placements):
            bias = -problem.graph.positions.astype(np.float64) if list_order == "topological" else np.zeros(count)
            if priority is not None:
                bias += step * priority[number, self.item]
            seconds[number], _ = decode(space.wiring, placement, bias, weight, np.inf, scratch)
            order[number] = run_order(problem.graph, scratch)
        cost = seconds / self.environment.rules.scale_seconds
        fits: Bools = np.ones(len(placements), dtype=bool)
        if space.memory_binds:
            steps = self.environment.simulator.simulate(placements, order.astype(np.int32), memory=True)
            peaks: Any = steps.peak_bytes
            fits = np.asarray((peaks <= problem.limit_bytes).all(axis=1))
        return Scores(np.where(fits, np.minimum(cost, MAX_COST), MAX_COST), fits, order)

    @cached_property
    def _longest_seconds(self) -> float:
        """Return more than any path takes, with all transfers on the slowest link."""
        graph, (latency, per_byte) = self.problem.graph, self.problem.target.link_arrays()
        calls = 2 * len(graph) * max(device.segment_seconds for device in self.problem.target.devices)
        sent = len(graph.value_names) * float(latency.max()) + float(graph.value_bytes.sum()) * float(per_byte.max())
        return float(self.problem.seconds.max(axis=0).sum()) + sent + calls + 1e-9


def _join_groups(problem: PlacementProblem, max_groups: int) -> PlacementProblem:
    """Return a problem with the groups of the finest coarser version that has at most so many; nodes stay single."""
    cluster, coarse = np.arange(len(problem.graph), dtype=np.int32), problem
    for level in coarsen(problem)[1:]:
        if len(coarse.pinned) <= max_groups:
            break
        coarse, cluster = level.problem, level.cluster[cluster]
    return replace(problem, group=coarse.group[cluster], pinned=coarse.pinned)


def _squash(amounts: Floats) -> Floats:
    """Map amounts to numbers from 0 to 1; those of the mean become a half."""
    mean = float(amounts.mean()) if amounts.size else 0.0
    return np.asarray(amounts / (amounts + mean) if mean > 0 else np.zeros_like(amounts))
