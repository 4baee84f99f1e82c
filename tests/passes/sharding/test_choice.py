"""Choices: the cheapest of all, within memory, and never worse than whole nodes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from random import Random

import pytest
from onnx import parser

from onnxplace.passes.sharding.choose import layout_choice
from onnxplace.passes.sharding.choose.elimination import Solution
from onnxplace.passes.sharding.choose.layout_choice import ChoiceProblem, count_weight_bytes, is_sharded
from onnxplace.passes.sharding.rules.layouts import REPLICATED, Layout
from onnxplace.passes.sharding.space.node_strategies import NodeStrategy
from onnxplace.passes.sharding.space.strategy_space import StrategySpace, restrict_space
from tests.support.shardable_models import make_model
from tests.support.shardings import SHARES, make_costs, make_space

# `h` is read by three nodes, `x` by two; `a` is returned too.
FAN = """
<ir_version: 8, opset_import: ["": 18]>
g (float[4, 8] x) => (a, c) <float[8, 8] w = {WEIGHT}, float[8, 8] v = {WEIGHT}>
{
    h = MatMul(x, w)
    a = Relu(h)
    b = MatMul(h, v)
    c = Add(h, b)
}
""".replace("WEIGHT", ", ".join("0.5" for _ in range(64)))


def make_problem(space: StrategySpace, seed: int = 0) -> ChoiceProblem:
    """Return a problem whose split nodes take a random part of the time of whole ones."""
    random = Random(seed)
    seconds = []
    for options in space.strategies:
        whole = random.choice((1e-6, 1e-5, 1e-4))
        seconds.append([whole * (0.4 + 0.4 * random.random() if item.is_split else 1.0) for item in options])
    return ChoiceProblem(space, seconds, make_costs(space.division.count))


def price_choice(problem: ChoiceProblem, strategies: Sequence[NodeStrategy]) -> float:
    """Return the seconds of a choice by definition: each value is exchanged into at most one more layout."""
    model, space = problem.space.facts.model, problem.space
    total = 0.0
    for options, seconds, strategy in zip(space.strategies, problem.strategy_seconds, strategies):
        total += seconds[list(options).index(strategy)]
    sources = {value.name: REPLICATED for value in model.inputs}
    for node, strategy in zip(model.nodes, strategies):
        sources |= {name: layout for name, layout in zip(node.output, strategy.outputs) if name and layout}
    returned = {value.name for value in model.outputs}
    for name, source in sources.items():
        wants = [
            {layout for item, layout in zip(node.input, strategy.inputs) if item == name and layout}
            for node, strategy in zip(model.nodes, strategies)
        ]
        total += price_value(problem, name, source, wants, name in returned)
    return total


def price_value(
    problem: ChoiceProblem, name: str, source: Layout, wants: Sequence[set[Layout]], is_returned: bool
) -> float:
    size, seconds = problem.space.facts.bytes(name), problem.costs.seconds
    best = math.inf
    for other in {source, REPLICATED, *itertools.chain(*wants)}:
        if source == REPLICATED != other:
            continue
        cost = seconds(source, other, size)
        if is_returned and REPLICATED not in (source, other):
            cost += seconds(source, REPLICATED, size)
        for layout in itertools.chain(*wants):
            if layout not in (source, other):
                cost += seconds(REPLICATED, layout, size) if REPLICATED in (source, other) else math.inf
        best = min(best, cost)
    return best


@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_the_cheapest_of_all(seed: int) -> None:
    problem = make_problem(make_space(parser.parse_model(FAN), {}, SHARES[seed % 4]), seed)
    choice = problem.solve()
    assert choice is not None
    cheapest = min(price_choice(problem, item) for item in itertools.product(*problem.space.strategies))
    assert choice.seconds == pytest.approx(cheapest, rel=1e-9)
    assert price_choice(problem, choice.strategies) == pytest.approx(cheapest, rel=1e-9)
    assert choice.lower_bound_seconds == pytest.approx(cheapest, rel=1e-9)


def test_choices_of_random_models_lie_between_their_bound_and_whole_nodes() -> None:
    for seed in range(40):
        model = make_model(Random(seed))
        space = make_space(model.proto, model.dimensions[0], SHARES[seed % 4])
        problem = make_problem(space, seed)
        choice = problem.solve()
        assert choice is not None
        whole = [next(item for item in options if item.is_whole) for options in space.strategies]
        whole_seconds = sum(seconds[0] for seconds in problem.strategy_seconds)
        assert price_choice(problem, whole) == pytest.approx(whole_seconds)
        assert choice.lower_bound_seconds <= choice.seconds <= whole_seconds
        assert choice.weight_bytes == count_weight_bytes(space, choice.strategies)


def fail(sizes: Sequence[int], factors: object) -> Solution:
    """Return a poor choice, of which nothing is known."""
    return Solution(tuple(size - 1 for size in sizes), math.inf, 0.0)


def test_what_elimination_does_not_prove_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(make_space(parser.parse_model(FAN), {}))
    expected = problem.solve()
    monkeypatch.setattr(layout_choice, "minimise", fail)
    choice = problem.solve()
    assert choice is not None
    assert expected is not None
    assert choice.seconds == pytest.approx(expected.seconds) == pytest.approx(choice.lower_bound_seconds)


def test_whole_nodes_are_chosen_where_the_search_finds_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(make_space(parser.parse_model(FAN), {}))
    monkeypatch.setattr(layout_choice, "minimise", fail)
    nothing = Solution([], math.inf, 0.0, fits=False)
    monkeypatch.setattr(layout_choice, "solve", lambda problem, **options: nothing)
    choice = problem.solve()
    assert choice is not None
    assert not is_sharded(choice)
    assert choice.seconds == pytest.approx(sum(seconds[0] for seconds in problem.strategy_seconds))


def test_a_map_that_splits_a_node_is_obeyed_at_any_cost() -> None:
    space = restrict_space(make_space(parser.parse_model(FAN), {}), '{"MatMul_0": "sum"}')
    seconds = [[1e-9 if item.is_whole else 1.0 for item in options] for options in space.strategies]
    choice = ChoiceProblem(space, seconds, make_costs(2)).solve()
    assert choice is not None
    assert is_sharded(choice)


def test_as_many_weights_as_possible_are_split_at_least_cost() -> None:
    space = make_space(parser.parse_model(FAN), {})
    seconds = [
        [1e-6 if item.is_whole else 2e-6 + 1e-7 * number for number, item in enumerate(options)]
        for options in space.strategies
    ]
    problem = ChoiceProblem(space, seconds, make_costs(2))
    free, least = problem.solve(), problem.solve_least_weights()
    assert free is not None
    assert (free.weight_bytes, least.weight_bytes) == (512, 256)
    lightest = [
        price_choice(problem, item)
        for item in itertools.product(*space.strategies)
        if count_weight_bytes(space, item) == 256
    ]
    assert least.seconds == pytest.approx(min(lightest), rel=1e-9)
    assert least.lower_bound_seconds <= least.seconds
