"""Trials: a compiled bundle is run once, and its prediction uses the measured times of its segments."""

import json
import re
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from onnx import numpy_helper

import onnxplace
from onnxplace.bundle.bundle import describe_step
from onnxplace.bundle.bundle_routes import list_routes
from onnxplace.bundle.bundle_simulation import predict_serial_seconds, simulate_manifest
from onnxplace.bundle.manifest import Manifest
from onnxplace.driver import trials as driver_trials
from onnxplace.driver.compile import compile_model
from onnxplace.errors import Diagnostic, ExecutionError
from onnxplace.facts import REFUSED_SECONDS, Placement
from onnxplace.machine import measurement_cache, repeated_runs
from onnxplace.machine.hardware import available_cores, local_target
from onnxplace.measure import trial
from onnxplace.model.model import Model
from onnxplace.passes import emit
from onnxplace.problem import bound_speedup
from onnxplace.runtime.interface import Event, Result, RuntimeSession
from onnxplace.runtimes.execution.segments import OpenSegment
from onnxplace.runtimes.onnxruntime import OnnxRuntime
from onnxplace.simulation.steady_state import HANDOVER_SECONDS, QUEUED_REQUEST_SECONDS
from onnxplace.target.target import Device, Target
from tests.support.simulated_machine import NOISES, Noise, SimulatedMachine, run_simulated_trials
from tests.support.state_checks import STATES, sums

POLICY = trial.REPEAT_POLICY
TWO = {"devices": "cpu:0,cpu:1", "shape": {"batch": 4}, "device_map": {"left|relu|sum": "cpu:0", ".*": "cpu:1"}}


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    """Keep trials short."""
    monkeypatch.setattr(trial, "REPEAT_POLICY", replace(trial.REPEAT_POLICY, max_runs=3))
    monkeypatch.setattr(trial, "BURST_SECONDS", 0.0)


@pytest.fixture
def open_calls(monkeypatch) -> list[object]:
    """Return the list of bundles that are opened for trials from now on; comparisons open them in other processes."""
    monkeypatch.setattr(trial, "compare_at_another_size", lambda bundle: ())
    opened_bundles: list[object] = []
    actual = OnnxRuntime.open
    monkeypatch.setattr(
        OnnxRuntime,
        "open",
        lambda self, bundle, **options: opened_bundles.append(bundle) or actual(self, bundle, **options),
    )
    return opened_bundles


def compile_bundle(model_file, path, **options):
    return onnxplace.compile(model_file, path, **{**TWO, "force": True, **options})


def test_predictions_use_measured_times_of_segments(model_file, tmp_path):
    manifest = compile_bundle(model_file, tmp_path / "b").manifest
    predicted, tried = manifest.predicted, manifest.trial
    assert tried is not None
    assert 1 <= tried.requests <= 3
    assert tried.step_seconds > 0
    assert tried.planned_seconds > 0
    assert {segment.device for segment in manifest.segments} == {"cpu:0", "cpu:1"}
    assert all(segment.seconds > 0 for segment in manifest.segments)
    simulation = simulate_manifest(manifest)
    assert predicted.step_seconds == pytest.approx(simulation.makespan_seconds + predicted.request_seconds)
    for device in manifest.devices:
        busy_seconds = sum(segment.seconds for segment in manifest.segments if segment.device == device.id)
        assert device.compute_seconds == pytest.approx(busy_seconds)


def apply_times(bundle, *, segment: float, request: float):
    """Return the manifest after a trial in which each segment took so long, and the rest of a request, too."""
    times = {item.id: segment for item in bundle.manifest.segments}
    return trial.apply_trial(bundle.manifest, trial.Trial(segment + request, request, times, requests=9, waiting=0.0))


def test_the_interval_of_copies_contains_the_part_of_a_request_that_is_in_python(model_file, tmp_path):
    pipeline = "optimize,profile{estimate=true},single,split,replicate{routes=cpu:1},emit"
    bundle = compile_bundle(model_file, tmp_path / "b", device_map=None, pipeline=pipeline, trial=False)
    assert len(list_routes(bundle.manifest)) == 2
    assert apply_times(bundle, segment=2e-6, request=25e-6).predicted.interval_seconds == 2 * HANDOVER_SECONDS
    assert apply_times(bundle, segment=2e-2, request=25e-6).predicted.interval_seconds == pytest.approx(1e-2)


def test_a_request_that_queues_on_one_device_takes_longer_than_one_that_its_caller_runs(model_file, tmp_path):
    bundle = compile_bundle(model_file, tmp_path / "b", device_map={".*": "cpu:0"}, trial=False)
    assert apply_times(bundle, segment=2e-6, request=10e-6).predicted.interval_seconds == QUEUED_REQUEST_SECONDS
    assert apply_times(bundle, segment=2e-6, request=50e-6).predicted.interval_seconds == 50e-6


def test_a_later_trial_replaces_an_earlier_one_on_all_routes(model_file, tmp_path):
    pipeline = "optimize,profile{estimate=true},single,split,replicate{routes=cpu:1},emit"
    bundle = compile_bundle(model_file, tmp_path / "b", device_map=None, pipeline=pipeline, trial=False)
    earlier = replace(bundle, manifest=apply_times(bundle, segment=2e-2, request=25e-6))
    again = apply_times(earlier, segment=2e-3, request=30e-6)
    assert again == apply_times(bundle, segment=2e-3, request=30e-6)
    assert [*again.routes[0].seconds.values()] == pytest.approx([2e-3])


@pytest.mark.parametrize(
    ("device_map", "kind", "expected"),
    [
        ({".*": "cpu:0"}, "cpu", 80e-6),
        ({".*": "cpu:0"}, "cuda", QUEUED_REQUEST_SECONDS),
        (None, "cpu", 5 * HANDOVER_SECONDS),
    ],
    ids=["one CPU device", "a GPU", "two devices with three segments"],
)
def test_waiting_for_gpus_overlaps_with_other_requests_and_handovers_of_the_interpreter_do_not(
    model_file, tmp_path, device_map, kind, expected
):
    options = {} if device_map is None else {"device_map": device_map}
    manifest = compile_bundle(model_file, tmp_path / "b", trial=False, **options).manifest
    text = manifest.model_dump_json().replace('"cpu:0"', f'"{kind}:0"')
    manifest = Manifest.model_validate_json(text)
    predicted = manifest.predicted.model_copy(update={"request_seconds": 80e-6})
    assert predict_serial_seconds(manifest.model_copy(update={"predicted": predicted})) == expected


def test_the_returned_manifest_is_the_one_on_disk(model_file, tmp_path):
    bundle = compile_bundle(model_file, tmp_path / "b")
    assert onnxplace.load(bundle.path, "all").manifest == bundle.manifest


def test_the_planned_time_is_the_prediction_without_a_trial(model_file, tmp_path):
    tried = compile_bundle(model_file, tmp_path / "a").manifest
    planned = compile_bundle(model_file, tmp_path / "b", trial=False).manifest
    assert planned.trial is None
    assert tried.trial.planned_seconds == pytest.approx(planned.predicted.step_seconds)
    assert planned.predicted.request_seconds > 0


def test_a_trial_is_cached(model_file, tmp_path, open_calls):
    first, second = (compile_bundle(model_file, tmp_path / name).manifest for name in "ab")
    assert len(open_calls) == 1
    assert second.predicted == first.predicted
    compile_bundle(model_file, tmp_path / "c", cache=False)
    assert len(open_calls) == 2


def test_another_placement_has_its_own_trial(model_file, tmp_path, open_calls):
    compile_bundle(model_file, tmp_path / "a")
    compile_bundle(model_file, tmp_path / "b", device_map={".*": "cpu:1"})
    assert len(open_calls) == 2


def test_a_trial_on_a_busy_machine_is_noted_and_not_cached(model_file, tmp_path, monkeypatch, open_calls):
    waited = iter(range(0, 10**15, 10**12))  # a thread waits 1000 s in each burst, more than its whole time
    monkeypatch.setattr(trial, "read_run_delays", lambda pool: {"": next(waited)})
    monkeypatch.setattr(trial, "DOUBTFUL_WAITING_SHARE", 0.05)
    for name in "ab":
        result = compile_model(model_file, tmp_path / name, **TWO)
        messages = [note.message for note in result.diagnostics if note.code == "C004"]
        assert any(item.startswith(f"{trial.DOUBT} waited 90% of their time for a core") for item in messages)
    assert len(open_calls) == 2


@given(st.floats(0.0, 0.9))
def test_waiting_is_subtracted_from_segments_and_from_the_step(share):
    events = (Event("cpu:0", "run", "a", 1.0, 5.0), Event("cpu:1", "run", "b", 5.0, 9.0))
    session = trial._TrialSession(None, None)
    session._steps, session._waiting_shares = [(events, 10.0)] * 3, [share] * 3
    session._reference_seconds = [1e-4] * 3
    result = session.summarise()
    working_share = 1 - share
    assert result.step_seconds == pytest.approx(10 * working_share)
    assert result.segment_seconds == pytest.approx({"a": 4 * working_share, "b": 4 * working_share})
    assert result.request_seconds == pytest.approx(2 * working_share)
    assert result.waiting == pytest.approx(share)


def test_waiting_of_other_processes_makes_a_trial_doubtful_and_is_not_subtracted(monkeypatch):
    class Session(RuntimeSession):
        delays = iter([{"cpu:1 7": 10**12}, {"cpu:1 7": 10**14}])

        def read_remote_delays(self):
            return next(self.delays)

        def submit(self, feeds, states=()):
            future = Future()
            future.set_result(Result({}, (Event("cpu:0", "run", "a", 1.0, 5.0),), 10.0))
            return future

        def close(self, timeout=None):
            pass

    monkeypatch.setattr(trial, "read_run_delays", lambda pool: {})
    monkeypatch.setattr(trial, "DOUBTFUL_WAITING_SHARE", 0.05)
    monkeypatch.setattr(repeated_runs, "time_reference", lambda: 60e-6)
    monkeypatch.setattr(repeated_runs, "_references", [60e-6] * repeated_runs.MIN_REFERENCES)
    session = trial._TrialSession(Session(), SimpleNamespace(prepare=lambda session: {}))
    session.warm_up()
    session.run_burst()
    assert not trial.is_doubtful(session.summarise())
    session.end()
    result = session.summarise()
    assert trial.is_doubtful(result)
    assert (result.waiting, result.step_seconds) == (0.9, 10.0)


DAMAGES = [
    *({"segment_seconds": {}}, {"step_seconds": -1.0}, {"waiting": "?"}),
    *({"requests": -1}, {"requests": "many"}, {"step_seconds": 10**400}),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: next(iter(damage)))
def test_an_invalid_cached_trial_is_measured_again(model_file, tmp_path, open_calls, damage):
    compile_bundle(model_file, tmp_path / "a")
    for path in measurement_cache.folder().glob("*"):
        data = json.loads(path.read_text())
        if "trials" in data:
            path.write_text(json.dumps({**data, "trials": [{**data["trials"][0], **damage}]}))
    compile_bundle(model_file, tmp_path / "b")
    assert len(open_calls) == 2


def test_estimated_costs_are_not_tried_out(model_file, tmp_path, open_calls):
    pipeline = "optimize,profile{estimate=true},coplace,m-topo,split,emit"
    bundle = onnxplace.compile(model_file, tmp_path / "b", devices="cpu:0,cpu:1", shape={"batch": 4}, pipeline=pipeline)
    assert bundle.manifest.trial is None
    assert not open_calls


def test_given_costs_are_used_without_a_trial(model_file, tmp_path, open_calls):
    costs = tmp_path / "costs.json"
    compile_bundle(model_file, tmp_path / "a", save_costs=costs, trial=False)
    result = compile_model(model_file, tmp_path / "b", costs=costs, **TWO)
    assert [note.message for note in result.diagnostics if note.code == "C020"] == [
        "no trial was run: the predictions use the costs you gave"
    ]
    assert result.bundle.manifest.trial is None
    assert not open_calls


def test_a_pipeline_without_cache_repeats_the_trial_with_the_same_inputs(model_file, tmp_path, open_calls, monkeypatch):
    seeds = []
    feeds = Model.feeds
    monkeypatch.setattr(Model, "feeds", lambda self, seed=0: seeds.append(seed) or feeds(self, seed))
    pipeline = "optimize,profile{cache=false,seed=11},coplace,m-topo,split,emit"
    for name in "ab":
        onnxplace.compile(model_file, tmp_path / name, devices="cpu:0,cpu:1", shape={"batch": 4}, pipeline=pipeline)
    assert len(open_calls) == 2
    assert set(seeds) == {11}


def test_after_a_trial_bounds_do_not_contradict_it(model_file, tmp_path):
    manifest = compile_bundle(model_file, tmp_path / "a", device_map={".*": "cpu:0"}).manifest
    # The bound is proven for the costs of nodes, and compared with the step that the same costs plan.
    assert manifest.predicted.lower_bound_seconds <= manifest.trial.planned_seconds
    assert manifest.predicted.single_device_seconds <= manifest.predicted.step_seconds


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_a_trial_moves_no_lower_bound(model_file, tmp_path, factor):
    bundle = compile_bundle(model_file, tmp_path / "b", trial=False)
    before = bundle.manifest
    after = apply_times(bundle, segment=factor * before.predicted.step_seconds, request=1e-6)
    assert after.predicted.lower_bound_seconds == before.predicted.lower_bound_seconds
    assert after.trial.planned_seconds == before.predicted.step_seconds
    assert after.gap == before.gap >= 0


def test_a_speedup_is_of_times_from_one_trial(model_file, tmp_path):
    bundle = compile_bundle(model_file, tmp_path / "b")
    manifest = bundle.manifest
    assert manifest.trial.one_device_seconds > 0
    assert manifest.trial.all_cores_seconds > 0
    assert 0 < manifest.trial.speedup_low <= manifest.trial.speedup_high
    assert manifest.speedup == manifest.trial.one_device_seconds / manifest.trial.step_seconds
    # Without plain sessions, both times follow from the costs of nodes.
    planned = apply_times(compile_bundle(model_file, tmp_path / "b", trial=False), segment=9.0, request=1.0)
    assert planned.speedup == planned.predicted.single_device_seconds / planned.trial.planned_seconds


def test_plain_sessions_take_part_only_where_there_is_memory_for_them(model_file, tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "available_memory_bytes", lambda: trial.count_process_bytes(bundle.manifest))
    bundle = compile_bundle(model_file, tmp_path / "b", trial=False)
    assert trial._list_reference_cores([bundle]) == ()
    monkeypatch.setattr(trial, "available_memory_bytes", lambda: 1 << 40)
    assert [len(cores) for cores in trial._list_reference_cores([bundle])] == [1, len(available_cores())]


def find_untried_note(bundle, **changes):
    target = bundle.manifest.target.model_copy(update=changes)
    return trial.find_trial_obstacle(replace(bundle, manifest=bundle.manifest.model_copy(update={"target": target})))


def test_a_bundle_with_missing_devices_is_not_tried_out(branches_bundle):
    many = tuple(Device(f"cpu:{index}", 1 << 30, cores=64) for index in range(64))
    note = find_untried_note(branches_bundle, devices=many)
    assert note.code == "C020"
    assert "4096 cores" in note.message
    gpu = replace(Target(many[:2]).devices[0], id="cuda:99")
    programs = {**branches_bundle.manifest.programs, "cuda:99": branches_bundle.manifest.programs["cpu:0"]}
    manifest = branches_bundle.manifest.model_copy(update={"programs": programs})
    note = find_untried_note(replace(branches_bundle, manifest=manifest), devices=(*many[:1], gpu))
    assert note.where == "cuda:99"


def test_below_a_quota_devices_that_compete_are_tried(branches_bundle, monkeypatch):
    many = tuple(Device(f"cpu:{index}", 1 << 30, cores=64) for index in range(2))
    assert find_untried_note(branches_bundle, devices=many).code == "C020"
    monkeypatch.setattr(trial, "find_core_limit", lambda: 0.6)
    assert find_untried_note(branches_bundle, devices=many) is None


def test_a_bundle_that_does_not_fit_into_memory_is_not_tried_out(model_file, tmp_path, monkeypatch, open_calls):
    monkeypatch.setattr(trial, "available_memory_bytes", lambda: 1000)
    result = compile_model(model_file, tmp_path / "b", **TWO)
    (note,) = [note for note in result.diagnostics if note.code == "C020"]
    assert "1000 are free" in note.message
    assert result.bundle.manifest.trial is None
    assert [item.code for item in onnxplace.load(tmp_path / "b").manifest.diagnostics] == [
        item.code for item in result.diagnostics
    ]
    assert not open_calls


@pytest.fixture
def branches_bundle(compiled):
    return onnxplace.load(compiled)


def test_running_on_fewer_cores_than_compiled_for_is_noted(bundle_copy, run_cli):
    manifest = bundle_copy / "manifest.json"
    data = json.loads(manifest.read_text())
    for device, cores in zip(data["target"]["devices"], (4096, 1)):
        device["cores"] = cores
    manifest.write_text(json.dumps(data))
    for command in (["run", bundle_copy], ["bench", bundle_copy, "--repeat", "1", "--no-memory"]):
        assert "note[F008] branches: its CPU devices have 4097 cores, this machine " in run_cli(*command).err
    assert "F008" not in run_cli("run", bundle_copy, "--runtime", "simulated").err


def test_a_failed_trial_leaves_the_bundle_with_a_note(model_file, tmp_path, run_cli, monkeypatch):
    def fail(*_, **__):
        raise ExecutionError("X001", "segment cpu0-000 failed: out of order", where="cpu:0")

    monkeypatch.setattr("onnxplace.driver.trials.run_trials", fail)
    result = run_cli(
        "compile", model_file, "-o", tmp_path / "b", "--devices", "cpu:0,cpu:1", "--shape", "batch=4", "-v"
    )
    assert result.code == 0
    assert "note[C021] cpu:0: the bundle fails in its trial: segment cpu0-000 failed: out of order" in result.err
    assert "onnxplace verify" in result.err
    assert onnxplace.load(tmp_path / "b").manifest.trial is None


def test_an_interrupt_during_the_trial_leaves_nothing(model_file, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("onnxplace.driver.trials.run_trials", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compile_bundle(model_file, tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_the_command_shows_the_trial_and_can_skip_it(model_file, tmp_path, run_cli):
    command = ["compile", model_file, "-o", tmp_path / "b", "--devices", "cpu:0,cpu:1", "--shape", "batch=4", "--force"]
    assert re.search(r"\n[\d.e-]+ ms a step, (?!predicted)", run_cli(*command).out)
    data = json.loads(run_cli(*command, "--json").out)
    assert data["trial"]["step_seconds"] > 0
    assert data["passes"][-1]["name"] == "trial"
    assert " a step, predicted, " in run_cli(*command, "--no-trial").out
    assert json.loads(run_cli(*command, "--no-trial", "--json").out)["trial"] is None


def test_a_segments_time_includes_the_work_before_it():
    events = (
        Event("cpu:0", "run", "a", 1.0, 2.0),
        Event("cpu:1", "wait", "v", 1.0, 3.0),
        Event("cpu:1", "copy", "v", 3.25, 4.0),
        Event("cpu:1", "run", "b", 4.5, 5.0),
        Event("cpu:0", "run", "c", 2.5, 3.0),
    )
    assert trial.measure_segment_seconds(events) == {"a": 1.0, "b": 0.25 + 0.5 + 0.5, "c": 0.5 + 0.5}


# ---------------------------------------------------------------------------------------------- think again


@pytest.fixture
def make_model_for_two(model_file, tmp_path):
    """Compile with `auto` and costs that favour two devices; the test sets the results of the trial."""
    seconds = {device.cost_class: 0.01 for device in local_target(["cpu:0", "cpu:1"]).devices}
    costs = {name: {"seconds": seconds} for name in ("left", "right", "relu", "tanh", "sum")}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"format": "onnxplace-costs", "version": 1, "nodes": costs}))
    options = {
        "devices": "cpu:0,cpu:1",
        "shape": {"batch": 4},
        "costs": file,
        "placer": "auto{seconds=0,proposals=300}",
    }
    return lambda **more: compile_model(model_file, tmp_path / "out" / "b", **options, **more)


def pretend_trials(monkeypatch, seconds_by_devices):
    """Let trials return these times of a step, by the number of devices that a bundle uses."""

    def result(bundles, feeds, **options):
        return tuple(
            trial.Trial(
                seconds_by_devices[len(list_devices(bundle))],
                1e-5,
                {segment.id: 0.001 for segment in bundle.manifest.segments},
                5,
                0.0,
            )
            for bundle in bundles
        )

    monkeypatch.setattr("onnxplace.driver.trials.run_trials", result)
    monkeypatch.setattr("onnxplace.driver.trials._find_unmeasured_costs", lambda state: None)
    monkeypatch.setattr(
        "onnxplace.driver.trials.predict_single_device_seconds", lambda state, must_fit: np.array([0.02, 0.02])
    )


def list_devices(bundle):
    return {segment.device for segment in bundle.manifest.segments}


def test_a_single_device_is_chosen_if_its_trial_is_faster(make_model_for_two, monkeypatch, tmp_path):
    pretend_trials(monkeypatch, {2: 0.03, 1: 0.025})
    result = make_model_for_two()
    (note,) = [note for note in result.diagnostics if note.code == "P042"]
    assert note.message == "in a trial, a step took 30 ms, and on cpu:0 alone 25 ms: kept cpu:0"
    manifest = onnxplace.load(tmp_path / "out" / "b", "all").manifest
    assert manifest == result.bundle.manifest
    assert len(list_devices(result.bundle)) == 1
    assert (manifest.placer, manifest.trial.step_seconds) == ("single", 0.025)
    assert ",single,split,emit" in manifest.pipeline == result.pipeline
    assert [note.where for note in result.diagnostics if note.code == "P010"] == ["cpu:1"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b"]


@pytest.mark.parametrize("alone", [0.0295, 0.03, 0.04])
def test_two_devices_are_chosen_unless_one_is_clearly_faster(make_model_for_two, monkeypatch, tmp_path, alone):
    pretend_trials(monkeypatch, {2: 0.03, 1: alone})
    result = make_model_for_two()
    assert len(list_devices(result.bundle)) == 2
    assert "P042" not in {note.code for note in result.diagnostics}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b"]


@pytest.mark.parametrize(
    ("high", "slower", "alone", "runs", "kept", "took"),
    [
        (0.9, 1.0, 0.026, [2, 1], "cpu:0", "30 ms"),  # shown by nine of ten turns: only the one device runs
        (0.9, 2.0, 0.052, [2, 1], "cpu:0", "60 ms"),  # the machine has become slower meanwhile
        (0.9, 1.0, 0.031, [2, 1], "", ""),  # the bundle is slower than the plain session
        (1.02, 1.0, 0.026, [2, 2, 1], "cpu:0", "30 ms"),  # not sure: both run in turns
    ],
)
def test_a_bundle_that_turns_have_shown_to_be_slower_does_not_run_again(
    make_model_for_two, monkeypatch, high, slower, alone, runs, kept, took
):
    pretend_trials(monkeypatch, {2: 0.03, 1: alone})
    pretend, ran = driver_trials.run_trials, []

    def run(bundles, feeds, **options):
        several = [len(list_devices(bundle)) == 2 for bundle in bundles]
        ran.extend(len(list_devices(bundle)) for bundle in bundles)
        one_device = 0.025 if any(several) else 0.025 * slower
        plain = trial.PlainTimes(one_device, 1.0, 0.8, high)
        return tuple(replace(item, plain=plain) for item in pretend(bundles, feeds, **options))

    monkeypatch.setattr("onnxplace.driver.trials.run_trials", run)
    result = make_model_for_two()
    assert ran == runs
    notes = [note.message for note in result.diagnostics if note.code == "P042"]
    assert notes == (
        [f"in a trial, a step took {took}, and on cpu:0 alone {alone * 1e3:.0f} ms: kept cpu:0"] * bool(kept)
    )
    assert len(list_devices(result.bundle)) == (1 if kept else 2)


def test_two_devices_are_chosen_if_there_is_no_room_for_another_bundle(make_model_for_two, monkeypatch, tmp_path):
    pretend_trials(monkeypatch, {2: 0.03, 1: 0.025})

    write = emit.write_bundle_files

    def full(state, folder, *arguments):
        if len(set(state[Placement].device.tolist())) < 2:
            raise OSError(28, "No space left on device")
        return write(state, folder, *arguments)

    monkeypatch.setattr(emit, "write_bundle_files", full)
    result = make_model_for_two()
    assert len(list_devices(result.bundle)) == 2
    assert onnxplace.load(tmp_path / "out" / "b", "all").manifest == result.bundle.manifest
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b"]


def test_a_required_use_of_all_devices_is_not_reconsidered(make_model_for_two, monkeypatch):
    pretend_trials(monkeypatch, {2: 0.03, 1: 0.001})
    assert len(list_devices(make_model_for_two(strict=True).bundle)) == 2


def test_every_request_of_a_trial_begins_with_the_same_states(tmp_path, monkeypatch):
    model = sums()
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(6, "f4"), "log"))  # so that it need not be fed
    inputs = []
    actual = OpenSegment.run

    def run(self, values, kept_alive, options):
        inputs.append(values["log"].tolist())
        actual(self, values, kept_alive, options)

    monkeypatch.setattr(OpenSegment, "run", run)
    bundle = onnxplace.compile(model, tmp_path / "b", devices="cpu:0", shape={"n": 2, "m": 6}, state=STATES)
    assert bundle.manifest.trial is not None
    assert inputs
    assert all(values == [0] * 6 for values in inputs)


def test_a_trial_that_is_faster_than_costs_allow_is_run_again_and_then_unsure(make_model_for_two, monkeypatch):
    calls = []

    def result(bundles, feeds, **options):
        calls.append(options["cached"])
        times = {segment.id: 1e-3 for segment in bundles[0].manifest.segments}
        return tuple(trial.Trial(2e-3, 1e-5, times, 5, 0.0) for _ in bundles)  # by the costs, it takes 20 ms and more

    monkeypatch.setattr("onnxplace.driver.trials.run_trials", result)
    monkeypatch.setattr("onnxplace.driver.trials._find_unmeasured_costs", lambda state: None)
    compiled = make_model_for_two()
    assert calls == [True, False]
    (note,) = [note for note in compiled.diagnostics if note.code == "C004"]
    assert "the step of 2 ms is below the lower bound of " in note.message
    assert "these costs are wrong" in note.message
    assert describe_step(compiled.bundle.manifest).endswith(", unsure: see note C004, repeat when the machine is idle")


def test_costs_above_what_one_device_takes_in_a_trial_are_unsure_and_forgotten(model_file, tmp_path, monkeypatch):
    module = "onnxplace.driver.trials"
    monkeypatch.setattr(f"{module}.MIN_JUDGED_SECONDS", 0.0)
    monkeypatch.setattr(f"{module}.CREDIBLE_EXCESS", np.inf)
    compile_bundle(model_file, tmp_path / "b")
    files = measurement_cache.contents().files
    monkeypatch.setattr(f"{module}.CREDIBLE_SUM", 0.0)
    manifest = compile_bundle(model_file, tmp_path / "c").manifest
    (note,) = [note for note in manifest.diagnostics if note.code == "C004"]
    assert "one device takes " in note.message
    assert " by the costs of nodes, so these costs are wrong" in note.message
    assert manifest.is_unsure
    assert 1 <= measurement_cache.contents().files < files  # the second trial, and no costs


def test_two_equal_devices_are_at_most_twice_as_fast_as_one():
    seconds = {"a": np.array([1.0, 3.0]), "b": np.array([2.0, np.inf])}
    profile = SimpleNamespace(seconds=seconds, unsharded_seconds={}, needs_host=False)

    def target(*names):
        devices = [SimpleNamespace(cost_class=name, kind="cpu") for name in names]
        return SimpleNamespace(devices=devices, processors=np.eye(len(devices), dtype=bool))

    assert bound_speedup(profile, target("a", "a")) == pytest.approx(2.0)
    assert bound_speedup(profile, target("a")) == pytest.approx(1.0)
    # Of the first node, the three do 2.5 in a second, of the second one, two do 2 / 3.
    assert bound_speedup(profile, target("a", "a", "b")) == pytest.approx(4 / (1 / 2.5 + 1.5))
    assert bound_speedup(profile, target("b")) == np.inf
    profile.seconds["b"][1] = REFUSED_SECONDS  # as profiles say it
    assert bound_speedup(profile, target("a", "a", "b")) == pytest.approx(4 / (1 / 2.5 + 1.5))
    assert bound_speedup(profile, target("b")) == np.inf


def test_a_speedup_has_the_same_figures_in_the_summary_as_in_reports(model_file, tmp_path):
    manifest = compile_bundle(model_file, tmp_path / "b", trial=False).manifest
    single = 123.4 * manifest.predicted.step_seconds
    predicted = manifest.predicted.model_copy(update={"single_device_seconds": single})
    assert "123.40 times as fast as one device" in describe_step(manifest.model_copy(update={"predicted": predicted}))


@pytest.mark.parametrize(
    ("waiting", "uncertainty", "reason"),
    [
        (0.3, 0.1, "other programs used the cores for 30% of the time"),
        (0.02, 0.17, "the speed of the machine drifted by 17%"),
        (0.01, 0.02, "see note C004"),  # the costs are unsure, and the trial is not
    ],
)
def test_the_summary_names_what_made_the_figures_unsure(model_file, tmp_path, waiting, uncertainty, reason):
    manifest = compile_bundle(model_file, tmp_path / "b").manifest
    record = manifest.trial.model_copy(update={"waiting": waiting, "uncertainty": uncertainty})
    note = Diagnostic(code="C004", message="costs are less sure than usual")
    unsure = manifest.model_copy(update={"trial": record, "diagnostics": (note,)})
    assert describe_step(unsure).endswith(f", unsure: {reason}, repeat when the machine is idle")


@pytest.mark.parametrize(("step_seconds", "is_used"), [(2e-3, False), (1.0, True)])
def test_a_disturbed_trial_that_contradicts_the_costs_is_not_used(
    make_model_for_two, monkeypatch, step_seconds, is_used
):
    calls = []

    def result(bundles, feeds, **options):
        calls.append(options["cached"])
        times = {segment.id: 1e-3 for segment in bundles[0].manifest.segments}
        return tuple(trial.Trial(step_seconds, 1e-5, times, 5, 0.9) for _ in bundles)  # by the costs, 20 ms and more

    monkeypatch.setattr("onnxplace.driver.trials.run_trials", result)
    monkeypatch.setattr("onnxplace.driver.trials._find_unmeasured_costs", lambda state: None)
    monkeypatch.setattr(trial, "DOUBTFUL_WAITING_SHARE", 0.05)
    compiled = make_model_for_two()
    manifest = compiled.bundle.manifest
    assert (manifest.trial is not None) is is_used
    assert manifest.step_seconds >= manifest.predicted.lower_bound_seconds
    messages = [note.message for note in compiled.diagnostics if note.code == "C004"]
    assert any("waited 90% of their time for a core" in text for text in messages)
    assert any("so all figures are predictions" in text for text in messages) is not is_used
    assert manifest.is_unsure


# ------------------------------------------------------------------------------ on a simulated machine, without a clock


NOISY = [name for name in NOISES if name != "busy"]  # whose waits are reported in any case


def run_shares(steps, seeds=20, **plain):
    """Return the shares of trials, over noises and seeds, that prefer the slower bundle, and that do so without doubt.

    Also return the mean time of a trial.
    """
    wrong = sure = count = 0
    seconds = 0.0
    for name in NOISY:
        for seed in range(seeds):
            machine = SimulatedMachine(NOISES[name], seed)
            trials = run_simulated_trials(machine, steps, **plain)
            is_wrong = trials[0].step_seconds >= trials[1].step_seconds
            wrong, count, seconds = wrong + is_wrong, count + 1, seconds + machine.now
            sure += is_wrong and not any(item.is_doubtful for item in trials)
    return wrong / count, sure / count, seconds / count


@pytest.mark.parametrize(("step", "limit_seconds"), [(1e-3, 1.0), (10e-3, 1.0), (100e-3, 2.0), (250e-3, 3.5)])
def test_trials_find_the_faster_bundle_in_bounded_time(monkeypatch, step, limit_seconds):
    """The limits are shares and times that the rules before these had, or less (benchmarks/stop_rules.py)."""
    monkeypatch.setattr(trial, "REPEAT_POLICY", POLICY)
    monkeypatch.setattr(trial, "BURST_SECONDS", 0.01)
    monkeypatch.setattr(trial, "DOUBTFUL_WAITING_SHARE", 0.05)
    monkeypatch.setattr(repeated_runs, "MIN_SECONDS", 0.1)
    wrong, sure, seconds = run_shares([step, 1.05 * step])
    assert wrong <= 0.1
    assert sure <= 0.05
    assert seconds <= limit_seconds


def test_a_trial_of_a_long_step_takes_three_runs_after_one_to_warm_up(monkeypatch):
    monkeypatch.setattr(trial, "REPEAT_POLICY", POLICY)
    machine = SimulatedMachine(Noise(jitter=0.0), 0)
    run_simulated_trials(machine, [0.25])
    assert machine.runs == 4


def test_sessions_that_are_open_are_not_opened_or_warmed_up_again(model_file, tmp_path, open_calls, monkeypatch):
    bundle = compile_bundle(model_file, tmp_path / "b", trial=False)
    feeds, references = {"x": np.zeros((4, 64), np.float32)}, []
    actual = trial.open_reference
    monkeypatch.setattr(trial, "open_reference", lambda *a: references.append(a) or actual(*a))
    with trial.TrialSessions() as sessions:
        for _ in range(2):
            trial.run_trials([bundle], feeds, cached=False, plain=True, sessions=sessions)
        assert {bundle.path} < sessions.opened.keys()
    assert len(open_calls) == 1
    assert len(references) == len({cores for _, _, cores in references})


@pytest.mark.parametrize(
    ("waiting", "uncertainty", "low", "high"), [(0.0, 0.0, 0.96, 0.98), (0.0, 0.1, 0.7, 0.8), (0.2, 0.0, 0.0, 0.0)]
)
def test_a_trial_in_doubt_prefers_all_cores_where_they_are_faster_by_more_than_the_doubt(
    waiting, uncertainty, low, high, monkeypatch
):
    monkeypatch.setattr(trial, "DOUBTFUL_WAITING_SHARE", 0.05)
    tried = trial.Trial(0.2, 1e-5, {}, 5, waiting, uncertainty=uncertainty)
    sure = trial.Trial(0.2, 1e-5, {}, 5, 0.0)
    assert low <= driver_trials._find_clear_ratio(sure, tried) <= high
