"""Search for a contiguous split under a bound, with each value counted once for each later stage that reads it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from onnxplace.graph import Ints, Longs
from onnxplace.passes.placement.stages.ideal_kernels import new_scratch, stages_below
from onnxplace.passes.placement.stages.stage_dp import Cutting, Lattice, Table, assigned
from onnxplace.utils import budget_clock

Stage = tuple[int, int, int]
"""The ideal before, the ideal after, and the kind of device."""


def exact_split(
    cut: Cutting, lattice: Lattice, table: Table, bound: float, deadline: float
) -> tuple[Ints | None, bool]:
    """Return the devices of a split whose largest load is below `bound`, and whether the search went through all.

    Stages are chosen from the last one on, so that it is known how often the values of each are sent; the table
    says what the stages before can at best cost. A set of later stages matters only through what it has left and
    how often it reads each value: what failed once is not tried again. All links must be alike.
    """
    search = _Search(cut, lattice, table, bound, deadline)
    times = np.zeros(len(cut.graph.value_names), dtype=np.int64)
    stages = search.complete(len(lattice) - 1, len(cut.used) - 1, times)
    return (assigned(cut, lattice, stages[::-1]) if stages is not None else None), not search.late


@dataclass
class _Search:
    cut: Cutting
    lattice: Lattice
    table: Table
    bound: float
    deadline: float
    failed: set[tuple[int, int, bytes]] = field(default_factory=set)
    late: bool = False

    def complete(self, ideal: int, left: int, times: Longs) -> list[Stage] | None:
        """Return stages for the nodes of `ideal` on the set of devices `left`, the last one first; None if none fit."""
        if ideal == 0:
            return []
        self.late = self.late or budget_clock() > self.deadline
        key = (ideal, left, times.tobytes())
        if self.late or key in self.failed:
            return None
        for before, kind in self._stages(ideal, left, times):
            rest = self.complete(before, left - int(self.cut.step[kind]), self._times(ideal, before, times))
            if rest is not None:
                return [(before, ideal, kind), *rest]
        if not self.late:
            self.failed.add(key)
        return None

    def _stages(self, ideal: int, left: int, times: Longs) -> list[tuple[int, int]]:
        """Return where a stage that ends with `ideal` may begin, and its kind of device, the most promising first."""
        cut, count = self.cut, len(self.lattice)
        graph = cut.graph
        scratch = new_scratch(len(graph), len(times), len(graph.weight_bytes), len(cut.kinds))
        found, load = np.empty(count, dtype=np.int32), np.empty((count, len(cut.kinds)))
        seen = stages_below(
            ideal, self.lattice.arrays, cut.arrays, cut.costs, times, cut.rule, self.bound, scratch, found, load
        )
        promising = []
        for kind in np.flatnonzero(cut.has[left]):
            before = self.table.best[found[:seen], left - cut.step[kind]]
            value = np.maximum(load[:seen, kind], before)
            promising += [(float(value[k]), int(found[k]), int(kind)) for k in np.flatnonzero(value < self.bound)]
        return [(before, kind) for _, before, kind in sorted(promising)]

    def _times(self, ideal: int, before: int, times: Longs) -> Longs:
        """Return how often each value is sent, by the stages before, once the stage between two ideals is there too."""
        graph = self.cut.graph
        stage = self.lattice.inside(ideal, len(graph)) & ~self.lattice.inside(before, len(graph))
        here = np.zeros_like(times)
        here[graph.inputs.items[stage[graph.inputs.rows]]] = 1
        outside = (graph.producer >= 0) & ~stage[np.maximum(graph.producer, 0)]
        return np.where(outside, times + here, 0)
