"""Placements to imitate: the best that the search finds, as `auto` does."""

from __future__ import annotations

from dataclasses import dataclass

from onnxplace.graph.op_graph import Ints
from onnxplace.passes.placement.search.placement_search import Budget, SearchSpace, coarsen, evaluate_candidate, explore
from onnxplace.passes.placement.search.portfolio import plan_blocks, published_plans
from onnxplace.problem import PlacementProblem


@dataclass(frozen=True)
class Lesson:
    """A problem and the best placement that was found for it."""

    problem: PlacementProblem
    device: Ints
    """Per node."""
    seconds: float
    """The step."""
    fallback_seconds: float
    """The step of the best placement without a search: one device, m-TOPO, m-ETF or m-SCT."""


def search_lesson(problem: PlacementProblem, proposals: int, seed: int) -> Lesson | None:
    """Search for a placement to imitate as `auto` does; return None where nothing fits.

    Proposals, not the clock, end the search: it is deterministic under `seed`.
    """
    space, budget = SearchSpace(problem), Budget(0.0, proposals)
    published = published_plans(problem)
    plans = [*published, *plan_blocks(problem, budget, seed)]
    candidates = [evaluate_candidate(space, plan.name, plan.device, plan.order) for plan in plans]
    fitting = [candidate for candidate in candidates if candidate]
    try:
        best = explore(coarsen(problem), fitting, budget, seed, 0.0).best
    except LookupError:
        return None
    alone = [candidate.seconds for candidate in candidates[: len(published)] if candidate]
    return Lesson(problem, best.device, best.seconds, min(alone, default=best.seconds))
