"""Try the placements of all placers, search from them, and keep the best by simulation.

No placer wins on every graph, and most take far less time than a search. So the portfolio runs all of them, gives their
placements to the search as starts, and lets one judge decide: the simulation of the final schedule, with its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from onnxplace.errors import Diagnostic, Figure, InfeasibleError
from onnxplace.facts import Profile, Schedule
from onnxplace.graph.op_graph import Floats, Ints
from onnxplace.passes.placement.list_scheduling.list_planner import fill_devices, find_best_plan
from onnxplace.passes.placement.list_scheduling.sct_favourites import favourite_children, transfer_edges
from onnxplace.passes.placement.search.placement_search import (
    Budget,
    Candidate,
    Explored,
    SearchSpace,
    coarsen,
    count_worthwhile_moves,
    evaluate_candidate,
    explore,
    list_distinct_devices,
    place_on_one_device,
    polish,
)
from onnxplace.passes.placement.search.series_blocks import BlockChain, BlockPlan, compose_blocks, decompose_series
from onnxplace.problem import (
    PlacementProblem,
    commit_placement,
    out_of_memory_error,
    simulate_plan,
    sort_by_start,
)
from onnxplace.simulation.lower_bounds import lower_bound_seconds
from onnxplace.state import State

# The linear program of m-SCT takes 0.3 s at 3 000 nodes and 7 s at 20 000.
MAX_SCT_NODES = 3_000
# Graphs of at most so many nodes are decomposed into blocks. The blocks are searched if they hold this share of the
# work, and none of them more than half of the nodes.
MAX_SERIES_NODES, MIN_SERIES_WORK_SHARE = 30_000, 0.9
# Nodes of a block, proposals of each search of it, and the share of the time for all of them.
MAX_BLOCK_NODES, MAX_BLOCK_PROPOSALS, BLOCK_TIME_SHARE = 100, 500, 0.2
# Rounds of an eager search, as shares of the moves that are worth it: shares of time would depend on the clock. It ends
# after one that comes this close to the lower bound, or gains less than this share of the step.
ROUNDS, NEAR_BOUND_RATIO, LEAST_GAIN = (1 / 32, 3 / 32, 7 / 8), 1.02, 0.005
# It does not begin where one device comes this close: several would gain less than predictions of them are off.
ONE_DEVICE_RATIO = 1.03
# However unsure costs are, a search goes on while it is further than this from the lower bound.
MAX_COST_ERROR = 0.05


@dataclass(frozen=True)
class PlacerPlan:
    """The placement of one placer."""

    name: str
    device: Ints
    """Per node of the problem."""
    order: Ints
    """The nodes in the order in which they run."""

    @property
    def rank(self) -> Floats:
        """Return the position of each node in the order."""
        return np.argsort(self.order).astype(np.float64)


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan that fits, with its simulated step."""

    plan: PlacerPlan
    seconds: float
    """The step, with the calls of segments."""


def published_plans(problem: PlacementProblem) -> list[PlacerPlan]:
    """Return the fitting plans of single devices, m-TOPO, m-ETF and m-SCT.

    What a device refuses is on the fastest device that takes it, and pinned nodes stay: those are plans of a device
    that comes first.
    """
    graph, plans = problem.graph, list[PlacerPlan]()
    for index in list_distinct_devices(problem):
        device, name = place_on_one_device(problem, index), problem.target.devices[index].id
        plans.append(PlacerPlan(f"{name} first" if (device != index).any() else name, device, graph.order))

    def plan_by_list(favourite: Ints | None) -> tuple[Ints, Ints]:
        device, start = find_best_plan(problem, favourite)
        return device, sort_by_start(graph, start)

    planners: dict[str, Callable[[], tuple[Ints, Ints]]] = {
        "m-topo": lambda: (fill_devices(problem), graph.order),
        "m-etf": lambda: plan_by_list(None),
    }
    if len(graph) <= MAX_SCT_NODES:
        planners["m-sct"] = lambda: plan_by_list(
            favourite_children(problem.seconds.min(axis=0), transfer_edges(problem), 0.1)
        )
    for name, planner in planners.items():
        with suppress(InfeasibleError):
            plans.append(PlacerPlan(name, *planner()))
    return plans


def plan_blocks(problem: PlacementProblem, budget: Budget, seed: int) -> list[PlacerPlan]:
    """Search blocks in series and return the composed plan; return none where blocks hold too little work."""
    if len(problem.graph) > MAX_SERIES_NODES or len(problem.target.devices) < 2:
        return []
    chain, least = decompose_series(problem, MAX_BLOCK_NODES), problem.seconds.min(axis=0)
    if not chain.fork_indices or not _blocks_suffice(chain, least):
        return []
    # Each block gets an equal share of the time, and few proposals: it is small, and there are many.
    proposals = min(MAX_BLOCK_PROPOSALS, budget.proposals or MAX_BLOCK_PROPOSALS)
    share = Budget(budget.seconds / len(chain.fork_indices), proposals)
    deadline = time.perf_counter() + budget.seconds if budget.seconds else np.inf

    def search_block(block: PlacementProblem) -> BlockPlan:
        space = SearchSpace(block)
        candidates = [
            evaluate_candidate(space, "", place_on_one_device(block, index), block.graph.order)
            for index in list_distinct_devices(block)
        ]
        fitting, goal = [candidate for candidate in candidates if candidate], _goal_seconds(block)
        best = min(fitting, key=lambda candidate: candidate.seconds)
        if best.seconds > goal and time.perf_counter() < deadline:
            best = explore(coarsen(block), fitting, share, seed, goal).best
        return best.device, best.order

    plans = [search_block(block) for block in chain.problems]
    return [PlacerPlan("blocks", *compose_blocks(problem, chain, plans, search_block))]


def _blocks_suffice(chain: BlockChain, least: Floats) -> bool:
    """Return whether the blocks hold most of the work, and no single one most of the graph."""
    covered = np.zeros(len(least), dtype=bool)
    for block in chain.blocks:
        covered[block.nodes] = True
    largest = max(len(chain.problems[index].graph) for index in chain.fork_indices)
    return bool(least[covered].sum() >= MIN_SERIES_WORK_SHARE * least.sum()) and 2 * largest <= len(least)


def search_and_commit(
    state: State,
    problem: PlacementProblem,
    plans: Sequence[PlacerPlan],
    placer: str,
    budget: Budget,
    seed: int,
    *,
    promising: str = "",
) -> State:
    """Search from the plans and from scratch; commit the best placement to `state`, with a note about it.

    One of the first two searches starts from the plan `promising`, if there is one and it fits.

    Raises:
        InfeasibleError: No placement fits.
    """
    space, moves = SearchSpace(problem), ""
    # 1. Score the plans as the search does; those that do not fit drop out.
    candidates = {plan.name: evaluate_candidate(space, plan.name, plan.device, plan.order) for plan in plans}
    simulated, goal = list[SimulatedPlan](), _goal_seconds(problem)
    if not (budget.eager and _is_one_device_enough(problem, candidates, goal)):
        start_time = time.perf_counter()
        # 2. Blocks in series. They leave memory out, so they are tried only where one device can hold everything.
        if any(candidates.get(device.id) for device in problem.target.devices):
            for plan in plan_blocks(problem, replace(budget, seconds=BLOCK_TIME_SHARE * budget.seconds), seed):
                plans = [*plans, plan]
                candidates[plan.name] = evaluate_candidate(space, plan.name, plan.device, plan.order)
        # 3. Search from all of them, with at least half of the time, even if blocks took more than their share.
        spent = time.perf_counter() - start_time
        remaining = replace(budget, seconds=max(budget.seconds - spent, budget.seconds / 2))
        fitting = [candidate for candidate in candidates.values() if candidate]
        try:
            exploration = _explore_in_rounds(problem, fitting, remaining, seed, goal, candidates.get(promising))
        except LookupError:
            pass
        else:
            moves = f"{exploration.proposals} moves{budget}"
            before = candidates.get(exploration.best.name)
            improved = before is not None and exploration.best.seconds < before.seconds
            plan = _to_plan(exploration.best, "improved" if improved else "")
            simulated += _simulate_if_fitting(state, problem, plan, exploration.best)
    for plan in plans:
        simulated += _simulate_if_fitting(state, problem, plan, candidates[plan.name])
    # 4. The schedule decides, not the search's own account: of the plans that fit, the shortest step is kept.
    if not simulated:
        raise out_of_memory_error(problem, placer)
    best = min(simulated, key=lambda option: option.seconds)
    after = commit_placement(state, problem, best.plan.device, best.plan.rank, placer)
    return after.with_notes(_describe_result(best, simulated, moves, after[Schedule].lower_bound_seconds, placer))


def _is_one_device_enough(problem: PlacementProblem, candidates: Mapping[str, Candidate | None], goal: float) -> bool:
    """Return whether one device takes little longer than the lower bound and what the second segment's call takes."""
    alone = [item.seconds for item in candidates.values() if item and (item.device == item.device[:1]).all()]
    call_seconds = min(device.segment_seconds for device in problem.target.devices)
    return min(alone, default=np.inf) <= ONE_DEVICE_RATIO * goal + call_seconds


def _explore_in_rounds(
    problem: PlacementProblem,
    given: Sequence[Candidate],
    budget: Budget,
    seed: int,
    goal: float,
    promising: Candidate | None,
) -> Explored:
    """Search from given candidates; where the budget is eager, in rounds from the best so far while that gains much."""
    ladder, began, moves, goal = coarsen(problem), time.perf_counter(), 0, goal * (1 + budget.tolerance)
    worth = budget.proposals or count_worthwhile_moves(problem)
    rounds = [replace(budget, proposals=int(np.ceil(share * worth))) for share in ROUNDS] if budget.eager else [budget]
    for part in rounds:
        before = min((candidate.seconds for candidate in given), default=np.inf)
        found = explore(ladder, given, part, seed, goal, promising)
        given, moves = [*given, found.best], moves + found.proposals
        is_over = 0 < budget.seconds <= time.perf_counter() - began
        gains_little = found.best.seconds >= (1 - LEAST_GAIN) * before
        if is_over or gains_little or found.best.seconds <= NEAR_BOUND_RATIO * goal:
            break
    return replace(found, proposals=moves)


def estimate_cost_error(profile: Profile) -> float:
    """Return the standard error of a step's computing time, as a share of it, as far as costs were measured.

    Steps that differ by less are equal for all that is known. It is that of the least sure class of devices, of
    independent errors of the nodes. The median of n runs is off by 1.25 / sqrt(n) standard deviations, and half of an
    interquartile range is 0.67 of them.
    """
    errors = [
        1.86 * np.linalg.norm(profile.spread[name]) / max(profile.seconds[name].sum(), 1e-12) / quality.runs**0.5
        for name, quality in profile.quality.items()
        if name in profile.spread and quality.runs
    ]
    return min(float(max(errors, default=0.0)), MAX_COST_ERROR)


def improve_and_commit(state: State, problem: PlacementProblem, plan: PlacerPlan, budget: Budget, seed: int) -> State:
    """Search from the plan of `state`; commit a better one if there is one, with a note."""
    space, seconds_before = SearchSpace(problem), state[Schedule].simulation.makespan_seconds
    start = evaluate_candidate(space, plan.name, plan.device, plan.order)
    if start is None:
        return state
    exploration = polish(space, start, budget, seed, _goal_seconds(problem))
    improved = _to_plan(exploration.best, "refined")
    message = f"nothing better than {seconds_before * 1e3:.4g} ms"
    if any(option.seconds < seconds_before for option in _simulate_if_fitting(state, problem, improved, None)):
        state = commit_placement(state, problem, improved.device, improved.rank, improved.name)
        message = f"{seconds_before * 1e3:.4g} ms -> {state[Schedule].simulation.makespan_seconds * 1e3:.4g} ms"
    return state.with_notes(Diagnostic("P021", f"{message}; {exploration.proposals} moves{budget}", where="refine"))


def _goal_seconds(problem: PlacementProblem) -> float:
    """Return the lower bound on a step, raised by what rounding may add."""
    bound = lower_bound_seconds(problem.graph, problem.seconds, problem.target, problem.group, problem.pinned)
    return bound * (1 + 1e-9)


def _to_plan(candidate: Candidate, suffix: str) -> PlacerPlan:
    return PlacerPlan(f"{candidate.name}, {suffix}" if suffix else candidate.name, candidate.device, candidate.order)


def _simulate_if_fitting(
    state: State, problem: PlacementProblem, plan: PlacerPlan, candidate: Candidate | None
) -> list[SimulatedPlan]:
    """Return a plan with its simulated step, or nothing if it does not fit."""
    _, _, simulation = simulate_plan(state, problem, plan.device, plan.rank)
    if problem.excess_bytes(simulation).any() or problem.refuses(plan.device):
        return []
    seconds = simulation.makespan_seconds
    if candidate and any(device.segment_seconds for device in problem.target.devices):
        # The schedule leaves out the cost of cuts; the candidate includes it.
        # What calls add is the difference between the two simulations of the same placement.
        seconds += max(0.0, candidate.seconds - problem.simulate(plan.device, plan.order).makespan_seconds)
    return [SimulatedPlan(plan, seconds)]


def _describe_result(
    best: SimulatedPlan, simulated: Sequence[SimulatedPlan], moves: str, bound: float, placer: str
) -> Diagnostic:
    excess = (
        f"{100 * (best.seconds / bound - 1):.1f} % over the lower bound" if bound > 0 else "the lower bound is zero"
    )
    tried = [option for option in simulated if option.plan.name != best.plan.name]
    others = ", ".join(f"{option.plan.name} {option.seconds * 1e3:.4g} ms" for option in tried)
    return Diagnostic(
        "P040",
        f"kept {best.plan.name}: {best.seconds * 1e3:.4g} ms, {excess}"
        + (f"; tried {others}" if others else "")
        + (f"; {moves}" if moves else ""),
        where=placer,
        figures=tuple(Figure(option.plan.name, option.seconds) for option in (best, *tried)),
    )
