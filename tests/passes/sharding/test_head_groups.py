"""Attention as PyTorch exports it, with as many heads of keys as devices, or fewer: groups of devices share them."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from onnx import TensorProto, helper, parser

from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.passes.sharding.apply.exchanges import ExchangeWriter
from onnxplace.passes.sharding.choose.layout_choice import ChoiceProblem
from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Division, Layout
from onnxplace.passes.sharding.space.sharding_costs import ExchangeCosts
from onnxplace.passes.sharding.space.strategy_space import StrategySpace, build_space
from onnxplace.passes.sharding.space.tensor_facts import TensorFacts
from tests.support.chains import exported_decoder
from tests.support.forced_sharding import Feeds, try_strategies
from tests.support.random_models import run_plain
from tests.support.shardings import complete_choice, make_costs

SIZES = {"batch": 2, "seq": 3, "past": 5}


RELU = '<ir_version: 8, opset_import: ["": 18]> g (float[3, 16] x) => (float[3, 16] y) { y = Relu(x) }'


def make_space(heads: int, kept: int, ways: int, **sizes: int) -> StrategySpace:
    model = replace(load(exported_decoder(heads, kept)), states=MappingProxyType({"past": "present"}))
    return build_space(TensorFacts.of(bind(model, {**SIZES, **sizes}, {})), Division((1.0,) * ways))


def draw(kept: int, batch: int, seq: int, past: int) -> Feeds:
    random = np.random.default_rng(0)
    return {
        "x": random.standard_normal((batch, seq, 32)).astype(np.float32),
        "past": random.standard_normal((batch, kept, past, 8)).astype(np.float32),
    }


@pytest.mark.parametrize(
    ("heads", "kept", "ways", "layout"),
    [
        (4, 4, 2, Layout(1, 1, 2)),
        (4, 2, 2, Layout(1, 1, 2)),
        (4, 2, 4, Layout(1, 1, 2)),
        (8, 2, 8, Layout(1, 1, 2)),
        (8, 4, 8, Layout(1, 1, 4)),
        (4, 1, 4, REPLICATED),
    ],
)
@pytest.mark.parametrize("sizes", [{}, {"batch": 1, "seq": 1}, {"seq": 8, "past": 8}])
@pytest.mark.sampled(3)
def test_a_cache_is_split_by_heads_where_exchanges_are_dear(heads, kept, ways, layout, sizes):
    space = make_space(heads, kept, ways, **sizes)
    fractions = [[max(map(space.division.largest_fraction, item.inputs)) for item in own] for own in space.strategies]
    products = [node.op_type in ("MatMul", "Concat") for node in space.facts.model.nodes]
    seconds = [[part if is_product else 0.0 for part in own] for own, is_product in zip(fractions, products)]
    costs = ExchangeCosts(ways, 0.0, 0.0, 1.6, 0.0, 0.0)
    choice = ChoiceProblem(space, seconds, costs).solve()
    assert choice is not None
    assert choice.states == {"past": layout}
    (mix,) = (item for item, node in zip(choice.strategies, space.facts.model.nodes) if node.name == "mix")
    assert mix.outputs == (Layout(1, 1, ways),)


@pytest.mark.parametrize("kept", [1, 2, 4])
@pytest.mark.sampled(3)
def test_every_strategy_of_an_exported_decoder_is_right_at_every_size(kept):
    feeds = [draw(kept, *sizes) for sizes in ((2, 3, 5), (1, 1, 4), (2, 2, 2), (1, 4, 0), (4, 8, 8))]
    trials = list(try_strategies(exported_decoder(4, kept), feeds))
    assert [trial for trial in trials if trial.problem] == []
    assert {"MatMul", "Expand", "Reshape"} <= {name for trial in trials for name in trial.nodes}


def test_a_layout_in_runs_is_followed_to_where_heads_are_apart():
    space = make_space(4, 4, 2)
    names = [node.name for node in space.facts.model.nodes]
    (merge,) = (item for item in space.strategies[names.index("merge")] if item.outputs[0] == Layout(0, -4, 2))
    choice = complete_choice(space, {names.index("merge"): merge}, float)
    assert choice is not None
    assert choice.strategies[names.index("turn")].outputs == (Layout(0, -4, 2),)


def test_a_target_that_says_how_many_rows_there_are_is_not_split_in_runs():
    """Each device would have to compute the size of its part."""
    model = exported_decoder(4, 4)
    merged = next(node for node in model.graph.node if node.output[0] == "merged")
    merged.input[0] = "rows"
    position = [*model.graph.node].index(merged)
    later = [*model.graph.node][position:]
    del model.graph.node[position:]
    rows = model.graph.node.add(op_type="ReduceProd", input=["begin"], output=["rows"], name="rows")
    rows.attribute.add(name="keepdims", type=2, i=1)
    model.graph.node.extend(later)
    space = build_space(TensorFacts.of(bind(load(model), SIZES, {})), Division((1.0, 1.0)))
    (merge,) = (own for own, node in zip(space.strategies, space.facts.model.nodes) if node.name == "merge")
    assert not any(item.outputs[0].is_in_runs for item in merge if item.outputs[0] is not None)
    assert [trial for trial in try_strategies(model, [draw(4, 2, 3, 5), draw(4, 3, 1, 0)]) if trial.problem] == []


def test_layouts_say_which_devices_have_which_blocks():
    division, shared = Division((1.0,) * 4), Layout(0, 1, 2)
    assert [division.blocks_of(shared, device) for device in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [[*division.holders(shared, device)] for device in (0, 1)] == [[0, 2], [1, 3]]
    assert shared.contains(Layout(0, 1, 4))
    assert not shared.contains(Layout(1, 1, 4))
    assert not shared.contains(REPLICATED)
    assert Division((1.0,) * 3).split(0, 2, 1, 2) is None
    assert Division((2.0, 1.0, 1.0, 2.0)).split(0, 2, 1, 2) is None
    assert str(Layout(0, -12, 2)) == "axis 0 in runs of 12"


def test_equal_parts_are_cut_from_what_devices_share_without_a_message():
    costs = ExchangeCosts(4, 1e-2, 1e-6, 1e-2, 1e-9, 1e-6)
    shared, split, other = Layout(1, 1, 2), Layout(1, 1, 4), Layout(2, 1, 4)
    assert costs.seconds(shared, split, 1000) < 1e-5
    assert costs.seconds(shared, REPLICATED, 1000) < costs.seconds(split, REPLICATED, 1000)
    assert costs.seconds(split, shared, 1000) == costs.seconds(shared, other, 1000) == float("inf")
    assert costs.seconds(Layout(0, -12, 2), REPLICATED, 1000) == float("inf")


def test_parts_of_fused_tensors_are_cut_off_those_that_devices_share():
    proto = parser.parse_model(RELU)
    space = build_space(TensorFacts.of(bind(load(proto), {}, {})), Division((1.0,) * 4))
    shared, finer = Layout(1, 2, 2), Layout(1, 2, 4)
    writer = ExchangeWriter(space, make_costs(4))
    writer.layouts["y"], writer.wanted["y"] = PARTIAL, {shared, finer}
    random = np.random.default_rng(0)
    summands = {f"s{device}": random.integers(0, 9, (3, 16)).astype(np.float32) for device in range(4)}
    writer.parts.update({("y", PARTIAL, device): f"s{device}" for device in range(4)})
    names = [writer.get("y", finer, device) for device in range(4)]
    graph = helper.make_graph(
        writer.nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, (3, 16)) for name in summands],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names],
        list(writer.weights.values()),
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 18)])
    (parts,) = run_plain(model.SerializeToString(), [summands])
    total = sum(summands.values())
    for device, part in enumerate(parts):
        ranges = space.division.ranges(finer, 16, device)
        np.testing.assert_array_equal(part, np.concatenate([total[:, low:high] for low, high in ranges], axis=1))
