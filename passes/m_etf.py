"""m-ETF: the node that can start earliest goes first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.passes.placement.list_scheduling.list_planner import place_by_list_schedule
from onnxplace.problem import placement_problem
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class MEtf(Pass):
    """Memory-constrained Earliest Task First.

    Hwang et al. 1989; Baechi, SoCC 2020, section 3.2. Of all ready nodes and devices, the pair with the earliest start
    is taken; ties go to the node that is first in topological order, then to the first device. The first node of a
    group decides for the group, whose weights are reserved there. O(N D log N), whatever the width of the graph.

    Two branches of 5 ms each between nodes of 1 ms, where a transfer takes 1 ms:

        before   a -> b -> d,  a -> c -> d
        after    first device    a b    a at 0 ms, b at 1 ms
                 second device   c d    c at 2 ms, since the first device is busy until 6 ms; d at 7 ms
    """

    name: ClassVar[str] = "m-etf"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    reserve: Literal["weights", "peak"] = "weights"
    """What a group reserves on its device: its weights, or also the largest output and workspace of a member."""

    def run(self, state: State) -> State:
        problem = placement_problem(state)
        return place_by_list_schedule(state, problem, None, self.name, self.reserve == "peak")
