"""Outputs of segments that are computed where another process reads them."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from onnx import parser

from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.runtimes.execution.segments import OpenSegment, PlacedDevice, open_routes
from onnxplace.target.target import Device
from onnxplace.utils.ort import import_onnxruntime
from onnxplace_hosts.ranks import placed_outputs
from onnxplace_hosts.ranks.placed_outputs import place_outputs, place_segment
from onnxplace_hosts.ranks.shared_blocks import MIN_PLACED_BYTES
from tests.support.two_hosts import compile_alternating

SIZE = 40
# Outputs of all kinds: of fixed and of other shapes, of shapes that depend on what is in inputs, of subgraphs, of no
# computation, constants, and small ones.
MODEL = """
<ir_version: 8, opset_import: ["": 17]>
outputs (float[n] x, bool flag, int64 count, float[40] w) => (
    float[n] same, float[n] copy, float[a, b] flat, int64[1, k] places, float[c] chosen, float[m] last, float[i, l] all,
    bool[n] signs, float16[n] half, float sum, float[40] fixed, float[40] constant
)
    <float zero = {0}, int64[2] row = {1, -1}, int64[1] axis = {0}, int64[1] size = {40}>
{
    same = Neg(x)
    copy = Identity(x)
    flat = Reshape(same, row)
    places = NonZero(x)
    chosen = If(flag)
        <then_branch = yes () => (float[c1] r1) { r1 = Identity(x) },
         else_branch = no () => (float[c2] r2) { r2 = Concat<axis = 0>(x, x) }>
    last, all = Loop(count, , x)
        <body = step (int64 i, bool go, float[s] v) => (bool on, float[t] u, float[40] first) {
            on = Identity(go) u = Concat<axis = 0>(v, w) first = Neg(w) }>
    signs = Less(x, zero)
    half = Cast<to = 10>(x)
    sum = ReduceSum<keepdims = 0>(x, axis)
    fixed = Neg(w)
    constant = ConstantOfShape <value = float[1] {1}> (size)
}
"""


@pytest.fixture(scope="module")
def session():
    return open_session(parser.parse_model(MODEL).SerializeToString(), make_session_options((0,)))


def make_segment(session, allocate=None, names=None):
    outputs = [item.name for item in session.get_outputs()]
    record = SimpleNamespace(inputs=[item.name for item in session.get_inputs()], streamed=(), outputs=outputs)
    segment = OpenSegment(record, session, PlacedDevice(Device("cpu:0", 1 << 30), ()))
    if allocate is not None:
        segment = place_segment(segment, outputs if names is None else names, allocate)
    return segment


def run(segment, feeds):
    values = dict(feeds)
    segment.run(values, [], import_onnxruntime().RunOptions())
    return {name: value for name, value in values.items() if name not in feeds}


feeds = st.builds(
    lambda size, zeros, flag, count, seed: {
        "x": np.where(np.arange(size) < zeros, 0, np.random.default_rng(seed).standard_normal(size)).astype("f4"),
        "flag": np.array(flag),
        "count": np.array(count),
        "w": np.full(SIZE, seed, np.float32),
    },
    st.sampled_from([0, 1, SIZE, 100]), st.sampled_from([0, 3]), st.booleans(),
    st.integers(0, 2), st.integers(0, 9),
)  # fmt: skip


@given(
    requests=st.lists(feeds, min_size=2, max_size=8), names=st.sets(st.sampled_from(["same", "places", "half", "sum"]))
)
@settings(deadline=None)
def test_placed_outputs_are_those_of_other_runs_whatever_their_shapes(session, requests, names):
    plain, placed = make_segment(session), make_segment(session, np.empty, names or None)
    kept = [(run(plain, item), run(placed, item)) for item in requests]
    for expected, actual in kept:
        assert list(actual) == list(expected)
        for name, value in actual.items():
            assert (value.dtype, value.shape) == (expected[name].dtype, expected[name].shape), name
            np.testing.assert_array_equal(value, expected[name])


def make_feeds(size=SIZE, zeros=0):
    x = np.arange(1, size + 1, dtype=np.float32)
    x[:zeros] = 0
    return {"x": x, "flag": np.array(True), "count": np.array(1), "w": np.ones(SIZE, np.float32)}


class Memory:
    """Makes arrays, and remembers them."""

    def __init__(self):
        self.arrays = []

    def allocate(self, shape, dtype):
        self.arrays.append(np.empty(shape, dtype))
        return self.arrays[-1]


def test_outputs_are_placed_from_the_second_run_of_a_shape_on(session):
    memory = Memory()
    segment = make_segment(session, memory.allocate, ["same", "elsewhere"])
    run(segment, make_feeds())
    assert not memory.arrays
    for _ in range(2):
        outputs = run(segment, make_feeds())
        assert outputs["same"] is memory.arrays[-1]
    assert len(memory.arrays) == 2  # for the one output that was named
    run(segment, make_feeds(2 * SIZE))
    assert len(memory.arrays) == 2
    assert run(segment, make_feeds(2 * SIZE))["same"] is memory.arrays[2]


def test_outputs_are_not_placed_any_more_once_their_shapes_were_not_those_expected(session):
    memory = Memory()
    segment = make_segment(session, memory.allocate, ["same", "places"])
    for zeros in (0, 0, 5, 5, 5):
        assert run(segment, make_feeds(zeros=zeros))["places"].shape == (1, SIZE - zeros)
    assert len(memory.arrays) == 4  # in the second and the third run


def test_inputs_that_are_outputs_are_returned():
    text = '<ir_version: 8, opset_import: ["": 17]> passed (float[4] x) => (float[4] y, float[4] x) { y = Neg(x) }'
    segment = make_segment(
        open_session(parser.parse_model(text).SerializeToString(), make_session_options((0,))), np.empty
    )
    x = np.arange(4, dtype=np.float32)
    for _ in range(3):
        values = {"x": x.copy()}
        segment.run(values, [], import_onnxruntime().RunOptions())
        np.testing.assert_array_equal(values["x"], x)
        np.testing.assert_array_equal(values["y"], -x)


def test_runs_that_fail_or_are_ended_do_not_keep_outputs_from_being_placed(session):
    memory = Memory()
    segment = make_segment(session, memory.allocate, ["same"])
    run(segment, make_feeds())
    options = import_onnxruntime().RunOptions()
    options.terminate = True
    with pytest.raises(Exception, match="terminate"):
        segment.run(make_feeds(), [], options)
    assert run(segment, make_feeds())["same"] is memory.arrays[-1]


def test_what_a_signal_handler_raises_is_not_taken_for_an_error_of_the_run(session, monkeypatch):
    segment = make_segment(session, Memory().allocate)
    run(segment, make_feeds())

    def fail(*arguments):
        raise TimeoutError

    monkeypatch.setattr(placed_outputs, "run_into", fail)
    with pytest.raises(TimeoutError):
        run(segment, make_feeds())


def test_large_values_that_another_process_reads_are_placed(tmp_path):
    size, memory = MIN_PLACED_BYTES // 4, Memory()
    text = f"""
        <ir_version: 8, opset_import: ["": 17]>
        chain (float[{size}] x) => (float[{size}] y, float s)
        {{ sent = Neg(x) t = ReduceSum<keepdims = 0>(sent) kept = Abs(x) s = Neg(t) y = Sub(sent, kept) }}
    """
    bundle = compile_alternating(parser.parse_model(text), tmp_path, "cpu:0", "cpu:1")
    devices = {item.id: PlacedDevice(item, ()) for item in bundle.target.devices}
    (route,) = routes = open_routes(bundle, devices)
    place_outputs(bundle, routes, memory.allocate)
    x = np.ones(size, np.float32)
    for _ in range(2):
        values = {"x": x}
        for segment in route.segments.values():
            segment.run(values, [], import_onnxruntime().RunOptions())
    assert {id(values["sent"]), id(values["y"])} == {id(item) for item in memory.arrays}
    np.testing.assert_array_equal(values["y"], -2 * x)
