"""m-TOPO: fill one device after the other in topological order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxplace.costs import Problem, decided, problem, shortage
from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.graph import Bools, Csr, Ints, Longs, sum_by
from onnxplace.simulate import device_weights
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


def group_bytes(asked: Problem) -> Longs:
    """Return, per group, the bytes of weights, each once, and of outputs together."""
    graph = asked.graph
    count = len(asked.pinned)
    made = np.flatnonzero(graph.producer >= 0)
    outputs = sum_by(asked.group[graph.producer[made]], graph.value_bytes[made], count)
    return device_weights(graph, asked.group, count) + outputs.astype(np.int64)


def _fill(asked: Problem) -> Ints:
    """Return the device of each node; raises InfeasibleError when the last device is full."""
    graph, need = asked.graph, group_bytes(asked)
    devices = len(asked.target.devices)
    cap = int(need.sum()) // devices + int(need.max(initial=0))
    weights = Csr.grouped(asked.group[graph.weights.rows], graph.weights.items, len(asked.pinned))
    used = np.zeros(devices, dtype=np.int64)
    held = np.zeros((devices, len(graph.weight_bytes)), dtype=bool)
    held_bytes = np.zeros(devices, dtype=np.int64)
    home = asked.pinned.copy()
    for group in np.flatnonzero(home >= 0).tolist():
        used[home[group]] += need[group]
        held[home[group], weights[group]] = True
    held_bytes += held @ graph.weight_bytes
    current = 0
    for group in asked.group[graph.order].tolist():
        if home[group] < 0:
            own = weights[group]
            more = ~held[:, own] @ graph.weight_bytes[own]
            within_limit = held_bytes + more <= asked.limit_bytes
            fits = _fitting(range(current, devices), used + need[group] <= cap, within_limit)
            if fits is None:
                raise shortage(asked, MTopo.name)
            home[group] = current = fits
            used[current] += need[group]
            held_bytes[current] += more[current]
            held[current, own] = True
    return home[asked.group].astype(np.int32)


def _fitting(candidates: Sequence[int], within_cap: Bools, within_limit: Bools) -> int | None:
    return next((index for index in candidates if within_cap[index] and within_limit[index]), None)
