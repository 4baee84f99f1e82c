"""The incumbent: the shortest step so far of a placement problem, and the best lower bound."""

from __future__ import annotations

import numpy as np

from onnxplace.graph import Ints
from onnxplace.passes.placement.exact.branch_and_bound import SearchResult
from onnxplace.problem import PlacementProblem
from onnxplace.simulation import lower_bound_seconds

# Relative difference of times that are equal except for rounding.
ROUNDING = 1e-9


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
