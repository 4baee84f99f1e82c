"""m-TOPO: fill one device after the other in topological order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.passes.placement.list_scheduling.list_planner import fill_devices
from onnxplace.problem import commit_placement, placement_problem
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class MTopo(Pass):
    """Memory-constrained TOPO (Baechi, SoCC 2020, section 3.1).

    Nodes are taken in topological order. A device is filled up to an equal share of all memory plus that of the
    largest group, never beyond its own limit; then the next device is filled. A group goes where its first node goes.
    As in the published code, a group's weights and largest workspace have to be below that mark beforehand, while all
    its weights, outputs and workspaces count afterwards (docs/baechi.md). Of devices that share a processor, one is
    filled; others take what it has no room for.

    Six nodes with outputs of equal size on two devices; one is filled up to half of the bytes and one node more:

        before   a -> b -> c -> d -> e -> f
        after    a    b    c    d  | e    f        first device | second device
    """

    name: ClassVar[str] = "m-topo"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    def run(self, state: State) -> State:
        problem = placement_problem(state)
        device = fill_devices(problem, self.name)
        order = problem.graph.order
        return commit_placement(state, problem, device, problem.simulate(device, order).start_seconds, self.name)
