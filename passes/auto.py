"""The default placer: try all placers, search on, and keep the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge

from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.passes.placement.search.placement_search import Budget
from onnxplace.passes.placement.search.portfolio import estimate_cost_error, published_plans, search_and_commit
from onnxplace.problem import placement_problem
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class Auto(Pass):
    """Try all placers, search on from the best, and keep the best.

    The search goes on as that of `multilevel`, and blocks in series are placed one by one too. The simulator scores all
    of them: by its costs, the result is never worse than the best single device that fits. `compile` tries it out
    afterwards, and may find that device better. A note lists the attempts and the gap to the lower bound.
    """

    name: ClassVar[str] = "auto"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    seconds: Annotated[float, Ge(0)] = 2.0
    """How long to search by the clock at most; 0 for no such limit."""
    proposals: Annotated[int, Ge(0)] = 0
    """How many moves each search may try; 0 for as many as are worth it."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the random moves."""
    eager: bool = False
    """Search in rounds; end after one that comes within 2 % of the lower bound or gains less than 0.5 %.

    And end as soon as the step exceeds the bound by no more than the standard error of measured costs, at most 5 %.
    Do not begin where one device takes at most 3 % and the call of a segment longer than the bound."""

    def run(self, state: State) -> State:
        problem = placement_problem(state)
        tolerance = estimate_cost_error(state[Profile]) if self.eager else 0.0
        budget = Budget(self.seconds, self.proposals, self.eager, tolerance)
        return search_and_commit(state, problem, published_plans(problem), self.name, budget, self.seed)
