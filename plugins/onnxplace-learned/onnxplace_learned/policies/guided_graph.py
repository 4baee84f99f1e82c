"""A placement problem as the policy of `guided` sees it: features of nodes, groups and their neighbours.

No feature depends on the names, the number or the order of devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from onnxplace.graph import Csr, Floats, Ints, Longs, sum_by
from onnxplace.passes.placement.list_scheduling import transfer_edges
from onnxplace.passes.placement.search import SearchSpace, interchangeable_devices
from onnxplace.problem import PlacementProblem
from onnxplace_learned.policies.guided_kernels import DEVICE_FEATURES, ListInputs, ListScratch, Trace, fill_levels
from onnxplace_learned.policies.policy_kernels import Singles

NODE_FEATURES, GROUP_FEATURES, PAIR_FEATURES = 17, 2, 5
# How the group of a pair is related to its neighbour.
READS, IS_READ, READS_THE_SAME, READ_BY_THE_SAME = range(4)
# Share of a transfer in the order of placing: edges are local about half of the time.
TRANSFER_SHARE = 0.5


@dataclass(frozen=True)
class Pairs:
    """Neighbours of each group: those that it reads or that read it, and those next to it at the same value."""

    starts: Longs
    """Per group."""
    groups: Ints
    """Per pair, the group that is being placed."""
    neighbours: Ints
    features: Singles
    """[pair, feature]."""


@dataclass(frozen=True)
class GuidedGraph:
    """A problem with the arrays that a policy reads."""

    problem: PlacementProblem

    @cached_property
    def space(self) -> SearchSpace:
        return SearchSpace(self.problem)

    @cached_property
    def interchangeable(self) -> Ints:
        """Return, per device, the first device that it is interchangeable with."""
        return interchangeable_devices(self.problem)

    @cached_property
    def least_seconds(self) -> Floats:
        """Return the seconds of each node on its fastest device."""
        least: Floats = np.ascontiguousarray(self.problem.seconds.min(axis=0))
        return least

    @cached_property
    def value_seconds(self) -> Floats:
        """Return the seconds to send each value over the mean link."""
        latency, per_byte = self.problem.target.link_arrays()
        remote = ~np.eye(len(latency), dtype=bool)
        if not remote.any():
            return np.zeros(len(self.problem.graph.value_bytes))
        seconds: Floats = latency[remote].mean() + self.problem.graph.value_bytes * per_byte[remote].mean()
        return seconds

    @cached_property
    def fair_seconds(self) -> float:
        """Return the work of each device if all had the same."""
        return max(float(self.least_seconds.sum()) / len(self.problem.target.devices), 1e-30)

    def levels(self, transfer_share: float) -> tuple[Floats, Floats]:
        """Return the longest path to the start of each node, and from there to the end."""
        top, bottom = np.zeros((2, len(self.problem.graph)))
        fill_levels(self.space.wiring, self.least_seconds, transfer_share * self.value_seconds, top, bottom)
        return top, bottom

    @cached_property
    def order(self) -> Ints:
        """Return the nodes in the order of placing: by bottom level, the longest path first."""
        _, bottom = self.levels(TRANSFER_SHARE)
        return np.lexsort((self.problem.graph.positions, -bottom)).astype(np.int32)

    @cached_property
    def node_features(self) -> Singles:
        """Return what the policy knows of each node: [node, feature], all between 0 and about 1."""
        graph, least, fair = self.problem.graph, self.least_seconds, self.fair_seconds
        count, devices = len(graph), len(self.problem.target.devices)
        mean = max(float(least.mean()) if count else 0.0, 1e-30)
        read = np.flatnonzero((graph.producer >= 0) & (np.diff(graph.readers.starts) > 0))
        transfer = sum_by(graph.producer[read], self.value_seconds[read], count)
        top, bottom = self.levels(0.0)
        far_top, far_bottom = self.levels(1.0)
        longest = max(float((top + bottom).max(initial=0.0)), 1e-30)
        farthest = max(float((far_top + far_bottom).max(initial=0.0)), 1e-30)
        middle, last = top + least / 2, longest - bottom + least / 2
        stored = sum_by(graph.weights.rows, graph.weight_bytes[graph.weights.items], count)
        whole = [
            np.full(count, number)
            for number in (1 / devices, fair / (fair + longest), 1 - 1 / (1 + transfer.sum() / (devices * fair)))
        ]
        columns = [
            _squash(least / mean),
            _squash(20 * least / fair),
            _squash(transfer / mean),
            transfer / (transfer + least + 1e-30),
            top / longest,
            bottom / longest,
            (top + bottom) / longest,
            (far_top + far_bottom) / farthest,
            far_bottom / farthest,
            _squash(np.diff(graph.predecessors.starts) / 2),
            _squash(np.diff(graph.successors.starts) / 2),
            _squash(_count_concurrent(top, top + least, middle) / devices),
            _squash(_count_concurrent(longest - bottom, longest - bottom + least, last) / devices),
            np.minimum(stored / max(float(self.problem.limit_bytes.min(initial=1)), 1.0), 1.0),
            *whole,
        ]
        return np.ascontiguousarray(np.stack(columns, axis=1), dtype=np.float32)

    @cached_property
    def group_seconds(self) -> Floats:
        return sum_by(self.problem.group.astype(np.int32), self.least_seconds, len(self.problem.pinned))

    @cached_property
    def group_sizes(self) -> Longs:
        return np.bincount(self.problem.group, minlength=len(self.problem.pinned)).astype(np.int64)

    @cached_property
    def group_features(self) -> Singles:
        """Return what the policy knows of each group: [group, feature]."""
        columns = [_squash(20 * self.group_seconds / self.fair_seconds), _squash((self.group_sizes - 1) / 2)]
        return np.ascontiguousarray(np.stack(columns, axis=1), dtype=np.float32)

    @cached_property
    def pairs(self) -> Pairs:
        """Return the neighbours of each group."""
        graph, group, count = self.problem.graph, self.problem.group.astype(np.int64), len(self.problem.pinned)
        edges = transfer_edges(self.problem)
        inner = graph.producer[graph.readers.rows] >= 0
        same_value = _list_consecutive(graph.readers.rows[inner], graph.readers.items[inner])
        same_reader = _list_consecutive(graph.predecessors.rows, graph.predecessors.items)
        nothing = (np.zeros(len(same_value[0])), np.zeros(len(same_reader[0])))
        parts = [
            (READS, edges.destination, edges.source, edges.seconds),
            (IS_READ, edges.source, edges.destination, edges.seconds),
            (READS_THE_SAME, *same_value, nothing[0]),
            (READS_THE_SAME, *same_value[::-1], nothing[0]),
            (READ_BY_THE_SAME, *same_reader, nothing[1]),
            (READ_BY_THE_SAME, *same_reader[::-1], nothing[1]),
        ]
        key = np.concatenate([4 * (group[own] * count + group[other]) + kind for kind, own, other, _ in parts])
        key, index = np.unique(key, return_inverse=True)
        seconds = np.bincount(index, np.concatenate([part[3] for part in parts]), len(key))
        own, other, kind = key // 4 // max(count, 1), key // 4 % max(count, 1), key % 4
        apart = own != other
        own, other, kind, seconds = own[apart], other[apart], kind[apart], seconds[apart]
        mean = max(float(self.least_seconds.mean()) if len(graph) else 0.0, 1e-30)
        features = np.column_stack([kind == number for number in range(4)] + [_squash(seconds / mean)])
        return Pairs(
            starts=np.searchsorted(own, np.arange(count + 1)).astype(np.int64),
            groups=own.astype(np.int32),
            neighbours=other.astype(np.int32),
            features=np.ascontiguousarray(features, dtype=np.float32),
        )

    @cached_property
    def list_inputs(self) -> ListInputs:
        """Return the problem as list schedules read it."""
        problem, graph = self.problem, self.problem.graph
        group = problem.group.astype(np.int32)
        weights = Csr.grouped(group[graph.weights.rows], graph.weights.items, len(problem.pinned))
        return ListInputs(
            order=self.order,
            group=group,
            pinned=problem.pinned.astype(np.int32),
            weight_starts=weights.starts,
            weights=weights.items,
            weight_bytes=graph.weight_bytes,
            least_seconds=self.least_seconds,
            group_seconds=self.group_seconds,
            fair_seconds=np.array([self.fair_seconds]),
        )

    def new_trace(self) -> Trace:
        """Return an empty record of decisions."""
        groups, devices = len(self.problem.pinned), len(self.problem.target.devices)
        return Trace(
            features=np.zeros((groups, devices, DEVICE_FEATURES), dtype=np.float32),
            allowed=np.zeros((groups, devices), dtype=bool),
            rank=np.full(groups, -1, dtype=np.int32),
            choice=np.full(groups, -1, dtype=np.int32),
        )


def new_list_scratch(devices: int, message_width: int, hidden: int) -> ListScratch:
    """Return arrays for list schedules."""
    return ListScratch(
        work=np.zeros(devices),
        begin=np.zeros(devices),
        finish=np.zeros(devices),
        incoming=np.zeros(devices),
        needed=np.zeros(devices, dtype=np.int64),
        heard=np.zeros((devices, message_width), dtype=np.float32),
        heard_by_all=np.zeros(message_width, dtype=np.float32),
        hidden=np.zeros(hidden, dtype=np.float32),
        scores=np.zeros(devices, dtype=np.float32),
    )


def _squash(amounts: Floats) -> Floats:
    """Map numbers from 0 on to numbers from 0 to 1; 1 becomes a half."""
    return amounts / (1.0 + amounts)


def _count_concurrent(begin: Floats, finish: Floats, moments: Floats) -> Floats:
    """Return how many intervals contain each moment."""
    started = np.searchsorted(np.sort(begin), moments, side="right")
    ended = np.searchsorted(np.sort(finish), moments, side="right")
    counts: Floats = np.maximum(started - ended, 0).astype(np.float64)
    return counts


def _list_consecutive(rows: Ints, items: Ints) -> tuple[Ints, Ints]:
    """Return the pairs of items that follow each other in the same row."""
    same = rows[1:] == rows[:-1]
    return items[:-1][same], items[1:][same]
