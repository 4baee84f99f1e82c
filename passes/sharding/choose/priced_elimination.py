"""Least cost within memory over time: each point of time gets a price per byte, and elimination does the rest.

A limit of memory couples all variables that hold something at the same time, which elimination cannot express. At fixed
prices per byte and point of time, the problem is a sum of tables again (Lagrangian relaxation): its minimum, less what
the limit costs at these prices, is a lower bound. Prices rise where too much is held and fall elsewhere (sub-gradients;
Held, Wolfe and Crowder, "Validation of subgradient optimization", Mathematical Programming 6, 1974).

Equal layers react to a price all at once, so the best choice that fits may save more than it has to. Then the variables
up to some position get the prices at which too much is held, and the others those at which it fits: the position is
bisected, and elimination finds the best transition.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onnxplace.graph.op_graph import Floats
from onnxplace.passes.sharding.choose.elimination import Factor, Solution, evaluate, minimise
from onnxplace.passes.sharding.choose.factor_solver import FactorProblem

# Rounds of prices: at first the step doubles until something fits, then it shrinks with each round.
_ROUNDS, _GROWTH, _SHRINKING = 40, 2.0, 0.75
_SMALL_GAP = 1e-4


class _PriceSearch:
    """Memory counts at the points of time where some interval begins, one of which has the most."""

    def __init__(self, problem: FactorProblem, deadline: float) -> None:
        self.problem, self.deadline = problem, deadline
        self.spans = problem.spans
        places = np.arange(len(problem.sizes))
        for factor in problem.factors:
            for variable in factor.scope:
                places[variable] = min(places[variable], factor.scope[0])
        # A holding is where its variable is; a variable, where the first one is that it shares a table with: a value
        # with the node that makes it.
        self.places = places[np.array([item.variable for item in problem.holdings], np.int64)]
        self.best: Solution | None = None
        self.bound = -math.inf

    def minimise(self, prices: Floats, until: int = 0, lower: Floats | None = None) -> Solution:
        """Return the best assignment at these prices; holdings before a position have the lower ones."""
        problem, per_byte = self.problem, self._interval_prices(prices)
        if lower is not None:
            per_byte = np.where(self.places < until, self._interval_prices(lower), per_byte)
        priced = [
            Factor((item.variable,), item.bytes * price)
            for item, price in zip(problem.holdings, per_byte.tolist())
            if price > 0
        ]
        return minimise(problem.sizes, [*problem.factors, *priced], sweeps=0)

    def _interval_prices(self, prices: Floats) -> Floats:
        total = np.concatenate([[0.0], prices.cumsum()])
        result: Floats = total[self.spans[:, 1]] - total[self.spans[:, 0]]
        return result

    def is_over(self) -> bool:
        gap = math.inf if self.best is None else self.best.cost - self.bound
        return gap <= _SMALL_GAP * abs(self.bound) or time.monotonic() > self.deadline

    def keep(self, values: Sequence[int]) -> Floats:
        """Keep an assignment that fits and costs less than the best one.

        Returns the bytes above the limit at each moment, negative where some are free.
        """
        excess = self.problem.held_bytes(values) - self.problem.limit
        cost = evaluate(self.problem.factors, values)
        if excess.max(initial=0.0) <= 0 and (self.best is None or cost < self.best.cost):
            self.best = Solution(values, cost, self.bound)
        return excess

    def run(self) -> Solution:
        first = self.minimise(np.zeros(self.problem.moment_count))
        self.bound = first.lower_bound
        excess = self.keep(first.values)
        prices = light = heavy = np.zeros(len(excess))
        step = abs(first.cost) / max(self.problem.limit, 1.0) ** 2
        for _ in range(_ROUNDS):
            if self.is_over():
                break
            # Until something fits, no price falls: what was moved away must not come back.
            prices = np.maximum(prices + step * (np.maximum(excess, 0.0) if self.best is None else excess), 0.0)
            solution = self.minimise(prices)
            self.bound = max(self.bound, solution.lower_bound - float(prices.sum()) * self.problem.limit)
            known, excess = self.best, self.keep(solution.values)
            if self.best is not known:
                light = prices
            elif excess.max() > 0:
                heavy = prices
            step *= _GROWTH if self.best is None else _SHRINKING
        if self.best is not None:
            self._mix(light, heavy)
            return replace(self.best, lower_bound=min(self.bound, self.best.cost))
        return replace(first, lower_bound=self.bound, fits=False)

    def _mix(self, light: Floats, heavy: Floats) -> None:
        """Find the last position up to which the prices may be those at which too much is held."""
        low, high = 0, int(self.places.max(initial=0)) + 1
        while high - low > 1 and not self.is_over():
            middle = (low + high) // 2
            excess = self.keep(self.minimise(light, middle, heavy).values)
            low, high = (middle, high) if excess.max() <= 0 else (low, middle)


def solve_by_prices(problem: FactorProblem, *, seconds: float) -> Solution:
    """Return the best assignment found within the limit of memory, with a lower bound on the cost of all that fit.

    Args:
        problem: Tables, and memory over time.
        seconds: No further round begins after this time; whatever ends before is the same in each run.
    """
    return _PriceSearch(problem, time.monotonic() + seconds).run()
