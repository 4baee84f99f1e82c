"""Solve a placement problem with a proof: searches of the whole graph or of its blocks in series share the time.

All of them improve one incumbent from both ends: shorter steps, and higher lower bounds. The search is narrow first and
then wider. A graph with too many nodes for it is cut into blocks in series, which are searched by themselves: their
bounds add up to a bound, their steps to a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onnxplace.graph.op_graph import Ints
from onnxplace.passes.placement.exact.branch_and_bound import (
    MAX_DEVICES,
    MAX_NODES,
    SearchResult,
    branch_and_bound_search,
    build_tables,
)
from onnxplace.passes.placement.exact.branch_kernels import ProblemTables
from onnxplace.passes.placement.search.placement_search import Budget, SearchSpace, coarsen, evaluate_candidate, explore
from onnxplace.passes.placement.search.portfolio import PlacerPlan, published_plans
from onnxplace.passes.placement.search.series_blocks import BlockPlan, compose_blocks, decompose_series
from onnxplace.problem import PlacementProblem
from onnxplace.simulation.lower_bounds import lower_bound_seconds

# Relative difference of times that are equal except for rounding.
ROUNDING = 1e-9

# States kept per layer in the first search, and by how much a search widens each time.
FIRST_WIDTH, WIDENING = 300, 5
# A layer of so many states takes about 250 MB.
MAX_WIDTH = 187_500
# The part of the time for heuristic searches.
HEURISTIC_SHARE = 0.1
# For another search of a block after another block has placed one of its groups elsewhere.
REPEATED_BLOCK_SECONDS = 0.1


class Incumbent:
    """The shortest step so far that fits, and the best lower bound."""

    def __init__(self, problem: PlacementProblem, gap: float) -> None:
        self.problem, self.max_gap = problem, gap
        self.makespan_seconds = np.inf
        self.device = self.order = np.zeros(0, dtype=np.int32)
        self.bound_seconds = lower_bound_seconds(
            problem.graph, problem.seconds, problem.target, problem.group, problem.pinned
        )

    def offer_step(self, device: Ints, order: Ints) -> None:
        """Take a step if it fits and is shorter."""
        if self.problem.refuses(device):
            return
        step = self.problem.simulate(device, order)
        if step.makespan_seconds < self.makespan_seconds and not self.problem.excess_bytes(step).any():
            self.makespan_seconds, self.device, self.order = step.makespan_seconds, device, order

    def offer_result(self, result: SearchResult) -> None:
        """Take the step and the bound of a search where they are better."""
        if result.makespan_seconds < self.makespan_seconds:
            self.makespan_seconds, self.device, self.order = result.makespan_seconds, result.device, result.order
        self.raise_bound(result.bound_seconds)

    def raise_bound(self, seconds: float) -> None:
        """Take a bound if it is better, but none beyond the step, which only rounding could cause."""
        self.bound_seconds = max(self.bound_seconds, min(seconds, self.makespan_seconds))

    @property
    def gap(self) -> float:
        """Return the part of the step by which the bound is shorter; 1 without a step."""
        if not np.isfinite(self.makespan_seconds):
            return 1.0
        gap = 1 - self.bound_seconds / self.makespan_seconds if self.makespan_seconds > 0 else 0.0
        return gap if gap > ROUNDING else 0.0

    @property
    def is_proven(self) -> bool:
        return self.gap <= self.max_gap and bool(np.isfinite(self.makespan_seconds))

    def describe_proof(self) -> str:
        """Return a sentence with step, bound and gap."""
        step, bound = self.makespan_seconds, min(self.bound_seconds, self.makespan_seconds)
        times = f"step {step * 1e3:.4g} ms, bound {bound * 1e3:.4g} ms"
        if not self.is_proven:
            return f"stopped at a gap of {self.gap * 100:.2g} %: {times}"
        return f"optimal within {self.gap * 100:.2g} %: {times}" if self.gap else f"optimal: {times}"


def solve_exactly(problem: PlacementProblem, seconds: float, gap: float, seed: int) -> Incumbent:
    """Return the shortest step found within the time, and the best lower bound.

    Stops early once the bound is within `gap`, a part of the step. Without a step that fits, the incumbent's makespan
    is infinite.
    """
    nodes, few_devices = len(problem.graph), len(problem.target.devices) <= MAX_DEVICES
    is_searchable = 0 < nodes <= MAX_NODES and few_devices
    best, plans = _begin_from_placers(problem, gap)
    blocks = BlockSearch(best, seed) if few_devices and nodes > MAX_NODES and not best.is_proven else None
    # Search one state per layer: the first use compiles the loops, which is not to count as time.
    for small in [best] if is_searchable else blocks.distinct[:1] if blocks else []:
        if not small.is_proven:
            _search_relaxed(small, build_tables(small.problem), 1, np.inf)
    deadline = time.perf_counter() + seconds
    # A narrow search proves most small graphs at once.
    if is_searchable and not best.is_proven:
        _search_widening(best, FIRST_WIDTH, deadline, FIRST_WIDTH)
    if blocks:
        blocks.search(deadline - HEURISTIC_SHARE * seconds)
    if not best.is_proven:
        remaining = deadline - time.perf_counter()
        _search_heuristically(best, plans, HEURISTIC_SHARE * seconds if is_searchable else max(remaining, 0.05), seed)
    if is_searchable and not best.is_proven:
        _search_widening(best, WIDENING * FIRST_WIDTH, deadline)
    return best


def _begin_from_placers(problem: PlacementProblem, gap: float) -> tuple[Incumbent, list[PlacerPlan]]:
    """Return the best of the other placers' plans, and all of them."""
    best, plans = Incumbent(problem, gap), published_plans(problem)
    for plan in plans:
        best.offer_step(plan.device, plan.order)
    return best, plans


class BlockSearch:
    """A graph that is too large to search, as blocks in series that are searched one by one."""

    def __init__(self, whole: Incumbent, seed: int) -> None:
        self.whole, self.seed = whole, seed
        self.series = decompose_series(whole.problem, MAX_NODES)
        # Half of the gap is left for the costs of groups and transfers between the blocks.
        self.incumbents = [_begin_from_placers(problem, whole.max_gap / 2)[0] for problem in self.series.problems]
        self.distinct = [self.incumbents[index] for index in self.series.fork_indices]

    def search(self, deadline: float) -> None:
        """Search each block, then add up steps and bounds; time that one block leaves goes to the next."""
        for index, best in enumerate(self.distinct):
            now = time.perf_counter()
            if not best.is_proven and now < deadline:
                share = (deadline - now) / (len(self.distinct) - index)
                _search_heuristically(best, [], HEURISTIC_SHARE * share, self.seed)
                _search_widening(best, FIRST_WIDTH, now + share, is_whole=False)
        self.whole.raise_bound(sum(self.incumbents[index].bound_seconds for index in self.series.problem_indices))
        steps = [(best.device, best.order) for best in self.incumbents]
        self.whole.offer_step(*compose_blocks(self.whole.problem, self.series, steps, self._search_again))

    def _search_again(self, block: PlacementProblem) -> BlockPlan:
        best, _ = _begin_from_placers(block, 0.0)
        _search_heuristically(best, [], REPEATED_BLOCK_SECONDS, self.seed)
        return best.device, best.order


def _search_heuristically(best: Incumbent, plans: Sequence[PlacerPlan], seconds: float, seed: int) -> None:
    """Look for a shorter step as `auto` does: from the incumbent, from plans and from scratch."""
    space = SearchSpace(best.problem)
    candidates = [evaluate_candidate(space, plan.name, plan.device, plan.order) for plan in plans]
    if np.isfinite(best.makespan_seconds):
        candidates.append(evaluate_candidate(space, "exact", best.device, best.order))
    valid = [candidate for candidate in candidates if candidate]
    goal = best.bound_seconds * (1 + ROUNDING)
    try:
        shortest = explore(coarsen(best.problem), valid, Budget(seconds, 0), seed, goal).best
    except LookupError:
        return
    best.offer_step(shortest.device, shortest.order)


def _search_widening(
    best: Incumbent, width: int, deadline: float, max_width: int = MAX_WIDTH, *, is_whole: bool = True
) -> None:
    """Search wider and wider, by turns for proofs and, under relaxed bounds, for shorter steps.

    Channels that several devices use, and turns on shared processors, are counted once leaving them out proves too
    little. Of a block, turns prove nothing: other nodes may delay the one that is in the way.
    """
    tables = build_tables(best.problem)
    # Two devices with a channel each way: transfers to one come from the other only, in the order they were sent.
    has_shared_channels = not tables.free_links and (tables.devices > 2 or tables.one_channel)
    # Where a transfer may fill a gap of an incoming channel, sums and maxima along the actions are no bound on it.
    proofs = [tables, tables._replace(receives=True, delays=True)][: 1 + tables.one_channel]
    relaxations = [tables._replace(receives=True)] * has_shared_channels
    if best.problem.target.shares_processors:
        # Where nodes take turns, one that is ready later may end sooner, so that no state dominates. Turns follow from
        # when values arrive, which is exact without shared channels; and of nodes at one time, if all take time.
        turns = 1 + bool((best.problem.seconds > 0).all())
        in_turn = tables._replace(receives=has_shared_channels, in_turn=turns, patient=True)
        (proofs if is_whole and not has_shared_channels else relaxations).append(in_turn)
    graph = best.problem.graph
    # Some device or pool might have to hold more than its limit.
    if best.problem.may_exceed(graph.total_weight_bytes + graph.value_bytes.sum() + graph.workspace_bytes.sum()):
        careful = tables._replace(receives=has_shared_channels, careful=True)
        patient = tables._replace(receives=has_shared_channels, patient=True)
        relaxations += [careful] if np.isfinite(best.makespan_seconds) else [careful, patient]
    while width <= max_width and (proofs or relaxations):
        if proofs and _prove(best, proofs[0], width, deadline):
            proofs.pop(0)
        relaxations = [
            relaxed for relaxed in relaxations if best.is_proven or not _search_relaxed(best, relaxed, width, deadline)
        ]
        if best.is_proven or time.perf_counter() > deadline:
            return
        width *= WIDENING


def _prove(best: Incumbent, tables: ProblemTables, width: int, deadline: float) -> bool:
    """Return whether a search of this width is complete; if it is not, prove as much as it can."""
    result = _search(best, tables, width, deadline, best.max_gap)
    best.offer_result(result)
    while not result.complete and not best.is_proven and best.gap > 2 * best.max_gap and time.perf_counter() < deadline:
        weaker = _search(best, tables, width, deadline, best.gap / 2)
        best.offer_result(weaker)
        if not weaker.complete:
            break
    return result.complete


def _search_relaxed(best: Incumbent, tables: ProblemTables, width: int, deadline: float) -> bool:
    """Search where the bound holds for some steps only; return whether the search was complete."""
    result = _search(best, tables, width, deadline, best.max_gap)
    best.offer_result(replace(result, bound_seconds=0.0))
    return result.complete


def _search(best: Incumbent, tables: ProblemTables, width: int, deadline: float, gap: float) -> SearchResult:
    """Search for a step that is shorter by the part `gap`, or prove that there is none."""
    gain = max(gap * 0.999, ROUNDING / 10)
    return branch_and_bound_search(best.problem, tables, best.makespan_seconds, gain, width, deadline)
