"""The command line with an NPU: devices, compile, run, verify, bench and doctor."""

import json
import os
import subprocess
import sys

import pytest

import onnxplace
from onnxplace.machine.isolated_sessions import list_taken_nodes, open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.target.device_kinds import DeviceAddress
from tests.conftest import FAST_PIPELINE, Ran
from tests.support.command_checks import (
    test_bench_measures_both as test_bench_measures_both,
    test_run_writes_the_outputs as test_run_writes_the_outputs,
)
from tests.support.commands import only_json
from tests.support.npu_models import NPU, fixed_branches

PLACES = {"left|relu": NPU, ".*": "cpu:0"}
# The NPU computes Add in the tests of one device too.
ALL = {".*": NPU}


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(fixed_branches().SerializeToString())
    return path


@pytest.fixture(params=[PLACES, ALL], ids=["cpu:0,npu:0", "npu:0"])
def bundle_path(request, run_cli, model_file, tmp_path):
    path, device_map = tmp_path / "bundle", tmp_path / "map.json"
    device_map.write_text(json.dumps(request.param))
    pipeline = FAST_PIPELINE.replace("join=never", f'join=never,device_map="{device_map}"')
    devices = ",".join(sorted({name.removeprefix("qnn/") for name in request.param.values()}))  # `npu:0`, as people say
    result = run_cli("compile", model_file, "-o", path, "--devices", devices, "--pipeline", pipeline)
    assert result.code == 0, result.err
    segments = onnxplace.load(path).manifest.segments
    assert {segment.device for segment in segments} == set(request.param.values())
    return path


def test_verify_compares_the_results_with_those_of_the_cpu(run_cli, bundle_path):
    result = run_cli("verify", bundle_path, "--json")
    assert (result.code, only_json(result)["equal"]) == (0, True), result.err


def test_the_npu_takes_every_node_of_its_segments(bundle_path):
    bundle = onnxplace.load(bundle_path)
    for segment in bundle.manifest.segments:
        if segment.device == NPU:
            options = make_session_options([0], entries={"session.record_ep_graph_assignment_info": "1"})
            session = open_session(bundle.file(segment.file), options, DeviceAddress.of(NPU))
            assert len(list_taken_nodes(session, DeviceAddress.of(NPU))) >= segment.nodes


@pytest.mark.parametrize("command", [["run"], ["verify"], ["bench", "--repeat", "2"]], ids=" ".join)
@pytest.mark.slow
def test_json_is_alone_on_stdout_although_the_simulator_greets_there(bundle_path, command):
    """In a process of its own, as a user types it: the library greets once in a process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    typed = [sys.executable, "-m", "onnxplace", command[0], str(bundle_path), *command[1:], "--json"]
    result = subprocess.run(typed, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    only_json(Ran(result.returncode, result.stdout, ""))
    assert "LIBNATIVE" in result.stderr


def test_stdout_of_a_session_that_is_opened_before_any_probe_is_clean(bundle_path):
    code = """
import sys
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
open_session(sys.argv[1], make_session_options([0]), DeviceAddress("qnn/npu", 0))
print("opened")
"""
    bundle = onnxplace.load(bundle_path)
    file = next(bundle.file(item.file) for item in bundle.manifest.segments if item.device == NPU)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, env=environment)
    assert result.stdout == "opened\n", result.stderr


def test_devices_describes_the_npu(run_cli):
    (npu,) = only_json(run_cli("devices", "--json"))["accelerators"]
    expected = {
        "id": NPU,
        "name": "Qualcomm NPU, simulated on the processor",
        "vendor": "Qualcomm",
        "provider": "qnn",
        "package": "onnxruntime-qnn",
        "precision": "float16",
        "needs_static_shapes": True,
        "problem": None,
    }
    assert {key: npu[key] for key in expected} == expected
    (line,) = [line for line in run_cli("devices").out.splitlines() if line.startswith(f"{NPU}: ")]
    taken = "takes elementwise operators, matrix products, convolutions, quantised operators, float16"
    assert f"onnxruntime-qnn {npu['version']}; {taken}; inputs of fixed sizes only" in line


def test_an_npu_that_is_not_there_is_refused_with_those_that_are(run_cli, model_file):
    for name in ("qnn/npu:1", "qnn/gpu:0"):
        result = run_cli("compile", model_file, "--devices", name)
        assert result.code == 2
        assert f"error[T011] {name}: onnxruntime-qnn offers qnn/npu:0 on this machine" in result.err


@pytest.mark.slow
def test_calibration_measures_the_link_with_fixed_sizes(run_cli, model_file, tmp_path):
    target = tmp_path / "target.toml"
    sizes = ("--sizes", "1KiB,64KiB,64MiB", "--seconds", "1")
    result = run_cli("devices", "--devices", "npu:0,cpu:0", "--calibrate", *sizes, "-o", target)
    assert result.code == 0, result.err
    assert f"{NPU} <-> cpu:0 (memory)" in result.out or f"{NPU} -> cpu:0 (memory)" in result.out
    assert "4194304" in result.out  # the most that is sent to an NPU
    assert run_cli("devices", "--devices", "cpu:0").code == 0
    arguments = ("--target", target, "--pipeline", FAST_PIPELINE)
    assert run_cli("compile", model_file, "-o", tmp_path / "b", *arguments).code == 0


@pytest.mark.slow
def test_doctor_checks_the_npu(run_cli, tmp_path):
    output = tmp_path / "report.json"
    result = run_cli("doctor", "--devices", "npu:0", "--seconds", "40", "--output", output)
    assert result.code == 0, result.out
    statuses = {item["check"]: item["status"] for item in json.loads(output.read_text())["checks"]}
    assert statuses["open"] == statuses["operators"] == statuses["contract"] == "ok"
