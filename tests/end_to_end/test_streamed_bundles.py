"""Bundles whose weights stream, in every command that reads a bundle."""

import json
import shutil
from functools import partial

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.measure.memory_use import measure_memory
from onnxplace.measure.trial import apply_trial, run_trials
from onnxplace_hosts.ranks import opening
from tests.support.large_chains import LAYERS, PIPELINE, compile_chain, feed_chain, write_chain


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("streamed")


@pytest.fixture(scope="module")
def streamed(folder):
    """A bundle of which some weights stream, next to its model: read it, do not alter it."""
    return compile_chain(write_chain(folder / "chain.onnx"), folder / "bundle")


@pytest.fixture(scope="module")
def expected(folder, streamed):
    return onnxruntime.InferenceSession(folder / "chain.onnx").run(None, feed_chain())[0]


def run_bundle(bundle):
    with onnxplace.InferenceSession(bundle) as session:
        return session.run(["y"], feed_chain())[0]


def is_close(result, expected):
    return np.allclose(result, expected, atol=1e-5)


def test_some_weights_stream(streamed):
    manifest = streamed.manifest
    assert 0 < len(manifest.streamed) < LAYERS
    assert sorted(name for item in manifest.segments for name in item.streamed) == sorted(manifest.streamed)
    assert not manifest.predicted.single_device_fits


def test_a_copy_in_another_folder_runs(streamed, expected, tmp_path):
    copy = shutil.copytree(streamed.path, tmp_path / "elsewhere")
    assert is_close(run_bundle(copy), expected)


def test_linked_weights_stream(expected, tmp_path):
    model = write_chain(tmp_path / "chain.onnx", external=True)
    bundle = compile_chain(model, tmp_path / "bundle", link_weights=True)
    assert all(record.linked for record in bundle.manifest.streamed.values())
    assert is_close(run_bundle(bundle.path), expected)


def test_a_cut_linked_file_is_an_error_that_names_it(tmp_path):
    model = write_chain(tmp_path / "chain.onnx", external=True)
    bundle = compile_chain(model, tmp_path / "bundle", link_weights=True)
    with (tmp_path / "chain.onnx.data").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(onnxplace.BundleError, match=r"chain\.onnx\.data"):
        onnxplace.load(bundle.path)


def test_a_merged_model_holds_all_weights(run_cli, streamed, expected, tmp_path):
    result = run_cli("merge", streamed.path, "-o", tmp_path / "merged.onnx")
    assert result.code == 0, result
    merged = onnx.load(tmp_path / "merged.onnx")
    assert [item.name for item in merged.graph.input] == ["x"]
    assert len(merged.graph.initializer) == LAYERS
    session = onnxruntime.InferenceSession(tmp_path / "merged.onnx")
    assert is_close(session.run(None, feed_chain())[0], expected)


@pytest.mark.parametrize("to", ["stages", "triton", "onnx-metadata", "ort-layers"])
def test_exports_hold_all_weights(run_cli, streamed, expected, tmp_path, to):
    result = run_cli("export", streamed.path, "--to", to, "-o", tmp_path / "export")
    assert result.code == 0, result
    models = [onnx.load(file, load_external_data=False) for file in sorted((tmp_path / "export").rglob("*.onnx"))]
    assert sorted(tensor.name for model in models for tensor in model.graph.initializer) == sorted(
        f"w{layer}" for layer in range(LAYERS)
    )
    assert not {item.name for model in models for item in model.graph.input}.intersection(streamed.manifest.streamed)


def test_verify_and_the_drop_in_session_read_such_a_bundle(run_cli, streamed, expected):
    assert run_cli("verify", streamed.path).code == 0
    session = onnxplace.InferenceSession(streamed.path)
    assert [item.name for item in session.get_inputs()] == ["x"]
    assert is_close(session.run(["y"], feed_chain())[0], expected)


def test_bench_shows_the_rate_of_weights_and_how_long_they_were_waited_for(run_cli, streamed):
    result = run_cli("bench", streamed.path, "--repeat", 2, "--no-memory")
    assert result.code == 0, result
    (line,) = [line for line in result.out.splitlines() if line.startswith("weights -> cpu:0")]
    assert "MiB" in line
    assert "waited for" in result.out
    result = run_cli("bench", streamed.path, "--repeat", 2, "--no-memory", "--json")
    (stream,) = json.loads(result.out)["streams"]
    assert stream["device"] == "cpu:0"
    assert stream["bytes"] == sum(record.bytes for record in streamed.manifest.streamed.values())
    assert stream["wait_seconds"] >= 0
    assert stream["predicted_wait_seconds"] > 0


def test_bench_of_other_bundles_has_no_streams(run_cli, compiled):
    result = run_cli("bench", compiled, "--repeat", 1, "--no-memory", "--json")
    assert "streams" not in json.loads(result.out)


def test_compile_says_how_much_streams_and_how_long_a_step_waits_for_it(run_cli, folder, streamed, tmp_path):
    options = ["--devices", "cpu:0", "--max-memory", "6MiB", "--shape", "rows=2", "--pipeline", PIPELINE]
    result = run_cli("compile", folder / "chain.onnx", *options, "-o", tmp_path / "bundle")
    assert result.code == 0, result
    assert ", of which " in result.out
    assert " waits for weights, " in result.out
    assert "from disk stream in each step, to cpu:0 through a pool of 2.5 MiB at " in result.out
    assert "on one device, which cannot hold all weights" in result.out


def test_a_trace_has_a_row_of_weights_which_a_report_shows(run_cli, streamed, tmp_path):
    trace = tmp_path / "trace.json"
    assert run_cli("run", streamed.path, "--trace", trace, "--repeat", 3).code == 0
    events = json.loads(trace.read_text())["traceEvents"]
    rows = {(item["pid"], item["args"]["name"]): item["tid"] for item in events if item["name"] == "thread_name"}
    loads = [item for item in events if item.get("cat") == "load"]
    for process in (1, 2):  # measured and predicted
        own = [item for item in loads if item["pid"] == process]
        assert own
        assert {item["tid"] for item in own} == {rows[process, "cpu:0 weights"]}
        assert all(item["args"]["bytes"] > 0 for item in own)
    result = run_cli("report", streamed.path, "--trace", trace, "-o", tmp_path / "report.html", "--json")
    assert result.code == 0, result
    (page,) = json.loads(result.out)["pages"]
    assert all("weights → cpu:0" in [row["name"] for row in item["rows"]] for item in page["timelines"])


def test_a_report_says_what_waits_and_what_would_help(run_cli, streamed, tmp_path):
    result = run_cli("report", streamed.path, "-o", tmp_path / "report.html", "--json")
    (page,) = json.loads(result.out)["pages"]
    assert page["verdict"]["limit"] == "waiting for weights"
    texts = " ".join(advice["text"] for advice in page["verdict"]["advice"])
    assert "Memory for all weights, " in texts
    assert "Weights that come twice as fast from disk" in texts
    waits = {part["kind"]: part["seconds"] for part in page["bound"]["chain"]}["weights"]
    assert waits == pytest.approx(streamed.manifest.predicted.weight_wait_seconds, rel=0.01)
    (timeline,) = page["timelines"]
    lane = [row["name"] for row in timeline["rows"]].index("weights → cpu:0")
    spans = zip(timeline["row"], timeline["start_seconds"], timeline["finish_seconds"])
    read = sum(finish - start for row, start, finish in spans if row == lane)
    size = sum(record.bytes for record in streamed.manifest.streamed.values())
    assert read == pytest.approx(size / streamed.manifest.streams[0].bytes_per_second["disk"])
    (table,) = [item for item in page["division"] if item["caption"] == "Weights that stream"]
    assert table["rows"][0][:2] == ["cpu:0", "disk"]


def test_a_trial_measures_the_rate_of_weights(streamed):
    (trial,) = run_trials([streamed], feed_chain(), cached=False)
    applied = apply_trial(streamed.manifest, trial)
    assert set(trial.load_seconds) <= {item.id for item in streamed.manifest.segments if item.streamed}
    size = max(record.bytes for record in streamed.manifest.streamed.values())
    (rate,) = applied.streams[0].bytes_per_second.values()
    times = trial.load_seconds.values()
    assert size / max(times) <= rate * 1.001
    assert rate <= size / min(times) * 1.001
    assert applied.predicted.weight_wait_seconds >= 0


def test_a_rank_fetches_the_weights_that_stream_to_it(streamed, tmp_path):
    fetch = partial(opening.read_piece, streamed)
    segments = [item for item in streamed.manifest.segments if item.streamed]
    opening._copy(streamed, segments, set(), fetch, tmp_path / "copies", tmp_path / "copies/one")
    copy = Bundle(tmp_path / "copies/one", streamed.manifest)
    for record in streamed.manifest.streamed.values():
        parts = [bundle.file(record.file).read_bytes()[record.offset :][: record.bytes] for bundle in (streamed, copy)]
        assert parts[0] == parts[1] != bytes(record.bytes)


@pytest.mark.slow
def test_the_measured_peak_holds_the_limit(tmp_path):
    model = write_chain(tmp_path / "chain.onnx", layers=24, width=1024)
    pipeline = PIPELINE.replace("2.5MiB", "16MiB")
    bundle = compile_chain(model, tmp_path / "bundle", max_memory="48MiB", pipeline=pipeline)
    (device,) = bundle.manifest.devices
    assert device.peak_bytes <= device.limit_bytes == 48 << 20
    feeds = {"x": np.ones((2, 1024), np.float32)}
    measured = measure_memory(bundle, feeds).device_bytes["cpu:0"]
    # The weights that stay, the pool and the values are counted; sessions take some memory besides.
    assert 0.8 * device.peak_bytes < measured < device.limit_bytes + (4 << 20)
