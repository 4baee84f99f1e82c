"""What was placed for one size, predicted at others; and what it takes to move states between plans."""

import math

import numpy as np
import onnx
import pytest
from hypothesis import given, settings, strategies as st
from onnx import numpy_helper, parser

import onnxplace
from onnxplace.bundle.split_states import COPIED_BYTES_PER_SECOND
from onnxplace.driver.candidates import (
    Candidate,
    Profiled,
    Strategy,
    create_pass,
    predict,
    predict_all,
    predict_elsewhere,
)
from onnxplace.driver.choose import list_sharded, list_simple
from onnxplace.driver.plan_sets import predict_moves, rank_sets
from onnxplace.facts import Placement
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.state_binding import bind_states
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target.target import Device, Link, Target

LAYERS, WIDTH = 4, 256
FRONT = "optimize,profile{estimate=true}"
REST = "coplace{join=never},fuse,stages{seconds=1},split"


def make_chain(width: int = WIDTH):
    """Return layers over tokens, with all of their results so far as a state."""
    nodes = "".join(f"a{n + 1} = MatMul(a{n}, w{n})\n" for n in range(LAYERS))
    proto, random = (
        parser.parse_model(
            f"""<ir_version: 8, opset_import: ["": 17]>
        chain (float[n, {width}] x, float[past, {width}] before) => (float[n, {width}] y, float[all, {width}] after) {{
            a0 = Identity(x)
            {nodes}
            after = Concat<axis=0>(before, a{LAYERS})
            mean = ReduceMean<axes=[0]>(after)
            y = Add(a{LAYERS}, mean)
        }}"""
        ),
        np.random.default_rng(0),
    )
    for n in range(LAYERS):
        weight = random.standard_normal((width, width)).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(weight, f"w{n}"))
    return load(proto)


@pytest.fixture(scope="module")
def chain():
    return make_chain()


def make_target(count: int = 2, memory: int = 1 << 30) -> Target:
    """Return devices of which each has its own speed."""
    devices = tuple(
        Device(
            f"cpu:{index}",
            memory,
            cores=index + 1,
            segment_seconds=1e-7,
            operations_per_second=1e10 * (index + 1),
            memory_bytes_per_second=1e10 / (index + 1),
        )
        for index in range(count)
    )
    return Target(devices, tuple(Link(a.id, b.id, 1e-7, 1e11) for a in devices for b in devices if a is not b))


def profile(model, n: int, target: Target, front: str = FRONT) -> Profiled:
    bound = bind(model, {"n": n, "past": 8}, {})
    bound = bound if "fixed" in front else bind_states(bound, ["after=before"])
    passes = Pipeline.parse(front).passes
    state, _ = Pipeline(passes).run(State(target).with_facts(bound))
    return Profiled(passes, state, Pipeline.parse(REST).passes, create_pass("emit"))


def list_candidates(profiled: Profiled) -> list[Candidate]:
    def propose(part, results):
        yield list_simple(part)
        yield list_sharded(part)
        auto = create_pass("auto", seconds=0.5)
        yield [Strategy("placed", "placed", part.replace_placer(auto))]

    return [item for item in predict_all(propose, profiled) if isinstance(item, Candidate)]


@settings(deadline=None, max_examples=8)
@given(st.integers(1, 64), st.integers(1, 64))
def test_at_its_own_size_the_step_is_its_own_and_alone_it_is_that_of_the_device(chain, n, other):
    target = make_target()
    own, elsewhere = (profile(chain, size, target) for size in (n, other))
    candidates = list_candidates(own)
    assert {item.strategy.kind for item in candidates} >= {"one device", "stages", "placed", "sharded"}
    for item in candidates:
        assert predict_elsewhere(item, own).seconds == pytest.approx(item.step_seconds, rel=1e-9), item.name
        assert 0 < predict_elsewhere(item, elsewhere).seconds < math.inf
    single = next(item for item in candidates if item.name == "one device")
    home = {int(index) for index in single.state[Placement].device}
    name = target.devices[home.pop()].id
    passes = elsewhere.replace_placer(create_pass("single"))
    there = predict(Strategy(name, "one device", passes, devices=(name,)), elsewhere)
    assert predict_elsewhere(single, elsewhere).seconds == pytest.approx(there.step_seconds, rel=1e-9)


def place(profiled: Profiled, name: str) -> Candidate:
    """Return the whole model on one device."""
    passes = profiled.replace_placer(create_pass("single"))
    return predict(Strategy(name, "one device", passes, devices=(name,)), profiled)


def test_a_plan_of_fixed_sizes_takes_no_others(chain):
    front = "optimize{fixed_sizes=true},profile{estimate=true}"
    own, other = (profile(chain, n, make_target(), front) for n in (1, 32))
    fixed = place(own, "cpu:0")
    assert predict_elsewhere(fixed, own).seconds == pytest.approx(fixed.step_seconds)
    assert predict_elsewhere(fixed, other).seconds == math.inf


def test_a_size_whose_values_do_not_fit_is_not_taken(chain):
    memory = (LAYERS * WIDTH * WIDTH + 64 * WIDTH) * 4
    own, large = (profile(chain, n, make_target(1, memory)) for n in (1, 256))
    assert predict_elsewhere(place(own, "cpu:0"), large).seconds == math.inf


@pytest.mark.parametrize("step", ["shard{ways=2,exact=true}", "recompute{limit=0}"])
def test_operators_in_parts_and_values_computed_again_grow_with_the_whole_model(chain, step):
    own, large = (profile(chain, n, make_target()) for n in (64, 512))
    if step.startswith("recompute"):
        (recompute,) = Pipeline.parse(step).passes
        item = place(own.insert(recompute, None), "cpu:0")
    else:
        passes = (*Pipeline.parse(step).passes, *own.replace_placer(create_pass("auto", seconds=0.5)))
        item = predict(Strategy("parts", "sharded", passes), own)
    growth = predict_elsewhere(item, large).seconds / item.step_seconds
    whole = place(large, "cpu:0").step_seconds / place(own, "cpu:0").step_seconds
    assert predict_elsewhere(item, own).seconds == pytest.approx(item.step_seconds, rel=1e-6)
    assert 1 < growth <= whole * 1.2


def test_weights_that_stream_take_as_long_at_each_size():
    model, target = make_chain(1024), make_target(1, memory=10 << 20)
    own, small = (profile(model, n, target) for n in (16, 1))
    item = predict(Strategy("streamed", "streamed", own.replace_placer(create_pass("stream"))), own)
    assert predict_elsewhere(item, own).seconds == pytest.approx(item.step_seconds)
    assert predict_elsewhere(item, small).seconds >= item.step_seconds


def test_a_device_that_the_other_profile_lacks_is_estimated_by_the_whole_model(chain):
    own, other = profile(chain, 4, make_target(2)), profile(chain, 8, make_target(1))
    assert 0 < predict_elsewhere(place(own, "cpu:1"), other).seconds < math.inf


def test_states_move_by_the_links_of_their_devices_and_stay_where_both_plans_have_them(chain):
    devices = (Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30), Device("cuda:0", 1 << 30, model="G"))
    target = Target(devices, tuple(Link(a.id, b.id, 1e-6, 1e9) for a in devices for b in devices if a is not b))
    profiled = profile(chain, 4, target)
    moves = predict_moves([place(profiled, device.id) for device in devices], target)
    size = (8 + 4) * WIDTH * 4
    assert (np.diag(moves) == 0).all()
    assert (moves == moves.T).all()
    assert moves[0, 1] == pytest.approx(2 * size / COPIED_BYTES_PER_SECOND)
    assert moves[0, 2] == pytest.approx(size / COPIED_BYTES_PER_SECOND + size / 1e9)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.floats(1e-4, 10.0), min_size=3, max_size=3), min_size=1, max_size=4),
    st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
)
def test_a_set_costs_at_most_what_each_of_its_plans_costs_where_states_do_not_move(steps, weights):
    sets = rank_sets(np.array(steps), np.array(weights), 4, lambda plans: True)
    losses = {item.plans: item.loss for item in sets}
    assert losses
    for plans, loss in losses.items():
        assert all(loss <= other * (1 + 1e-9) for less, other in losses.items() if set(less) < set(plans))
        assert {*next(item for item in sets if item.plans == plans).fastest} <= set(plans)


def compile_for(path, out, devices: Target | None, *sizes: int, **options):
    shapes = [{"n": n} for n in sizes]
    settings = {"target": devices} if devices else {"devices": "cpu:0"}
    return onnxplace.compile(path, out, shape=shapes, trial=False, effort="low", **settings, **options)


def test_without_a_trial_each_plan_has_a_predicted_step_at_each_size(tmp_path):
    devices = (
        Device("cpu:0", 1 << 30, operations_per_second=1e12, memory_bytes_per_second=2e9),
        Device("cuda:0", 1 << 30, model="G", operations_per_second=2e10, memory_bytes_per_second=1e11),
    )
    links = tuple(Link(a.id, b.id, 5e-3, 1e10) for a in devices for b in devices if a is not b)
    path = tmp_path / "m.onnx"
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> m (float[n, 1024] x) => (float[n, 1024] y) { y = MatMul(x, w) }'
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((1024, 1024), np.float32), "w"))
    onnx.save(proto, path)
    bundle = compile_for(path, tmp_path / "two", Target(devices, links), 1, 256)
    small, large = bundle.manifest.sizes
    assert [{segment.device for segment in plan.manifest.segments} for plan in bundle.plans] == [{"cuda:0"}, {"cpu:0"}]
    assert small.seconds[0] < small.seconds[1]
    assert large.seconds[1] < large.seconds[0]
    one = compile_for(path, tmp_path / "one", Target(devices, links), 1, 256, plans=1)
    assert len(one.plans) == 1
    assert {item.seconds for item in one.manifest.sizes} <= {
        (item.seconds[k],) for item in (small, large) for k in (0, 1)
    }


def test_a_plan_that_is_the_same_for_two_sizes_has_the_step_of_each(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(
        parser.parse_model(
            '<ir_version: 8, opset_import: ["": 17]> m (float[n, 64] x) => (float[n, 64] y) {y = Exp(x)}'
        ),
        path,
    )
    small, large = compile_for(path, tmp_path / "b", None, 1, 100_000).manifest.sizes
    assert large.seconds[0] > 10 * small.seconds[0]
