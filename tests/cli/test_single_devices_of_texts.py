"""A model with texts, on a CPU and a GPU that is fast at everything: the GPU alone is no device for it."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxplace.bundle.bundle import Bundle
from onnxplace.facts import Profile
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.problem import (
    bound_speedup,
    fits_single_device,
    predict_single_device_seconds,
    single_device_seconds,
)
from onnxplace.state import State
from onnxplace.target.target import Device, Target
from tests.cli.test_refused_nodes import TARGET
from tests.support.commands import only_json

MODEL = """<ir_version: 9, opset_import: ["": 18]>
g (string[n] texts, float[n, 64] x) => (float[n, 64] y) <string[1] one = {"1"}, int64[1] axis = {1}> {
    [compare] a = Equal (texts, one)
    [number] b = Cast <to = 1> (a)
    [column] c = Unsqueeze (b, axis)
    [scale] d = Mul (x, c)
    [last] y = Relu (d)
}"""
NODES = ("compare", "number", "column", "scale", "last")
CPU, GPU = Device("cpu:0", 1 << 30), Device("cuda:0", 1 << 30, model="Tiny")
# Of both, the GPU takes less for each node; the CPU has to compute the first one.
SECONDS = {"cpu/1": [0.006, 0.02, 0.02, 0.02, 0.02], "cuda/Tiny": [1e-5, 1e-3, 1e-3, 1e-3, 1e-3]}


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the model, a target of a CPU and a GPU, and their costs."""
    monkeypatch.chdir(tmp_path)
    onnx.save(parser.parse_model(MODEL), "model.onnx")
    Path("target.toml").write_text(TARGET)
    nodes = {
        name: {"seconds": {kind: times[index] for kind, times in SECONDS.items()}} for index, name in enumerate(NODES)
    }
    Path("costs.json").write_text(json.dumps({"format": "onnxplace-costs", "version": 1, "nodes": nodes}))
    return tmp_path


GIVEN = ("model.onnx", "--target", "target.toml", "--costs", "costs.json", "--shape", "n=4")


def profiled(*devices: Device, model: str = MODEL) -> State:
    state = State(Target(devices)).with_facts(bind(load(parser.parse_model(model)), {"n": 4}, {}))
    return Pipeline.parse("profile{estimate=true}").run(state)[0]


def test_a_bundle_is_compared_with_the_cpu_alone(run_cli, setup):
    data = only_json(run_cli("compile", *GIVEN, "--json"))
    manifest = Bundle.open(data["bundle"]).manifest
    assert {item.device for item in manifest.segments} == {"cpu:0", "cuda:0"}
    assert manifest.predicted.single_device_seconds == pytest.approx(0.086, rel=0.01)
    assert manifest.speedup > 5
    assert not [note for note in manifest.diagnostics if note.code == "P011"]
    (tried,) = [note for note in manifest.diagnostics if note.code == "P040"]
    assert "cuda:0 first" in {figure.name for figure in tried.figures}
    assert "cuda:0" not in {figure.name for figure in tried.figures}


def test_what_the_summary_compares_with_is_what_the_placer_single_does(run_cli, setup):
    several, single = (
        only_json(run_cli("compile", *GIVEN, "--json", "--force", *more)) for more in ((), ("--placer", "single"))
    )
    assert single["predicted"]["step_seconds"] == pytest.approx(several["predicted"]["single_device_seconds"])


def test_no_copy_of_the_model_is_proposed_for_the_gpu(run_cli, setup):
    plan = run_cli("plan", *GIVEN)
    assert plan.code == 0
    assert "no other device takes all nodes of a copy" in plan.out


def test_only_a_cpu_is_a_device_for_the_whole_model_where_there_is_one():
    state = profiled(GPU, CPU)
    assert np.isfinite(predict_single_device_seconds(state)).tolist() == [False, True]
    assert fits_single_device(state).tolist() == [False, True]
    assert bound_speedup(state[Profile], state.target) >= 1
    best = single_device_seconds(state[Profile], state.target).min()
    assert best == single_device_seconds(state[Profile], Target((CPU,)))[0]


def test_without_a_cpu_sessions_of_the_gpu_compute_them_on_the_host():
    state = profiled(GPU)
    assert np.isfinite(predict_single_device_seconds(state)).all()
    assert fits_single_device(state).all()


def test_models_of_numbers_alone_have_both_devices():
    numbers = '<ir_version: 9, opset_import: ["": 18]> g (float[n] x) => (float[n] y) { y = Relu (x) }'
    state = profiled(GPU, CPU, model=numbers)
    assert not state[Profile].needs_host
    assert fits_single_device(state).all()


def test_a_rewritten_model_still_needs_its_host():
    state = Pipeline.parse("recompute{limit=1}").run(profiled(GPU, CPU))[0]
    assert state[Profile].needs_host
    graph, nodes = state[Profile].graph, np.arange(len(NODES))
    assert state[Profile].rewritten(graph, nodes, nodes, 0.0, 1.0).needs_host
