"""Try placements, search from them, and keep the best by simulation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxplace.errors import Diagnostic, InfeasibleError
from onnxplace.facts import Schedule
from onnxplace.graph import Floats, Ints
from onnxplace.passes.placement.list_scheduling import favourite_children, fill_devices, find_best_plan, transfer_edges
from onnxplace.passes.placement.search.coarsening import coarsen
from onnxplace.passes.placement.search.search import (
    Budget,
    Candidate,
    SearchSpace,
    distinct_devices,
    evaluate_candidate,
    explore,
    on_one,
    polish,
)
from onnxplace.passes.placement.search.series_blocks import BlockChain, BlockPlan, compose_blocks, decompose_series
from onnxplace.problem import (
    PlacementProblem,
    commit_placement,
    describe_shortage,
    out_of_memory_error,
    simulate_plan,
    sort_by_start,
)
from onnxplace.simulation import lower_bound_seconds
from onnxplace.state import State

# The linear program of m-SCT takes 0.3 s at 3 000 nodes and seven at 20 000.
SCT_NODES = 3_000
# Blocks are looked for in graphs of so many nodes, and searched if they hold this part of the work, and none of them
# more than half of the nodes.
ROW_NODES, ROW_WORK = 30_000, 0.9
# How large a block may be, how many moves each search of it may try, and their part of the time.
BLOCK_NODES, BLOCK_PROPOSALS, BLOCKS_SHARE = 100, 500, 0.2


@dataclass(frozen=True)
class Plan:
    """What a placer came up with."""

    name: str
    device: Ints
    """Per node of the problem."""
    order: Ints
    """The nodes as they are to run."""

    @property
    def rank(self) -> Floats:
        """Return the position of each node in the order."""
        rank = np.empty(len(self.order))
        rank[self.order] = np.arange(len(self.order))
        return rank


@dataclass(frozen=True)
class Tried:
    """A plan that was carried out on paper, and fits."""

    plan: Plan
    seconds: float
    """The step, calls of segments counted."""


def published_plans(asked: PlacementProblem) -> list[Plan]:
    """Return the placements of the other placers: each device alone, m-TOPO, m-ETF, m-SCT; those that fit."""
    graph, nobody = asked.graph, np.full(len(asked.graph), -1, dtype=np.int32)
    names = [device.id for device in asked.target.devices]
    plans = [Plan(names[index], on_one(asked, index), graph.order) for index in distinct_devices(asked)]

    def listed(favourite: Ints) -> tuple[Ints, Ints]:
        device, start = find_best_plan(asked, favourite)
        return device, sort_by_start(graph, start)

    ways: dict[str, Callable[[], tuple[Ints, Ints]]] = {
        "m-topo": lambda: (fill_devices(asked), graph.order),
        "m-etf": lambda: listed(nobody),
    }
    if len(graph) <= SCT_NODES:
        ways["m-sct"] = lambda: listed(favourites(asked))
    for name, way in ways.items():
        try:
            plans.append(Plan(name, *way()))
        except InfeasibleError:
            continue
    return plans


def favourites(asked: PlacementProblem) -> Ints:
    """Return the favourite children that m-SCT goes by."""
    return favourite_children(asked.seconds.min(axis=0), transfer_edges(asked), 0.1)


def plan_of_blocks(asked: PlacementProblem, budget: Budget, seed: int) -> list[Plan]:
    """Return the plan that comes of searching blocks that run one after the other; none where they hold too little."""
    if len(asked.graph) > ROW_NODES or len(asked.target.devices) < 2:
        return []
    row, least = decompose_series(asked, BLOCK_NODES), asked.seconds.min(axis=0)
    if not row.forks or not _worthwhile(row, least):
        return []
    share = Budget(budget.seconds / len(row.forks), min(BLOCK_PROPOSALS, budget.proposals or BLOCK_PROPOSALS))
    until = time.perf_counter() + budget.seconds if budget.seconds else np.inf

    def searched(part: PlacementProblem) -> BlockPlan:
        ground = SearchSpace(part)
        begin = [
            evaluate_candidate(ground, "", on_one(part, index), part.graph.order) for index in distinct_devices(part)
        ]
        fitting, goal = [one for one in begin if one], _goal(part)
        best = min(fitting, key=lambda one: one.seconds)
        if best.seconds > goal and time.perf_counter() < until:
            best = explore(coarsen(part), fitting, share, seed, goal).best
        return best.device, best.order

    steps = [searched(part) for part in row.problems]
    return [Plan("blocks", *compose_blocks(asked, row, steps, searched))]


def _worthwhile(row: BlockChain, least: Floats) -> bool:
    """Return whether the blocks hold most of the work, and none of them most of the graph."""
    held = np.zeros(len(least), dtype=bool)
    for block in row.blocks:
        held[block.nodes] = True
    largest = max(len(row.problems[index].graph) for index in row.forks)
    return bool(least[held].sum() >= ROW_WORK * least.sum()) and 2 * largest <= len(least)


def search_and_commit(
    state: State, asked: PlacementProblem, plans: Sequence[Plan], placer: str, budget: Budget, seed: int
) -> State:
    """Search from the plans and from scratch; return `state` with the best placement of all, and a note about it.

    Raises InfeasibleError if nothing fits.
    """
    ground, effort = SearchSpace(asked), ""
    known = {plan.name: evaluate_candidate(ground, plan.name, plan.device, plan.order) for plan in plans}
    began = time.perf_counter()
    if any(known.get(device.id) for device in asked.target.devices):
        for plan in plan_of_blocks(asked, replace(budget, seconds=BLOCKS_SHARE * budget.seconds), seed):
            plans = [*plans, plan]
            known[plan.name] = evaluate_candidate(ground, plan.name, plan.device, plan.order)
    left = replace(budget, seconds=max(budget.seconds - (time.perf_counter() - began), budget.seconds / 2))
    tried = list[Tried]()
    try:
        found = explore(coarsen(asked), [each for each in known.values() if each], left, seed, _goal(asked))
    except LookupError:
        pass
    else:
        effort = f"{found.proposals} moves{budget}"
        begun = known.get(found.best.name)
        gained = begun is not None and found.best.seconds < begun.seconds
        tried += _tried(state, asked, _searched(found.best, "improved" if gained else ""), found.best)
    for plan in plans:
        tried += _tried(state, asked, plan, known[plan.name])
    if not tried:
        raise out_of_memory_error(asked, placer)
    best = min(tried, key=lambda one: one.seconds)
    after = commit_placement(state, asked, best.plan.device, best.plan.rank, placer)
    return after.saying(_note(best, tried, effort, after[Schedule].lower_bound_seconds, placer))


def improve_and_commit(state: State, asked: PlacementProblem, plan: Plan, budget: Budget, seed: int) -> State:
    """Return `state` with the plan it has, or a better one, and a note about that."""
    ground, had = SearchSpace(asked), state[Schedule].simulation.makespan_seconds
    begin = evaluate_candidate(ground, plan.name, plan.device, plan.order)
    if begin is None:
        return state
    found = polish(ground, begin, budget, seed, _goal(asked))
    better = _searched(found.best, "refined")
    message = f"nothing better than {had * 1e3:.4g} ms"
    if any(one.seconds < had for one in _tried(state, asked, better, None)):
        state = commit_placement(state, asked, better.device, better.rank, better.name)
        message = f"{had * 1e3:.4g} ms -> {state[Schedule].simulation.makespan_seconds * 1e3:.4g} ms"
    return state.saying(Diagnostic("P041", f"{message}; {found.proposals} moves{budget}", where="refine"))


def _goal(asked: PlacementProblem) -> float:
    """Return the time of a step below which there is nothing to find."""
    bound = lower_bound_seconds(asked.graph, asked.seconds, asked.target, asked.group, asked.pinned)
    return bound * (1 + 1e-9)


def _searched(found: Candidate, how: str) -> Plan:
    return Plan(f"{found.name}, {how}" if how else found.name, found.device, found.order)


def _tried(state: State, asked: PlacementProblem, plan: Plan, known: Candidate | None) -> list[Tried]:
    """Return a plan with the step that comes of it, or nothing if it does not fit."""
    _, _, simulation = simulate_plan(state, asked, plan.device, plan.rank)
    if describe_shortage(asked.target, simulation.peak_bytes):
        return []
    seconds = simulation.makespan_seconds
    if known and any(device.segment_seconds for device in asked.target.devices):
        # The schedule leaves out what cuts cost; the candidate has them.
        seconds += max(0.0, known.seconds - asked.simulate(plan.device, plan.order).makespan_seconds)
    return [Tried(plan, seconds)]


def _note(best: Tried, tried: Sequence[Tried], effort: str, bound: float, placer: str) -> Diagnostic:
    over = f"{100 * (best.seconds / bound - 1):.1f} % over the lower bound" if bound > 0 else "the lower bound is zero"
    others = ", ".join(
        f"{one.plan.name} {one.seconds * 1e3:.4g} ms" for one in tried if one.plan.name != best.plan.name
    )
    return Diagnostic(
        "P040",
        f"kept {best.plan.name}: {best.seconds * 1e3:.4g} ms, {over}"
        + (f"; tried {others}" if others else "")
        + (f"; {effort}" if effort else ""),
        where=placer,
    )
