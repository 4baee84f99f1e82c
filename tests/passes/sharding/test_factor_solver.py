"""The solver of factor graphs under memory over time: bounds, limits, and agreement with enumeration."""

import itertools
import math

import numpy as np
from hypothesis import given, settings, strategies as st

from onnxplace.passes.sharding.elimination import Factor, evaluate
from onnxplace.passes.sharding.factor_solver import FactorProblem, solve


def enumerate_optimum(problem: FactorProblem) -> float:
    best = math.inf
    for values in itertools.product(*map(range, problem.sizes)):
        held = [
            sum(
                float(usages[value])
                for usages, (first, end), value in zip(problem.usages, problem.intervals, values)
                if first <= point < end
            )
            for point, _ in problem.intervals
        ]
        if max(held, default=0) <= problem.limit:
            best = min(best, evaluate(problem.factors, values))
    return best


def random_problem(seed: int, *, is_limited: bool) -> FactorProblem:
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 8))
    sizes = [int(size) for size in random.integers(1, 4, count)]
    factors = [Factor((v,), random.integers(0, 20, size).astype(float)) for v, size in enumerate(sizes)]
    for first, second in itertools.combinations(range(count), 2):
        if random.random() < 0.4:
            table = random.integers(0, 20, (sizes[first], sizes[second])).astype(float)
            table[random.random(table.shape) < 0.2] = math.inf
            factors.append(Factor((first, second), table))
    starts = random.integers(0, 6, count)
    return FactorProblem(
        sizes=sizes,
        factors=factors,
        usages=[random.integers(0, 9, size).astype(float) for size in sizes],
        intervals=[(int(start), int(start + random.integers(0, 5))) for start in starts],
        limit=float(random.integers(8, 16)) if is_limited else math.inf,
    )


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_small_problem_without_a_limit_is_solved_exactly(seed: int) -> None:
    problem = random_problem(seed, is_limited=False)
    optimum = enumerate_optimum(problem)
    solution = solve(problem, seconds=10)
    assert solution.fits
    if optimum < math.inf:
        assert solution.cost == solution.bound == optimum == evaluate(problem.factors, solution.values)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_bound_holds_and_an_assignment_that_fits_keeps_the_limit(seed: int) -> None:
    problem = random_problem(seed, is_limited=True)
    optimum = enumerate_optimum(problem)
    solution = solve(problem, seconds=10)
    assert solution.bound <= optimum + 1e-6
    if solution.fits and solution.cost < math.inf:
        assert solution.cost >= optimum


def test_memory_at_one_time_makes_a_dearer_choice_necessary() -> None:
    big, small = np.array([10.0, 4.0]), np.array([0.0, 1.0])
    problem = FactorProblem(
        sizes=[2, 2, 2],
        factors=[Factor((variable,), small) for variable in range(3)],
        usages=[big] * 3,
        intervals=[(0, 2), (1, 3), (3, 5)],
        limit=14,
    )
    solution = solve(problem, seconds=10)
    assert solution.fits
    assert solution.cost == 1
    assert solution.values[2] == 0
    assert solution.bound <= 1 + 1e-9
