"""Improve the placement of another pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge

from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.passes.placement.search.placement_search import Budget
from onnxplace.passes.placement.search.portfolio import PlacerPlan, improve_and_commit
from onnxplace.problem import PlacementProblem, placement_problem, sort_by_start
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class Refine(Pass):
    """Move regions of a placement and reorder, while the step gets shorter.

    Simulated annealing as in `multilevel`, on the placement at hand; never worse than it. Deterministic under `seed`
    where `proposals`, not the clock, end the search.

        before   a b | c d      device 0 | device 1, a step of 9 ms, in which c waits for b
        after    a b c | d      a step of 8 ms
    """

    name: ClassVar[str] = "refine"
    requires: ClassVar[tuple[type, ...]] = (Profile, Placement, Schedule)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    seconds: Annotated[float, Ge(0)] = 2.0
    """How long to search by the clock; 0 for no such limit."""
    proposals: Annotated[int, Ge(0)] = 0
    """How many moves each search may try; 0 for as many as are worth it."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the random moves."""

    def run(self, state: State) -> State:
        problem = placement_problem(state)
        budget = Budget(self.seconds, self.proposals)
        return improve_and_commit(state, problem, current_plan(state, problem), budget, self.seed)


def current_plan(state: State, problem: PlacementProblem) -> PlacerPlan:
    """Return the placement of a state as a plan for its problem."""
    placement, schedule = state[Placement], state[Schedule]
    count = len(problem.graph)
    device = np.zeros(count, dtype=np.int32)
    device[problem.members] = placement.device
    first = np.full(count, np.inf)
    np.minimum.at(first, problem.members, np.argsort(schedule.order))
    return PlacerPlan(placement.placer, device, sort_by_start(problem.graph, first))
