"""Weights as inputs: what that costs a unit of nodes, what cannot be an input, and what is measured once."""

import json
import math
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from onnx import TensorProto, helper, numpy_helper, parser

from onnxplace.errors import ModelError
from onnxplace.facts import Profile, Source
from onnxplace.machine import measurement_cache
from onnxplace.machine.hardware import local_target
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.model import Model, store_for_session
from onnxplace.model.tensors import tensor_size
from onnxplace.passes.profiling import streamed_nodes
from onnxplace.passes.profiling.streamed_nodes import MIN_STREAMED_BYTES, measure_streamed
from onnxplace.passes.sharding.space.known_shapes import infer_shapes_and_values, infer_with_runtime
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target.target import Device
from tests.support.random_models import RandomModel, random_models, reference

SIDE = 512
CHAIN = f"""<ir_version: 8, opset_import: ["": 17]>
chain (float[N, {SIDE}] x) => (float[N, {SIDE}] y) {{
    [first] a = MatMul(x, v)
    [small] b = Add(a, bias)
    [second] c = MatMul(b, w)
    [relu] y = Relu(c)
}}"""
DEVICE = local_target("cpu:0").devices[0]
CLASS = DEVICE.cost_class
ESTIMATED, MEASURED = "profile{estimate=true}", "profile{repeat=3,seconds=0}"


def draw_weights(names="vw", side=SIDE):
    random = np.random.default_rng(0)
    return {name: random.standard_normal((side, side)).astype(np.float32) for name in names}


def profile(proto, weights, pipeline=MEASURED, rows=8, device="cpu:0") -> tuple[Model, Profile]:
    proto = parser.parse_model(proto) if isinstance(proto, str) else proto
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    state = State(local_target(device)).with_facts(bind(load(proto), {"N": rows}, {}))
    state, _ = Pipeline.parse(pipeline).run(state)
    return state[Model], state[Profile]


def measure(model, profile, *devices, nodes=None, cache=True):
    nodes = range(len(profile.graph)) if nodes is None else nodes
    shapes, types = infer_shapes_and_values(model)[0], infer_with_runtime(model, model.input_shapes()).types
    factors = measure_streamed(model, profile, devices or [DEVICE], nodes, shapes=shapes, types=types, cache=cache)
    return {name: dict(zip(profile.graph.names, array.tolist())) for name, array in factors.items()}


@pytest.fixture
def chain():
    return profile(CHAIN, {**draw_weights(), "bias": np.ones(SIDE, np.float32)})


@pytest.fixture
def comparisons(monkeypatch):
    """Return a list that takes the models of each comparison from now on, each of which is said to cost a half more."""
    compared = []
    monkeypatch.setattr(streamed_nodes, "_compare", lambda models, *_: compared.append(models) or 1.5)
    return compared


def test_products_are_measured_with_their_weights_as_inputs():
    model, costs = profile(CHAIN, {**draw_weights(side=SIDE), "bias": np.ones(SIDE, np.float32)})
    factors = measure(model, costs)[CLASS]
    assert 0 < factors["first"] < np.inf
    assert 0 < factors["second"] < np.inf


def test_large_weights_alone_become_inputs_and_keep_their_bytes(chain, comparisons):
    model, costs = chain
    factors = measure(model, costs)[CLASS]
    assert {name: factors[name] for name in ("first", "second")} == {"first": 1.5, "second": 1.5}
    for constant, streamed in comparisons:
        (weight,) = set(streamed.input_names) - set(constant.input_names)
        assert weight in ("v", "w")
        assert tensor_size(streamed.initializers[weight]) >= MIN_STREAMED_BYTES
        assert constant.initializers == streamed.initializers


@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(random_models())
def test_weights_as_inputs_with_defaults_give_the_same_results(model: RandomModel) -> None:
    try:
        reference(model.proto, model.feeds[:1])
    except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        assume(False)
    bound = bind(load(model.proto), {}, model.feeds[0])
    state = State(local_target("cpu:0")).with_facts(bound)
    costs = Pipeline.parse(ESTIMATED).run(state)[0][Profile]
    costs = replace(costs, sources={CLASS: np.full(len(costs.graph), Source.MEASURED, np.uint8)})

    def compare(models, feeds, device, folder):
        constant, streamed = [run(model, feeds, folder) for model in models]
        require_close(streamed, constant)
        return 1.5

    def require_close(actual, expected):
        if isinstance(expected, list):  # a sequence, or all outputs
            assert len(actual) == len(expected)
            for first, second in zip(actual, expected):
                require_close(first, second)
        elif isinstance(expected, np.ndarray) and expected.dtype.kind in "fiu":
            np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)
        else:
            np.testing.assert_equal(actual, expected)

    def run(model, feeds, folder):
        source, entries = store_for_session(model, folder)
        return open_session(source, make_session_options((0,), "none", entries)).run(None, feeds)

    with patch.object(streamed_nodes, "_compare", compare), patch.object(streamed_nodes, "MIN_STREAMED_BYTES", 1):
        factors = measure(bound, costs, cache=False)[CLASS]
    assert set(factors.values()) <= {1.0, 1.5, math.inf}


def test_equal_units_are_measured_once_and_found_in_the_cache(chain, comparisons):
    model, costs = chain
    alone = replace(costs, unit=np.arange(4, dtype=np.int32))
    measure(model, alone)
    assert len(comparisons) == 1  # both products are equal
    assert measure(model, alone)[CLASS] == {"first": 1.5, "small": 1.0, "second": 1.5, "relu": 1.0}
    assert len(comparisons) == 1
    measure(model, alone, cache=False)
    assert len(comparisons) == 2


def test_a_unit_of_other_sizes_or_of_another_device_is_another_one(chain, comparisons):
    model, costs = chain
    measure(model, costs)
    count = len(comparisons)
    other = bind(model, {"N": 16}, {})
    measure(other, costs)
    assert len(comparisons) == 2 * count
    more = replace(costs, seconds={**costs.seconds, "cpu/1": costs.seconds[CLASS]},
                   sources={**costs.sources, "cpu/1": costs.sources[CLASS]})  # fmt: skip
    measure(model, more, Device("cpu:0", 1 << 30))
    assert len(comparisons) == (2 if CLASS == "cpu/1" else 3) * count


@pytest.mark.parametrize("content", ['{"a": "x"}', "[1]", '{"a": -1.0}', "null"])
def test_damaged_factors_are_measured_again(chain, comparisons, content):
    measure(*chain)
    (path,) = [path for path in measurement_cache.folder().glob("*.json") if "factors" in path.read_text()]
    count = len(comparisons)
    path.write_text(json.dumps({**json.loads(path.read_text()), "factors": json.loads(content)}))
    assert measure(*chain)[CLASS]["first"] == 1.5
    assert len(comparisons) == 2 * count


def test_only_the_nodes_that_are_wanted_are_measured_with_all_of_their_unit(chain, comparisons):
    model, costs = chain
    joined = replace(costs, unit=np.array([0, 0, 1, 2], dtype=np.int32))
    assert measure(model, joined, nodes=[1])[CLASS] == {"first": 1.5, "small": 1.5, "second": 1.0, "relu": 1.0}
    ((constant, _),) = comparisons
    assert [node.name for node in constant.nodes] == ["first", "small"]


def test_a_weight_that_onnx_runtime_refuses_as_an_input_cannot_stream(chain, monkeypatch):
    def refuse(source, options, device, where):
        session = open_session(source, options, device, where)
        if session.get_overridable_initializers():
            raise ModelError("M012", "the weight must be a constant initializer", where=where)
        return session

    with monkeypatch.context() as patched:
        patched.setattr(streamed_nodes, "open_session", refuse)
        factors = measure(*chain)[CLASS]
    assert factors["first"] == factors["second"] == math.inf
    assert measure(*chain)[CLASS] == factors  # also from the cache


def test_nodes_that_read_weights_alone_cannot_stream_and_with_their_reader_are_a_unit(comparisons):
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    turned (float[N, {SIDE}] x) => (float[N, {SIDE}] y) {{
        [turn] t = Transpose <perm = [1, 0]> (v)
        [product] y = MatMul(x, t)
    }}"""
    model, costs = profile(text, draw_weights("v"))
    apart, joined = np.arange(2, dtype=np.int32), np.zeros(2, dtype=np.int32)
    assert measure(model, replace(costs, unit=apart))[CLASS] == {"turn": math.inf, "product": 1.0}
    assert measure(model, replace(costs, unit=joined))[CLASS] == {"turn": 1.5, "product": 1.5}


def test_estimated_costs_are_not_measured(comparisons):
    weights = {**draw_weights(), "bias": np.ones(SIDE, np.float32)}
    assert set(measure(*profile(CHAIN, weights, ESTIMATED))[CLASS].values()) == {1.0}
    assert comparisons == []


def test_a_device_that_is_not_here_is_not_measured(chain, comparisons):
    model, costs = chain
    gpu = Device("cuda:0", 1 << 30, model="NVIDIA H100 PCIe")
    costs = replace(costs, seconds={**costs.seconds, gpu.cost_class: costs.seconds[CLASS]},
                    sources={**costs.sources, gpu.cost_class: np.full(4, Source.GIVEN, np.uint8)})  # fmt: skip
    assert set(measure(model, costs, gpu)[gpu.cost_class].values()) == {1.0}
    assert comparisons == []


def test_devices_that_compile_hold_their_weights(chain, comparisons):
    model, costs = chain
    npu = Device("qnn/npu:0", 1 << 30)
    costs = replace(costs, seconds={npu.cost_class: costs.seconds[CLASS]},
                    sources={npu.cost_class: costs.sources[CLASS]})  # fmt: skip
    factors = measure(model, costs, npu)[npu.cost_class]
    assert factors["first"] == factors["second"] == math.inf
    assert comparisons == []


def quantised(rows, sizes=(1024, 2048)):
    """Return a product with a weight of 4 bits, behind which ONNX infers no shapes, and a plain one."""
    inner, outer = sizes
    random = np.random.default_rng(0)
    weights = {
        "q": random.integers(0, 255, (outer, inner // 32, 16)).astype(np.uint8),
        "scales": random.random((outer, inner // 32), np.float32),
        "w": random.random((outer, 256), np.float32),
    }
    nodes = [
        helper.make_node("MatMulNBits", ["x", "q", "scales"], ["h"], "packed", domain="com.microsoft",
                         K=inner, N=outer, bits=4, block_size=32),
        helper.make_node("MatMul", ["h", "w"], ["y"], "plain"),
    ]  # fmt: skip
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", inner])
    graph = helper.make_graph(nodes, "quantised", [x], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8), weights


def test_a_quantised_kernel_unpacks_an_input_in_each_run():
    model, costs = profile(*quantised(1), rows=1)
    factors = measure(model, costs)[CLASS]
    assert factors["packed"] > 3
    assert factors["plain"] < factors["packed"]


def test_units_behind_operators_that_onnx_does_not_know_are_told_apart_by_what_they_read(comparisons):
    model, costs = profile(*quantised(1), rows=1)
    for rows in (1, 8):
        measure(bind(model, {"N": rows}, {}), costs)
    assert len(comparisons) == 4


@given(st.integers(1, 64))
def test_without_a_measurement_unpacking_takes_a_time_per_byte(rows):
    model, costs = profile(*quantised(rows), ESTIMATED, rows)
    factors = measure(model, costs)[CLASS]
    seconds = dict(zip(costs.graph.names, costs.seconds[CLASS].tolist()))
    assert factors["plain"] == 1
    assert factors["packed"] * seconds["packed"] == pytest.approx(seconds["packed"] + (1 << 20) * 9e-9)


def test_a_value_of_unknown_shape_leaves_an_estimate(chain, comparisons):
    model, costs = chain
    factors = measure_streamed(model, costs, [DEVICE], range(4), shapes={"x": (8, SIDE)}, types={})[CLASS]
    assert factors.tolist()[2:] == [1.0, 1.0]
