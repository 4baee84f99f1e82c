"""`onnxplace run`: its outputs, its times and its timeline."""

import json
from pathlib import Path

import numpy as np
import pytest

import onnxplace
from tests.support.commands import compiled_from, only_json, run_unsplit
from tests.support.trace_checks import check_format, check_requests

pytestmark = pytest.mark.usefixtures("no_gpus", "work_in_temporary_folder")


def test_run_writes_what_the_model_computes(run_cli, compiled):
    feeds = {"x": np.random.default_rng(7).standard_normal((5, 64)).astype("f4")}
    np.savez("feeds.npz", **feeds)
    result = run_cli("run", compiled, "--inputs", "feeds.npz", "--outputs", "out.npz")
    assert result.code == 0
    assert "y  float32 [5, 64]" in result.out
    with np.load("out.npz") as outputs:
        assert outputs.files == ["y"]
        np.testing.assert_allclose(outputs["y"], run_unsplit(feeds), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
def test_outputs_are_written_even_if_the_trace_cannot_be(run_cli, compiled):
    Path("trace.json").symlink_to("/dev/full")
    result = run_cli("run", compiled, "--outputs", "out.npz", "--trace", "trace.json")
    assert result.code == 2
    assert "No space left on device" in result.err
    with np.load("out.npz") as outputs:
        assert outputs["y"].shape == (4, 64)


def test_run_without_inputs_draws_the_same_ones_for_the_same_seed(run_cli, compiled):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run_cli("run", compiled, "--seed", seed, "--outputs", f"{name}.npz").code == 0
    a, b, c = (np.load(f"{name}.npz") for name in "abc")
    with a, b, c:
        assert np.array_equal(a["y"], b["y"])
        assert not np.array_equal(a["y"], c["y"])


def test_run_accepts_sizes_other_than_the_compiled_ones(run_cli, compiled):
    assert "y  float32 [9, 64]" in run_cli("run", compiled, "--shape", "batch=9").out


def test_run_json_holds_the_time_and_the_outputs(run_cli, compiled):
    result = run_cli("run", compiled, "--repeat", "3", "--json")
    data = only_json(result)
    assert (result.code, data["runs"], data["runtime"]) == (0, 3, "onnxruntime")
    assert data["seconds"] > 0
    assert data["outputs"] == {"y": {"dtype": "float32", "shape": [4, 64]}}


@pytest.mark.parametrize("runtime", ["onnxruntime", "simulated"])
def test_a_trace_has_a_row_for_each_device_and_an_event_for_each_segment(run_cli, compiled, runtime):
    assert run_cli("run", compiled, "--runtime", runtime, "--trace", "trace.json").code == 0
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert {"cpu:0 compute", "cpu:1 compute", "requests"} <= rows
    result = {event["name"] for event in events if event["ph"] == "X" and event["cat"] == "run"}
    assert result == {segment.id for segment in onnxplace.load(compiled).manifest.segments}
    trace = json.loads(Path("trace.json").read_text())
    check_format(trace)
    check_requests(trace, onnxplace.load(compiled).manifest, [1])


def test_a_trace_after_repeated_runs_has_the_last_one_only(run_cli, compiled):
    assert run_cli("run", compiled, "--repeat", "3", "--trace", "trace.json").code == 0
    trace = json.loads(Path("trace.json").read_text())
    check_requests(trace, onnxplace.load(compiled).manifest, [3])
    assert trace["otherData"]["requests"] == 1


def test_simulated_runs_take_the_predicted_time(run_cli, compiled):
    result = run_cli("run", compiled, "--runtime", "simulated", "--json")
    assert result.code == 0
    predicted = onnxplace.load(compiled).manifest.predicted.step_seconds
    assert only_json(result)["seconds"] == pytest.approx(predicted)
    assert "predicted" in run_cli("run", compiled, "--runtime", "simulated").out


def test_repeated_simulated_runs_take_the_same_time(run_cli, compiled):
    result = run_cli("run", compiled, "--runtime", "simulated", "--repeat", "3", "--json")
    assert only_json(result)["seconds"] == pytest.approx(onnxplace.load(compiled).manifest.predicted.step_seconds)


def test_outputs_of_a_simulated_run_are_refused(run_cli, compiled):
    assert run_cli("run", compiled, "--runtime", "simulated", "--outputs", "out.npz").code == 2
    assert not Path("out.npz").exists()


def test_a_model_that_only_hands_its_input_back_runs(run_cli):
    assert run_cli("verify", compiled_from(run_cli, "(float[2] x) => (float[2] x) { }")).code == 0


def test_outputs_may_have_any_name(run_cli):
    bundle = compiled_from(run_cli, "(float[2] x) => (float[2] file) { file = Relu(x) }")
    assert run_cli("run", bundle, "--outputs", "out.npz").code == 0
    with np.load("out.npz") as outputs:
        assert outputs.files == ["file"]


@pytest.mark.parametrize("command", ["run", "verify"])
def test_sequences_come_out_as_lists(run_cli, command):
    bundle = compiled_from(run_cli, "(float[2] x, float[3] z) => (seq(float) y) { y = SequenceConstruct(x, z) }")
    result = run_cli(command, bundle, "--json")
    assert (result.code, only_json(result).get("equal", True)) == (0, True)


def test_strings_go_in_and_come_out(run_cli):
    bundle = compiled_from(run_cli, "(string[2] x) => (string[2] y) { y = Identity(x) }")
    assert run_cli("verify", bundle).code == 0
