"""The best step of a small graph, with a proof of how near the best it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Gt

from onnxplace.errors import Diagnostic
from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.graph import Ints
from onnxplace.passes.placement.exact import (
    MAX_DEVICES,
    MAX_NODES,
    ProblemTables,
    SearchResult,
    branch_and_bound_search,
    build_tables,
    solve_milp,
)
from onnxplace.passes.placement.search import (
    BlockPlan,
    Budget,
    Plan,
    SearchSpace,
    coarsen,
    compose_blocks,
    decompose_series,
    evaluate_candidate,
    explore,
    published_plans,
)
from onnxplace.problem import PlacementProblem, commit_placement, out_of_memory_error, placement_problem, sort_by_start
from onnxplace.simulation import lower_bound_seconds
from onnxplace.state import Pass, State

# States kept per layer at first, and once the solver has had its turn; by how much more each time.
WIDTH, WIDE, WIDER = 300, 7500, 5
# A layer of so many states takes about 250 MB.
WIDEST = 187_500
# The parts of the time that the search for better steps has, and after which the solver has its turn, and the rest.
SHARE, SOLVED_FROM, SOLVED_UNTIL = 0.1, 0.3, 0.6
# What a block is searched for once more if another has put one of its groups elsewhere.
AGAIN_SECONDS = 0.1
# Beyond this, a program takes longer to build than it is worth.
MAX_SOLVED = 400
# Relative difference of what is equal but for rounding.
EQUAL = 1e-9


@dataclass(frozen=True)
class Exact(Pass):
    """Find the shortest step of a small graph and prove it: branch and bound, and a mixed-integer program.

    Up to 62 nodes (after `fuse`) on 4 devices are searched state by state as the simulator runs them: groups, pins,
    weights and the order of transfers are exact; contention between transfers from different devices is added when
    the search without it is done and its bound is not met. The other placers and a search as that of `multilevel` give
    a step to begin with; the solver leaves out what is longer. HiGHS has a share of the time if a first search proves
    too little, and at last for graphs of up to 400 nodes that are too large to search. Most values that wait in
    memory, and weights that several groups read, are left out of the bounds; every step is simulated, and only what
    fits is taken. The gap between bound and step is part of the result; when time is up, the best step so far is.

    Of a larger graph, blocks that any step goes through one after the other (pieces of the longest path with what runs
    beside them) are searched by themselves: what they take at least adds up to a bound, and their steps to a step. It
    leaves out memory, what is in no block, and what groups ask across blocks.

    If the graph is contracted, the proof is for steps that run each cluster in one go: the schedule of single nodes
    may be shorter than that bound, which is then not recorded with it. The same input gives the same answer as long
    as `gap` is reached within the time.
    """

    name: ClassVar[str] = "exact"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    seconds: Annotated[float, Gt(0)] = 30.0
    """When to stop with what there is."""
    gap: Annotated[float, Ge(0)] = 0.01
    """Stop once bound and step differ by less than this part of the step; 0: find the very best."""
    seed: Annotated[int, Ge(0)] = 0
    """For the search that begins, and for the solver."""

    def run(self, state: State) -> State:
        asked = placement_problem(state)
        few = len(asked.target.devices) <= MAX_DEVICES
        searched = 0 < len(asked.graph) <= MAX_NODES and few
        best, plans = _begun(asked, self.gap)
        blocks = _Blocks(best, self.seed) if few and len(asked.graph) > MAX_NODES and not best.proven else None
        for one in [best] if searched else blocks.forks[:1] if blocks else []:
            if not one.proven:
                # One state per layer: kernels never used before are compiled, which is not to count as time.
                _seek(one, build_tables(one.asked), 1, np.inf)
        began = time.perf_counter()
        deadline = began + self.seconds
        if searched and not best.proven:
            _search(best, WIDTH, deadline, WIDTH)
        if blocks:
            blocks.search(deadline - SHARE * self.seconds)
        if not best.proven:
            left, rest = deadline - time.perf_counter(), 0.5 if len(asked.graph) <= MAX_SOLVED else 1.0
            _improve(best, plans, SHARE * self.seconds if searched else max(left * rest, 0.05), self.seed)
        if searched and not best.proven:
            _search(best, WIDER * WIDTH, began + SOLVED_FROM * self.seconds)
        if 0 < len(asked.graph) <= MAX_SOLVED and not best.proven:
            _solve(best, began + SOLVED_UNTIL * self.seconds if searched else deadline, self.seed)
        if searched and not best.proven:
            _search(best, WIDE, deadline)
        if not np.isfinite(best.makespan):
            raise out_of_memory_error(asked, self.name)
        step = asked.simulate(best.device, best.order)
        bound = best.bound if len(asked.graph) == len(asked.members) else 0.0
        done = commit_placement(state, asked, best.device, step.start_seconds, self.name, bound)
        return done.saying(Diagnostic("P021", best.verdict(), where=self.name))


class _Best:
    """The best step so far, and the best bound."""

    def __init__(self, asked: PlacementProblem, gap: float) -> None:
        self.asked, self.gap = asked, gap
        self.makespan = np.inf
        self.device = self.order = np.zeros(0, dtype=np.int32)
        self.bound = lower_bound_seconds(asked.graph, asked.seconds, asked.target, asked.group, asked.pinned)

    def offer(self, device: Ints, order: Ints) -> None:
        """Take a step if it fits and is shorter."""
        step = self.asked.simulate(device, order)
        if step.makespan_seconds < self.makespan and not self.asked.excess_bytes(step).any():
            self.makespan, self.device, self.order = step.makespan_seconds, device, order

    def take(self, found: SearchResult) -> None:
        """Take the result of a search."""
        if found.makespan_seconds < self.makespan:
            self.makespan, self.device, self.order = found.makespan_seconds, found.device, found.order
        self.raise_bound(found.bound_seconds)

    def raise_bound(self, seconds: float) -> None:
        """Take a bound, but for what rounding adds to the step."""
        self.bound = max(self.bound, min(seconds, self.makespan))

    @property
    def left(self) -> float:
        """Return the part of the step by which the bound is shorter."""
        if not np.isfinite(self.makespan):
            return 1.0
        left = 1 - self.bound / self.makespan if self.makespan > 0 else 0.0
        return left if left > EQUAL else 0.0

    @property
    def proven(self) -> bool:
        return self.left <= self.gap and bool(np.isfinite(self.makespan))

    def verdict(self) -> str:
        times = f"step {self.makespan * 1e3:.4g} ms, bound {min(self.bound, self.makespan) * 1e3:.4g} ms"
        if not self.proven:
            return f"stopped at a gap of {self.left * 100:.2g} %: {times}"
        return f"optimal within {self.left * 100:.2g} %: {times}" if self.left else f"optimal: {times}"


def _begun(asked: PlacementProblem, gap: float) -> tuple[_Best, list[Plan]]:
    """Return the best of what the other placers find, and all that they find."""
    best, plans = _Best(asked, gap), published_plans(asked)
    for plan in plans:
        best.offer(plan.device, plan.order)
    return best, plans


class _Blocks:
    """A graph that is too large to search, as a row of blocks: each is searched by itself."""

    def __init__(self, whole: _Best, seed: int) -> None:
        self.whole, self.seed = whole, seed
        self.row = decompose_series(whole.asked, MAX_NODES)
        # Half of the gap is left for what groups and transfers between the blocks cost.
        self.best = [_begun(part, whole.gap / 2)[0] for part in self.row.problems]
        self.forks = [self.best[index] for index in self.row.forks]

    def search(self, until: float) -> None:
        """Search each block in turn, what one leaves of its time is for the others; add up steps and bounds."""
        for index, best in enumerate(self.forks):
            now = time.perf_counter()
            if not best.proven and now < until:
                part = (until - now) / (len(self.forks) - index)
                _improve(best, [], SHARE * part, self.seed)
                _search(best, WIDTH, now + part)
        self.whole.raise_bound(sum(self.best[index].bound for index in self.row.which))
        steps = [(best.device, best.order) for best in self.best]
        self.whole.offer(*compose_blocks(self.whole.asked, self.row, steps, self._again))

    def _again(self, part: PlacementProblem) -> BlockPlan:
        best, _ = _begun(part, 0.0)
        _improve(best, [], AGAIN_SECONDS, self.seed)
        return best.device, best.order


def _improve(best: _Best, plans: Sequence[Plan], seconds: float, seed: int) -> None:
    """Look for a better step as `auto` does, from the best one, from plans and from scratch."""
    ground = SearchSpace(best.asked)
    begin = [evaluate_candidate(ground, plan.name, plan.device, plan.order) for plan in plans]
    if np.isfinite(best.makespan):
        begin.append(evaluate_candidate(ground, "exact", best.device, best.order))
    goal = best.bound * (1 + EQUAL)
    try:
        found = explore(coarsen(best.asked), [one for one in begin if one], Budget(seconds, 0), seed, goal).best
    except LookupError:
        return
    best.offer(found.device, found.order)


def _search(best: _Best, width: int, until: float, widest: int = WIDEST) -> None:
    """Search wider and wider; count channels that several devices use once leaving them out proves too little."""
    known = build_tables(best.asked)
    # Two devices with a channel each way: what arrives comes from one device only, in the order it was sent.
    shared = not known.free_links and (known.devices > 2 or known.one_channel)
    proofs = [known, known._replace(receives=True, delays=True)][: 1 + shared]
    seekers = [known._replace(receives=True)] * shared
    if _tight(best.asked):
        careful = known._replace(receives=shared, careful=True)
        seekers += [careful] if np.isfinite(best.makespan) else [careful, known._replace(receives=shared, patient=True)]
    while width <= widest and (proofs or seekers):
        if proofs and _prove(best, proofs[0], width, until):
            proofs.pop(0)
        seekers = [known for known in seekers if best.proven or not _seek(best, known, width, until)]
        if best.proven or time.perf_counter() > until:
            return
        width *= WIDER


def _prove(best: _Best, known: ProblemTables, width: int, until: float) -> bool:
    """Return whether a search of this width leaves nothing out; if it does, prove as much of the bound as it can."""
    found = _run(best, known, width, until, best.gap)
    best.take(found)
    while not found.complete and not best.proven and best.left > 2 * best.gap and time.perf_counter() < until:
        lower = _run(best, known, width, until, best.left / 2)
        best.take(lower)
        if not lower.complete:
            break
    return found.complete


def _run(best: _Best, known: ProblemTables, width: int, until: float, aim: float) -> SearchResult:
    """Search for what is shorter than the best step by the part `aim`, or prove that there is nothing."""
    return branch_and_bound_search(best.asked, known, best.makespan, max(aim * 0.999, EQUAL / 10), width, until)


def _seek(best: _Best, known: ProblemTables, width: int, until: float) -> bool:
    """Search where the bound holds for a part of the steps only; return whether nothing was left out."""
    found = _run(best, known, width, until, best.gap)
    best.take(replace(found, bound_seconds=0.0))
    return found.complete


def _tight(asked: PlacementProblem) -> bool:
    """Return whether some device could be asked for more than it has."""
    graph = asked.graph
    most = graph.total_weight_bytes + int(graph.value_bytes.sum() + graph.workspace_bytes.sum())
    return most > int(asked.limit_bytes.min(initial=most))


def _solve(best: _Best, deadline: float, seed: int) -> None:
    """Let HiGHS close the gap from where it is."""
    asked = best.asked
    upper = best.makespan
    if not np.isfinite(upper):
        latency, per_byte = asked.target.link_arrays()
        sent = len(asked.graph.value_names) * latency.max() + asked.graph.value_bytes.sum() * per_byte.max()
        upper = float(asked.seconds.max(axis=0).sum() + sent * len(latency))
    if upper <= 0:
        return
    solved = solve_milp(asked, upper, best.gap, deadline, seed)
    if solved.device is not None and solved.start_seconds is not None:
        order = sort_by_start(asked.graph, solved.start_seconds)
        try:
            best.offer(solved.device, order)
        except ValueError:  # starts that are equal but for rounding, in an order that cannot run
            best.offer(solved.device, asked.graph.order)
    best.raise_bound(solved.bound_seconds)
