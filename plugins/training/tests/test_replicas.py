"""Data-parallel replicas: the same steps, each parameter owned by one replica, each replica with its own parts."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from pathlib import Path
from random import Random

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxplace.driver.compile import compile_model
from onnxplace.errors import UsageError
from onnxplace.facts import MicroBatches, Placement, Profile, Segments
from onnxplace.model.model import Model
from onnxplace.state import State
from onnxplace_training.microbatch_model import divide_parts
from tests.support.step_checks import assert_bundle_takes_the_same_steps, assert_same_steps, compile_state
from tests.support.training_models import OPTIMIZERS, make_mlp, make_recurrent, make_transformer, make_two_tower

STEPS = {"mlp": make_mlp, "transformer": make_transformer, "two_tower": make_two_tower, "recurrent": make_recurrent}
FRONT = "optimize,profile{estimate=true}"
REST = "coplace{parameters=free,join=never},pipelined"
DEVICES = "cpu:0,cpu:1,cpu:2,cpu:3"


def replicate(
    proto: ModelProto, count: int, replicas: int, devices: int | None = None, rest: str = f"{REST},split"
) -> State:
    names = DEVICES.split(",")[: devices or replicas]
    text = f"{FRONT},microbatch{{count={count},replicas={replicas}}},{rest}"
    return compile_state(proto, text, ",".join(names))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.sampled(4)
def test_replicas_take_the_same_steps_as_the_undivided_model(name: str, replicas: int) -> None:
    proto = STEPS[name]("adamw", batch=6)
    assert_same_steps(proto, replicate(proto, replicas, replicas)[Model], unsure=("k.bias",))


def test_each_replica_computes_its_parts_and_each_parameter_has_one_owner() -> None:
    state = replicate(make_mlp("adamw", widths=(8, 16, 16, 16, 4), batch=8), 4, 2)
    model, facts, device = state[Model], state[MicroBatches], state[Placement].device
    assert (facts.replica[facts.part >= 0] == facts.part[facts.part >= 0] // 2).all()
    assert (device == facts.replica).all()
    producer = {name: index for index, node in enumerate(model.nodes) for name in node.output}
    owners = set()
    for name, output in model.states.items():
        owner = device[producer[model.sources.get(output, output)]]
        owners.add(int(owner))
        readers = [index for index, reads in enumerate(model.reads) if name in reads]
        assert (device[readers] == owner).all()
        base = name.removesuffix(".exp_avg").removesuffix(".exp_avg_sq")
        assert device[producer[f"{base}.new"]] == owner
    assert owners == {0, 1}


def test_parameters_and_gradients_cross_once_and_activations_never() -> None:
    state = replicate(make_mlp("sgd", widths=(16, 32, 32, 8), batch=32), 2, 2)
    graph, device = state[Profile].graph, state[Placement].device
    sizes = sum(int(np.prod(shape)) * 4 for shape in ((16, 32), (32,), (32, 32), (32,), (32, 8), (8,)))
    crossing = {
        value
        for value in np.flatnonzero(graph.producer >= 0).tolist()
        if (device[graph.readers[value]] != device[graph.producer[value]]).any()
    }
    total = sum(int(graph.value_bytes[value]) for value in crossing)
    # Of each parameter, its value or its gradient goes each way; besides, a few scalars.
    assert 2 * sizes <= total <= 2 * sizes + 64


def test_replicas_of_stages_have_devices_of_their_own() -> None:
    state = replicate(make_transformer("sgd", layers=4, batch=8), 8, 2, devices=4)
    facts, device = state[MicroBatches], state[Placement].device
    assert (device // 2 == facts.replica).all()
    assert set(device.tolist()) == {0, 1, 2, 3}
    for source in range(int(facts.source.max()) + 1):  # the same stages in both
        assert len({int(item) % 2 for item in device[(facts.source == source) & (facts.part >= 0)]}) <= 1


def test_replicas_halve_the_step_and_need_few_segments() -> None:
    proto = make_mlp("sgd", widths=(256, 512, 512, 256), batch=512)
    state = replicate(proto, 2, 2)
    (before,) = compile_state(proto, FRONT)[Profile].seconds.values()
    assert state[Segments].simulation.makespan_seconds < 0.7 * before.sum()
    assert len(state[Segments].segments) < len(state[Profile].graph) / 4


@pytest.mark.parametrize(
    ("count", "speeds", "expected"),
    [
        (2, [1, 1], [0, 1]),
        (5, [1, 1], [0, 0, 0, 1, 1]),
        (4, [3, 1], [0, 0, 0, 1]),
        (3, [100, 1], [0, 0, 1]),
        (3, [1, 1, 1], [0, 1, 2]),
    ],
)
def test_parts_are_divided_by_speed(count: int, speeds: list[float], expected: list[int]) -> None:
    assert divide_parts(count, speeds).tolist() == expected


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.sampled(6)
def test_random_steps_on_random_replicas_are_right(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    replicas, stages = random.choice(((2, 1), (3, 1), (2, 2)))
    proto = STEPS[random.choice(sorted(STEPS))](random.choice(OPTIMIZERS), batch=random.choice((4, 5, 7)))
    count = random.choice((replicas, replicas + 1))
    text = f"{FRONT},microbatch{{count={count},replicas={replicas}}},{REST},split,emit"
    devices = ",".join(DEVICES.split(",")[: replicas * stages])
    compiled = compile_model(proto, tmp_path / "bundle", devices=devices, pipeline=text)
    assert_bundle_takes_the_same_steps(proto, compiled.bundle)


@pytest.mark.parametrize(
    ("count", "replicas", "devices", "message"),
    [
        (2, 3, 3, "expected at least one micro-batch for each of 3 replicas, got 2"),
        (4, 2, 3, "expected a number of devices that 2 replicas can share evenly, got 3"),
    ],
)
def test_replicas_that_cannot_be_filled_are_refused(count: int, replicas: int, devices: int, message: str) -> None:
    with pytest.raises(UsageError, match=f"U075.*{message}"):
        replicate(make_mlp("sgd", batch=8), count, replicas, devices)


def test_the_command_refuses_them_too(run_cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(make_mlp("sgd", batch=8), "step.onnx")
    pipeline = f"{FRONT},microbatch{{count=4,replicas=2}},{REST},split,emit"
    ran = run_cli("compile", "step.onnx", "--devices", "cpu:0,cpu:1,cpu:2", "--pipeline", pipeline)
    assert ran.code == 2
    assert "error[U075]" in ran.err
