"""Choose values of discrete variables: least sum of cost tables, within memory that variables hold for intervals.

A limit of memory couples all variables that are alive at the same time. So each point of time gets a price per byte
(Lagrangian relaxation): at fixed prices the problem is a sum of tables, whose minimum less the price of the limit is a
lower bound. Prices rise where the limit is exceeded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onnxplace.passes.sharding.elimination import CostTable, Factor, evaluate, minimise


@dataclass(frozen=True)
class FactorProblem:
    """A sum of cost tables over discrete variables, and memory that they hold over time."""

    sizes: Sequence[int]
    """Number of values of each variable."""
    factors: Sequence[Factor]
    """Their sum is minimised; infinite entries forbid."""
    usages: Sequence[NDArray[np.float64]] = ()
    """Tables of bytes, one entry per value of the variable that holds them."""
    intervals: Sequence[tuple[int, int]] = ()
    """Per table of bytes, the time [from, to) during which they are held."""
    limit: float = math.inf
    """Bytes that all variables together may hold at any time."""
    holders: Sequence[int] = ()
    """Per table of bytes, its variable; empty where table v is that of variable v."""


@dataclass(frozen=True)
class FactorSolution:
    """An assignment of all variables."""

    values: list[int]
    cost: float
    bound: float
    """No assignment within the limit costs less."""
    fits: bool
    """Whether the assignment keeps within the limit of memory."""


@dataclass
class _Memory:
    """Memory over time, at the points where some interval begins: usage is largest at one of them."""

    problem: FactorProblem
    starts: NDArray[np.int64] = field(init=False)
    spans: list[tuple[int, int]] = field(init=False)
    holders: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        self.holders = self.problem.holders or range(len(self.problem.usages))
        self.starts = np.unique(np.array([first for first, end in self.problem.intervals if end > first], np.int64))
        self.spans = [
            (int(np.searchsorted(self.starts, first)), int(np.searchsorted(self.starts, max(end, first))))
            for first, end in self.problem.intervals
        ]

    def usage(self, values: Sequence[int]) -> NDArray[np.float64]:
        """Return the bytes held at each point."""
        changes = np.zeros(len(self.starts) + 1)
        for (first, end), usages, holder in zip(self.spans, self.problem.usages, self.holders):
            changes[first] += usages[values[holder]]
            changes[end] -= usages[values[holder]]
        return changes.cumsum()[:-1]

    def repair(self, values: Sequence[int]) -> list[int]:
        """Return values that hold less where too much is held, with little more cost."""
        result = list(values)
        touching: dict[int, list[Factor]] = {}
        for factor in self.problem.factors:
            for variable in factor.scope:
                touching.setdefault(variable, []).append(factor)
        while (held := self.usage(result)).max() > self.problem.limit:
            point = int(held.argmax())
            best = (math.inf, -1, 0)
            for variable, (first, end), usages in zip(self.holders, self.spans, self.problem.usages):
                if first <= point < end:
                    before = evaluate(touching.get(variable, ()), result)
                    for value in np.flatnonzero(usages < usages[result[variable]]):
                        trial = [*result]
                        trial[variable] = int(value)
                        added = evaluate(touching.get(variable, ()), trial) - before
                        best = min(best, (added, variable, int(value)))
            if best[0] == math.inf:
                break
            result[best[1]] = best[2]
        return result

    def price(self, prices: NDArray[np.float64]) -> list[Factor]:
        """Return what the values of each variable cost at these prices per byte and point."""
        total = np.concatenate([[0.0], prices.cumsum()])
        return [
            Factor((variable,), np.asarray(usages, np.float64) * (total[end] - total[first]))
            for variable, (first, end), usages in zip(self.holders, self.spans, self.problem.usages)
            if end > first
        ]


_ROUNDS = 60


def solve(problem: FactorProblem, *, seconds: float, seed: int = 0) -> FactorSolution:
    """Return the best assignment found, with a lower bound on the cost of all that fit.

    Args:
        problem: Tables, sizes, and memory over time.
        seconds: No further round begins after this time.
        seed: Of random choices.
    """
    deadline = time.monotonic() + seconds
    first = minimise(problem.sizes, problem.factors)
    best = list(first.values), first.cost, first.lower_bound
    memory = _Memory(problem)
    if not memory.starts.size or memory.usage(first.values).max() <= problem.limit:
        return FactorSolution(best[0], best[1], best[2], fits=True)
    prices, bound, found, step = np.zeros(len(memory.starts)), first.lower_bound, None, 1.0
    values: Sequence[int] = first.values
    excess = math.inf
    for round_number in range(_ROUNDS):
        # Equal variables react to a price all at once, so the repair takes the largest excess from one after the other.
        values = memory.repair(values) if round_number % 5 == 0 else values
        over = memory.usage(values) - problem.limit
        cost = evaluate(problem.factors, values)
        if over.max() <= 0 and (found is None or cost < found[1]):
            found = list(values), cost
        if found is None and over.max() < excess:
            best, excess = (list(values), cost, bound), over.max()
        if (found and found[1] - bound <= 1e-9 * abs(found[1])) or time.monotonic() > deadline:
            break
        # The Polyak step, from a gap that is assumed until an assignment fits.
        gap = (found[1] if found else bound + 0.5 * abs(bound) + 1e-300) - bound
        direction: CostTable = np.where((prices > 0) | (over > 0), over, 0.0)
        prices = np.maximum(prices + step * gap / max(float(direction @ direction), 1e-300) * direction, 0.0)
        relaxed = minimise(problem.sizes, [*problem.factors, *memory.price(prices)])
        values, dual = relaxed.values, relaxed.lower_bound - float(prices.sum()) * problem.limit
        step = step if dual > bound else step * 0.85
        bound = max(bound, dual)
    if found:
        return FactorSolution(found[0], found[1], min(bound, found[1]), fits=True)
    return FactorSolution(best[0], best[1], bound, fits=False)
