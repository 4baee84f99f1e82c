"""The solver of factor graphs under memory over time: bounds, limits, and agreement with enumeration."""

import itertools
import math

import numpy as np
from hypothesis import given, settings, strategies as st

from onnxplace.passes.sharding.choose.elimination import Factor, evaluate
from onnxplace.passes.sharding.choose.factor_network import Holding, build_network, connect, reduce_network
from onnxplace.passes.sharding.choose.factor_solver import FactorProblem, peak_bytes, solve


def hold(usages: list[np.ndarray], intervals: list[tuple[int, int]]) -> list[Holding]:
    """Return what variables hold, each during one interval."""
    return [Holding(variable, *interval, usage) for variable, (interval, usage) in enumerate(zip(intervals, usages))]


def enumerate_optimum(problem: FactorProblem) -> float:
    best = math.inf
    for values in itertools.product(*map(range, problem.sizes)):
        held = [
            sum(float(item.bytes[values[item.variable]]) for item in problem.holdings if item.begin <= point < item.end)
            for _, point, _, _ in problem.holdings
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
        holdings=hold(
            [random.integers(0, 9, size).astype(float) for size in sizes],
            [(int(start), int(start + random.integers(0, 5))) for start in starts],
        ),
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
        assert solution.cost == solution.lower_bound == optimum == evaluate(problem.factors, solution.values)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_bound_holds_and_an_assignment_that_fits_keeps_the_limit(seed: int) -> None:
    problem = random_problem(seed, is_limited=True)
    optimum = enumerate_optimum(problem)
    solution = solve(problem, seconds=10)
    assert solution.lower_bound <= optimum + 1e-6
    if solution.fits and solution.cost < math.inf:
        assert solution.cost == evaluate(problem.factors, solution.values) >= optimum
        assert peak_bytes(problem, solution.values) <= problem.limit


def test_memory_at_one_time_makes_a_dearer_choice_necessary() -> None:
    big, small = np.array([10.0, 4.0]), np.array([0.0, 1.0])
    problem = FactorProblem(
        sizes=[2, 2, 2],
        factors=[Factor((variable,), small) for variable in range(3)],
        holdings=hold([big] * 3, [(0, 2), (1, 3), (3, 5)]),
        limit=14,
    )
    solution = solve(problem, seconds=10)
    assert solution.fits
    assert solution.cost == 1
    assert solution.values[2] == 0
    assert solution.lower_bound <= 1 + 1e-9


def test_variables_that_correspond_one_to_one_become_one() -> None:
    swap = np.array([[math.inf, 1.0], [2.0, math.inf]])
    factors = [Factor((0, 1), swap), Factor((1, 2), swap), Factor((0, 2), np.array([[5.0, math.inf], [math.inf, 0.0]]))]
    reduced = reduce_network(build_network([2, 2, 2], factors))
    assert reduced.group.tolist() == [0, 0, 0]
    assert reduced.network.costs.tolist() == [8.0, 3.0]
    assert reduced.expand(np.array([0])) == [0, 1, 0]
    assert reduced.expand(np.array([1])) == [1, 0, 1]


def test_both_variables_of_an_edge_read_its_table_by_their_arc() -> None:
    table = np.arange(6.0).reshape(2, 3)
    graph = connect(build_network([2, 3], [Factor((0, 1), table)]))
    for own, arc, entries in zip((0, 1), graph.arcs, (table, table.T)):
        assert arc["other"] == 1 - own
        for (i, j), cost in np.ndenumerate(entries):
            assert graph.table[arc["table"] + i * arc["own_step"] + j * arc["other_step"]] == cost
    # What one variable sends, the other one receives.
    assert graph.arcs["sent"].tolist() == graph.arcs["received"][::-1].tolist()


def test_a_choice_that_no_neighbour_goes_with_is_impossible() -> None:
    forbidden = np.full((2, 2), math.inf)
    assert not reduce_network(build_network([2, 2], [Factor((0, 1), forbidden)])).is_possible


def grid_problem(*, limit: float) -> FactorProblem:
    """Return a grid that is too wide for tables of 64 entries; cheap values hold more memory."""
    random = np.random.default_rng(1)
    rows, columns, size = 4, 8, 3
    factors = [Factor((v,), np.array([0.0, 6.0, 9.0])) for v in range(rows * columns)]
    for v in range(rows * columns):
        for w in (v + 1, v + columns):
            if w < rows * columns and (w % columns > 0 or w == v + columns):
                factors.append(Factor((v, w), random.integers(0, 10, (size, size)).astype(float)))
    return FactorProblem(
        sizes=[size] * rows * columns,
        factors=factors,
        holdings=hold([np.array([9.0, 4.0, 1.0])] * rows * columns, [(v, v + 5) for v in range(rows * columns)]),
        limit=limit,
    )


def test_a_graph_too_wide_for_elimination_gets_the_cost_of_elimination() -> None:
    problem = grid_problem(limit=math.inf)
    optimum = solve(problem, seconds=10).cost
    searched = solve(problem, seconds=10, max_entries=64)
    assert searched.cost == optimum
    assert searched.lower_bound <= optimum


def test_the_search_repeats_itself() -> None:
    problem = grid_problem(limit=24)
    solutions = [solve(problem, seconds=60, max_entries=64) for _ in range(2)]
    assert solutions[0].fits
    assert solutions[0] == solutions[1]
    assert peak_bytes(problem, solutions[0].values) <= 24


def test_a_factor_over_three_variables_counts() -> None:
    table = np.full((2, 2, 2), 9.0)
    table[1, 0, 1] = 1.0
    table[0, 0, 0] = math.inf
    problem = FactorProblem(
        sizes=[2, 2, 2],
        factors=[Factor((0, 1, 2), table)],
        holdings=hold([np.array([0.0, 8.0]), np.array([3.0, 2.0])], [(0, 1), (0, 1)]),
        limit=10,
    )
    solution = solve(problem, seconds=5)
    assert solution.fits
    assert solution.cost == 9


def test_too_little_room_for_any_choice_is_reported() -> None:
    problem = FactorProblem([2], [Factor((0,), np.array([1.0, 2.0]))], hold([np.array([5.0, 4.0])], [(0, 1)]), 3)
    assert not solve(problem, seconds=5).fits
