"""`--objective step`: ways to run a training step are compared, and all of them compute what the step computes."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import json
from pathlib import Path
from random import Random

import onnx
import pytest

from onnxplace.driver.compile import compile_model
from onnxplace.driver.plan import plan_model
from onnxplace.errors import UsageError
from tests.support.step_checks import assert_bundle_takes_the_same_steps
from tests.support.training_models import (
    OPTIMIZERS,
    make_mlp,
    make_recurrent,
    make_transformer,
    make_two_tower,
)

FRONT = "optimize,profile{estimate=true}"
PIPELINES = {
    "stages": "microbatch{count=3},coplace{join=never},pipelined",
    "gpipe": "microbatch{count=2},coplace{join=never},pipelined{schedule=gpipe}",
    "interleaved": "microbatch{count=4},coplace{join=never},pipelined{stages=4}",
    "placed parts": "microbatch{count=2},coplace,m-etf",
    "replicas": "microbatch{count=3,replicas=REPLICAS},coplace{parameters=free,join=never},pipelined",
    "in turns": "microbatch{count=3},coplace,m-topo",
    "sharded": "shard{ways=2,exact=true},coplace,m-etf",
    "sharded weights": "shard{ways=2,weights=least},coplace,m-etf",
}


@pytest.mark.parametrize("devices", ["cpu:0,cpu:1", "cpu:0,cpu:1,cpu:2"])
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.sampled(4)
def test_bundles_take_the_same_steps(name: str, devices: str, tmp_path: Path) -> None:
    proto = make_transformer("momentum")
    text = f"{FRONT},{PIPELINES[name]},split,emit".replace("REPLICAS", str(devices.count(",") + 1))
    compiled = compile_model(proto, tmp_path / "bundle", devices=devices, pipeline=text)
    assert_bundle_takes_the_same_steps(proto, compiled.bundle)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.sampled(4)
def test_random_steps_are_right_in_random_pipelines(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    optimizer, batch = random.choice(OPTIMIZERS), random.choice((4, 5, 6))
    widths = [random.choice((4, 8, 16)) for _ in range(random.choice((3, 4, 5)))]
    proto = random.choice(
        (
            lambda: make_mlp(optimizer, widths=widths, batch=batch, seed=seed),
            lambda: make_recurrent(optimizer, steps=random.choice((1, 3)), batch=batch, seed=seed),
            lambda: make_two_tower(optimizer, depth=random.choice((1, 2)), batch=batch, seed=seed),
        )
    )()
    devices = random.choice(("cpu:0,cpu:1", "cpu:0,cpu:1,cpu:2"))
    chosen = PIPELINES[random.choice(sorted(PIPELINES))].replace("REPLICAS", str(devices.count(",") + 1))
    text = f"{FRONT},{chosen},split,emit"
    compiled = compile_model(proto, tmp_path / "bundle", devices=devices, pipeline=text)
    assert_bundle_takes_the_same_steps(proto, compiled.bundle)


def test_the_objective_step_compares_all_kinds_and_keeps_the_best_by_prediction(tmp_path: Path) -> None:
    proto = make_mlp("adamw", widths=(64, 128, 128, 64), batch=32)
    compiled = compile_model(proto, tmp_path / "bundle", devices="cpu:0,cpu:1", objective="step", trial=False)
    (note,) = (item for item in compiled.diagnostics if item.code == "L068")
    for kind in ("one device", "whole operators placed", "sharded 2 ways", "2 replicas", "micro-batches"):
        assert kind in note.message
    assert_bundle_takes_the_same_steps(proto, compiled.bundle)


@pytest.mark.slow
def test_a_trial_compares_kinds_of_strategies(tmp_path: Path) -> None:
    proto = make_transformer("sgd", width=32, tokens=16, batch=8)
    compiled = compile_model(proto, tmp_path / "bundle", devices="cpu:0,cpu:1", objective="step", cache=False)
    codes = {item.code for item in compiled.diagnostics}
    assert "L068" in codes
    assert codes & {"P044", "C004"}  # C004 on a busy machine
    assert_bundle_takes_the_same_steps(proto, compiled.bundle)


def test_other_objectives_suggest_this_one_for_training_steps(tmp_path: Path) -> None:
    compiled = compile_model(make_mlp(), tmp_path / "bundle", devices="cpu:0,cpu:1", trial=False)
    (note,) = (item for item in compiled.diagnostics if item.code == "L075")
    assert "--objective step" in note.hint


def test_one_device_is_compiled_without_a_comparison(tmp_path: Path) -> None:
    compiled = compile_model(make_mlp(), tmp_path / "bundle", devices="cpu:0", objective="step", trial=False)
    assert "L068" not in {item.code for item in compiled.diagnostics}


def test_symbolic_batches_are_split_at_their_size_and_a_note_says_so(tmp_path: Path) -> None:
    proto = make_mlp("sgd", batch=8)
    for value in proto.graph.input[:2]:
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    text = f"{FRONT},shard{{ways=2,exact=true,fixed=true}},coplace,m-etf,split,emit"
    options = {"devices": "cpu:0,cpu:1", "shape": {"batch": 8}, "pipeline": text}
    compiled = compile_model(proto, tmp_path / "bundle", **options)
    assert "L065" in {item.code for item in compiled.diagnostics}
    assert_bundle_takes_the_same_steps(make_mlp("sgd", batch=8), compiled.bundle)


def test_a_model_that_is_no_training_step_is_refused(tmp_path: Path) -> None:
    graph = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[4] x) => (float[4] y) {y = Relu(x)}'
    )
    with pytest.raises(UsageError, match=r"L040.*carries no parameters"):
        compile_model(graph, tmp_path / "bundle", devices="cpu:0,cpu:1", objective="step")


def test_plans_of_training_steps_list_stages_of_micro_batches(tmp_path: Path) -> None:
    path = tmp_path / "step.onnx"
    onnx.save(make_mlp("sgd", widths=(64, 256, 256, 64), batch=64), path)
    plan = plan_model(path, devices="cpu:0,cpu:1", estimate=True)
    names = [item.name for item in plan.strategies]
    assert names[:4] == ["one device", "whole operators placed", "sharded 2 ways", "2 replicas"]
    assert "2 stages x 4 micro-batches (1f1b)" in names
    assert "2 stages x 4 micro-batches (gpipe)" in names or "2 stages x 2 micro-batches (gpipe)" in names
    assert all("microbatch" in item.pipeline for item in plan.strategies if "micro-batches" in item.name)


def test_the_commands_plan_and_compile_a_training_step(
    run_cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(make_mlp("sgd", widths=(64, 256, 64), batch=16), "step.onnx")
    planned = run_cli("plan", "step.onnx", "--devices", "cpu:0,cpu:1", "--estimate")
    assert planned.code == 0, planned.err
    assert "2 stages x 8 micro-batches (1f1b)" in planned.out
    arguments = ("compile", "step.onnx", "--devices", "cpu:0,cpu:1", "--objective", "step", "--no-trial", "--json")
    compiled = run_cli(*arguments)
    assert compiled.code == 0, compiled.err
    assert "L068" in {item["code"] for item in json.loads(compiled.out)["diagnostics"]}
    verified = run_cli("verify", "step.bundle")
    assert verified.code == 0, verified.err


@pytest.mark.parametrize("layers", ["0", "1"])
def test_split_parameters_that_all_devices_read_whole_are_sent_as_copies(layers: str, tmp_path: Path) -> None:
    proto = make_mlp("momentum", widths=(8, 16, 16, 4), batch=4)
    split = {f"layers.{layers}/.*(weight.new|weight.momentum_buffer.new|update.*)": "batch"}
    whole = {".*/forward/.*": "whole", ".*/backward/.*": "whole"}
    (tmp_path / "map.json").write_text(json.dumps({**split, **whole}))
    shard = f"shard{{ways=2,exact=true,map={tmp_path / 'map.json'}}}"
    text = f"{FRONT},{shard},coplace,m-etf,split,emit"
    compiled = compile_model(proto, tmp_path / "bundle", devices="cpu:0,cpu:1", pipeline=text)
    assert compiled.bundle.manifest.sharding is not None
    assert_bundle_takes_the_same_steps(proto, compiled.bundle)
