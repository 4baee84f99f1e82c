"""The command line with a provider that has no record here; each command is a process, as a user types it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from tests.conftest import FAST_PIPELINE, Ran, branches
from tests.support.commands import only_json

GGML = "ggml/cpu:0"
SHAPE = ("--shape", "batch=4")
QUICK = ("--placer", "auto{seconds=0.1}")
DEVICES = (GGML, f"cpu:0,{GGML}")


def run(*arguments: object) -> Ran:
    """Run a command, and check that none of its output is that of the library, or a traceback."""
    command = [sys.executable, "-m", "onnxplace", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert re.findall(r"(?m)^\d{4}-\d\d-\d\dT.*", done.stdout) == []  # its log
    assert "Traceback" not in done.stderr
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with `model.onnx`, and with a bundle for each of DEVICES, in which ggml computes."""
    folder = tmp_path_factory.mktemp("ggml")
    onnx.save(branches(), folder / "model.onnx")
    (folder / "map.json").write_text(json.dumps({"left|relu": GGML, ".*": "cpu:0"}))
    for number, devices in enumerate(DEVICES):
        device_map = f',device_map="{folder / "map.json"}"' if "," in devices else ""
        pipeline = FAST_PIPELINE.replace("join=never", f"join=never{device_map}")
        arguments = ("--devices", devices, *SHAPE, "--pipeline", pipeline)
        compiled = run("compile", folder / "model.onnx", "-o", folder / f"bundle{number}", *arguments)
        assert compiled.code == 0, compiled.err
    return folder


@pytest.fixture(params=range(len(DEVICES)), ids=DEVICES)
def bundle(request, folder) -> Path:
    return folder / f"bundle{request.param}"


def test_devices_finds_it_and_says_what_it_takes():
    (found,) = only_json(run("devices", "--json"))["accelerators"]
    assert (found["id"], found["provider"], found["problem"]) == (GGML, "ggml", None)
    assert (found["package"], found["version"]) == (
        os.environ["ONNXPLACE_PROVIDER_LIBRARIES"].partition("=")[2],
        "0.2.0",
    )
    assert {"elementwise operators", "matrix products"} <= set(found["takes"])
    assert "quantised operators" not in found["takes"]
    (line,) = [line for line in run("devices").out.splitlines() if line.startswith(f"{GGML}: ")]
    assert "takes elementwise operators, matrix products" in line


def test_verify_compares_within_the_precision_of_its_weights(bundle):
    result = run("verify", bundle, "--json")
    found = only_json(result)
    assert (result.code, found["equal"]) == (0, True), result.err
    assert 1e-6 < max(output["max_rel_error"] for output in found["outputs"]) < 2e-3


def test_run_writes_the_outputs(bundle, tmp_path):
    result = run("run", bundle, "--outputs", tmp_path / "outputs.npz", "--json")
    assert result.code == 0, result.err
    assert only_json(result)["outputs"]["y"]["shape"] == [4, 64]
    assert np.isfinite(np.load(tmp_path / "outputs.npz")["y"]).all()


def test_bench_measures_both(bundle):
    result = run("bench", bundle, "--no-memory", "--repeat", "2", "--json")
    assert result.code == 0, result.err
    assert only_json(result)["bundle"]["median_seconds"] > 0


def test_a_graph_that_it_refuses_for_one_operator_is_taken_in_part(tmp_path):
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[4, 8] x) => (float[4, 8] y) <float s = {0.02}, uint8 z = {128}> {
        [first] a = Relu(x) [second] t = Tanh(a) [third] b = Relu(t) [quantise] c = QuantizeLinear(b, s, z)
        [restore] d = DequantizeLinear(c, s, z) [last] y = Relu(d) }"""
    onnx.save(parser.parse_model(text), tmp_path / "model.onnx")
    costs = tmp_path / "costs.json"
    arguments = ("--devices", f"cpu:0,{GGML}", *QUICK, "--save-costs", costs, "--json")
    compiled = run("compile", tmp_path / "model.onnx", "-o", tmp_path / "bundle", *arguments)
    assert compiled.code == 0, compiled.err
    nodes = json.loads(costs.read_text())["nodes"]
    refused = {name for name, node in nodes.items() if "refused" in node["seconds"].values()}
    assert {"quantise", "restore"} <= refused
    assert not {"first", "second"} & refused
    assert run("verify", tmp_path / "bundle").code == 0


def test_plan_measures_it(folder):
    result = run("plan", folder / "model.onnx", "--devices", f"cpu:0,{GGML}", *SHAPE, "--effort", "low", "--json")
    assert result.code == 0, result.err
    only_json(result)


def test_doctor_checks_it(tmp_path):
    output = tmp_path / "report.json"
    result = run("doctor", "--devices", GGML, "--seconds", "15", "--output", output)
    assert result.code in (0, 1), result.err
    statuses = {item["check"]: item["status"] for item in json.loads(output.read_text())["checks"]}
    assert statuses["open"] == "ok", result.out
