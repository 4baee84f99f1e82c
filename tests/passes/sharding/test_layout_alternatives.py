"""Alternatives of layouts: their costs are those of the best choice with them, and what they force is what changes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from onnx import ModelProto, parser

from onnxplace.facts import Shards
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.model import Model
from onnxplace.passes.sharding.apply.apply_sharding import ShardingOptions, shard_state
from onnxplace.passes.sharding.apply.group_choice import GroupChoice, describe_strategy
from onnxplace.passes.sharding.choose.layout_choice import ChoiceProblem, LayoutChoice
from onnxplace.passes.sharding.space.sharding_costs import WorkCosts
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.problem import placement_problem
from onnxplace.state import State
from onnxplace.target.target import Device, Pool, Target
from tests.passes.sharding.test_choice import FAN, make_problem, price_choice
from tests.support.chains import mlp
from tests.support.shardable_models import make_model
from tests.support.shardings import SHARES, make_space

EXACT = ShardingOptions(ways=2, exact=True)


def profile(proto: ModelProto, memory_bytes: int = 1 << 40) -> State:
    """Return the model with estimated costs, for two equal devices."""
    target = Target((Device("cpu:0", memory_bytes), Device("cpu:1", memory_bytes)))
    state = State(target).with_facts(bind(load(proto), {}, {}))
    return Pipeline.parse("optimize,profile{estimate=true}").run(state)[0]


def explain_problem(problem: ChoiceProblem) -> tuple[GroupChoice, LayoutChoice]:
    """Return what explains the best choice of a problem."""
    choice = problem.solve()
    assert choice is not None
    work = WorkCosts(problem.space, ())
    group = GroupChoice((0, 1), work, problem, (0, 0), choice, lambda restricted: restricted.solve(), choice.seconds)
    return group, choice


def explain_state(state: State, options: ShardingOptions = EXACT) -> GroupChoice:
    """Return what explains the choice that the pass makes."""
    return shard_state(state, options)[Shards].choice


@pytest.mark.parametrize("seed", range(4))
def test_each_alternative_costs_what_the_best_of_all_choices_with_it_costs(seed: int) -> None:
    problem = make_problem(make_space(parser.parse_model(FAN), {}, SHARES[seed % 4]), seed)
    explainer, _ = explain_problem(problem)
    choices = [(price_choice(problem, item), item) for item in itertools.product(*problem.space.strategies)]
    for index in range(len(problem.space.strategies)):
        least: dict[str, float] = {}
        for seconds, strategies in choices:
            layout = describe_strategy(strategies[index])
            least[layout] = min(least.get(layout, math.inf), seconds)
        alternatives = explainer.list_alternatives(problem.space.facts.model.nodes[index].name)
        assert {item.layout: item.seconds for item in alternatives} == pytest.approx(least)


def test_no_alternative_of_a_random_model_beats_a_choice_that_is_proven_best() -> None:
    compared = 0
    for seed in range(5):
        model = make_model(Random(seed))
        problem = make_problem(make_space(model.proto, model.dimensions[0], SHARES[seed % 4]), seed)
        explainer, choice = explain_problem(problem)
        if choice.seconds > choice.lower_bound_seconds * (1 + 1e-9):
            continue
        for index in Random(seed).sample(range(len(choice.strategies)), min(3, len(choice.strategies))):
            strategy = choice.strategies[index]
            kept, *others = explainer.list_alternatives(problem.space.facts.model.nodes[index].name)
            assert (kept.layout, kept.seconds) == (describe_strategy(strategy), choice.seconds)
            assert [kept.is_kept, *(item.is_kept for item in others)] == [True] + [False] * len(others)
            times = [item.seconds for item in others if item.seconds is not None]
            assert times == sorted(times)
            assert min(times, default=choice.seconds) >= choice.seconds * (1 - 1e-9)
            compared += len(others)
    assert compared > 0


@pytest.mark.parametrize(("layout", "kind"), [("summed axis", "sum"), ("axis 0", "batch")])
def test_an_alternative_is_what_a_shard_map_with_it_gives(layout: str, kind: str) -> None:
    state = profile(mlp(rows=64, width=512, inner=1024))
    kept, *others = explain_state(state).list_alternatives("layer1_up")
    item = next(item for item in (kept, *others) if item.layout == layout)
    mapped = replace(EXACT, map=f'{{"layer1_up": "{kind}"}}')
    before, after = (shard_state(state, options)[Shards] for options in (EXACT, mapped))
    assert item.seconds == pytest.approx(after.choice.choice.seconds)
    expected = {
        name: after.exchanges.get(name, 0) - before.exchanges.get(name, 0)
        for name in {*before.exchanges, *after.exchanges}
    }
    assert item.exchanges == {name: count for name, count in expected.items() if count}


def test_what_a_layout_forces_on_others_is_counted_and_named_where_it_is_next_to_the_node() -> None:
    state = profile(mlp(rows=64, width=512, inner=1024))
    _, *others = explain_state(state).list_alternatives("layer1_up")
    next_to_it = {"layer0_add", "layer1_act"}
    assert any(item.neighbours for item in others)
    for item in others:
        assert set(item.neighbours) <= next_to_it
        assert all(len(set(change.split(" -> "))) == 2 for change in item.neighbours.values())
        assert 0 <= item.others <= len(state[Model].nodes) - 3


def test_the_layouts_of_a_value_are_those_in_which_its_node_makes_or_reads_it() -> None:
    state = profile(mlp(rows=64, width=512, inner=1024))
    explainer = explain_state(state)
    of_weight = {item.layout: item.seconds for item in explainer.list_alternatives("layer1_up", "w1")}
    of_node = {item.layout: item.seconds for item in explainer.list_alternatives("layer1_up")}
    assert set(of_weight) == {"replicated", "axis 0", "axis 1"}
    assert of_weight["axis 1"] == of_node["axis 1"]
    assert of_weight["axis 0"] == of_node["summed axis"]


def test_a_layout_with_which_weights_do_not_fit_is_impossible() -> None:
    proto = mlp(layers=2, rows=8, width=512, inner=1024)
    state = profile(proto, memory_bytes=4_600_000)  # the weights have 8 MiB
    kept, *others = explain_state(state, ShardingOptions()).list_alternatives("layer0_up", "w0")
    assert kept.layout != "replicated"
    assert {item.layout: item.seconds for item in others}["replicated"] is None


def test_devices_of_a_pool_hold_their_parts_within_its_memory() -> None:
    state = profile(mlp(layers=2, rows=64, width=512, inner=1024))
    peaks = []
    for pool_bytes in (1 << 40, 9_500_000):
        pool = Pool(("cpu:0", "cpu:1"), pool_bytes)
        sharded = shard_state(State(replace(state.target, pools=(pool,)), state.facts), EXACT)
        problem = placement_problem(sharded)
        step = problem.simulate(sharded[Shards].device, problem.graph.order)
        assert np.bincount(sharded[Shards].device).min() > 0
        peaks.append(int(step.pool_peak_bytes[0]))
    # With room for more, each device has all weights.
    assert peaks[1] <= 9_500_000 < peaks[0]


def test_where_nothing_is_split_there_is_nothing_to_explain() -> None:
    state = profile(mlp(layers=1, rows=1, width=4, inner=4))
    assert shard_state(state, ShardingOptions())[Shards].choice is None
