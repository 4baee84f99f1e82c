"""Place a problem with a policy: episodes, fine-tuning, and the best placement that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxplace.errors import Diagnostic
from onnxplace.facts import Schedule
from onnxplace.graph.op_graph import Ints
from onnxplace.passes.placement.search.placement_search import SearchSpace, coarsen, evaluate_candidate
from onnxplace.passes.placement.search.portfolio import PlacerPlan, published_plans
from onnxplace.problem import (
    PlacementProblem,
    commit_placement,
    out_of_memory_error,
    simulate_plan,
)
from onnxplace.state import State
from onnxplace_learned.policies.environment import Environment, Episode, Order
from onnxplace_learned.policies.placeto_learning import Learner, Settings, update_policy
from onnxplace_learned.policies.placeto_network import Policy, hash_names

# Placements that are kept for the end, where one may turn out not to fit.
MAX_KEPT = 4


@dataclass(frozen=True)
class Visited:
    """A placement that an episode visited."""

    cost: float
    device: Ints
    """Per node of the problem."""
    order: Ints | None = None
    """Another order of nodes to try; topological by default."""


@dataclass(frozen=True)
class PolicyResult:
    """The placements that a policy found."""

    visited: Sequence[Visited]
    """The best ones that fit, best first."""
    episodes: int
    start_cost: float
    """Cost of the placement that the episodes started from, or of one device."""
    seconds_per_cost: float
    start_name: str = "started from"
    """How a note calls `start_cost`."""


def place_with_policy(
    problem: PlacementProblem, policy: Policy, order: Order, *, episodes: int, seed: int, max_nodes: int
) -> PolicyResult:
    """Run episodes that always take the likeliest device, then fine-tune in `episodes` more.

    Problems with more groups than `max_nodes`, or than the policy was trained with, are coarsened first. A policy that
    was trained with measured rewards may know better than the simulator: the end of its episode comes first.
    """
    coarse, cluster = coarsen_to(problem, min(max_nodes, policy.max_nodes or max_nodes))
    environment = Environment(coarse, order, seed, policy.start)
    episodes_before = environment.run_best(policy.network)
    first = episodes_before[0]
    visited = _collect_best([], episodes_before)
    learner, settings = Learner.of(policy), Settings(seed=seed)
    rounds = -(-episodes // settings.episodes) if len(environment.visits.group) else 0
    for index in range(rounds):
        count = min(settings.episodes, episodes - index * settings.episodes)
        update = update_policy(learner, environment, replace(settings, episodes=count), index / rounds)
        learner, visited = update.learner, _collect_best(visited, update.episodes)
    if rounds:
        visited = _collect_best(visited, environment.run_best(learner.policy.network))
    if policy.reward == "measured":
        visited.insert(0, Visited(float(first.trajectory.cost[-1]), first.final))
    elif coarse is problem:
        visited = _rank_with_orders(visited, environment)
    # It may fit in another order of nodes, where nothing that was visited fits in that of the episodes.
    visited.append(Visited(float(first.trajectory.cost[0]), environment.start))
    return PolicyResult(
        visited=[replace(item, device=item.device[cluster]) for item in visited],
        episodes=episodes,
        start_cost=float(first.trajectory.cost[0]),
        seconds_per_cost=environment.rules.scale_seconds,
    )


def recall_placement(policy: Policy, problem: PlacementProblem, names: Sequence[str]) -> Visited | None:
    """Return the placement that was kept for this graph in a training with measured rewards; None without one.

    The graph is known by the names of its nodes. Nodes that are one in the problem go where most of them are; pinned
    groups stay where they are pinned.
    """
    device, count = policy.kept.get(hash_names(names)), len(problem.target.devices)
    if device is None or len(device) != len(problem.members) or device.max(initial=0) >= count:
        return None
    votes = np.zeros((len(problem.pinned), count), dtype=np.int64)
    np.add.at(votes, (problem.group[problem.members], device), 1)
    chosen = np.where(problem.pinned >= 0, problem.pinned, votes.argmax(axis=1))
    return Visited(0.0, chosen[problem.group].astype(np.int32))


def coarsen_to(problem: PlacementProblem, max_nodes: int) -> tuple[PlacementProblem, Ints]:
    """Return a version of a problem with at most so many nodes, or the coarsest, and the cluster of each node."""
    cluster = np.arange(len(problem.graph), dtype=np.int32)
    if len(problem.graph) <= max_nodes:
        return problem, cluster
    for level in coarsen(problem)[1:]:
        problem, cluster = level.problem, level.cluster[cluster]
        if len(problem.graph) <= max_nodes:
            break
    return problem, cluster


def _collect_best(visited: Sequence[Visited], episodes: Sequence[Episode]) -> list[Visited]:
    """Add the best placement of each episode that fits, and return the best of all."""
    best = [Visited(*item) for episode in episodes if (item := episode.best())]
    return sorted([*visited, *best], key=lambda item: item.cost)[:MAX_KEPT]


def _rank_with_orders(visited: Sequence[Visited], environment: Environment) -> list[Visited]:
    """Sort placements by their steps in the better of two orders of nodes; add that of m-ETF with its own order.

    In an episode, devices run the ready node with the longest path to the end first, which m-ETF does not.
    """
    planned, graph_order = environment.planned, environment.problem.graph.order
    items = [*visited, *([Visited(np.inf, *planned)] if planned else [])]
    ranked = []
    for item in items:
        order = graph_order if item.order is None else item.order
        if candidate := evaluate_candidate(environment.space, "", item.device, order):
            ranked.append(replace(item, cost=candidate.seconds / environment.rules.scale_seconds))
    return sorted(ranked, key=lambda item: item.cost)


def commit_result(state: State, problem: PlacementProblem, result: PolicyResult, placer: str) -> State:
    """Commit the best placement that fits, with a note.

    Each device runs its nodes by bottom level or in topological order, whichever is better. Where no placement of the
    policy fits, a published one is taken.

    Raises:
        InfeasibleError: No placement fits.
    """
    for item in result.visited:
        if after := commit_devices(state, problem, item.device, placer, item.order):
            seconds = after[Schedule].simulation.makespan_seconds
            start = result.start_cost * result.seconds_per_cost
            shown = f"{seconds * 1e3:.4g} ms, {result.start_name} {start * 1e3:.4g} ms"
            message = f"{shown}; {result.episodes} episodes to learn"
            return after.with_notes(Diagnostic("P021", message, where=placer))
    for plan in published_plans(problem):
        if _fits(state, problem, plan):
            message = f"no placement of the policy fits: kept that of {plan.name}"
            after = commit_placement(state, problem, plan.device, plan.rank, placer)
            return after.with_notes(Diagnostic("P021", message, where=placer))
    raise out_of_memory_error(problem, placer)


def commit_devices(
    state: State, problem: PlacementProblem, device: Ints, placer: str, order: Ints | None = None
) -> State | None:
    """Commit a placement; return None if it does not fit.

    Each device runs its nodes by bottom level or in the given order, topological by default, whichever is better.
    """
    tried = problem.graph.order if order is None else order
    candidate = evaluate_candidate(SearchSpace(problem), placer, device, tried)
    if candidate is None:
        return None
    plan = PlacerPlan(placer, candidate.device, candidate.order)
    return commit_placement(state, problem, plan.device, plan.rank, placer) if _fits(state, problem, plan) else None


def _fits(state: State, problem: PlacementProblem, plan: PlacerPlan) -> bool:
    """Return whether a plan fits, with the nodes of contracted groups one by one."""
    _, _, simulation = simulate_plan(state, problem, plan.device, plan.rank)
    return not problem.excess_bytes(simulation).any()
