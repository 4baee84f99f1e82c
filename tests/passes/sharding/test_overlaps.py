"""Parts that overlap: runs of convolutions by rows compute what the model computes, with fewer exchanges."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from onnxplace.passes.sharding.apply.derived_facts import annotate_model, build_whole_model
from onnxplace.passes.sharding.apply.sharded_model import write_sharded_model
from onnxplace.passes.sharding.apply.sharding_specs import read_layout
from onnxplace.passes.sharding.choose.layout_choice import ChoiceProblem, LayoutChoice
from onnxplace.passes.sharding.rules.convolution_rules import MAX_OVERLAP, list_overlaps
from onnxplace.passes.sharding.rules.layouts import REPLICATED, Division, Layout
from onnxplace.passes.sharding.space.sharding_costs import ExchangeCosts
from onnxplace.passes.sharding.space.strategy_space import StrategySpace
from tests.support.random_models import run_plain
from tests.support.shardings import SHARES, check_structure, choose_randomly, make_costs, make_space

EVEN = Division((1.0, 1.0))


class _Network:
    """A random network of convolutions, pools and residual connections on one image."""

    def __init__(self, random: Random) -> None:
        self.random, self.rank = random, random.choice((3, 4, 4))
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.size = [random.randint(6, 17) for _ in range(self.rank - 2)]
        self.shape, self.value = [1, 4, *self.size], "x"

    def build(self) -> tuple[ModelProto, dict[str, Any]]:
        shape = list(self.shape)
        for _ in range(self.random.randint(2, 5)):
            self.random.choice((self.convolve, self.convolve, self.pool, self.add_block, self.add_block))()
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
        outputs = [helper.make_tensor_value_info(self.value, TensorProto.FLOAT, [None] * self.rank)]
        graph = helper.make_graph(self.nodes, "network", inputs, outputs, self.weights)
        model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
        return model, {"x": np.random.default_rng(0).normal(size=shape).astype(np.float32)}

    def add(self, op: str, inputs: list[str], **attributes: Any) -> str:
        name = f"{op}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def convolve(self, keeps_size: bool = False) -> None:
        random, spatial = self.random, self.rank - 2
        kernel = [random.choice((1, 3, 3, 5, 2)) for _ in range(spatial)]
        kernel = [size | 1 for size in kernel] if keeps_size else kernel
        dilations = [random.choice((1, 1, 2)) for _ in range(spatial)]
        attributes: dict[str, Any] = {"kernel_shape": kernel, "dilations": dilations, "group": random.choice((1, 1, 2))}
        reach = [(size - 1) * dilation for size, dilation in zip(kernel, dilations)]
        if keeps_size:
            attributes["pads"] = [size // 2 for size in reach] * 2
        else:
            attributes["strides"] = [random.choice((1, 1, 2, 3)) for _ in range(spatial)]
            attributes |= random.choice(
                (
                    {"pads": [random.randint(0, size) for size in reach * 2]},
                    {"auto_pad": "SAME_UPPER", "dilations": [1] * spatial},
                    {"auto_pad": "SAME_LOWER", "dilations": [1] * spatial},
                    {"pads": [size // 2 for size in reach] * 2},
                )
            )
        weight = np.random.default_rng(len(self.nodes)).normal(size=(4, 4 // attributes["group"], *kernel))
        name = f"w{len(self.nodes)}"
        self.weights.append(numpy_helper.from_array(weight.astype(np.float32), name))
        self.value = self.add("Conv", [self.value, name], **attributes)
        if random.random() < 0.5:
            self.value = self.add(random.choice(("Relu", "Sigmoid")), [self.value])

    def pool(self) -> None:
        spatial = self.rank - 2
        kernel = [self.random.randint(1, 3) for _ in range(spatial)]
        pads = [self.random.randint(0, size - 1) for size in kernel * 2]
        strides = [self.random.randint(1, 2) for _ in range(spatial)]
        op = self.random.choice(("MaxPool", "AveragePool", "LpPool"))
        self.value = self.add(op, [self.value], kernel_shape=kernel, pads=pads, strides=strides)

    def add_block(self) -> None:
        source = self.value
        for _ in range(self.random.randint(1, 3)):
            self.convolve(keeps_size=True)
        self.value = self.add("Add", [source, self.value])


def check(space: StrategySpace, choice: LayoutChoice, feeds: dict[str, Any], expected: Any) -> None:
    sharded = write_sharded_model(space, choice, make_costs(space.division.count))
    check_structure(space.facts.model, sharded)
    (actual,) = run_plain(sharded.model.whole_proto().SerializeToString(), [feeds])
    for one, other in zip(actual, expected, strict=True):
        # Roots, as of LpPool, make more of the rounding of small sums.
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * max(1.0, float(np.abs(other).max(initial=0.0))))


def choose(space: StrategySpace, costs: ExchangeCosts) -> LayoutChoice:
    """Return the choice if each element of a result takes 0.1 us."""
    facts, division = space.facts, space.division
    seconds = [
        [
            sum(
                1e-7 * np.prod(facts.shapes[name]) * division.largest_fraction(layout)
                for name, layout in zip(node.output, strategy.outputs)
            )
            for strategy in strategies
        ]
        for node, strategies in zip(facts.model.nodes, space.strategies)
    ]
    choice = ChoiceProblem(space, seconds, costs).solve()
    assert choice is not None
    return choice


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_random_networks_compute_the_same_with_any_overlaps(seed: int) -> None:
    random = Random(seed)
    proto, feeds = _Network(random).build()
    try:
        (expected,) = run_plain(proto.SerializeToString(), [feeds])
    except Exception:  # noqa: BLE001 - windows that do not fit into what is left of the image
        return
    space = make_space(proto, {}, random.choice(SHARES))
    for _ in range(3):
        check(space, choose_randomly(space, random), feeds, expected)
    costs = make_costs(space.division.count, latency_seconds=random.choice((1e-8, 1e-7, 1e-6)))
    check(space, choose(space, costs), feeds, expected)


def test_layouts_overlap_by_more_and_more_rows() -> None:
    layouts = list_overlaps(EVEN, 32)
    assert layouts[0] == Layout(2, 1, 2)
    assert layouts[2] == Layout(2, rows=((0, 17), (15, 32)))
    assert layouts[1] == Layout(2, rows=((0, 17), (15, 32)), valid=((0, 16), (16, 32)))
    assert len(layouts) == (MAX_OVERLAP + 1) * (MAX_OVERLAP + 2) // 2
    assert len(set(layouts)) == len(layouts)
    assert list_overlaps(EVEN, 1) == []
    assert REPLICATED not in list_overlaps(EVEN, 4)


def test_parts_are_made_of_parts_with_all_their_rows() -> None:
    even, wrong, right = list_overlaps(EVEN, 32)[:3]
    assert EVEN.holds(right, even)
    assert EVEN.holds(right, wrong)
    assert EVEN.holds(wrong, even)
    assert not EVEN.holds(even, right)
    assert not EVEN.holds(wrong, right)
    assert not EVEN.holds(Layout(1, 1, 2), even)
    assert EVEN.holds(REPLICATED, right)


def residual_blocks(count: int) -> ModelProto:
    """Return blocks of two convolutions of 3 x 3 around which a shortcut leads."""
    lines, value = [], "x"
    for index in range(count):
        lines.append(f"a{index} = Conv<pads=[1,1,1,1]>({value}, w)")
        lines.append(f"b{index} = Conv<pads=[1,1,1,1]>(a{index}, w)")
        lines.append(f"s{index} = Add(b{index}, {value})")
        value = f"s{index}"
    text = f"(float[1,1,64,8] x) => (float[1,1,64,8] {value}) {{ {' '.join(lines)} }}"
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}')
    model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 1, 3, 3), np.float32), "w"))
    return model


@pytest.mark.parametrize("shares", SHARES)
def test_the_dearer_an_exchange_the_fewer_there_are(shares: tuple[float, ...]) -> None:
    space = make_space(residual_blocks(4), {}, shares)
    counts = []
    for latency_seconds in (1e-9, 5e-6, 2e-5):
        costs = make_costs(len(shares), latency_seconds)
        sharded = write_sharded_model(space, choose(space, costs), costs)
        counts.append(sharded.exchanges.get("halo", 0))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2]


def test_where_a_cut_reorders_what_is_alive_there_are_fewer() -> None:
    space, counts = make_space(residual_blocks(4), {}), []
    for rate in (0.0, 1e-8):
        costs = replace(make_costs(2, 1e-9), reorder_seconds_per_byte=rate)
        counts.append(write_sharded_model(space, choose(space, costs), costs).exchanges.get("halo", 0))
    assert counts[0] > counts[1]


def test_residual_connections_are_added_without_cutting_rows_off() -> None:
    space = make_space(residual_blocks(2), {})
    costs = make_costs(2, 2e-5)
    sharded = write_sharded_model(space, choose(space, costs), costs)
    slices = [node for node in sharded.model.nodes if node.op_type == "Slice" and not node.input[0].startswith("x")]
    assert sharded.exchanges == {"all-gather": 1}
    assert len(slices) <= 2  # of the result, before it is gathered


SHIFTED = """
<ir_version: 10, opset_import: ["": 21]>
g (float[1,1,16,4] x, float[1,1,3,3] w) => (float[1,1,16,4] y)
<float[1,1,16,1] shift = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}>
{ s = Add(x, shift) y = Conv<pads=[1,1,1,1]>(s, w) }
"""


def test_weights_and_specifications_of_parts_that_overlap_stay_whole() -> None:
    space = make_space(parser.parse_model(SHIFTED), {})
    model = space.facts.model
    overlaps = next(item for item in space.strategies[1] if item.overlaps and not item.outputs[0].rows)
    before = next(item for item in space.strategies[0] if item.outputs == overlaps.inputs[:1])
    choice = LayoutChoice((before, overlaps), {}, 0.0, 0.0, 0)
    sharded = write_sharded_model(space, choice, make_costs(2))
    parts = [tuple(tensor.dims) for name, tensor in sharded.model.initializers.items() if "shift" in name]
    assert parts == [(1, 1, 9, 1)] * 2
    whole = build_whole_model(model, sharded, space, from_parts=True)
    assert "shift" in whole.initializers
    annotated = annotate_model(model, space, choice.strategies, ["cpu:0", "cpu:1"], {})
    (entry,) = annotated.nodes[0].device_configurations
    specs = {spec.tensor_name: read_layout(spec, [1, 1, 16, 4], space.division) for spec in entry.sharding_spec}
    assert specs["s"] == before.outputs[0]
    assert isinstance(specs["s"], Layout)
    assert specs["s"].rows
    feeds = {"x": np.arange(64, dtype=np.float32).reshape(1, 1, 16, 4), "w": np.ones((1, 1, 3, 3), np.float32)}
    (expected,) = run_plain(whole.whole_proto().SerializeToString(), [feeds])
    check(space, choice, feeds, expected)


def test_overlapping_rows_are_put_together_from_parts_that_several_devices_have() -> None:
    """Eight devices have four rows, two of them each: once, overlapping rows passed for parts of them."""
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["": 21]> g (float[1, 2, 4, 4] x, float[2, 4, 2, 2] w)
        => (float[1, 4, 8, 8] y) { a = Relu(x) y = ConvTranspose<kernel_shape = [2, 2], strides = [2, 2]>(a, w) }""")
    random = np.random.default_rng(0)
    feeds = {"x": random.normal(size=(1, 2, 4, 4)), "w": random.normal(size=(2, 4, 2, 2))}
    feeds = {name: array.astype(np.float32) for name, array in feeds.items()}
    (expected,) = run_plain(proto.SerializeToString(), [feeds])
    space = make_space(proto, {}, (1.0,) * 8)
    shared = [item for item in space.strategies[0] if item.outputs[0].axis == 2 and item.outputs[0].blocks == 4]
    overlapping = [item for item in space.strategies[1] if item.overlaps]
    assert shared
    assert overlapping
    for strategy in overlapping:
        check(space, LayoutChoice((shared[0], strategy), {}, 0.0, 0.0, 0), feeds, expected)
