"""Errors of nodes: each by itself, against the CPU's exact values; and the nodes that have to stay off a device."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from onnx import numpy_helper, parser

from onnxplace.errors import ModelError
from onnxplace.machine.hardware import local_target
from onnxplace.model.lineage import RANDOM_OPERATORS
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind, build_op_graph, infer_static_shapes, value_bytes
from onnxplace.passes.profiling import node_errors
from onnxplace.passes.profiling.node_errors import choose_refused, measure_errors
from onnxplace.utils.differences import relative_error
from tests.support.half_device import half_kind as half_kind
from tests.support.random_models import RandomModel, random_models, reference

HALF_ROUND_OFF = 2.0**-11
TOWER = """<ir_version: 8, opset_import: ["": 17]> tower (float[4, 64] x) => (float[4, 64] y, int64[4] i)
{
    [first] a = MatMul(x, w)
    [relu] b = Relu(a)
    [second] y = MatMul(b, w)
    [choice] i = ArgMax<axis = 1, keepdims = 0>(y)
}"""


@pytest.fixture
def tower():
    model = parser.parse_model(TOWER)
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return load(model)


def build_graph(model):
    return build_op_graph(model, value_bytes(model, {**infer_static_shapes(model), **model.input_shapes()}))


def measure_on(device_id, model, group, feeds=None):
    (device,) = local_target(device_id).devices
    return measure_errors(model, build_graph(model), feeds or model.feeds(), device.address, np.array(group))


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(random_models(), st.data())
def test_a_device_that_computes_exactly_has_no_errors_however_nodes_are_grouped(model: RandomModel, data) -> None:
    try:
        reference(model.proto, model.feeds[:1])
    except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        assume(False)
    bound = bind(load(model.proto), {}, model.feeds[0])
    nodes = len(bound.nodes)
    group = data.draw(st.lists(st.integers(-1, 3), min_size=nodes, max_size=nodes))
    group = [-1 if node.op_type in RANDOM_OPERATORS else item for node, item in zip(bound.nodes, group)]
    assert not measure_on("cpu:0", bound, group, model.feeds[0]).any()


def test_the_error_of_a_node_is_its_own_rounding_and_not_that_of_nodes_before_it(tower):
    errors = measure_on("half:0", tower, [0, 1, 2, 3])
    assert (errors[:3] > 0).all()
    assert (errors <= HALF_ROUND_OFF).all()
    assert errors[3] == 0  # the index of exact values


def test_nodes_of_one_kernel_have_one_error_and_values_within_it_stay_there(tower):
    single = measure_on("half:0", tower, [0, 1, 2, 3])
    joined = measure_on("half:0", tower, [0, 0, 2, 3])
    assert joined[0] == joined[1] == single[1]
    assert joined[2] == single[2]


def test_nodes_of_group_minus_one_do_not_run_on_the_device(tower):
    errors = measure_on("half:0", tower, [-1, 0, -1, -1])
    assert errors[[0, 2, 3]].tolist() == [0, 0, 0]
    assert errors[1] > 0


def test_a_model_measured_in_parts_has_the_errors_of_the_whole(tower, monkeypatch):
    whole = measure_on("half:0", tower, [0, 1, 2, 3])
    monkeypatch.setattr(node_errors, "MAX_PART_BYTES", 1)
    assert measure_on("half:0", tower, [0, 1, 2, 3]).tolist() == whole.tolist()


def test_a_kernel_that_cannot_run_alone_has_an_infinite_error_and_the_others_their_own(tower, monkeypatch):
    whole, actual = measure_on("half:0", tower, [0, 1, 2, 3]), node_errors.open_session

    def refuse_relu(source, options, device, where):
        if device.kind == "half" and b"Relu" in source:
            raise ModelError("M001", "no kernel for Relu", where=where)
        return actual(source, options, device, where)

    monkeypatch.setattr(node_errors, "open_session", refuse_relu)
    errors = measure_on("half:0", tower, [0, 1, 2, 3])
    assert errors.tolist() == [whole[0], np.inf, whole[2], whole[3]]


costs = st.floats(0, 1, allow_nan=False)
errors_of_nodes = st.one_of(st.just(0.0), st.floats(1e-6, 1, allow_nan=False), st.just(np.inf))


@given(st.data(), st.integers(1, 12), st.floats(1e-6, 2, allow_nan=False))
def test_accepted_errors_are_within_the_maximum_together(data, nodes, maximum):
    def draw(items):
        return np.array(data.draw(st.lists(items, min_size=nodes, max_size=nodes)))

    _, unit = np.unique(draw(st.integers(0, 5)), return_inverse=True)
    seconds = {name: draw(costs) for name in ("cpu", "a", "b")}
    errors = {name: draw(errors_of_nodes) for name in ("a", "b")}
    refused = choose_refused(seconds, errors, unit, maximum)
    total = 0.0
    for name, error in errors.items():
        for item in range(unit.max() + 1):
            own = unit == item
            assert len(set(refused[name][own].tolist())) == 1
            if not error[own].any():
                assert not refused[name][own].any()
            total += error[own].max() ** 2 * (not refused[name][own].any()) if np.isfinite(error[own].max()) else 0
        assert refused[name][~np.isfinite(error)].all()
    assert total <= maximum**2 * (1 + 1e-9)


def test_a_device_keeps_the_nodes_that_save_most_time_for_their_error():
    seconds = {"cpu": np.array([5.0, 1.0, 4.0]), "npu": np.array([1.0, 0.9, 1.0])}
    errors = {"npu": np.array([3e-4, 3e-4, 3e-4])}
    for maximum, refused in ((1e-4, [1, 1, 1]), (3.5e-4, [0, 1, 1]), (4.5e-4, [0, 1, 0]), (6e-4, [0, 0, 0])):
        chosen = choose_refused(seconds, errors, np.arange(3), maximum)
        assert chosen["npu"].tolist() == [bool(item) for item in refused]


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        (np.float32([1, 2.5]), np.float32([1, 2]), 0.25),
        (np.float32([0, 0.5]), np.float32([0, 0]), 0.5),
        (np.float32([1, np.nan]), np.float32([1, np.nan]), 0),
        (np.float32([1, np.inf]), np.float32([1, 2]), np.inf),
        (np.float32([1]), np.float32([1, 2]), np.inf),
        (np.int64([7]), np.int64([8]), np.inf),
        (np.uint8([199]), np.uint8([200]), 0.005),
        (np.array([True]), np.array([True]), 0),
        ([np.float32([1])], [np.float32([2])], 0),
    ],
)
def test_a_relative_error_is_that_of_the_largest_magnitude(actual, expected, error):
    assert relative_error(actual, expected) == pytest.approx(error)
