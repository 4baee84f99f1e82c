"""Search for a contiguous split under a bound that counts each value once per later stage that reads it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from onnxplace.graph import Ints, Longs
from onnxplace.passes.placement.stages.stage_dp import Cutting, Lattice, Table, assign_devices
from onnxplace.passes.placement.stages.stage_kernels import list_stages, new_scratch
from onnxplace.utils import budget_clock

Stage = tuple[int, int, int]
"""The ideal before, the ideal after, and the kind of device."""


def exact_split(
    cutting: Cutting, lattice: Lattice, table: Table, bound: float, deadline: float
) -> tuple[Ints | None, bool]:
    """Return the devices of a split whose largest load is below `bound`, and whether the search was exhaustive.

    Stages are chosen from the last one on, so the number of later stages that read each value is known. The table
    bounds the cost of the stages before. A set of later stages matters only through the remaining nodes and devices,
    and through how often it reads each value: a state that failed once is not tried again. All links must be alike.
    """
    search = _BoundedSearch(cutting, lattice, table, bound, deadline)
    send_counts = np.zeros(len(cutting.graph.value_names), dtype=np.int64)
    stages = search.complete(len(lattice) - 1, len(cutting.used) - 1, send_counts)
    return (assign_devices(cutting, lattice, stages[::-1]) if stages is not None else None), not search.timed_out


@dataclass
class _BoundedSearch:
    cutting: Cutting
    lattice: Lattice
    table: Table
    bound: float
    deadline: float
    failed: set[tuple[int, int, bytes]] = field(default_factory=set)
    timed_out: bool = False

    def complete(self, ideal: int, remaining: int, send_counts: Longs) -> list[Stage] | None:
        """Return stages for `ideal` on the remaining devices, the last one first; None if none are below the bound."""
        if ideal == 0:
            return []
        self.timed_out = self.timed_out or budget_clock() > self.deadline
        state_key = (ideal, remaining, send_counts.tobytes())
        if self.timed_out or state_key in self.failed:
            return None
        for begin, kind in self._list_stages(ideal, remaining, send_counts):
            earlier = self.complete(
                begin, remaining - int(self.cutting.step[kind]), self._count_sends(ideal, begin, send_counts)
            )
            if earlier is not None:
                return [(begin, ideal, kind), *earlier]
        if not self.timed_out:
            self.failed.add(state_key)
        return None

    def _list_stages(self, ideal: int, remaining: int, send_counts: Longs) -> list[tuple[int, int]]:
        """Return possible stages that end with `ideal`: where they begin and the kind of device, best first."""
        cutting, ideal_count = self.cutting, len(self.lattice)
        graph = cutting.graph
        scratch = new_scratch(len(graph), len(send_counts), len(graph.weight_bytes), len(cutting.kinds))
        begins, load = np.empty(ideal_count, dtype=np.int32), np.empty((ideal_count, len(cutting.kinds)))
        count = list_stages(
            ideal,
            self.lattice.arrays,
            cutting.arrays,
            cutting.costs,
            send_counts,
            cutting.rule,
            self.bound,
            scratch,
            begins,
            load,
        )
        candidates = []
        for kind in np.flatnonzero(cutting.has[remaining]):
            table_values = self.table.best[begins[:count], remaining - cutting.step[kind]]
            values = np.maximum(load[:count, kind], table_values)
            candidates += [(float(values[k]), int(begins[k]), int(kind)) for k in np.flatnonzero(values < self.bound)]
        return [(table_values, kind) for _, table_values, kind in sorted(candidates)]

    def _count_sends(self, ideal: int, before: int, send_counts: Longs) -> Longs:
        """Return how often earlier stages send each value, with the stage between two ideals added."""
        graph = self.cutting.graph
        is_stage = self.lattice.inside(ideal, len(graph)) & ~self.lattice.inside(before, len(graph))
        read_here = np.zeros_like(send_counts)
        read_here[graph.inputs.items[is_stage[graph.inputs.rows]]] = 1
        outside = (graph.producer >= 0) & ~is_stage[np.maximum(graph.producer, 0)]
        return np.where(outside, send_counts + read_here, 0)
