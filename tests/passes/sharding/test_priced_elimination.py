"""Prices per point of time against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from onnxplace.passes.sharding.choose.elimination import Factor, evaluate
from onnxplace.passes.sharding.choose.factor_network import Holding
from onnxplace.passes.sharding.choose.factor_solver import FactorProblem
from onnxplace.passes.sharding.choose.priced_elimination import solve_by_prices


def make_problem(seed: int) -> FactorProblem:
    """Return a chain of five variables, which hold something for a while, and two of them something throughout."""
    random = np.random.default_rng(seed)
    sizes = random.integers(2, 4, 5).tolist()
    factors = [Factor((index,), random.integers(0, 20, size).astype(float)) for index, size in enumerate(sizes)]
    for index in range(4):
        table = random.integers(0, 10, (sizes[index], sizes[index + 1])).astype(float)
        table[random.random(table.shape) < 0.15] = np.inf
        factors.append(Factor((index, index + 1), table))
    holders = [0, 1, 2, 3, 4, 0, 3]
    intervals = [*((index, index + 2) for index in range(5)), (0, 7), (0, 7)]
    usages = [random.integers(0, 10, sizes[holder]).astype(float) for holder in holders]
    holdings = [Holding(holder, *interval, usage) for holder, interval, usage in zip(holders, intervals, usages)]
    return FactorProblem(sizes, factors, holdings, limit=float(random.integers(10, 30)))


def count_peak(problem: FactorProblem, values: tuple[int, ...] | list[int]) -> float:
    return max(
        sum(usage[values[holder]] for holder, begin, end, usage in problem.holdings if begin <= moment < end)
        for moment in range(7)
    )


def test_what_fits_is_near_the_least_cost_and_above_its_bound() -> None:
    found, ratios = [], []
    for seed in range(60):
        problem = make_problem(seed)
        fitting = [
            values
            for values in itertools.product(*map(range, problem.sizes))
            if count_peak(problem, values) <= problem.limit and evaluate(problem.factors, values) < np.inf
        ]
        solution = solve_by_prices(problem, seconds=10)
        if not fitting:
            assert not solution.fits or solution.cost == np.inf
            continue
        least = min(evaluate(problem.factors, values) for values in fitting)
        found.append(solution.fits)
        assert solution.lower_bound <= least + 1e-6
        if solution.fits:
            assert count_peak(problem, solution.values) <= problem.limit
            assert solution.cost == pytest.approx(evaluate(problem.factors, solution.values))
            assert solution.cost >= least - 1e-6
            ratios.append(solution.cost / max(least, 1.0))
    assert np.mean(found) > 0.8
    assert float(np.median(ratios)) < 1.05
