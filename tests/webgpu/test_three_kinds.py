"""One bundle for three kinds of devices: a CPU, a GPU by WebGPU, and the NPU that QNN's library simulates."""

import json
from importlib.util import find_spec

import numpy as np
import onnx
import pytest

import models
import onnxplace
from tests.support.commands import only_json, run_unsplit
from tests.support.fault_checks import HUNG_SECONDS
from tests.support.npu_models import NPU, fixed_branches, quantised_mobilenet

pytestmark = pytest.mark.skipif(find_spec("onnxruntime_qnn") is None, reason="the NPU's simulator is not installed")

PLACES = {"left|relu": NPU, "right|tanh": "webgpu:0", ".*": "cpu:0"}


@pytest.fixture
def bundle_path(run_cli, tmp_path):
    (tmp_path / "model.onnx").write_bytes(fixed_branches().SerializeToString())
    (tmp_path / "map.json").write_text(json.dumps(PLACES))
    arguments = ("--devices", "cpu:0,webgpu:0,npu:0", "--device-map", tmp_path / "map.json")
    result = run_cli("compile", tmp_path / "model.onnx", "-o", tmp_path / "bundle", *arguments)
    assert result.code == 0, result.err
    segments = onnxplace.load(tmp_path / "bundle").manifest.segments
    assert {segment.device for segment in segments} == set(PLACES.values())
    return tmp_path / "bundle"


def test_the_bundle_is_equal_to_the_whole_model(run_cli, bundle_path):
    result = run_cli("verify", bundle_path, "--json")
    assert (result.code, only_json(result)["equal"]) == (0, True), result.err


def test_each_of_many_requests_in_flight_gets_its_own_results(bundle_path):
    feeds = [{"x": np.random.default_rng(seed).standard_normal((4, 64)).astype(np.float32)} for seed in range(12)]
    with onnxplace.InferenceSession(bundle_path, max_in_flight=4) as session:
        results = [future.result(HUNG_SECONDS) for future in [session.submit(item) for item in feeds]]
    for item, result in zip(feeds, results):
        np.testing.assert_allclose(result.outputs["y"], run_unsplit(item), rtol=1e-3, atol=1e-4)


def place_quantised() -> tuple[onnx.ModelProto, dict[str, str]]:
    return quantised_mobilenet(), {"(stem|image).*": "cpu:0", "(flat|head|logits|pool).*": "webgpu:0", ".*": NPU}


def place_transformer() -> tuple[onnx.ModelProto, dict[str, str]]:
    model = models.build("transformer", layers=2, hidden=64, vocab=100, positions=32)
    refused = "|".join(node.name for node in model.graph.node if node.op_type in ("Gather", "Where", "Shape", "Erf"))
    return model, {refused: "cpu:0", ".*1.*": NPU, ".*": "webgpu:0"}


@pytest.mark.parametrize("place", [place_quantised, place_transformer])
def test_whole_models_agree_within_the_precision_of_the_devices(run_cli, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    model, places = place()
    onnx.save(model, "model.onnx")
    (tmp_path / "map.json").write_text(json.dumps(places))
    shape = () if place is place_quantised else ("--shape", "batch=1,seq=16")
    pipeline = (
        "optimize{fixed_sizes=true},profile{estimate=true},coplace{device_map=map.json,join=never},m-etf,split,emit"
    )
    result = run_cli(
        "compile", "model.onnx", "-o", "b", "--devices", "cpu:0,webgpu:0,npu:0", *shape, "--pipeline", pipeline
    )
    assert result.code == 0, result.err
    assert {segment.device for segment in onnxplace.load("b").manifest.segments} == {"cpu:0", "webgpu:0", NPU}
    verified = run_cli("verify", "b", "--json")
    assert (verified.code, only_json(verified)["equal"]) == (0, True), verified.out


def test_the_machine_has_both_accelerators(run_cli):
    listed = only_json(run_cli("devices", "--json"))["accelerators"]
    assert {item["id"]: item["problem"] for item in listed} == {"webgpu:0": None, NPU: None}
