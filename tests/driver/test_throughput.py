"""`--objective throughput`: what is chosen by prediction, by a trial with requests in flight, and what is said."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxplace
from onnxplace.bundle.bundle_routes import list_routes
from onnxplace.bundle.bundle_simulation import predict_interval_seconds
from onnxplace.driver import trials
from onnxplace.driver.compile import compile_model
from onnxplace.errors import ExecutionError, InfeasibleError
from onnxplace.measure import trial as step_trial
from onnxplace.measure.rate_trial import RateTrial
from onnxplace.measure.trial import PlainTimes, count_process_bytes
from onnxplace.passes import profile
from onnxplace.passes.profiling.roofline import PeakRates
from onnxplace.reports.text import compile_summary
from onnxplace.target.target import Device, Target
from tests.driver.test_strategies import make_target
from tests.support.chains import mlp
from tests.support.state_checks import STATES, sums

pytestmark = pytest.mark.usefixtures("no_gpus", "work_here")
TWO = {"devices": "cpu:0,cpu:1", "objective": "throughput", "force": True}


@pytest.fixture
def work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(layers=4, rows=16, width=256, inner=512), tmp_path / "m.onnx")


@pytest.fixture
def short_trials(monkeypatch):
    """Keep trials of steps short, and assume enough cores."""
    monkeypatch.setattr(step_trial, "REPEAT_POLICY", replace(step_trial.REPEAT_POLICY, max_runs=3))
    monkeypatch.setattr(step_trial, "BURST_SECONDS", 0.0)


def use_estimates(monkeypatch):
    """Let costs be the same in each run, whatever else the machine does."""
    monkeypatch.setattr(profile, "find_measurement_obstacle", lambda device: "costs that are the same in each run")
    monkeypatch.setattr(profile, "measure_peaks", lambda core: PeakRates(40e9, 8e9, 5e-6))


@pytest.fixture
def measured(monkeypatch, short_trials):
    """Return a list to be filled with a function from bundles to intervals; it also gets the calls."""
    use_estimates(monkeypatch)
    monkeypatch.setattr("onnxplace.driver.trials._find_unmeasured_costs", lambda state: None)
    calls = []
    rules = {
        "intervals": lambda bundles: [1.0] * len(bundles),
        "waiting": 0.0,
        "plain": 0.0,
        "factor": lambda segment: 1.0,
    }

    def run(bundles, feeds, in_flight, *, cached):
        calls.append([bundle.manifest for bundle in bundles])
        return tuple(
            RateTrial(
                interval_seconds=interval,
                segment_seconds={item.id: item.seconds * rules["factor"](item) for item in bundle.manifest.segments},
                in_flight=in_flight,
                requests=8,
                waiting=rules["waiting"],
            )
            for bundle, interval in zip(bundles, rules["intervals"](bundles))
        )

    def run_steps(bundles, feeds, **options):
        found = step_trial.run_trials(bundles, feeds, **options)
        plain = PlainTimes(1.0, rules["plain"], 1.0, 1.0)
        return tuple(replace(trial, plain=plain if rules["plain"] else None) for trial in found)

    monkeypatch.setattr(trials, "run_rate_trials", run)
    monkeypatch.setattr(trials, "run_trials", run_steps)
    rules["calls"] = calls
    return rules


def notes(compiled, code: str) -> list[str]:
    return [note.message for note in compiled.diagnostics if note.code == code]


def predicted(model: onnx.ModelProto, target: Target, **options):
    return compile_model(model, "out", target=target, objective="throughput", trial=False, force=True, **options)


def test_by_prediction_copies_are_chosen_where_the_model_fits():
    compiled = predicted(mlp(), make_target(4))
    manifest = compiled.bundle.manifest
    assert len(list_routes(manifest)) == 4
    assert manifest.trial is None
    (text,) = notes(compiled, "P043")
    assert text.startswith("requests per second by prediction: 4 copies of the model: ")
    assert not notes(compiled, "P044")
    assert not notes(compiled, "P010"), "no device is idle"
    assert manifest.pipeline.endswith("replicate{routes=cpu:1;cpu:2;cpu:3},emit")


def test_requests_of_tiny_models_queue_in_python_so_that_one_device_serves_most():
    compiled = predicted(mlp(layers=1, width=8, rows=1), make_target(2))
    (text,) = notes(compiled, "P043")
    assert text.startswith("requests per second by prediction: one device: ")
    assert "2 copies of the model: 10000" in text
    assert not compiled.bundle.manifest.routes
    assert "requests/s), predicted\n" in compile_summary(compiled.bundle)


def test_by_prediction_a_model_that_is_too_large_gets_stages():
    manifest = predicted(mlp(layers=4), make_target(2, memory=14 << 20)).bundle.manifest
    assert manifest.placer == "stages"
    assert not manifest.routes
    assert all(device.peak_bytes <= 14 << 20 for device in manifest.devices)


def test_a_recorded_pipeline_gives_the_same_bundle():
    first = predicted(mlp(layers=4), make_target(4, memory=14 << 20)).bundle.manifest
    again = compile_model(mlp(layers=4), "again", target=make_target(4, memory=14 << 20), pipeline=first.pipeline)
    assert again.bundle.manifest.programs == first.programs
    assert [route.devices for route in again.bundle.manifest.routes] == [route.devices for route in first.routes]


def test_unlike_devices_share_by_what_they_can_do(monkeypatch):
    use_estimates(monkeypatch)
    speeds = {"operations_per_second": 1e10, "memory_bytes_per_second": 1e10}
    slow = Device("cpu:1", 1 << 30, cores=1, **speeds)
    fast = Device("cpu:0", 1 << 30, cores=4, **{name: 2.5 * speed for name, speed in speeds.items()})
    manifest = predicted(mlp(), Target((fast, slow))).bundle.manifest
    shares = {min(route.devices.values()): route.share for route in list_routes(manifest)}
    assert shares["cpu:0"] == pytest.approx(2.5 * shares["cpu:1"], rel=0.1)


def test_a_model_that_fits_nowhere_is_refused():
    with pytest.raises(InfeasibleError) as raised:
        predicted(mlp(layers=4), make_target(2, memory=(8 << 20) + 4096), shard="off")
    assert raised.value.code == "P002"
    assert not Path("out").exists()


def test_one_device_needs_no_strategy():
    compiled = predicted(mlp(), make_target(1))
    assert not notes(compiled, "P043")


def test_a_placement_that_the_user_gave_is_kept():
    compiled = predicted(mlp(), make_target(2), device_map={"layer0.*": "cpu:0", ".*": "cpu:1"})
    assert not notes(compiled, "P043")
    assert not compiled.bundle.manifest.routes


def test_the_measured_best_is_kept_with_its_interval(measured):
    measured["intervals"] = lambda bundles: [0.01 if bundle.manifest.routes else 0.02 for bundle in bundles]
    compiled = compile_model("m.onnx", "out", **TWO)
    manifest = compiled.bundle.manifest
    assert len(manifest.routes) == 1
    assert manifest.predicted.interval_seconds == manifest.trial.interval_seconds == 0.01
    assert manifest.trial.in_flight == 4
    kinds = [bool(item.routes) for item in measured["calls"][0]]
    assert set(kinds) == {True, False}, "copies and stages are tried"
    (text,) = notes(compiled, "P044")
    assert "measured with 4 in flight" in text
    assert text.endswith("kept 2 copies of the model")
    assert "(100 requests/s), measured in a trial with 4 in flight" in compile_summary(compiled.bundle)
    assert onnxplace.load("out", "all").manifest == manifest


def test_stages_are_kept_where_they_are_measured_to_be_faster(measured):
    measured["intervals"] = lambda bundles: [0.02 if bundle.manifest.routes else 0.01 for bundle in bundles]
    compiled = compile_model("m.onnx", "out", **TWO)
    assert not compiled.bundle.manifest.routes
    assert compiled.bundle.manifest.placer == "stages"
    x = np.ones((16, 256), "f4")
    with onnxplace.InferenceSession("out") as session:
        assert np.isfinite(session.run(None, {"x": x})[0]).all()


def count_nodes(manifest, device: str) -> int:
    return sum(segment.nodes for segment in manifest.segments if segment.device == device)


def test_stages_are_balanced_by_what_their_segments_took(measured):
    # The first device is slower under load than its costs say, so it gets less.
    measured["factor"] = lambda segment: 3.0 if segment.device == "cpu:0" else 1.0
    measured["intervals"] = lambda bundles: [1.0 - 0.1 * index for index in range(len(bundles))]
    compiled = compile_model("m.onnx", "out", devices="cpu:0,cpu:1", placer="stages", force=True)
    (before,), (_, after) = measured["calls"]
    assert count_nodes(after, "cpu:0") < count_nodes(before, "cpu:0")
    assert compiled.bundle.manifest.programs == after.programs
    assert compiled.bundle.manifest.predicted.interval_seconds == 0.9
    assert "kept stages, balanced by the trial" in notes(compiled, "P044")[0]


def test_balanced_stages_that_are_slower_are_not_kept(measured):
    measured["factor"] = lambda segment: 3.0 if segment.device == "cpu:0" else 1.0
    measured["intervals"] = lambda bundles: [1.0 + 0.1 * index for index in range(len(bundles))]
    compiled = compile_model("m.onnx", "out", devices="cpu:0,cpu:1", placer="stages", force=True)
    assert len(measured["calls"]) == 2
    assert compiled.bundle.manifest.programs == measured["calls"][0][0].programs


def test_stages_are_not_balanced_where_even_work_is_no_faster_than_the_best(measured):
    measured["factor"] = lambda segment: 3.0 if segment.device == "cpu:0" else 1.0
    measured["intervals"] = lambda bundles: [1e-9] * len(bundles)
    compiled = compile_model("m.onnx", "out", devices="cpu:0,cpu:1", placer="stages", force=True)
    assert len(measured["calls"]) == 1
    assert "balanced" not in notes(compiled, "P044")[0]


def test_stages_that_need_not_be_contiguous_are_not_tried_where_they_are(measured):
    compiled = compile_model("m.onnx", "out", **TWO)
    assert "stages, not contiguous" in notes(compiled, "P043")[0]
    placers = [manifest.placer for manifest in measured["calls"][0]]
    assert placers == ["single", "stages"]


def test_a_request_that_comes_back_to_a_device_overlaps_no_other_one(run_cli, monkeypatch):
    use_estimates(monkeypatch)
    names = [node.name for node in onnx.load("m.onnx").graph.node]
    thirds = {name: f"cpu:{1 if len(names) // 3 <= i < 2 * len(names) // 3 else 0}" for i, name in enumerate(names)}
    Path("map.json").write_text(json.dumps(thirds))
    arguments = ("--devices", "cpu:0,cpu:1", "--device-map", "map.json", "--no-trial", "--json")
    result = run_cli("compile", "m.onnx", "-o", "out", *arguments)
    assert result.code == 0, result.err
    manifest = onnxplace.Bundle.open("out").manifest
    assert manifest.segments[0].device == manifest.segments[-1].device == "cpu:0"
    busy = max(device.compute_seconds for device in manifest.devices)
    part_seconds = manifest.predicted.step_seconds - manifest.predicted.request_seconds
    assert manifest.predicted.interval_seconds == pytest.approx(part_seconds, rel=0.01)
    assert manifest.predicted.interval_seconds > 1.2 * busy
    assert predict_interval_seconds(manifest) == pytest.approx(manifest.predicted.interval_seconds)


def test_a_disturbed_trial_leaves_the_choice_to_the_prediction(measured):
    measured["waiting"] = 0.5
    measured["intervals"] = lambda bundles: [1.0 - 0.1 * index for index in range(len(bundles))]
    compiled = compile_model("m.onnx", "out", **TWO)
    assert compiled.bundle.manifest.programs == measured["calls"][0][0].programs
    manifest = compiled.bundle.manifest
    assert manifest.predicted.interval_seconds == manifest.trial.interval_seconds == 1.0
    assert "(1 requests/s), measured in a disturbed trial with 4 in flight" in compile_summary(compiled.bundle)
    (text,) = (text for text in notes(compiled, "C004") if "by prediction" in text)
    assert "had 1 requests/s, but workers waited 50% of their time" in text


def test_a_plain_session_that_is_faster_is_named_by_the_command(measured, run_cli):
    measured["plain"] = 0.5
    result = run_cli("compile", "m.onnx", "-o", "out", "--devices", "cpu:0,cpu:1", "--objective", "throughput", "-v")
    message = "one onnxruntime session with all cores is faster: 2 requests/s, this bundle 1"
    assert f"\n{message}\n" in result.out
    assert f"note[P048] throughput: {message}\n  hint: run the model itself with onnxruntime" in result.err
    arguments = ("--force", "-o", "out", "--devices", "cpu:0,cpu:1", "--objective", "throughput", "--json")
    printed = json.loads(run_cli("compile", "m.onnx", *arguments).out)["diagnostics"]
    assert message in [note["message"] for note in printed]


@pytest.mark.parametrize("plain", [0.0, 0.95, 2.0], ids=["not measured", "as fast", "slower"])
def test_a_plain_session_that_is_not_clearly_faster_is_not_named(measured, plain):
    measured["plain"] = plain
    compiled = compile_model("m.onnx", "out", **TWO)
    assert not notes(compiled, "P048")
    assert "onnxruntime session" not in compile_summary(compiled.bundle)


def test_a_plain_session_is_no_choice_where_no_device_holds_the_model(measured):
    measured["plain"] = 0.5
    compiled = compile_model("m.onnx", "out", max_memory="cpu:0=3MiB,cpu:1=3MiB", **TWO)
    assert not compiled.bundle.manifest.predicted.single_device_fits
    assert not notes(compiled, "P048")


@pytest.mark.parametrize(("plain", "is_named"), [(1e-9, True), (0.5, False)])
def test_after_a_disturbed_trial_a_plain_session_has_to_be_faster_than_predicted_too(measured, plain, is_named):
    measured["waiting"], measured["plain"] = 0.5, plain
    assert bool(notes(compile_model("m.onnx", "out", **TWO), "P048")) == is_named


def test_copies_for_which_the_machine_has_no_memory_are_not_kept(measured, monkeypatch):
    copies = compile_model("m.onnx", "copies", max_memory="1GiB", **TWO).bundle.manifest
    stages = compile_model("m.onnx", "stages", devices="cpu:0,cpu:1", placer="stages").bundle.manifest
    assert copies.routes
    assert count_process_bytes(stages) < count_process_bytes(copies)
    monkeypatch.setattr(step_trial, "available_memory_bytes", lambda: count_process_bytes(copies) - 1)
    compiled = compile_model("m.onnx", "out", max_memory="1GiB", **TWO)
    assert not compiled.bundle.manifest.routes
    assert count_process_bytes(compiled.bundle.manifest) < count_process_bytes(copies)


def test_strategies_that_do_not_fit_at_one_time_are_chosen_by_prediction_and_that_is_said(measured, monkeypatch):
    copies = compile_model("m.onnx", "copies", **TWO).bundle.manifest
    calls = len(measured["calls"])
    monkeypatch.setattr(step_trial, "available_memory_bytes", lambda: count_process_bytes(copies) + 1)
    compiled = compile_model("m.onnx", "out", **TWO)
    assert len(measured["calls"]) == calls
    assert compiled.bundle.manifest.routes
    (text,) = notes(compiled, "C020")
    assert text.startswith("no trial was run: 2 bundles need ")
    assert text.endswith("; kept 2 copies of the model by prediction")


def test_a_bundle_that_fails_in_the_trial_is_reported(monkeypatch, short_trials):
    def fail(*_, **__):
        raise ExecutionError("X001", "broken", where="cpu:1")

    monkeypatch.setattr(trials, "run_rate_trials", fail)
    compiled = compile_model("m.onnx", "out", **TWO)
    assert compiled.bundle.manifest.trial.interval_seconds == 0
    assert not notes(compiled, "P044")


def test_no_folder_is_left_behind(measured):
    compile_model("m.onnx", "out", **TWO)
    assert sorted(path.name for path in Path().iterdir()) == ["m.onnx", "out"]


def test_requests_with_states_get_stages_and_a_note(short_trials):
    onnx.save(sums(), "states.onnx")
    compiled = compile_model("states.onnx", "out", state=STATES, shape={"n": 2, "m": 2}, trial=False, **TWO)
    assert not compiled.bundle.manifest.routes
    assert "several conversations" in notes(compiled, "P045")[0]


@pytest.mark.slow
def test_a_compiled_bundle_is_right_with_real_trials(run_cli, short_trials):
    result = run_cli("compile", "m.onnx", "-o", "out", "--devices", "cpu:0,cpu:1", "--objective", "throughput")
    assert result.code == 0, result.err
    assert "P043" in result.err
    assert "requests/s)" in result.out
    assert run_cli("verify", "out").code == 0


@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0,cpu:1"])
def test_a_model_without_nodes_has_nothing_to_copy(devices):
    proto = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[N] x) { }')
    bundle = onnxplace.compile(proto, "empty", devices=devices, shape={"N": 2}, objective="throughput", trial=False)
    assert not bundle.manifest.segments
    with onnxplace.InferenceSession(bundle) as session:
        x = np.arange(3, dtype=np.float32)
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], x)
