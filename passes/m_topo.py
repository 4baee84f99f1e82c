"""m-TOPO: fill one device after the other in topological order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxplace.costs import Problem, decided, problem, shortage
from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.graph import Bools, Ints, Longs, sum_by
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class MTopo(Pass):
    """Memory-constrained TOPO (Baechi, SoCC 2020, section 3.1).

    Nodes are taken in topological order; a device is filled up to an equal share of all memory plus that of the
    largest group, and never beyond its own limit, then the next one is. A group goes where its first node goes.
    """

    name: ClassVar[str] = "m-topo"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    def run(self, state: State) -> State:
        asked = problem(state)
        device = _fill(asked)
        order = asked.graph.order
        return decided(state, asked, device, asked.simulate(device, order).start_seconds, self.name)


def group_bytes(asked: Problem) -> tuple[Longs, Longs]:
    """Return, per group, the bytes of weights, and of weights and outputs together."""
    graph = asked.graph
    count = len(asked.pinned)
    weights = sum_by(asked.group[graph.weights.rows], graph.weight_bytes[graph.weights.items], count)
    made = np.flatnonzero(graph.producer >= 0)
    outputs = sum_by(asked.group[graph.producer[made]], graph.value_bytes[made], count)
    return weights.astype(np.int64), (weights + outputs).astype(np.int64)


def _fill(asked: Problem) -> Ints:
    """Return the device of each node; raises InfeasibleError when the last device is full."""
    weights, need = group_bytes(asked)
    devices = len(asked.target.devices)
    cap = int(need.sum()) // devices + int(need.max(initial=0))
    used, held = np.zeros(devices, dtype=np.int64), np.zeros(devices, dtype=np.int64)
    home = asked.pinned.copy()
    current = 0
    for group in asked.group[asked.graph.order].tolist():
        if home[group] < 0:
            fits = _fitting(
                range(current, devices), used + need[group] <= cap, held + weights[group] <= asked.limit_bytes
            )
            if fits is None:
                raise shortage(asked, MTopo.name)
            home[group] = current = fits
            used[current] += need[group]
            held[current] += weights[group]
    return home[asked.group].astype(np.int32)


def _fitting(candidates: Sequence[int], within_cap: Bools, within_limit: Bools) -> int | None:
    return next((index for index in candidates if within_cap[index] and within_limit[index]), None)
