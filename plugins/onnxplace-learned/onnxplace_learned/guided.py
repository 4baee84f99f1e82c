"""A placer that a learned policy guides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from annotated_types import Ge

from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.passes.placement.search.placement_search import Budget
from onnxplace.passes.placement.search.portfolio import PlacerPlan, published_plans, search_and_commit
from onnxplace.problem import placement_problem
from onnxplace.state import Pass, State
from onnxplace_learned.policies.guided_policy import default_policy_path, plan_with_policy, read_guided_policy
from onnxplace_learned.policies.placing import coarsen_to

# Placements of the policy that the search continues from.
MAX_STARTS = 3


@dataclass(frozen=True)
class Guided(Pass):
    """Let a learned policy choose devices in list schedules, and search on from the best.

    A graph network reads costs, transfers and the structure of the graph. Then nodes are placed by bottom level, as in
    HEFT (Topcuoglu, Hariri and Wu, 2002), except that a second network chooses the device of each: from the embedding
    of the node, the devices of its neighbours, and when it could start and finish on each device. It scores each device
    alone, so the policy knows no number and no order of devices. It was trained to imitate placements that `auto`'s
    search finds, and then by REINFORCE (`onnxplace learn guided`). One schedule takes the best device each time, others
    sample. Then follows the search of `auto`, in which one of the first two searches starts from the policy's best
    schedule instead of from a coarser version. So there is a placement wherever `auto` has one. The package has a
    policy. Deterministic under `seed` where `proposals`, not the clock, end the search.
    """

    name: ClassVar[str] = "guided"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    policy: str = ""
    """File of the policy; without one, that of the package."""
    schedules: Annotated[int, Ge(1)] = 12
    """How many list schedules to try."""
    seconds: Annotated[float, Ge(0)] = 0.05
    """How long to search by the clock afterwards; 0 for no such limit."""
    proposals: Annotated[int, Ge(0)] = 0
    """How many moves each search may try; 0 for as many as are worth it."""
    max_nodes: Annotated[int, Ge(1)] = 5_000
    """The policy sees coarser versions of graphs with more nodes."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the sampled devices and random moves."""

    def run(self, state: State) -> State:
        policy = read_guided_policy(Path(self.policy) if self.policy else default_policy_path())
        problem = placement_problem(state)
        coarse, cluster = coarsen_to(problem, self.max_nodes)
        starts = plan_with_policy(coarse, policy, self.schedules, self.seed, "policy")
        plans = [
            PlacerPlan(
                f"policy {number}", plan.device[cluster], problem.graph.order if coarse is not problem else plan.order
            )
            for number, plan in enumerate(starts[:MAX_STARTS], start=1)
        ]
        return search_and_commit(
            state,
            problem,
            [*plans, *published_plans(problem)],
            self.name,
            Budget(self.seconds, self.proposals),
            self.seed,
            promising=plans[0].name if plans else "",
        )
