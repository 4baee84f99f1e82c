"""`onnxplace bench` compares predictions with measurements, on every kind of bundle."""

import json
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

import onnxplace
from onnxplace.errors import Diagnostic
from onnxplace.measure import memory_use, trial
from onnxplace.measure.compare import Speedup, Timings, compute_speedup
from onnxplace.measure.memory_use import can_measure_memory
from onnxplace.measure.trial import replace_manifest
from onnxplace.session import benchmark
from tests.conftest import FAST_PIPELINE
from tests.support.state_checks import APART, START, STATES, feeds, sums
from tests.support.trace_checks import check_format, check_requests, list_events

pytestmark = pytest.mark.usefixtures("no_gpus")
only_linux = pytest.mark.skipif(not can_measure_memory(), reason="only Linux reports the peak memory of a process")

QUICK = ("--repeat", "2", "--no-memory")
DEVICE_KEYS = {"id", "predicted_busy_seconds", "busy_seconds", "predicted_peak_bytes", "peak_bytes"}
LINK_KEYS = {
    *("source", "destination", "values", "predicted_bytes", "bytes", "predicted_seconds", "seconds"),
}
PROCESS_KEYS = {"opening_bytes", "running_bytes", "all_plans_bytes", "predicted_all_plans_bytes"}


@pytest.fixture
def idle_machine(monkeypatch):
    """No thread waits for a core, whatever else runs here."""
    monkeypatch.setattr(benchmark, "read_run_delays", lambda pool: {"": 0})


def bench(run_cli, *arguments) -> dict:
    """Run the command and return its JSON."""
    result = run_cli("bench", *arguments, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def parsed(text: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')


def compiled_from(model: Path | onnx.ModelProto, folder: Path, device_map: dict[str, str], **options) -> Path:
    """Compile a model for two devices by a device map, without measuring."""
    (folder / "map.json").write_text(json.dumps(device_map))
    steps = f"optimize,profile{{estimate=true}},coplace{{join=never,device_map={folder / 'map.json'}}},m-etf,split,emit"
    return onnxplace.compile(model, folder / "bundle", devices="cpu:0,cpu:1", pipeline=steps, **options).path


@pytest.fixture(scope="module")
def measured() -> dict[object, object]:
    """What processes of their own were found to need, by what they opened."""
    return {}


@pytest.fixture
def measured_once(monkeypatch, measured):
    """Start no process for what an earlier test has measured."""
    measure, measure_opening = memory_use._run_in_child, benchmark.measure_model_opening

    def measure_once(job):
        key = job.bundle, job.device
        if key not in measured:
            measured[key] = measure(job)
        return measured[key]

    def measure_opening_once(bundle, against):
        if bundle.path not in measured:
            measured[bundle.path] = measure_opening(bundle, against)
        return measured[bundle.path]

    monkeypatch.setattr(memory_use, "_run_in_child", measure_once)
    monkeypatch.setattr(benchmark, "measure_model_opening", measure_opening_once)


@only_linux
@pytest.mark.usefixtures("measured_once")
def test_all_predictions_are_compared_with_measurements(run_cli, compiled):
    data, manifest = bench(run_cli, compiled, "--repeat", "3"), onnxplace.load(compiled).manifest
    for device, planned in zip(data["devices"], manifest.devices):
        assert set(device) == DEVICE_KEYS
        assert (device["id"], device["predicted_busy_seconds"]) == (planned.id, planned.compute_seconds)
        assert device["predicted_peak_bytes"] == planned.peak_bytes > 0
        assert 0 < device["busy_seconds"] < 1
        assert 0 <= device["peak_bytes"] < 100 << 20, "nothing, if a model this small fits into what was there"
        assert device["busy_seconds"] != planned.compute_seconds
        assert device["peak_bytes"] != planned.peak_bytes
    assert len(data["devices"]) == 2
    assert all({link["source"], link["destination"]} == {"cpu:0", "cpu:1"} for link in data["links"])
    assert sum(link["values"] for link in data["links"]) == manifest.transfers > 0
    assert sum(link["predicted_bytes"] for link in data["links"]) == manifest.transfer_bytes
    for link in data["links"]:
        assert set(link) == LINK_KEYS
        assert link["bytes"] == link["predicted_bytes"]
        assert 0 < link["seconds"] != link["predicted_seconds"] > 0
    process = data["process"]
    assert set(process) == PROCESS_KEYS
    assert 50 << 20 < process["opening_bytes"] < 1 << 30
    assert 50 << 20 < process["running_bytes"] < 1 << 30
    assert set(data["opening"]) == {"bundle", "model"}
    for opening in data["opening"].values():
        assert set(opening) == {"seconds", "peak_bytes", "resident_bytes"}
        assert 0 < opening["seconds"] < 60
        assert 0 <= opening["resident_bytes"] <= opening["peak_bytes"] < 100 << 20


@only_linux
@pytest.mark.usefixtures("measured_once")
def test_the_text_has_a_row_for_each_device_link_and_the_process(run_cli, compiled, idle_machine):
    result = run_cli("bench", compiled, "--repeat", "2")
    assert (result.code, result.err) == (0, "")
    blocks = (block.splitlines() for block in result.out.strip("\n").split("\n\n"))
    steps, devices, links, opening, timeline, verdict = blocks
    assert re.split(" {2,}", steps[0].strip()) == ["median", "p90", "predicted", "vs one device", "vs all cores"]
    assert steps[-1].endswith(" 1.00x")
    assert re.fullmatch(r"verdict: .*\d times as fast .*; limited by .*", verdict[0])
    assert devices[0].split() == ["busy", "predicted", "process", "peak", "predicted"]
    assert [line.split("  ")[0] for line in devices[1:]] == ["cpu:0", "cpu:1", "process, opening", "process, running"]
    for line in devices[1:3]:
        assert re.fullmatch(r"cpu:\d( +[\d.e+-]+ ms){2}( +[\d.]+ ([KM]i)?B){2}", line), line
    for line in devices[3:]:
        assert re.fullmatch(r"process, \w+ +- +- +[\d.]+ MiB +-", line), line
    assert links[0].split() == ["values", "size", "predicted", "time", "predicted"]
    manifest = onnxplace.load(compiled).manifest
    sent = {f"{device} -> {s.peer}" for device, program in manifest.programs.items() for s in program if s.op == "send"}
    assert {line.split("  ")[0] for line in links[1:]} == sent
    assert re.split(" {2,}", opening[0])[1:] == ["to open", "memory, peak", "once open"]
    for line, label in zip(opening[1:], ("bundle", "one session, all cores"), strict=True):
        assert re.fullmatch(rf"{label} +[\d.e+-]+ ms( +[\d.]+ ([KM]i)?B){{2}}", line), line
    share = r"\d+% \(predicted \d+%\)"
    assert re.fullmatch(rf"busy with 1 in flight, over 2 requests: cpu:0 {share}, cpu:1 {share}", timeline[0])
    times = r"predicted [\d.e+-]+ ms, measured [\d.e+-]+ ms"
    assert re.fullmatch(rf"largest difference: segment cpu\d-\d+ on cpu:\d: {times}", timeline[1])
    assert re.fullmatch(rf"largest difference: value \S+ to cpu:\d: {times}", timeline[2])


def test_a_trace_has_requests_in_flight_next_to_their_prediction(run_cli, compiled, tmp_path):
    path = tmp_path / "trace.json"
    data = bench(run_cli, compiled, *QUICK, "--in-flight", "3", "--trace", path)
    trace, manifest = json.loads(path.read_text()), onnxplace.load(compiled).manifest
    check_format(trace)
    check_requests(trace, manifest, range(24))
    spans = sorted((item["ts"], item["ts"] + item["dur"]) for item in list_events(trace, "measured", "request"))
    assert any(later < finish for (_, finish), (later, _) in pairwise(spans)), "several are in flight"
    timeline = data["timeline"]
    assert timeline["requests"] == 24
    assert [item["device"] for item in timeline["devices"]] == ["cpu:0", "cpu:1"]
    assert all(0 < item["share"] <= 1 and 0 < item["predicted_share"] <= 1 for item in timeline["devices"])
    assert timeline["segment"]["name"] in {segment.id for segment in manifest.segments}
    assert timeline["segment"]["seconds"] != timeline["segment"]["predicted_seconds"] > 0
    assert timeline["transfer"]["name"] in manifest.values


def test_a_trace_that_cannot_be_written_is_refused_before_any_work(run_cli, compiled, tmp_path):
    result = run_cli("bench", compiled, *QUICK, "--trace", tmp_path / "nowhere" / "trace.json")
    assert result.code == 2
    assert "nowhere" in result.err
    result = run_cli("bench", compiled, *QUICK, "--trace", compiled / "manifest.json")
    assert result.code == 2
    onnxplace.load(compiled)


def test_memory_is_omitted_on_request_and_on_other_systems(run_cli, compiled, monkeypatch, tmp_path):
    def refuses(*_):
        raise AssertionError("no process is to be started")

    monkeypatch.setattr(memory_use, "_run_in_child", refuses)
    data = bench(run_cli, compiled, *QUICK)
    monkeypatch.setattr(memory_use, "_CLEAR_REFS", tmp_path / "nowhere")
    for seen in (data, bench(run_cli, compiled, "--repeat", "1")):
        assert [device["peak_bytes"] for device in seen["devices"]] == [None, None]
        assert (seen["process"]["running_bytes"], seen["process"]["opening_bytes"]) == (None, None)
        assert "opening" not in seen
    rows = [row for row in run_cli("bench", compiled, *QUICK).out.splitlines() if row.startswith(("cpu", "process"))]
    assert all(re.search(r" -  +(-|[\d.]+ [KM]?i?B)$", row) for row in rows if "->" not in row)


@only_linux
@pytest.mark.usefixtures("measured_once")
def test_a_model_that_cannot_be_opened_again_is_a_note(run_cli, compiled, monkeypatch):
    def fail(*_):
        raise onnxplace.ExecutionError("X004", "it was killed", where="whole.onnx")

    monkeypatch.setattr(benchmark, "measure_model_opening", fail)
    result = run_cli("bench", compiled, "--repeat", "1")
    assert result.code == 0
    assert "note[X004] whole.onnx: the opening of the whole model was not measured: it was killed" in result.err
    assert "to open" not in result.out


@only_linux
def test_memory_that_cannot_be_measured_is_a_note(run_cli, compiled, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    result = run_cli("bench", compiled, "--repeat", "1")
    assert result.code == 0
    assert result.err.count("note[X004]") == 3
    message = "the memory of cpu:1 was not measured: measuring memory failed in a process of its own: exit code 1"
    assert f"note[X004] cpu:1: {message}" in result.err
    assert "Traceback" not in result.err
    assert "process, running" in result.out


def test_one_device_has_no_links(run_cli, model_file, tmp_path):
    bundle = onnxplace.compile(model_file, tmp_path / "b", devices="cpu:0", shape={"batch": 4}, placer="single").path
    data = bench(run_cli, bundle, *QUICK)
    assert data["links"] == []
    assert len(data["devices"]) == 1
    assert "values" not in run_cli("bench", bundle, *QUICK).out


def test_a_device_without_work_is_a_row_of_zeros(run_cli, tmp_path):
    bundle = compiled_from(parsed("g (float[4] x) => (float[4] y) { [n] y = Relu(x) }"), tmp_path, {".*": "cpu:1"})
    idle, busy = bench(run_cli, bundle, "--repeat", "1")["devices"]
    assert (idle["busy_seconds"], idle["predicted_busy_seconds"], idle["peak_bytes"]) == (0, 0, None)
    assert busy["busy_seconds"] > 0
    assert (busy["peak_bytes"] is not None) == can_measure_memory()


@pytest.mark.slow
def test_a_model_without_inputs_is_benched(run_cli, tmp_path):
    text = """g () => (float[3] y) <float[3] w = {1.0, 2.0, 3.0}> {
        [draw] a = RandomUniformLike(w)
        [neg] y = Neg(a)
    }"""
    bundle = compiled_from(parsed(text), tmp_path, {"draw": "cpu:0", "neg": "cpu:1"})
    data = bench(run_cli, bundle, "--repeat", "1")
    assert [link["bytes"] for link in data["links"]] == [12]
    assert all(device["busy_seconds"] > 0 for device in data["devices"])


@pytest.mark.slow
def test_sequences_and_optionals_may_cross(run_cli, tmp_path, idle_machine):
    text = """g (float[4] x, float[2] z) => (float[4] y, bool there) {
        [make] items = SequenceConstruct(x, z)
        [first] i = Constant<value = int64[1] {0}>()
        [index] at = Squeeze(i)
        [take] y = SequenceAt(items, at)
        [maybe] held = Optional(x)
        [has] there = OptionalHasElement(held)
    }"""
    bundle = compiled_from(parsed(text), tmp_path, {"make|maybe": "cpu:0", ".*": "cpu:1"})
    manifest = onnxplace.load(bundle).manifest
    sent = [step.value for program in manifest.programs.values() for step in program if step.op == "send"]
    kinds = [manifest.values[name].dtype for name in sent]
    assert "seq(tensor(float))" in kinds
    result = run_cli("bench", bundle, "--repeat", "1", "--json")
    assert (result.code, result.err) == (0, "")
    data = json.loads(result.out)
    sizes = {"seq(tensor(float))": 24, "optional(tensor(float))": 16}
    assert sum(link["bytes"] for link in data["links"]) == sum(sizes[kind] for kind in kinds)
    if can_measure_memory():
        assert all(device["peak_bytes"] is not None for device in data["devices"])


def test_an_input_that_is_an_output_takes_no_time(run_cli, tmp_path):
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])
    opset = helper.make_opsetid("", 17)
    model = helper.make_model(helper.make_graph([], "g", [x], [x]), opset_imports=[opset], ir_version=8)
    bundle = onnxplace.compile(model, tmp_path / "b", devices="cpu:0,cpu:1", pipeline=FAST_PIPELINE).path
    assert onnxplace.load(bundle).manifest.segments == ()
    data = bench(run_cli, bundle, "--repeat", "1")
    assert data["links"] == []
    assert [device["busy_seconds"] for device in data["devices"]] == [0, 0]
    assert (data["process"]["running_bytes"] is not None) == can_measure_memory()


@pytest.mark.slow
def test_each_traced_step_gets_states(run_cli, tmp_path):
    bundle = compiled_from(sums(), tmp_path, APART, state=STATES, shape={"n": 2, "m": 3})
    np.savez(tmp_path / "in.npz", **feeds(1, **START))
    result = run_cli("bench", bundle, "--repeat", "2", "--inputs", tmp_path / "in.npz", "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    assert all(device["busy_seconds"] > 0 for device in data["devices"])
    assert "note[F008]" in result.err
    assert "predictions are for m=3, and the inputs have m=0" in result.err
    refused = run_cli("bench", bundle, "--in-flight", "2")
    assert (refused.code, "U042" in refused.err) == (2, True)


def test_sizes_other_than_the_compiled_ones_are_noted_and_measured(run_cli, compiled, monkeypatch):
    monkeypatch.setattr(benchmark, "MIN_JUDGED_SECONDS", 1e9)  # no note that this machine is busy
    result = run_cli("bench", compiled, *QUICK, "--shape", "batch=8", "--json")
    assert result.code == 0
    assert "note[F008] branches: predictions are for batch=4, and the inputs have batch=8" in result.err
    data = json.loads(result.out)
    values = onnxplace.load(compiled).manifest.values
    for link in data["links"]:
        sent = sum(value.bytes for value in values.values() if value.bytes)
        assert 0 < link["bytes"] <= 2 * sent
    predictions = {key: item for key, item in _walk(data) if key.startswith("predicted")}
    assert predictions
    assert set(predictions.values()) == {None}  # never the figure of another size
    assert data["timeline"] is None
    text = run_cli("bench", compiled, *QUICK, "--shape", "batch=8").out
    assert re.search(r"bundle on 2 devices +\S+ ms +\S+ ms +- +\S+x", text)
    assert run_cli("bench", compiled, *QUICK, "--shape", "batch=4").err == ""


def _walk(data):
    """Yield the entries of nested JSON with their keys."""
    for key, item in data.items() if isinstance(data, dict) else ():
        yield key, item
    for item in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from _walk(item)


def test_the_verdict_says_how_sure_a_difference_is():
    usage = SimpleNamespace(
        devices=[SimpleNamespace(id="cpu:0", busy_seconds=0.9), SimpleNamespace(id="cpu:1", busy_seconds=0.5)],
        streams=[],
    )

    def judge(model, bundle, waiting=0.0):
        times = [Timings(float(np.median(samples)), 0.0, len(samples), tuple(samples)) for samples in (model, bundle)]
        return benchmark._phrase_verdict(compute_speedup(*times), Speedup(3.0, 3.0, 3.0), times[1], waiting, usage)

    limit = "limited by cpu:0, which is busy for 90% of a step, when traced"
    device = "3.00 times as fast as one device (3.00 to 3.00 in eight of ten turns)"
    faster = f"{device}, 2.00 times as fast as one session with all cores (2.00 to 2.00 in eight of ten turns)"
    assert judge([2.0] * 5, [1.0] * 5) == f"{faster}; {limit}"
    assert judge([2.0] * 4, [1.0] * 4).startswith(f"unsure after 4 rounds: {faster}")
    assert judge([2.0] * 5, [1.0] * 5, 0.5).startswith("unsure, as other programs used the cores for 50% of the time: ")
    assert ", slower: 0.50 times as fast as one session with all cores (" in judge([1.0] * 5, [2.0] * 5)
    assert ", no clear difference: 1.00 times as fast as one " in judge([1.0, 2.0] * 5, [1.5] * 10)
    usage.devices[1].busy_seconds = 0.0
    assert judge([2.0] * 5, [1.0] * 5).startswith("it runs on one device, 2.00 times as fast as one session with ")


def test_a_speedup_is_larger_than_one_where_the_bundle_is_faster():
    slow, fast = Timings(3.0, 3.0, 3, (3.0, 2.0, 4.0)), Timings(1.0, 1.0, 3, (1.0, 1.0, 1.0))
    speedup = compute_speedup(slow, fast)
    assert speedup.ratio == 3.0
    assert 2.0 <= speedup.low <= 3.0 <= speedup.high <= 4.0
    assert compute_speedup(fast, slow).ratio == pytest.approx(1 / 3)
    assert compute_speedup(Timings(2.0, 2.0, 3), Timings(1.0, 1.0, 3)).low == 2.0  # not timed in turns


@only_linux
@pytest.mark.slow
def test_weights_outside_the_bundle_are_found_by_each_process(run_cli, tmp_path, branches_bytes):
    model = onnx.load_model_from_string(branches_bytes)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    bundle = compiled_from(
        tmp_path / "m.onnx", tmp_path, {"left|relu": "cpu:0", ".*": "cpu:1"}, shape={"batch": 4}, link_weights=True
    )
    assert onnxplace.load(bundle).manifest.linked
    data = bench(run_cli, bundle, "--repeat", "1")
    assert all(device["peak_bytes"] is not None for device in data["devices"])


def chain_bundle(folder):
    model = parsed("m (float[n] x) => (float[n] y) { a = Neg(x) b = Exp(a) y = Neg(b) }")
    for node in model.graph.node:
        node.name = node.output[0]
    return compiled_from(model, folder, {"b": "cpu:1", ".*": "cpu:0"}, shape={"n": 64})


@pytest.mark.parametrize("options", [(), ("--runtime", "mpi", "--hosts", "localhost:2")], ids=["threads", "mpi"])
@pytest.mark.slow
def test_recorded_times_become_the_prediction_and_the_planned_ones_stay(run_cli, tmp_path, options):
    if options:
        pytest.importorskip("mpi4py")
    path = chain_bundle(tmp_path)
    planned = onnxplace.load(path).manifest
    assert planned.trial is None
    for _ in range(2):  # the second trial replaces the first
        data = bench(run_cli, path, *QUICK, "--update", *options)
        manifest = onnxplace.load(path).manifest
        assert manifest.trial is not None
        assert manifest.trial.planned_seconds == planned.predicted.step_seconds
        assert [item.planned_seconds for item in manifest.segments] == [item.seconds for item in planned.segments]
        assert all(item.seconds != item.planned_seconds for item in manifest.segments)
        assert data["predicted_seconds"] == manifest.step_seconds != planned.step_seconds
    assert run_cli("verify", path).code == 0


@pytest.mark.slow
def test_a_recorded_trial_replaces_notes_about_earlier_ones_and_reports_its_own_doubt(run_cli, tmp_path, monkeypatch):
    path = chain_bundle(tmp_path)
    bundle = onnxplace.load(path)
    earlier = [Diagnostic(code=code, message=code) for code in ("C020", "P040", "C021")]
    replace_manifest(bundle, bundle.manifest.model_copy(update={"diagnostics": tuple(earlier)}))
    doubt = "the trial is less sure than usual: steps waited 90% of their time for a core"
    for share in (0.05, 0.05, 1.0):  # the third trial is not doubtful
        waited = iter(range(0, 10**15, 10**12))  # a thread waits 1000 s in each burst, more than its whole time
        monkeypatch.setattr(trial, "read_run_delays", lambda pool, waited=waited: {"": next(waited)})
        monkeypatch.setattr(trial, "DOUBTFUL_WAITING_SHARE", share)
        result = run_cli("bench", path, *QUICK, "--update")
        assert (f"note[C004] {bundle.manifest.model}: {doubt}" in result.err) is (share < 1)
        # Such short steps may drift, too.
        notes = [note.message.partition(" and have a median")[0] for note in onnxplace.load(path).manifest.diagnostics]
        assert notes == (["P040", doubt] if share < 1 else ["P040"])


def test_a_wrong_prediction_is_reported_until_it_is_updated(run_cli, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "read_run_delays", lambda pool: {})  # whatever else runs here
    path = chain_bundle(tmp_path)
    bundle = onnxplace.load(path)
    predicted = bundle.manifest.predicted.model_copy(update={"step_seconds": 100.0})
    replace_manifest(bundle, bundle.manifest.model_copy(update={"predicted": predicted}))
    note = re.compile(
        r"^note\[F008\] .*: a step takes .* ms, predicted 100000 ms: --update writes it into the bundle$", re.M
    )
    assert note.search(run_cli("bench", path, "--no-memory", "--repeat", "5").err)
    assert "F008" not in run_cli("bench", path, *QUICK).err  # after two rounds, nothing is sure
    assert "predictions are for n=64" in (err := run_cli("bench", path, "--no-memory", "--shape", "n=65").err)
    assert "--update" not in err
    assert "F008" not in run_cli("bench", path, "--no-memory", "--update").err
    assert onnxplace.load(path).manifest.predicted.step_seconds < 50


@pytest.mark.parametrize(
    ("samples", "waiting", "is_wrong"),
    [
        ([1.0] * 5, 0.0, False),
        ([1.05] * 5, None, False),  # less than a tenth
        ([1.2] * 5, None, True),
        ([0.8] * 5, 0.0, True),
        ([1.2] * 5, 0.5, False),  # on a busy machine
        ([1.2] * 4, 0.0, False),
        ([0.9, 1.2, 1.2, 1.2, 1.2], 0.0, False),  # the prediction is among the rounds
        ([0.8, 0.8, 0.8, 1.1, 1.1], 0.0, False),
    ],
)
def test_a_prediction_is_wrong_beyond_a_tenth_and_the_spread_of_rounds(samples, waiting, is_wrong):
    manifest = SimpleNamespace(step_seconds=1.0, model="m")
    times = Timings(float(np.median(samples)), float(np.quantile(samples, 0.9)), len(samples), tuple(samples))
    notes = benchmark._report_wrong_prediction(times, waiting, manifest)
    assert [note.code for note in notes] == ["F008"] * is_wrong


def test_a_bundle_that_cannot_be_written_is_not_recorded(run_cli, tmp_path, monkeypatch):
    path = chain_bundle(tmp_path)
    monkeypatch.setattr(trial, "run_trials", lambda *arguments, **options: pytest.fail("it ran"))
    monkeypatch.setattr("onnxplace.utils.files.os.access", lambda folder, mode: folder != path)
    result = run_cli("bench", path, *QUICK, "--update")
    assert result.code == 2
    assert f"error[U032] {path}/manifest.json: cannot write there" in result.err


def test_times_of_other_sizes_are_not_recorded(run_cli, tmp_path):
    path = chain_bundle(tmp_path)
    before = (path / "manifest.json").read_bytes()
    result = run_cli("bench", path, *QUICK, "--update", "--shape", "n=65")
    assert result.code == 2
    assert "error[U042] --update: predictions are for n=64, and the inputs have n=65" in result.err
    assert (path / "manifest.json").read_bytes() == before


def test_a_busy_machine_is_noted_after_the_result(run_cli, compiled, monkeypatch):
    waited = iter(range(0, 10**15, 10**12))  # a thread waits 1000 s, more than the whole time
    monkeypatch.setattr(benchmark, "read_run_delays", lambda pool: {"": next(waited)})
    monkeypatch.setattr(benchmark, "MIN_JUDGED_SECONDS", 1e9)  # all steps together are too short to tell
    assert "note[C004]" not in run_cli("bench", compiled, *QUICK, "--no-memory").err
    monkeypatch.setattr(benchmark, "MIN_JUDGED_SECONDS", 0.0)
    result = run_cli("bench", compiled, *QUICK, "--no-memory", "--json")
    assert json.loads(result.out)["waiting"] == 0.9
    assert "note[C004] branches: the machine was busy: steps waited 90% of their time for a core\n" in result.err
