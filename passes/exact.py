"""The shortest step of a small graph, with a proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Gt

from onnxplace.errors import Diagnostic
from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.passes.placement.exact.exact_solver import solve_exactly
from onnxplace.problem import commit_placement, out_of_memory_error, placement_problem
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class Exact(Pass):
    """Find the shortest step of a small graph and prove it.

    It is a branch and bound: up to 62 nodes (after `fuse`) on 4 devices are searched state by state as the simulator
    runs them. Groups, pins, weights and the order of transfers are exact. Contention between transfers from different
    devices is added when the search without it is done and its bound is not met. The other placers and a search as that
    of `multilevel` give a step to begin with; longer ones are cut off. Most values that wait in memory, weights that
    several groups read, and pools of memory are left out of the bounds, which hold all the same: every step is
    simulated, and only steps that fit are taken.
    The gap between bound and step is part of the result; when time is up, the best step so far is.

    Of a larger graph, blocks that any step goes through one after the other (parts of the longest path with the nodes
    that run in parallel to them) are searched by themselves. Their lower bounds add up to a bound, and their steps to
    a step. That bound leaves out memory, nodes in no block, and groups that span blocks.

    If the graph is contracted, the proof is for steps that run each cluster in one go: the schedule of single nodes
    may be shorter than that bound, which is then not recorded with it. The same input gives the same answer as long
    as `gap` is reached within the time.

    Two branches of 3 ms each between nodes of 1 ms, on two devices, where a transfer takes 1 ms:

        before   a -> b -> d,  a -> c -> d
        after    a b | c d     a step of 6 ms: c starts at 2 ms, and d at 5 ms, when c ends and b's value arrives. One
                               device alone takes 8 ms, and with d on the device of a and b it is 7 ms
    """

    name: ClassVar[str] = "exact"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    seconds: Annotated[float, Gt(0)] = 30.0
    """When to stop with the best step so far."""
    gap: Annotated[float, Ge(0)] = 0.01
    """Stop once bound and step differ by less than this part of the step; 0: find the very best."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the heuristic search."""

    def run(self, state: State) -> State:
        problem = placement_problem(state)
        best = solve_exactly(problem, self.seconds, self.gap, self.seed)
        if not np.isfinite(best.makespan_seconds):
            raise out_of_memory_error(problem, self.name)
        # Starts would not tell nodes that take no time from those after them.
        rank = np.argsort(best.order).astype(np.float64)
        is_contracted = len(problem.graph) != len(problem.members)
        bound = 0.0 if is_contracted else best.bound_seconds
        after = commit_placement(state, problem, best.device, rank, self.name, bound)
        return after.with_notes(Diagnostic("P021", best.describe_proof(), where=self.name))
