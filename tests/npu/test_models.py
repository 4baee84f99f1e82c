"""Whole models on a CPU and an NPU, with costs as on real hardware: nodes on each, and results within its precision."""

import json
from pathlib import Path

import onnx
import pytest

import models
import onnxplace
from tests.support.commands import only_json
from tests.support.npu_models import NPU, quantised_mobilenet, scale_costs

QUICK = ("--devices", f"cpu:0,{NPU}", "--fixed-sizes", "--no-trial", "--placer", "auto{seconds=0.5}")


def transformer() -> onnx.ModelProto:
    return models.build("transformer", layers=2, hidden=64, vocab=100, positions=32)


@pytest.mark.slow
@pytest.mark.parametrize(("build", "shape"), [(quantised_mobilenet, ()), (transformer, ("--shape", "batch=1,seq=16"))])
def test_a_model_is_placed_on_both_and_agrees_within_the_npu_s_precision(run_cli, tmp_path, monkeypatch, build, shape):
    monkeypatch.chdir(tmp_path)
    onnx.save(build(), "model.onnx")
    measured = run_cli("compile", "model.onnx", *shape, *QUICK, "-o", "measured", "--save-costs", "costs.json")
    assert measured.code == 0, measured.err
    scale_costs(Path("costs.json"))
    if build is quantised_mobilenet:  # which the NPU takes whole, so that nothing is left for the CPU
        Path("map.json").write_text(json.dumps({"stem.*": "cpu:0"}))
        shape = ("--device-map", "map.json")
    placed = only_json(run_cli("compile", "model.onnx", *shape, *QUICK, "-o", "b", "--costs", "costs.json", "--json"))
    assert all(device["nodes"] > 0 for device in placed["devices"]), placed["devices"]
    assert {segment.device for segment in onnxplace.load("b").manifest.segments} == {"cpu:0", NPU}
    verified = run_cli("verify", "b", "--json")
    assert (verified.code, only_json(verified)["equal"]) == (0, True), verified.err
