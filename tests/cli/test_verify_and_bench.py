"""`onnxplace verify` and `bench`: verdicts, JSON and exit codes."""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxplace
from onnxplace.bundle.bundle_simulation import predict_serial_seconds
from tests.conftest import branches
from tests.support.commands import only_json

pytestmark = pytest.mark.usefixtures("no_gpus", "work_in_temporary_folder")
COPIES = "optimize,profile,coplace,single,split,replicate{routes=cpu:1},emit"


def test_verify_prints_equal_and_exits_with_zero(run_cli, compiled):
    result = run_cli("verify", compiled)
    assert result.code == 0
    assert result.out.startswith("equal  y")


def test_verify_json_has_the_keys_that_scripts_depend_on(run_cli, compiled):
    data = only_json(run_cli("verify", compiled, "--json"))
    assert data["equal"] is True
    assert [set(output) >= {"name", "max_abs_error", "max_rel_error"} for output in data["outputs"]] == [True]


def test_verify_compares_with_the_model_it_is_given(run_cli, compiled, model_file):
    assert run_cli("verify", compiled, "--against", model_file).code == 0
    Path("altered.onnx").write_bytes(branches(seed=1).SerializeToString())
    result = run_cli("verify", compiled, "--against", "altered.onnx")
    assert (result.code, result.err) == (1, "")
    assert result.out.startswith("DIFFERS y")
    result = run_cli("verify", compiled, "--against", "altered.onnx", "--json")
    assert (result.code, only_json(result)["equal"]) == (1, False)


def test_verify_notices_one_altered_weight(run_cli, compiled):
    model = branches()
    weight = bytearray(model.graph.initializer[0].raw_data)
    weight[:4] = np.float32(9).tobytes()
    model.graph.initializer[0].raw_data = bytes(weight)
    Path("altered.onnx").write_bytes(model.SerializeToString())
    assert run_cli("verify", compiled, "--against", "altered.onnx").code == 1


def test_verify_json_is_json_when_shapes_differ(run_cli, compiled):
    text = "(float[batch, 64] x) => (float[64, batch] y) { y = Transpose(x) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')
    Path("other.onnx").write_bytes(model.SerializeToString())
    result = run_cli("verify", compiled, "--against", "other.onnx", "--json")
    assert (result.code, only_json(result)["equal"]) == (1, False)


def test_bench_json_has_the_keys_that_scripts_depend_on(run_cli, compiled):
    result = run_cli("bench", compiled, "--no-memory", "--repeat", "2", "--json")
    data = only_json(result)
    assert result.code == 0
    for name in ("bundle", "model"):
        assert set(data[name]) == {"median_seconds", "p90_seconds", "runs", "samples"}
        assert data[name]["runs"] == len(data[name]["samples"]) == 2
    speedup = data["speedup"]
    assert speedup["ratio"] == pytest.approx(data["model"]["median_seconds"] / data["bundle"]["median_seconds"])
    assert speedup["low"] <= speedup["ratio"] <= speedup["high"]
    assert f"{speedup['ratio']:.2f} times as fast" in data["verdict"]
    assert data["predicted_seconds"] == onnxplace.load(compiled).manifest.predicted.step_seconds


def test_bench_shows_one_session_on_all_cores(run_cli, compiled):
    result = run_cli("bench", compiled, "--no-memory", "--repeat", "1")
    assert result.code == 0
    assert "bundle on 2 devices" in result.out
    assert "one session, all cores" in result.out


@pytest.mark.parametrize("count", [0, 1025])
def test_bench_in_flight_has_a_range(run_cli, compiled, count):
    result = run_cli("bench", compiled, "--in-flight", count)
    assert result.code == 2
    assert f"error[U005] expected --in-flight to be an integer from 1 to 1024, got {count}" in result.err


def test_bench_in_flight_compares_each_result_with_the_largest_load(run_cli, compiled):
    result = run_cli("bench", compiled, "--no-memory", "--repeat", "2", "--in-flight", "4", "--json")
    data, manifest = only_json(result), onnxplace.load(compiled).manifest
    assert data["in_flight"]["runs"] >= 4
    assert data["in_flight"]["median_seconds"] > 0
    rates = data["requests_per_second"]
    assert rates["measured"] == pytest.approx(1 / data["in_flight"]["median_seconds"])
    assert rates["predicted"] == pytest.approx(1 / manifest.predicted.interval_seconds)
    assert rates["all_cores"] == pytest.approx(1 / data["model"]["median_seconds"])
    assert data["predicted_interval_seconds"] == manifest.predicted.interval_seconds
    busiest = max(device.compute_seconds for device in manifest.devices)
    # Requests of tiny models queue in Python, which takes longer than one request after the other.
    longest = max(manifest.predicted.step_seconds, predict_serial_seconds(manifest))
    assert busiest <= manifest.predicted.interval_seconds <= longest * (1 + 1e-9)
    text = run_cli("bench", compiled, "--no-memory", "--repeat", "1", "--in-flight", "2").out
    assert "several in flight" in text
    assert "requests/s with several in flight: " in text


def test_run_and_bench_of_a_bundle_with_routes_and_a_batch_print_valid_json(run_cli, tmp_path):
    model, bundle = tmp_path / "m.onnx", tmp_path / "out"
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] x) => (float[N, 4] y) { y = Neg(x) }'
    onnx.save(onnx.parser.parse_model(text), model)
    options = ("--devices", "cpu:0,cpu:1", "--shape", "N=2", "--pipeline", COPIES)
    assert run_cli("compile", model, "-o", bundle, *options).code == 0
    manifest = onnxplace.load(bundle).manifest
    assert [route.devices for route in manifest.routes] == [{"cpu:0": "cpu:1"}]
    assert manifest.batching.outputs == {"y": 0}
    data = only_json(run_cli("run", bundle, "--shape", "N=5", "--repeat", "2", "--json"))
    assert data["outputs"] == {"y": {"dtype": "float32", "shape": [5, 4]}}
    assert (data["runs"], data["runtime"]) == (2, "onnxruntime")
    result = run_cli("bench", bundle, "--no-memory", "--repeat", "2", "--in-flight", "2", "--json")
    data = only_json(result)
    assert {device["id"] for device in data["devices"]} == {"cpu:0", "cpu:1"}
    assert data["requests_per_second"]["measured"] > 0


def test_bench_over_a_limit_exits_with_one(run_cli, compiled):
    result = run_cli("bench", compiled, "--no-memory", "--repeat", "1", "--min-speedup", "1e9", "--json")
    assert result.code == 1
    assert only_json(result)["speedup"]["ratio"] < 1e9
    assert "times as fast as one session, expected at least 1000000000.0" in result.err


def test_a_file_that_is_no_model_is_no_reference(run_cli, compiled, tmp_path):
    (tmp_path / "program.py").write_text("print()\n")
    result = run_cli("verify", compiled, "--against", tmp_path / "program.py")
    assert result.code == 2
    assert "error[M002]" in result.err
    assert "program.py: not an ONNX file, or a damaged one" in result.err
