"""Layouts that a model gives by its sharding specifications: what they leave, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import onnx
import pytest
from hypothesis import given as draws, settings, strategies as st
from onnx import ModelProto, TensorProto, helper, parser

from onnxplace.errors import InputError
from onnxplace.facts import Original, Shards
from onnxplace.model.device_metadata import ShardedNode, read_device_metadata
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.model import Model
from onnxplace.passes.sharding.apply.apply_sharding import ShardingOptions, shard_state
from onnxplace.passes.sharding.apply.derived_facts import annotate_model
from onnxplace.passes.sharding.apply.given_layouts import find_shares, restrict_layouts
from onnxplace.passes.sharding.choose.layout_choice import ChoiceProblem, LayoutChoice
from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Division, Layout
from onnxplace.passes.sharding.space.node_strategies import NodeStrategy, StrategySpace
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target.target import Device, Target
from tests.passes.sharding.test_choice import make_problem
from tests.support.annotated_models import Axes, annotate_nodes, save_annotated, strip_nodes
from tests.support.chains import mlp
from tests.support.shardable_models import make_model
from tests.support.shardings import SHARES, choose_randomly, make_space

MODEL = parser.parse_model("""
<ir_version: 8, opset_import: ["": 18]>
g (float[4, 6, 8] x, float[8, 10] w, float[10, 4] v) => (z)
{
    [up] h = MatMul(x, w)
    [act] a = Relu(h)
    [down] z = MatMul(a, v)
}
""")


@pytest.fixture(scope="module")
def space() -> StrategySpace:
    return make_space(MODEL, {})


def restrict(space: StrategySpace, folder: Path, axes: Mapping[str, Axes], devices: int = 2) -> StrategySpace:
    """Return the space with what a file of the same model gives."""
    given = read_device_metadata(save_annotated(folder / "given.onnx", MODEL, axes, devices)).sharded
    find_shares(given, space.division.shares, "given.onnx")
    return restrict_layouts(space, given, "given.onnx")


def list_layouts(space: StrategySpace, index: int) -> set[tuple[Layout | None, ...]]:
    return {strategy.layouts for strategy in space.strategies[index]}


def split(axis: int) -> Layout:
    return Layout(axis, 1, 2)


def test_a_node_keeps_the_strategies_that_agree_and_others_are_free(space: StrategySpace, tmp_path: Path) -> None:
    restricted = restrict(space, tmp_path, {"up": {"w": 1}})
    assert list_layouts(restricted, 0) == {(REPLICATED, split(1), split(2))}
    assert restricted.strategies[1:] == space.strategies[1:]


def test_several_specifications_of_a_node_hold_together(space: StrategySpace, tmp_path: Path) -> None:
    # Alone, each of them leaves several strategies.
    assert len(list_layouts(restrict(space, tmp_path, {"up": {"x": None}}), 0)) == 2
    assert len(list_layouts(restrict(space, tmp_path, {"up": {"h": 1, "w": None}}), 0)) == 1


@pytest.mark.parametrize("result", [None, 0, 2])
def test_the_result_of_a_summed_axis_may_be_given_as_it_is_after_the_exchange(
    result: int | None, space: StrategySpace, tmp_path: Path
) -> None:
    # In any order: what the inputs say decides, and the result is made as summands.
    for down in ({"z": result, "a": 2, "v": 0}, {"a": 2, "v": 0, "z": result}):
        restricted = restrict(space, tmp_path, {"down": down})
        assert list_layouts(restricted, 2) == {(split(2), split(0), PARTIAL)}


def test_a_result_alone_is_made_as_it_is_given(space: StrategySpace, tmp_path: Path) -> None:
    restricted = restrict(space, tmp_path, {"down": {"z": 2}})
    assert list_layouts(restricted, 2) == {(REPLICATED, split(1), split(2))}


def test_axes_may_be_counted_from_the_end(space: StrategySpace, tmp_path: Path) -> None:
    assert list_layouts(restrict(space, tmp_path, {"act": {"h": -1}}), 1) == {(split(2), split(2))}


@pytest.mark.parametrize("values", ["xwh", "x", "h"])
def test_a_node_on_one_device_is_computed_whole(space: StrategySpace, values: str, tmp_path: Path) -> None:
    model = annotate_nodes(MODEL, {"up": dict.fromkeys(values), "down": {"a": 2}})
    for spec in model.graph.node[0].device_configurations[0].sharding_spec:
        spec.device[:] = [1]
        del spec.index_to_device_group_map[:]
    onnx.save(model, tmp_path / "given.onnx")
    given = read_device_metadata(tmp_path / "given.onnx").sharded
    assert find_shares(given, (1.0, 1.0), "") == (0.5, 0.5)
    assert list_layouts(restrict_layouts(space, given, ""), 0) == {(REPLICATED,) * 3}


def fail(space: StrategySpace, folder: Path, axes: Mapping[str, Axes], devices: int = 2) -> InputError:
    with pytest.raises(InputError) as caught:
        restrict(space, folder, axes, devices)
    assert caught.value.where == "given.onnx"
    return caught.value


def test_a_layout_that_no_strategy_has_is_refused_with_those_that_it_can_have(
    space: StrategySpace, tmp_path: Path
) -> None:
    problem = fail(space, tmp_path, {"act": {"h": 1, "a": 0}})
    assert problem.code == "U023"
    assert problem.message == "node 'act' (Relu) cannot have 'a' as given: axis 0"
    assert problem.hint == "next to what else is given, it can: axis 1"


def test_specifications_of_inputs_that_contradict_each_other_are_refused(space: StrategySpace, tmp_path: Path) -> None:
    problem = fail(space, tmp_path, {"up": {"x": 2, "w": 1}})
    assert (problem.code, problem.message) == ("U023", "node 'up' (MatMul) cannot have 'w' as given: axis 1")
    assert problem.hint == "next to what else is given, it can: axis 0"


def test_an_axis_that_cannot_be_cut_is_named(space: StrategySpace, tmp_path: Path) -> None:
    problem = fail(space, tmp_path, {"act": {"h": 7}})
    assert problem.code == "U023"
    assert "node 'act' (Relu) cannot have 'h' as given: shape [4, 6, 10] has no rows along axis 7" in problem.message


def test_a_tensor_that_the_node_has_not_is_refused(space: StrategySpace, tmp_path: Path) -> None:
    problem = fail(space, tmp_path, {"act": {"w": 1}})
    assert problem.code == "U023"
    assert problem.message == "node 'act' (Relu) cannot have 'w' as given: its values are 'h', 'a'"
    assert "no such value" in (problem.hint or "")


def test_another_number_of_devices_is_refused_with_both(space: StrategySpace, tmp_path: Path) -> None:
    problem = fail(space, tmp_path, {"act": {"h": 1}}, devices=3)
    assert problem.code == "T005"
    assert problem.message == "its layouts are for 3 devices, and 2 would share operators"
    assert problem.hint == "name as many in --devices, or --shard 3"


def test_a_map_of_single_devices_is_for_another_option(space: StrategySpace, tmp_path: Path) -> None:
    problem = fail(space, tmp_path, {"act": {"h": None}}, devices=1)
    assert problem.message == "its layouts are for 1 device, and 2 would share operators"
    assert problem.hint == "take it as --device-map"


def test_nodes_that_the_model_lacks_are_named(space: StrategySpace) -> None:
    given = {"other": ShardedNode(MODEL.graph.node[0], [], (0, 1))}
    with pytest.raises(InputError, match="got 'other'") as caught:
        restrict_layouts(space, given, "given.onnx")
    assert (caught.value.code, caught.value.hint) == ("U020", "names look like 'up', 'act', 'down'")


def test_a_model_without_specifications_is_refused(space: StrategySpace, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no node of this model names a device"):
        restrict(space, tmp_path, {})
    with pytest.raises(InputError, match="expected layouts of nodes of this model, got none"):
        restrict_layouts(space, {}, "devices.onnx")


def test_nodes_that_an_optimisation_removed_are_left_out(space: StrategySpace) -> None:
    facts = replace(space.facts, model=replace(space.facts.model, removed=("folded",)))
    given = {"folded": ShardedNode(MODEL.graph.node[0], [], (0, 1))}
    assert restrict_layouts(replace(space, facts=facts), given, "").strategies == space.strategies


def test_values_are_found_by_position_where_an_optimisation_renamed_them(tmp_path: Path) -> None:
    # Each reader of a DequantizeLinear gets a copy of it, whose result has another name.
    model = parser.parse_model("""
    <ir_version: 8, opset_import: ["": 18]>
    g (uint8[4, 8] q, float scale, float[8, 8] w) => (y, z)
    { [dq] x = DequantizeLinear(q, scale) [first] y = MatMul(x, w) [second] z = MatMul(x, w) }
    """)
    target = Target((Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30)))
    optimised = Pipeline.parse("optimize").run(State(target).with_facts(load(model)))[0][Model]
    assert next(node for node in optimised.nodes if node.name == "second").input[0] != "x"
    path = save_annotated(tmp_path / "given.onnx", model, {"second": {"x": 0}})
    given = read_device_metadata(path).sharded
    space = make_space(optimised.whole_proto(), {})
    index = [node.name for node in space.facts.model.nodes].index("second")
    assert list_layouts(restrict_layouts(space, given, ""), index) == {(split(0), REPLICATED, split(0))}


# ------------------------------------------------------------------------------------------------------- random models


def list_given(space: StrategySpace, choice: LayoutChoice, random: Random, share: float) -> dict[str, ShardedNode]:
    """Return the specifications of a choice of strategies, of a share of the nodes."""
    nodes = annotate_model(space.facts.model, space, choice.strategies, ["a"] * space.division.count, {}).nodes
    devices = range(space.division.count)
    given = {node.name: ShardedNode(node, node.device_configurations[0].sharding_spec, devices) for node in nodes}
    return {name: item for name, item in given.items() if item.specs and random.random() < share}


@settings(max_examples=150, deadline=None)
@draws(st.integers(0, 10_000), st.sampled_from(SHARES), st.sampled_from((0.2, 0.6, 1.0)))
def test_strategies_agree_with_their_own_specifications(seed: int, shares: Sequence[float], share: float) -> None:
    random = Random(seed)
    model = make_model(random)
    space = make_space(model.proto, model.dimensions[0], shares)
    choice = choose_randomly(space, Random(seed))
    given = list_given(space, choice, random, share)
    if not given:
        return
    restricted = restrict_layouts(space, given, "")
    for index, node in enumerate(space.facts.model.nodes):
        if node.name in given:
            assert choice.strategies[index] in restricted.strategies[index]
            assert {*map(id, restricted.strategies[index])} <= {*map(id, space.strategies[index])}
        else:
            assert restricted.strategies[index] is space.strategies[index]


def solve(problem: ChoiceProblem, strategies: Sequence[Sequence[NodeStrategy]]) -> LayoutChoice | None:
    """Return the best choice of some of the strategies of each node, at the costs of a problem of all of them."""
    seconds = [
        [times[list(options).index(item)] for item in kept]
        for kept, options, times in zip(strategies, problem.space.strategies, problem.strategy_seconds)
    ]
    return ChoiceProblem(replace(problem.space, strategies=tuple(strategies)), seconds, problem.costs).solve()


@settings(max_examples=100, deadline=None)
@draws(st.integers(0, 10_000), st.sampled_from(SHARES))
def test_what_is_completed_is_no_worse_than_the_strategies_that_the_layouts_were_taken_from(
    seed: int, shares: Sequence[float]
) -> None:
    random = Random(seed)
    model = make_model(random)
    space = make_space(model.proto, model.dimensions[0], shares)
    choice = choose_randomly(space, random)
    if not (given := list_given(space, choice, random, 0.5)):
        return
    problem = make_problem(space, seed)
    names = [node.name for node in space.facts.model.nodes]
    forced = [
        (strategy,) if name in given else options
        for name, strategy, options in zip(names, choice.strategies, space.strategies)
    ]
    kept, same = solve(problem, restrict_layouts(space, given, "").strategies), solve(problem, forced)
    assert kept is not None
    assert same is not None
    assert kept.lower_bound_seconds <= same.seconds * (1 + 1e-9)
    if kept.seconds <= kept.lower_bound_seconds * (1 + 1e-9):
        assert kept.seconds <= same.seconds * (1 + 1e-9)


@settings(max_examples=300, deadline=None)
@draws(st.lists(st.integers(1, 40), min_size=2, max_size=5), st.lists(st.integers(1, 400), min_size=1, max_size=6))
def test_found_shares_cut_axes_as_the_given_ones_do(shares: Sequence[int], sizes: Sequence[int]) -> None:
    division = Division(tuple(map(float, shares)))
    layouts = {size: layout for size in sizes if (layout := division.split(0, size)) is not None}
    if not layouts:
        return
    nodes = [helper.make_node("Relu", [f"x{size}"], [f"y{size}"], name=f"n{size}") for size in layouts]
    inputs, outputs = (
        [helper.make_tensor_value_info(f"{letter}{size}", TensorProto.FLOAT, [size]) for size in layouts]
        for letter in "xy"
    )
    model = helper.make_model(helper.make_graph(nodes, "g", inputs, outputs), ir_version=11)
    space = make_space(model, {}, division.shares)
    strategies = [
        next(item for item in options if item.layouts == (layouts[size],) * 2)
        for size, options in zip(layouts, space.strategies)
    ]
    given = list_given(space, LayoutChoice(tuple(strategies), {}, 0.0, 0.0, 0), Random(0), 1.0)
    assert np.allclose(find_shares(given, division.shares, ""), np.array(shares) / sum(shares))
    # On devices of other speeds, all specifications together leave room for shares that cut as they do.
    other = Division(find_shares(given, (1.0, *[1e6] * (len(shares) - 1)), ""))
    assert [other.cuts(layout.blocks) for layout in layouts.values()] == [
        division.cuts(layout.blocks) for layout in layouts.values()
    ]


# ------------------------------------------------------------------------------------------------------------ the pass


def profile(proto: ModelProto | Path, devices: int = 2) -> State:
    """Return a model with estimated costs, for equal devices."""
    target = Target(tuple(Device(f"cpu:{index}", 1 << 40) for index in range(devices)))
    state = State(target).with_facts(bind(load(proto), {}, {}))
    return Pipeline.parse("optimize,profile{estimate=true}").run(state)[0]


def plan(state: State, ways: int, **options: str) -> Shards:
    return shard_state(state, ShardingOptions(ways=ways, exact=True, metadata=True, **options))[Shards]


@pytest.mark.parametrize("ways", [2, 4])
def test_all_layouts_of_a_plan_give_that_plan_and_so_do_those_of_a_product_per_block(ways: int, tmp_path: Path) -> None:
    state = profile(mlp(rows=64, width=512, inner=1024), ways)
    sharded = shard_state(state, ShardingOptions(ways=ways, exact=True, metadata=True))
    whole = sharded[Original].model.whole_proto()
    free = sharded[Shards]
    path = tmp_path / "whole.onnx"
    onnx.save(whole, path)
    assert plan(state, ways, map=str(path)).choice.choice.strategies == free.choice.choice.strategies
    onnx.save(strip_nodes(whole, {f"layer{index}_up" for index in range(3)}), path)
    assert plan(state, ways, map=str(path)).choice.choice.strategies == free.choice.choice.strategies


def test_given_layouts_that_are_worse_are_kept(tmp_path: Path) -> None:
    model = mlp(rows=64, width=512, inner=1024)
    state = profile(model)
    path = save_annotated(tmp_path / "given.onnx", model, {"layer0_up": {"w0": 0}, "layer2_down": {"d2": 0}})
    free, kept = plan(state, 2), plan(state, 2, map=str(path))
    strategies = dict(zip((node.name for node in state[Model].nodes), kept.choice.choice.strategies))
    assert strategies["layer0_up"].layouts == (split(1), split(0), PARTIAL)
    assert strategies["layer2_down"].outputs == (split(0),)
    assert kept.choice.choice.seconds > free.choice.choice.seconds


def test_four_devices_are_too_many_for_a_file_of_two_unless_two_are_asked_for(tmp_path: Path) -> None:
    model = mlp(rows=64, width=512, inner=1024)
    path = str(save_annotated(tmp_path / "given.onnx", model, {"layer0_up": {"w0": 1}}))
    with pytest.raises(InputError, match="are for 2 devices, and 4 would share operators"):
        shard_state(profile(model, 4), ShardingOptions(map=path))
    assert shard_state(profile(model, 4), ShardingOptions(ways=2, map=path))[Shards].ways == 2


def test_layouts_of_the_compiled_model_are_kept_if_it_is_its_own_map(tmp_path: Path) -> None:
    path = save_annotated(tmp_path / "given.onnx", mlp(rows=64, width=512, inner=1024), {"layer1_up": {"w1": 0}})
    state = profile(path)
    index = [node.name for node in state[Model].nodes].index("layer1_up")
    free, kept = (plan(state, 2, map=text).choice.choice.strategies[index] for text in ("", str(path)))
    assert kept.inputs[1] == split(0)
    assert free.inputs[1] != split(0)


def test_each_stage_of_a_file_has_its_own_devices(tmp_path: Path) -> None:
    model = annotate_nodes(mlp(rows=64, width=512, inner=1024), {"layer0_up": {"w0": 1}, "layer2_up": {"w2": 1}})
    model.configuration[0].num_devices = 4
    entry = model.graph.node[8].device_configurations[0]
    assert model.graph.node[8].name == "layer2_up"
    entry.pipeline_stage = 1
    entry.sharding_spec[0].device[:] = [2, 3]
    onnx.save(model, tmp_path / "stages.onnx")
    shards = plan(profile(mlp(rows=64, width=512, inner=1024)), 2, map=str(tmp_path / "stages.onnx"))
    strategies = [shards.choice.choice.strategies[index] for index in (0, 8)]
    assert [strategy.layouts for strategy in strategies] == [(REPLICATED, split(1), split(1))] * 2
