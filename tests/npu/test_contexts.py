"""Segments on an NPU: compiled models, a plan for each compiled size, the host for others."""

import shutil
import warnings

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from onnx import numpy_helper, parser

import onnxplace
from onnxplace.errors import NoteWarning
from onnxplace.machine.isolated_sessions import list_taken_nodes, open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.pipeline.registry import create_runtime
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.kind_table import find_kind
from tests.support.random_models import run_plain

PIPELINE = "optimize,profile{estimate=true},coplace{device_map=%s},m-etf,split,emit"
ON_NPU = ("first", "relu", "second", "sum", "soft")
MODEL = """<ir_version: 8, opset_import: ["": 17]> g (float[batch, 16] x) => (float[batch, 16] y) {
    [first] a = MatMul(x, w0) [relu] b = Relu(a) [erf] c = Erf(b) [second] d = MatMul(c, w1) [sum] e = Add(d, b)
    [soft] y = Softmax(e) }"""
SIZES = (1, 3)


@pytest.fixture(scope="module")
def model():
    proto = parser.parse_model(MODEL)
    random = np.random.default_rng(0)
    for name in ("w0", "w1"):
        array = random.standard_normal((16, 16)).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return proto


@pytest.fixture(scope="module")
def bundle(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("npu")
    places = {node.name: "qnn/npu:0" if node.name in ON_NPU else "cpu:0" for node in model.graph.node}
    (folder / "map.json").write_text(str(places).replace("'", '"'))
    return onnxplace.compile(
        model,
        folder / "bundle",
        devices="cpu:0,qnn/npu:0",
        shape={"batch": SIZES},
        pipeline=PIPELINE % (folder / "map.json"),
        trial=False,  # the simulator is slower than the host
    )


def on_npu(plan):
    return [segment for segment in plan.manifest.segments if segment.device == "qnn/npu:0"]


def run_plan(plan, feeds):
    with create_runtime("onnxruntime").open(plan) as session:
        (output,) = session.run(feeds).outputs.values()
    return output


def test_compiled_models_hold_all_nodes_and_open_in_less_time(bundle):
    assert len(bundle.plans) == len(SIZES)
    for owner, segment in [(plan, segment) for plan in bundle.plans for segment in on_npu(plan)]:
        (item,) = segment.compiled
        assert item.made_for.startswith("qnn 2.")
        options = make_session_options((), entries={"session.record_ep_graph_assignment_info": "1"})
        session = open_session(owner.file(item.files[0]), options, DeviceAddress("qnn/npu", 0))
        assert list_taken_nodes(session, DeviceAddress("qnn/npu", 0))
        assert not [group for group in session.get_provider_graph_assignment_info() if "CPU" in group.ep_name]


def test_a_target_of_reshape_from_another_segment_is_a_constant_so_that_the_reshape_is_taken(tmp_path):
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[n, 16] x) => (float[a, b] y)
        <int64[1] two = {2}, int64[1] half = {-1}> {
        [shape] s = Shape<end = 1>(x) [double] t = Mul(s, two) [join] u = Concat<axis = 0>(t, half)
        [relu] r = Relu(x) [reshape] y = Reshape(r, u) }"""
    places = {"shape|double|join": "cpu:0", "relu|reshape": "qnn/npu:0"}
    (tmp_path / "map.json").write_text(str(places).replace("'", '"'))
    bundle = onnxplace.compile(
        parser.parse_model(text),
        tmp_path / "bundle",
        devices="cpu:0,qnn/npu:0",
        shape={"n": [2, 4]},
        pipeline=PIPELINE % (tmp_path / "map.json"),
        trial=False,
    )
    for plan, size in zip(bundle.plans, (2, 4), strict=True):
        (segment,) = [item for item in on_npu(plan) if "u" in item.inputs]
        options = make_session_options((), entries={"session.record_ep_graph_assignment_info": "1"})
        session = open_session(plan.file(segment.static.file), options, DeviceAddress("qnn/npu", 0))
        assert "reshape" in list_taken_nodes(session, DeviceAddress("qnn/npu", 0))
        x = np.arange(16 * size, dtype=np.float32).reshape(size, 16)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            np.testing.assert_array_equal(run_plan(plan, {"x": x}), x.reshape(2 * size, 8))


@settings(max_examples=50, deadline=None)
@given(batch=st.integers(0, 5), seed=st.integers(0, 99))
def test_answers_are_those_of_the_model_at_every_size_by_every_plan(model, bundle, batch, seed):
    feeds = {"x": np.random.default_rng(seed).standard_normal((batch, 16)).astype(np.float32)}
    (expected,) = run_plain(model.SerializeToString(), [feeds])
    for plan, size in zip(bundle.plans, SIZES):
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            np.testing.assert_allclose(run_plan(plan, feeds), expected[0], rtol=1e-4, atol=1e-6)
        assert [str(note.message).partition(":")[0] for note in notes] == ["qnn/npu"] * (batch != size), notes


def test_a_session_of_other_precision_compiles_anew(bundle):
    kind = find_kind("qnn/npu")
    exact, half = (
        kind.describe_compiler(DeviceAddress("qnn/npu", 0, options=options))
        for options in ({}, {"precision": "float16"})
    )
    assert exact == on_npu(bundle)[0].compiled[0].made_for
    assert "precision=float16" in half
    assert exact != half


def test_a_bundle_without_compiled_models_computes_the_same(model, bundle, tmp_path):
    copy = onnxplace.load(shutil.copytree(bundle.path, tmp_path / "copy"))
    for name in copy.compiled_files:
        copy.file(name).unlink()
    for plan, rest, size in zip(bundle.plans, onnxplace.load(copy.path).plans, SIZES):
        feeds = {"x": np.ones((size, 16), np.float32)}
        with pytest.warns(NoteWarning, match="this file of the bundle is missing; compiling anew took"):
            actual = run_plan(rest, feeds)
        np.testing.assert_array_equal(actual, run_plan(plan, feeds))
