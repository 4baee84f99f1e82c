"""m-ETF: the node that can start earliest goes first, where it can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxplace.costs import Problem, decided, problem, shortage
from onnxplace.errors import InfeasibleError
from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.graph import Csr, Floats, Ints, Longs
from onnxplace.passes._list_scheduling import earliest_task_first
from onnxplace.state import Pass, State
from onnxplace.target import LINK_MODELS

# How often to plan again with tighter limits when the simulated peak exceeds what the plan had counted.
ATTEMPTS = 6


@dataclass(frozen=True)
class MEtf(Pass):
    """Memory-constrained Earliest Task First (Hwang et al. 1989; Baechi, SoCC 2020, section 3.2).

    Of all ready nodes and devices, the pair with the earliest start is taken; ties go to the node that is first in
    topological order, then to the first device. The first node of a group decides for the group, whose weights are
    reserved there. O(N R D) for R ready nodes.
    """

    name: ClassVar[str] = "m-etf"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    def run(self, state: State) -> State:
        asked = problem(state)
        limit = asked.limit_bytes
        for _ in range(ATTEMPTS):
            device, start = plan(asked, limit)
            if len(device) and device.min() < 0:
                raise shortage(asked, self.name)
            try:
                return decided(state, asked, device, start, self.name)
            except InfeasibleError as problem_found:
                excess = asked.excess_bytes(asked.simulate(device, _order(asked, start)))
                limit = limit - np.maximum(excess, asked.limit_bytes // 64)
                last = problem_found
        raise last


def _order(asked: Problem, start: Floats) -> Ints:
    position = np.empty(len(asked.graph), dtype=np.int64)
    position[asked.graph.order] = np.arange(len(asked.graph))
    return np.lexsort((position, start)).astype(np.int32)


def plan(asked: Problem, limit: Longs) -> tuple[Ints, Floats]:
    """Return device and planned start of each node under these limits; device -1 where nothing fits."""
    graph = asked.graph
    latency, per_byte = asked.target.link_arrays()
    members = Csr.grouped(asked.group, np.arange(len(graph), dtype=np.int32), len(asked.pinned))
    device, start = earliest_task_first(
        graph.order,
        asked.group,
        asked.pinned,
        asked.seconds,
        limit,
        graph.producer,
        graph.value_bytes,
        graph.is_output,
        graph.alias_roots,
        graph.outputs.starts,
        graph.outputs.items,
        graph.inputs.starts,
        graph.inputs.items,
        graph.readers.starts,
        graph.readers.items,
        graph.weights.starts,
        graph.weights.items,
        graph.weight_bytes,
        graph.workspace_bytes,
        members.starts,
        members.items,
        latency,
        per_byte,
        LINK_MODELS.index(asked.target.link_model),
    )
    return device, start
