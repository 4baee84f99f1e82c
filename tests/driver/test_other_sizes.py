"""What was placed for one size, predicted at others; and what it takes to move states between plans."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from onnx import parser

from onnxplace.driver.candidates import Candidate, Profiled, Strategy, create_pass, predict, predict_all
from onnxplace.driver.choose import list_sharded, list_simple
from onnxplace.driver.other_sizes import predict_elsewhere
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


def make_chain():
    """Return layers over tokens, with the sum of all tokens so far as a state."""
    nodes = "".join(f"a{n + 1} = MatMul(a{n}, w{n})\n" for n in range(LAYERS))
    weights = ", ".join(f"float[{WIDTH}, {WIDTH}] w{n}" for n in range(LAYERS))
    return parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        chain (float[n, {WIDTH}] x, float[past, {WIDTH}] before, {weights})
            => (float[n, {WIDTH}] y, float[all, {WIDTH}] after) {{
            a0 = Identity(x)
            {nodes}
            after = Concat<axis=0>(before, a{LAYERS})
            mean = ReduceMean<axes=[0]>(after)
            y = Add(a{LAYERS}, mean)
        }}"""
    )


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """The chain with weights."""
    from onnx import numpy_helper

    proto, random = make_chain(), np.random.default_rng(0)
    for n in range(LAYERS):
        weight = random.standard_normal((WIDTH, WIDTH)).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(weight, f"w{n}"))
    kept = [value for value in proto.graph.input if not value.name.startswith("w")]
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    return load(proto)


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
    bound = bind_states(bind(model, {"n": n, "past": 8}, {}), ["after=before"])
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
        assert predict_elsewhere(item, own) == pytest.approx(item.step_seconds, rel=1e-9), item.name
        assert 0 < predict_elsewhere(item, elsewhere) < math.inf
    single = next(item for item in candidates if item.name == "one device")
    home = {int(index) for index in single.state[Placement].device}
    name = target.devices[home.pop()].id
    passes = elsewhere.replace_placer(create_pass("single"))
    there = predict(Strategy(name, "one device", passes, devices=(name,)), elsewhere)
    assert predict_elsewhere(single, elsewhere) == pytest.approx(there.step_seconds, rel=1e-9)
