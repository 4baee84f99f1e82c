"""The command line with a GPU: compile, run, verify, bench and devices."""

import numpy as np
import pytest

import onnxplace
from tests.conftest import FAST_PIPELINE
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


def test_run_writes_the_outputs(run_cli, bundle_path, tmp_path):
    result = run_cli("run", bundle_path, "--outputs", tmp_path / "outputs.npz")
    assert result.code == 0, result.err
    assert np.load(tmp_path / "outputs.npz")["y"].shape == (4, 64)


def test_bench_measures_both(run_cli, bundle_path):
    result = run_cli("bench", bundle_path, "--no-memory", "--repeat", "2", "--json")
    assert result.code == 0, result.err
    assert only_json(result)["bundle"]["median_seconds"] > 0


def test_compile_with_measured_costs_makes_a_bundle_that_is_equal(run_cli, model_file, tmp_path):
    result = run_cli("compile", model_file, "-o", tmp_path / "b", "--devices", "webgpu:0,cpu:0", "--shape", "batch=4")
    assert result.code == 0, result.err
    assert {device.id for device in onnxplace.load(tmp_path / "b").target.devices} == {"webgpu:0", "cpu:0"}
    assert run_cli("verify", tmp_path / "b").code == 0


def test_devices_lists_the_gpu_as_usable(run_cli):
    (gpu,) = only_json(run_cli("devices", "--json"))["gpus"]
    assert (gpu["id"], gpu["problem"]) == ("webgpu:0", None)
