"""Place every node on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.problem import commit_placement, placement_problem, require_memory
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class Single(Pass):
    """Put every node on the fastest device that holds them all.

    With devices that take 9 ms and 4 ms for all nodes, and memory for them on both:

        before   a -> b -> c      no devices
        after    a -> b -> c      all on the second device, one step of 4 ms
    """

    name: ClassVar[str] = "single"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    def run(self, state: State) -> State:
        problem = placement_problem(state)
        pins = sorted({int(pin) for pin in problem.pinned if pin >= 0})
        if len(pins) > 1:
            names = " and ".join(state.target.devices[pin].id for pin in pins)
            raise InfeasibleError(
                "P003",
                f"nodes are pinned to {names}, which is more than one device",
                where=self.name,
                hint="choose another --placer, or change the device map",
            )
        candidates = pins or list(range(len(state.target.devices)))
        devices = {index: np.full(len(problem.graph), index, dtype=np.int32) for index in candidates}
        simulations = {index: problem.simulate(devices[index], problem.graph.order) for index in candidates}
        fitting_devices = [index for index in candidates if not problem.excess_bytes(simulations[index]).any()]
        if not fitting_devices:
            needed_bytes = np.max([simulations[index].peak_bytes for index in candidates], axis=0)
            pool_bytes = np.max([simulations[index].pool_peak_bytes for index in candidates], axis=0)
            require_memory(state.target, needed_bytes, pool_bytes, self.name)
        best = min(fitting_devices, key=lambda index: (simulations[index].makespan_seconds, index))
        return commit_placement(state, problem, devices[best], simulations[best].start_seconds, self.name)
