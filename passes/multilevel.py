"""Place a coarse graph first, then refine the placement level by level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge

from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.passes.placement.search.placement_search import Budget
from onnxplace.passes.placement.search.portfolio import search_and_commit
from onnxplace.problem import placement_problem
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class Multilevel(Pass):
    """Contract nodes, place the contracted graph, and refine it level by level.

    Nodes are contracted that are cheaper to move together than apart. On each level, list schedules by bottom level
    (HEFT; Topcuoglu, Hariri and Wu, 2002) and by earliest start give a first placement. Then regions around the nodes
    that the step waits for move between devices, accepted as in simulated annealing (Kirkpatrick, Gelatt and Vecchi,
    1983), each proposal scored by a simulation of the whole step. The next finer level begins from the result of the
    coarser one, as in multilevel graph partitioning (Karypis and Kumar, 1998). Deterministic under `seed` where
    `proposals`, not the clock, end the search.

        before   a -> b -> c -> d
        coarse   ab | cd            cuts of a -> b and of c -> d would be dear: each pair is placed as one node
        after    a b c | d          on the finest level, c moves to device 0, which shortens the step
    """

    name: ClassVar[str] = "multilevel"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    seconds: Annotated[float, Ge(0)] = 2.0
    """How long to search by the clock; 0 for no such limit."""
    proposals: Annotated[int, Ge(0)] = 0
    """How many moves each search may try; 0 for as many as are worth it."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the random moves."""

    def run(self, state: State) -> State:
        budget = Budget(self.seconds, self.proposals)
        return search_and_commit(state, placement_problem(state), [], self.name, budget, self.seed)
