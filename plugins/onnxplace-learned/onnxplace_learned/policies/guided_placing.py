"""Placements of a policy of `guided`: one that takes the best devices, and others that are sampled."""

from __future__ import annotations

import numpy as np

from onnxplace.graph import Ints
from onnxplace.passes.placement.search import Candidate, Plan, evaluate_candidate
from onnxplace.problem import PlacementProblem
from onnxplace_learned.policies.guided_graph import GuidedGraph
from onnxplace_learned.policies.guided_policy import GuidedPolicy, run_schedule


def plan_with_policy(
    problem: PlacementProblem, policy: GuidedPolicy, schedules: int, seed: int, name: str
) -> list[Plan]:
    """Return the placements of a policy that fit, each once, the shortest step first.

    The first of `schedules` list schedules takes the best device each time; the others sample devices under `seed`.
    """
    graph, candidates = GuidedGraph(problem), dict[bytes, Candidate]()
    choice, rng = policy.prepare(graph), np.random.default_rng(seed)
    for index in range(schedules):
        schedule = run_schedule(graph, choice, rng.random(len(problem.pinned)) if index else None)
        if schedule is None:
            continue
        device = schedule[0]
        if (key := device.tobytes()) not in candidates and (candidate := evaluate_schedule(graph, device, name)):
            candidates[key] = candidate
    best = sorted(candidates.values(), key=lambda candidate: candidate.seconds)
    return [Plan(candidate.name, candidate.device, candidate.order) for candidate in best]


def evaluate_schedule(graph: GuidedGraph, device: Ints, name: str = "") -> Candidate | None:
    """Return a placement with its step, in the better of two orders; None if it does not fit."""
    return evaluate_candidate(graph.space, name, device, graph.order)
