"""Devices that need static shapes have a session for the size of their plan; the host computes other sizes."""

from __future__ import annotations

import json
import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from onnx import TensorProto, helper, parser

import onnxplace
from onnxplace.driver import plan_sets
from onnxplace.driver.compile import compile_model
from onnxplace.errors import ModelError, NoteWarning
from onnxplace.feeds.synthetic import zero_feeds
from onnxplace.measure.size_comparison import compare_at_another_size
from onnxplace.pipeline.registry import create_runtime
from tests.support.commands import only_json
from tests.support.random_models import random_models, reference
from tests.support.random_placements import assert_same, compiled_with, placements
from tests.support.static_device import static_kind

NAMES = ("cpu:0", "static:0", "static:1", "cpu:1", "cpu:2", "cpu:3")


@pytest.fixture
def static():
    with static_kind() as kind:
        yield kind


EXAMPLES = int(os.environ.get("ONNXPLACE_EXAMPLES", "0"))


@settings(max_examples=EXAMPLES or 60, derandomize=not EXAMPLES, suppress_health_check=list(HealthCheck))
@given(random_models(), placements(), st.lists(st.integers(0, 4), max_size=2))
def test_random_models_compute_the_same_at_every_size_by_every_plan(model, placement, more):
    try:
        expected = reference(model.proto, model.feeds)
        reference(model.proto, (), "all")
    except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        assume(False)
    dimensions = {name: [size, *more] for name, size in model.dimensions.items()}
    with static_kind(), tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", NoteWarning)
        bundle = compiled_with(model.proto, placement, Path(folder), dimensions=dimensions, names=NAMES)
        for plan in bundle.plans:
            for feeds, outputs in zip(model.feeds, expected):
                results = run_plan(plan, feeds)
                assert_same([results[item.name] for item in bundle.outputs], outputs)


def run_plan(plan, feeds):
    """Return the outputs of one plan alone, by name."""
    with create_runtime("onnxruntime").open(plan) as session:
        return session.run(feeds).outputs


FILE = "static0-000.static.onnx"
PIPELINE = "optimize,profile{estimate=true},coplace,single,split,emit"


def compile_for(model, folder, shape, devices="static:0", **options):
    return onnxplace.compile(
        model, folder / "bundle", devices=devices, shape=shape, pipeline=PIPELINE, trial=False, **options
    )


def run(session, *shape):
    x = np.random.default_rng(0).standard_normal((*shape, 64)).astype(np.float32)
    return session.run(None, {"x": x})[0], x


def static_shapes(bundle):
    """Return the shapes of each plan's first segment."""
    return [plan.manifest.segments[0].static.shapes for plan in bundle.plans]


def test_the_compiled_size_has_a_session_and_the_host_computes_others_which_is_said_once(static, model_file, tmp_path):
    bundle = compile_for(model_file, tmp_path, {"batch": 4})
    assert static_shapes(bundle) == [{"x": (4, 64)}]
    plain = onnxruntime.InferenceSession(model_file)
    with onnxplace.InferenceSession(bundle) as session, warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        assert static.opened == [FILE]
        for batch, count in ((4, 0), (3, 1), (3, 1), (7, 1), (4, 1)):
            actual, x = run(session, batch)
            assert len(notes) == count
            np.testing.assert_allclose(actual, plain.run(None, {"x": x})[0], rtol=1e-4)
    assert static.opened == [FILE]
    (note,) = notes
    assert str(note.message) == ("static:0: no session of segment static0-000 is for 'x' [3, 64]; the host computes it")


def test_several_sizes_are_plans_of_which_each_runs_on_the_device_at_its_own_size(static, model_file, tmp_path):
    bundle = compile_for(model_file, tmp_path, {"batch": [1, 4]})
    assert static_shapes(bundle) == [{"x": (1, 64)}, {"x": (4, 64)}]
    assert [item.seconds.index(None) for item in bundle.manifest.sizes] == [1, 0], "not known without a trial"
    plain, random = onnxruntime.InferenceSession(model_file), np.random.default_rng(0)
    for plan, own in zip(onnxplace.load(bundle.path).plans, (1, 4)):
        for batch in (1, 4):
            x = random.standard_normal((batch, 64)).astype(np.float32)
            with warnings.catch_warnings(record=True) as notes:
                warnings.simplefilter("always")
                (actual,) = run_plan(plan, {"x": x}).values()
            assert len(notes) == (batch != own)
            np.testing.assert_allclose(actual, plain.run(None, {"x": x})[0], rtol=1e-4)


def test_a_plan_for_another_size_is_not_taken_although_the_host_is_faster(static, model_file, tmp_path, monkeypatch):
    def run_trials(bundles, feeds, **_):
        """Return steps as if the host, which runs sizes other than a plan's own, were faster than the device."""
        own = [bundle.manifest.dimensions["batch"] == len(feeds["x"]) for bundle in bundles]
        return [SimpleNamespace(step_seconds=9.0 if is_own else 1.0) for is_own in own]

    monkeypatch.setattr(plan_sets, "run_trials", run_trials)
    options = {"devices": "static:0", "shape": {"batch": [1, 4]}, "pipeline": PIPELINE, "force": True}
    bundle = onnxplace.compile(model_file, tmp_path / "bundle", **options)
    assert [item.seconds for item in bundle.manifest.sizes] == [(9.0, None), (None, 9.0)]
    bundle = onnxplace.compile(model_file, tmp_path / "bundle", **options, plans=1)
    assert [item.seconds for item in bundle.manifest.sizes] == [(9.0,), (1.0,)]


def test_with_one_plan_the_host_runs_the_other_size_as_the_trial_knows(static, model_file, tmp_path):
    compiled = compile_model(
        model_file, tmp_path / "bundle", devices="static:0", shape={"batch": [1, 4]}, pipeline=PIPELINE, plans=1
    )
    manifest = compiled.bundle.manifest
    assert manifest.plans == ()
    assert [len(item.seconds) for item in manifest.sizes] == [1, 1]
    assert all(item.seconds[0] > 0 for item in manifest.sizes)
    assert "F009" not in {note.code for note in compiled.diagnostics}


@pytest.mark.parametrize(
    ("first", "second", "given"),
    [(None, 3, {"x.0": [2, 5]}), ("n", "n", {"n": [2, 5]}), ("2*n", "n", {"n": [2, 5]})],
)
def test_axes_without_a_name_and_expressions_get_sizes_too(static, tmp_path, first, second, given):
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", [first, 4]), ("w", [second]), ("y", None), ("z", None))
    ]
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Relu", ["w"], ["z"])]
    proto = helper.make_model(helper.make_graph(nodes, "g", values[:2], values[2:]), ir_version=10)
    proto.opset_import[0].version = 17
    bundle = compile_for(proto, tmp_path, given)
    (name,) = given
    for plan, size in zip(bundle.plans, (2, 5), strict=True):
        static.opened.clear()
        feeds = zero_feeds(bundle.inputs, {name: size})
        shapes = [array.shape for array in run_plan(plan, feeds).values()]
        assert shapes == [array.shape for array in feeds.values()]
        assert static.opened == [FILE]


def test_all_combinations_of_sizes_have_a_plan(static, tmp_path):
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[n, m] x) => (float[n, m] y) { y = Relu(x) }'
    bundle = compile_for(parser.parse_model(text), tmp_path, {"n": [1, 2], "m": (3, 4)}, plans=4)
    assert static_shapes(bundle) == [{"x": (n, m)} for n in (1, 2) for m in (3, 4)]
    assert bundle.manifest.dimensions == {"n": 1, "m": 3}


def test_a_segment_whose_sizes_follow_from_values_runs_on_the_host(static, tmp_path):
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[n, 3] x) => (float[m, k] y) {
        a = NonZero(x) b = Cast<to = 1>(a) y = Relu(b) }"""
    proto = parser.parse_model(text)
    for node, name in zip(proto.graph.node, ("find", "cast", "relu")):
        node.name = name
    pipeline = PIPELINE.replace("coplace,single", "coplace{device_map=%s},m-etf" % (tmp_path / "map.json"))
    (tmp_path / "map.json").write_text('{"find": "cpu:0", "cast": "static:0", "relu": "static:0"}')
    bundle = onnxplace.compile(proto, tmp_path / "bundle", devices="cpu:0,static:0", shape={"n": 2}, pipeline=pipeline)
    with (
        onnxplace.InferenceSession(bundle) as session,
        pytest.warns(NoteWarning, match="static0-000 is for these sizes; the host"),
    ):
        (y,) = session.run(None, {"x": np.eye(3, dtype=np.float32)})
    np.testing.assert_array_equal(y, [[0, 1, 2], [0, 1, 2]])


RESHAPED = """<ir_version: 8, opset_import: ["": 17]> g (float[n, m] x, float[a, 2] h) => (float[b, c] y)
    <int64[1] two = {2}> {
    [shape] s = Shape(x) [half] t = Div(s, two) [relu] r = Relu(h) [reshape] y = Reshape(r, t) }"""


def compile_reshaped(tmp_path, shape):
    places = {"shape": "cpu:0", "half": "cpu:0", "relu": "static:0", "reshape": "static:0"}
    (tmp_path / "map.json").write_text(json.dumps(places))
    pipeline = PIPELINE.replace("coplace,single", f"coplace{{device_map={tmp_path / 'map.json'}}},m-etf")
    model, devices = parser.parse_model(RESHAPED), "cpu:0,static:0"
    return onnxplace.compile(model, tmp_path / "bundle", devices=devices, shape=shape, pipeline=pipeline, trial=False)


SIZES = [{"n": 4, "m": 8, "a": 4}, {"n": 8, "m": 4, "a": 4}]


def test_inputs_that_follow_from_the_sizes_are_constants_of_their_session(static, tmp_path):
    bundle = compile_reshaped(tmp_path, SIZES)
    segments = [item for plan in bundle.plans for item in plan.manifest.segments if "t" in item.inputs]
    (other,) = set(segments[0].inputs) - {"t"}
    assert [segment.static.shapes for segment in segments] == [{other: (4, 2)}] * 2
    values = [np.frombuffer(bytes.fromhex(segment.static.values["t"]), np.int64).tolist() for segment in segments]
    assert values == [[2, 4], [4, 2]]
    model = onnx.load(bundle.plans[1].file(segments[1].static.file), load_external_data=False)
    assert [item.name for item in model.graph.input] == [other]


@pytest.mark.parametrize(("n", "m"), [(4, 8), (8, 4), (2, 16), (16, 2)])
def test_the_values_of_such_inputs_choose_the_session(static, tmp_path, n, m):
    bundle = compile_reshaped(tmp_path, SIZES)
    feeds = {"x": np.zeros((n, m), np.float32), "h": np.arange(8, dtype=np.float32).reshape(4, 2)}
    for plan, own in zip(bundle.plans, SIZES, strict=True):
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            y = run_plan(plan, feeds)["y"]
        np.testing.assert_array_equal(y, feeds["h"].reshape(n // 2, m // 2))
        assert len(notes) == ((own["n"], own["m"]) != (n, m))


def test_a_session_that_cannot_be_opened_is_one_on_the_host(static, model_file, tmp_path, monkeypatch):
    bundle = compile_for(model_file, tmp_path, {"batch": 4})
    monkeypatch.setattr(static, "refused", FILE)
    text = (
        "^static:0: segment static0-000 cannot be opened on it: ONNX Runtime refuses the model: cannot finalise the "
        "graph; the host computes it$"
    )
    with pytest.warns(NoteWarning, match=text) as notes, onnxplace.InferenceSession(bundle) as session:
        outputs = [run(session, batch)[0] for batch in (1, 4)]
    assert [output.shape for output in outputs] == [(1, 64), (4, 64)]
    assert len(notes) == 1


def test_commands_print_the_note_and_take_several_sizes(static, run_cli, model_file, tmp_path):
    bundle = tmp_path / "bundle"
    options = ("--devices", "static:0", "--pipeline", PIPELINE, "--no-trial", "-o", bundle)
    assert run_cli("compile", model_file, "--shape", "batch=4", *options).code == 0
    result = run_cli("run", bundle, "--shape", "batch=3", "--json")
    assert only_json(result)["outputs"]["y"]["shape"] == [3, 64]
    assert result.err.splitlines() == [
        "note[F009] static:0: no session of segment static0-000 is for 'x' [3, 64]; the host computes it"
    ]
    assert run_cli("run", bundle, "--shape", "batch=4").err == ""
    assert run_cli("verify", bundle).err.count("note[F009]") == 1
    assert run_cli("compile", model_file, "--shape", "batch=1,4", *options, "--force").code == 0
    assert run_cli("run", bundle / "plan1", "--shape", "batch=4").err == ""


@pytest.mark.parametrize(
    ("command", "shape", "place"),
    [
        ("compile", "batch=1,x", "'x'"),
        ("compile", "4", "'4'"),
        ("compile", "batch=1,,-4", "'-4'"),
        ("run", "batch=1,4", "'4'"),
        ("verify", "batch=1,4", "'4'"),
    ],
)
def test_other_texts_of_sizes_are_refused(run_cli, model_file, bundle_copy, command, shape, place):
    result = run_cli(command, model_file if command == "compile" else bundle_copy, "--shape", shape)
    assert result.code == 2
    assert f"error[M022] --shape: not a dimension: {place}" in result.err


@pytest.mark.parametrize("sizes", [[], [1, "4"], [1, 2.5], {"a": 1}])
def test_sizes_in_python_that_are_no_numbers_are_refused(model_file, tmp_path, sizes):
    with pytest.raises(ModelError, match="expected a whole number from 0"):
        compile_for(model_file, tmp_path, {"batch": sizes}, devices="cpu:0")


def test_the_comparison_of_a_trial_at_another_size_says_nothing(static, model_file, tmp_path):
    bundle = compile_for(model_file, tmp_path, {"batch": 4})
    assert compare_at_another_size(bundle) == ()
