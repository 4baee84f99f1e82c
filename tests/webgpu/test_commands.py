"""The command line with a GPU: compile, run, verify, bench and devices."""

import pytest

import onnxplace
from tests.conftest import FAST_PIPELINE
from tests.support.command_checks import (
    test_bench_measures_both as test_bench_measures_both,
    test_run_writes_the_outputs as test_run_writes_the_outputs,
)
from tests.support.commands import only_json

DEVICES = ["webgpu:0,cpu:0", "webgpu:0"]


@pytest.fixture(params=DEVICES)
def bundle_path(request, run_cli, model_file, tmp_path):
    path = tmp_path / "bundle"
    result = run_cli(
        "compile", model_file, "-o", path, "--devices", request.param, "--shape", "batch=4", "--pipeline", FAST_PIPELINE
    )
    assert result.code == 0, result.err
    return path


def test_verify_compares_the_results_with_those_of_the_cpu(run_cli, bundle_path):
    result = run_cli("verify", bundle_path, "--json")
    assert (result.code, only_json(result)["equal"]) == (0, True), result.err


def test_compile_with_measured_costs_makes_a_bundle_that_is_equal(run_cli, model_file, tmp_path):
    result = run_cli("compile", model_file, "-o", tmp_path / "b", "--devices", "webgpu:0,cpu:0", "--shape", "batch=4")
    assert result.code == 0, result.err
    assert {device.id for device in onnxplace.load(tmp_path / "b").target.devices} == {"webgpu:0", "cpu:0"}
    assert run_cli("verify", tmp_path / "b").code == 0


def test_devices_lists_the_gpu_as_usable(run_cli):
    accelerators = only_json(run_cli("devices", "--json"))["accelerators"]
    (gpu,) = [item for item in accelerators if item["id"] != "qnn/npu:0"]
    assert (gpu["id"], gpu["name"], gpu["problem"]) == ("webgpu:0", "GPU by WebGPU", None)


def test_devices_says_that_the_memory_is_that_of_the_host(run_cli):
    assert "webgpu:0: GPU by WebGPU, its memory is unknown: that of the host is assumed" in run_cli("devices").out


def test_a_measured_target_file_places_nodes_on_the_gpu(run_cli, model_file, tmp_path):
    target, bundle, device_map = tmp_path / "target.toml", tmp_path / "b", tmp_path / "map.json"
    sizes = ("--sizes", "1KiB,64KiB,1MiB", "--seconds", "2")
    result = run_cli("devices", "--devices", "webgpu:0,cpu:0", "--calibrate", *sizes, "-o", target)
    assert result.code == 0, result.err
    assert "webgpu:0 -> cpu:0 (host)" in result.out
    device_map.write_text('{"left|relu": "webgpu:0", ".*": "cpu:0"}')
    arguments = ("--target", target, "--device-map", device_map, "--shape", "batch=4")
    result = run_cli("compile", model_file, "-o", bundle, *arguments)
    assert result.code == 0, result.err
    assert {segment.device for segment in onnxplace.load(bundle).manifest.segments} == {"webgpu:0", "cpu:0"}
    assert run_cli("verify", bundle).code == 0


def test_a_memory_limit_of_the_gpu_is_kept(run_cli, model_file, tmp_path):
    target, device_map = tmp_path / "target.toml", tmp_path / "map.json"
    # One of the two weights of 16 KiB fits.
    target.write_text(
        '[[devices]]\nid = "webgpu:0"\nmemory_bytes = 20000\n[[devices]]\nid = "cpu:0"\nmemory_bytes = 1e9\n'
    )
    arguments = ("--target", target, "--shape", "batch=4", "--pipeline", FAST_PIPELINE)
    result = run_cli("compile", model_file, "-o", tmp_path / "fits", *arguments)
    assert result.code == 0, result.err
    manifest = onnxplace.load(tmp_path / "fits").manifest
    assert sum(item.weights_bytes for item in manifest.segments if item.device == "webgpu:0") <= 16 << 10
    assert run_cli("verify", tmp_path / "fits").code == 0
    device_map.write_text('{".*": "webgpu:0"}')
    pinned = FAST_PIPELINE.replace("join=never", f'join=never,device_map="{device_map}"')
    arguments = ("--target", target, "--shape", "batch=4", "--pipeline", pinned)
    result = run_cli("compile", model_file, "-o", tmp_path / "too_small", *arguments)
    assert (result.code, result.err[:11]) == (3, "error[P002]"), result.err
    assert "webgpu:0 lacks" in result.err
