"""Variable elimination against brute force."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.passes.sharding.choose import elimination
from onnxplace.passes.sharding.choose.elimination import (
    Elimination,
    Factor,
    Joins,
    Solution,
    evaluate,
    improve_windows,
    minimise,
    order_factor,
    round_costs,
)


@dataclass(frozen=True)
class Problem:
    sizes: tuple[int, ...]
    factors: tuple[Factor, ...]

    @property
    def optimum(self) -> float:
        return min(evaluate(self.factors, values) for values in itertools.product(*map(range, self.sizes)))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw sums of up to ten tables over up to eight variables, with equal tables and infinite entries."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=3, max_size=8)))
    variables = st.lists(st.integers(0, len(sizes) - 1), unique=True, max_size=3)
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    infinite = draw(st.sampled_from((0.0, 0.1, 0.4)))
    scale = draw(st.sampled_from((1e-6, 1.0, 1e6)))
    tables: dict[tuple[int, ...], np.ndarray] = {}
    factors = []
    for scope in draw(st.lists(variables, min_size=1, max_size=10)):
        shape = tuple(sizes[variable] for variable in scope)
        if shape not in tables or draw(st.booleans()):
            table = random.integers(-3, 9, shape) * scale if draw(st.booleans()) else random.normal(size=shape) * scale
            tables[shape] = np.where(random.random(shape) < infinite, math.inf, table)
        factors.append(order_factor(scope, tables[shape]))
    return Problem(sizes, tuple(factors))


def close_to(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-9 * (1 if math.isinf(value) else max(abs(value), 1e-6)))


def assert_valid(problem: Problem, solution: Solution) -> None:
    assert len(solution.values) == len(problem.sizes)
    assert all(0 <= value < size for value, size in zip(solution.values, problem.sizes))
    assert solution.cost == evaluate(problem.factors, solution.values)
    assert solution.lower_bound <= solution.cost


@settings(max_examples=300)
@given(problems())
def test_elimination_finds_the_optimum_and_proves_it(problem: Problem) -> None:
    solution = minimise(problem.sizes, problem.factors)
    assert_valid(problem, solution)
    assert solution.cost == close_to(problem.optimum)
    assert solution.lower_bound == close_to(solution.cost)


@settings(max_examples=300)
@given(problems(), st.sampled_from((1, 4, 16)), st.integers(0, 3))
def test_small_tables_give_a_lower_bound_and_an_upper_one(problem: Problem, max_entries: int, sweeps: int) -> None:
    solution = minimise(problem.sizes, problem.factors, max_entries, sweeps)
    assert_valid(problem, solution)
    optimum = problem.optimum
    tolerance = 0.0 if math.isinf(optimum) else 1e-9 * max(abs(optimum), 1e-6)
    assert solution.lower_bound <= optimum + tolerance
    assert solution.cost >= optimum - tolerance


def test_a_sum_without_finite_entries_costs_infinity() -> None:
    diagonal = np.array([[0.0, math.inf], [math.inf, 0.0]])
    factors = [Factor((0, 1), diagonal), Factor((0, 1), diagonal[::-1])]
    solution = minimise((2, 2), factors)
    assert (solution.cost, solution.lower_bound) == (math.inf, math.inf)


def test_too_much_work_for_the_exact_method_still_gives_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    pairs = list(itertools.combinations(range(8), 2))
    problem = Problem((4,) * 8, tuple(Factor(pair, random.random((4, 4))) for pair in pairs))
    monkeypatch.setattr(elimination, "MAX_WORK", 0)
    solution = minimise(problem.sizes, problem.factors)
    assert_valid(problem, solution)
    assert solution.lower_bound <= problem.optimum <= solution.cost


def test_windows_improve_an_assignment() -> None:
    random = np.random.default_rng(0)
    pairs = [pair for pair in itertools.combinations(range(10), 2) if random.random() < 0.7]
    problem = Problem((3,) * 10, tuple(Factor(pair, random.random((3, 3))) for pair in pairs))
    rough, improved = (minimise(problem.sizes, problem.factors, max_entries=9, sweeps=sweeps) for sweeps in (0, 3))
    assert improved.cost <= rough.cost
    assert improved.cost >= problem.optimum - 1e-9


def test_layers_that_repeat_are_added_up_once() -> None:
    """A chain of 2000 equal layers takes no more sums of tables than one of 200."""
    works = []
    for count in (200, 2000):
        table, start = np.random.default_rng(0).random((5, 5)), np.arange(5.0)
        factors = [Factor((i, i + 1), table.copy()) for i in range(count - 1)] + [Factor((0,), start)]
        joins = Joins((5,) * count)
        rounded, _ = round_costs(factors)
        assert Elimination(joins, rounded, range(count), 1 << 20).run()
        works.append(joins.work)
    assert works[1] == works[0]


def test_order_factor_sorts_the_variables_of_a_table() -> None:
    table = np.arange(6.0).reshape(2, 3)
    factor = order_factor((7, 3), table)
    assert factor.scope == (3, 7)
    np.testing.assert_array_equal(factor.table, table.T)


def test_windows_hold_values_next_to_the_nodes_that_make_them() -> None:
    """Nodes 0 to 299 prefer 1; values 300 to 599 must be equal to them, so neither changes without the other."""
    count = 300
    equal = np.where(np.eye(2) > 0, 0.0, 1e3)
    factors = [Factor((node,), np.array([1.0, 0.0])) for node in range(count)]
    factors += [Factor((node, count + node), equal) for node in range(count)]
    factors += [Factor((node, count + node - 1), np.zeros((2, 2))) for node in range(1, count)]
    values = [0] * (2 * count)
    improve_windows((2,) * (2 * count), factors, values, max_entries=1 << 10, sweeps=1)
    assert evaluate(factors, values) == 0.0
