"""What the predicted latency of a strategy consists of, by the chain of nodes and copies that determines it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from onnx import TensorProto, helper, parser

from onnxplace.driver import step_parts
from onnxplace.driver.candidates import Candidate, Profiled, Strategy, predict, predict_all
from onnxplace.driver.choose import list_copied_stages, list_sharded, list_simple
from onnxplace.driver.step_parts import list_step_parts, suggest_fixed_sizes
from onnxplace.errors import InfeasibleError
from onnxplace.facts import Profile, Schedule, Source
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.state_binding import bind_states
from onnxplace.pipeline.pipeline import Pipeline, make_pass
from onnxplace.state import State
from onnxplace.target.machines import parse_machine
from onnxplace.target.target import Device, Link, Target
from onnxplace.utils.quantities import format_milliseconds
from tests.support.chains import mlp
from tests.support.random_models import random_models

REST = "coplace{join=never},fuse,stages{seconds=0.2},split"


def build_profiled(model, target, sizes=None, states=()):
    front = Pipeline.parse("optimize,profile{estimate=true}").passes
    start = State(target).with_facts(bind_states(bind(load(model), sizes or {}, {}), states))
    return Profiled(front, Pipeline(front).run(start)[0], Pipeline.parse(REST).passes, make_pass("emit"))


def place_alone(profiled):
    return predict(Strategy("one device", "one device", profiled.replace_placer(make_pass("single"))), profiled)


def predict_alone(text, machine, **sizes):
    return place_alone(build_profiled(parser.parse_model(text), parse_machine(machine).to_target(), sizes))


def make_slow_target(memory=1 << 30):
    """Return two devices that send each other a megabyte in a second."""
    devices = [Device(f"cpu:{index}", memory, operations_per_second=1e12) for index in range(2)]
    return Target(tuple(devices), tuple(Link(a.id, b.id, 0.0, 1e6) for a in devices for b in devices if a is not b))


TARGETS = [make_slow_target(), parse_machine("4xH100-NVLink").to_target()]


@settings(max_examples=10, deadline=None)
@given(model=random_models(), target=st.sampled_from(TARGETS))
def test_the_parts_of_every_strategy_are_its_latency_and_the_longest_comes_first(model, target):
    quick = make_pass("auto", {"seconds": "0.1"})

    def propose(profiled, results):
        yield [*list_simple(profiled), Strategy("auto", "placed", profiled.replace_placer(quick))]
        yield from list_copied_stages(profiled, results)
        yield list_sharded(profiled)

    built = [
        r
        for r in predict_all(propose, build_profiled(model.proto, target, model.dimensions))
        if isinstance(r, Candidate)
    ]
    assume(built)
    for item in built:
        parts = list_step_parts(item)
        assert sum(part.seconds for part in parts) == pytest.approx(item.step_seconds, rel=1e-9)
        assert [part.seconds for part in parts] == sorted((part.seconds for part in parts), reverse=True)
        assert all(part.seconds > 0 and part.count > 0 for part in parts)
        assert len({part.kind for part in parts}) == len(parts)


def test_many_small_nodes_are_limited_by_launches_of_five_microseconds_each():
    nodes = "\n".join(f"x{index + 1} = Relu(x{index})" for index in range(99))
    text = f'<ir_version: 8, opset_import: ["": 17]> g (float[batch, 8] x0) => (float[batch, 8] x99) {{ {nodes} }}'
    part = list_step_parts(predict_alone(text, "H100", batch=2))[0]
    assert (part.kind, part.count) == ("launches", 99)
    assert part.seconds / part.count == pytest.approx(5e-6)


PRODUCT = """<ir_version: 8, opset_import: ["": 17]>
g (float[batch, 8192] x, float[8192, 8192] w) => (float[batch, 8192] y) { y = MatMul(x, w) }"""
RELU = '<ir_version: 8, opset_import: ["": 17]> g (float[batch, 1024] x) => (float[batch, 1024] y) { y = Relu(x) }'


@pytest.mark.parametrize(
    ("text", "batch", "kind"),
    [(PRODUCT, 8192, "computes"), (PRODUCT, 1, "memory rate"), (RELU, 65536, "memory rate"), (RELU, 1, "calls")],
)
def test_a_node_computes_or_waits_for_memory_by_the_roofline(text, batch, kind):
    built = predict_alone(text, "T4", batch=batch)
    assert list_step_parts(built)[0].kind == kind
    assert not {"copies", "waits", "streamed weights"} & {part.kind for part in list_step_parts(built)}


@pytest.mark.parametrize(("slower", "kind"), [(1.0, "memory rate"), (1.9, "memory rate"), (2.1, "computes")])
def test_a_measured_node_waits_for_memory_at_half_of_the_peak_rate_or_more(slower, kind):
    profiled = build_profiled(parser.parse_model(RELU), parse_machine("T4").to_target(), {"batch": 65536})
    profile = profiled.state[Profile]
    (name,) = profile.seconds
    seconds = {name: 5e-6 + slower * (profile.seconds[name] - 5e-6)}
    measured = replace(profile, seconds=seconds, sources={name: np.array([Source.MEASURED], np.uint8)})
    built = place_alone(replace(profiled, state=profiled.state.with_facts(measured)))
    assert list_step_parts(built)[0].kind == kind


def test_copies_over_a_slow_link_limit_stages():
    whole = place_alone(build_profiled(mlp(layers=4), make_slow_target())).state[Schedule].simulation.peak_bytes.max()
    profiled = build_profiled(mlp(layers=4), make_slow_target(int(0.8 * whole)))
    built = predict(Strategy("stages", "stages", profiled.rest), profiled)
    assert built.devices == 2
    parts = list_step_parts(built)
    assert (parts[0].kind, parts[0].count) == ("copies", 1)
    assert sum(part.seconds for part in parts) == pytest.approx(built.step_seconds)


# ------------------------------------------------------------------------------------------------------- fixed sizes


# Rows of a Softmax along the other axis are only split if the size of the batch is fixed.
ROWS = """<ir_version: 8, opset_import: ["": 17]>
g (float[batch, 4096] x) => (float[batch, 1] y) {
    a = Softmax(x)  b = Softmax(a)  c = Softmax(b)  d = Softmax(c)  y = ReduceMax<axes = [1]>(d) }"""


def test_a_batch_that_only_fixed_sizes_let_split_is_named_with_both_times():
    profiled = build_profiled(parser.parse_model(ROWS), TARGETS[1], {"batch": 1 << 16})
    kept = place_alone(profiled)
    with pytest.raises(InfeasibleError, match="gains nothing"):
        predict(Strategy("", "sharded", (make_pass("shard"), *profiled.rest)), profiled)
    (note,) = suggest_fixed_sizes(kept)
    assert note.code == "P069"
    fixed = predict(Strategy("", "sharded", (make_pass("shard", {"fixed": "true"}), *profiled.rest)), profiled)
    assert fixed.step_seconds < 0.5 * kept.step_seconds
    times = f"{format_milliseconds(fixed.step_seconds)} instead of {format_milliseconds(kept.step_seconds)}"
    assert note.message == f"with --fixed-sizes, batch can be split: {times}"


@pytest.fixture
def no_prediction(monkeypatch):
    """Fail if a strategy is predicted for a hint."""
    monkeypatch.setattr(step_parts, "predict", lambda *_: pytest.fail("no layouts need to be chosen"))


@pytest.mark.usefixtures("no_prediction")
def test_no_layouts_are_chosen_where_no_size_is_open_or_launches_and_calls_leave_nothing_to_gain():
    model = parser.parse_model(ROWS)
    small = place_alone(build_profiled(model, TARGETS[1], {"batch": 1}))
    alone = place_alone(build_profiled(model, parse_machine("H100").to_target(), {"batch": 1 << 16}))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1 << 16
    fixed = place_alone(build_profiled(model, TARGETS[1]))
    assert [suggest_fixed_sizes(item) for item in (small, alone, fixed)] == [[], [], []]


def test_no_size_is_to_be_fixed_where_a_state_grows_with_each_call():
    def value(name, *shape):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    nodes = [
        helper.make_node("Concat", ["past", "x"], ["present"], axis=1),
        helper.make_node("Softmax", ["present"], ["y"]),
    ]
    inputs = [value("past", "batch", "past", 4096), value("x", "batch", 1, 4096)]
    graph = helper.make_graph(
        nodes, "g", inputs, [value("y", "batch", "n", 4096), value("present", "batch", "n", 4096)]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    sizes = {"batch": 1024, "past": 127}
    grows = place_alone(build_profiled(model, TARGETS[1], sizes, {"present": "past"}))
    assert not suggest_fixed_sizes(grows)
    with pytest.raises(InfeasibleError, match="a call changes state 'past'"):
        predict(Strategy("", "sharded", (make_pass("shard", {"fixed": "true"}), *grows.profiled.rest)), grows.profiled)
