"""Everything on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.problem import PlacementProblem, commit_placement, placement_problem, require_memory
from onnxplace.simulation import Simulation
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class Single(Pass):
    """Put every node on the device that runs them all in the least time, among those where they fit."""

    name: ClassVar[str] = "single"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    def run(self, state: State) -> State:
        asked = placement_problem(state)
        pins = sorted({int(pin) for pin in asked.pinned if pin >= 0})
        if len(pins) > 1:
            names = " and ".join(state.target.devices[pin].id for pin in pins)
            raise InfeasibleError(
                "P003",
                f"nodes are pinned to {names}, which is more than one device",
                where=self.name,
                hint="choose another --placer, or change the device map",
            )
        choices = pins or list(range(len(state.target.devices)))
        simulated = {index: _on_one(asked, index) for index in choices}
        fitting = [index for index in choices if not asked.excess_bytes(simulated[index]).any()]
        if not fitting:
            least = np.max([simulated[index].peak_bytes for index in choices], axis=0)
            require_memory(state.target, least, self.name)
        best = min(fitting, key=lambda index: (simulated[index].makespan_seconds, index))
        device = np.full(len(asked.graph), best, dtype=np.int32)
        return commit_placement(state, asked, device, simulated[best].start_seconds, self.name)


def _on_one(asked: PlacementProblem, index: int) -> Simulation:
    return asked.simulate(np.full(len(asked.graph), index, dtype=np.int32), asked.graph.order)
