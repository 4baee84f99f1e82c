"""Explanations of devices: the steps are simulated, groups move together, and memory is looked at."""

from __future__ import annotations

import pytest
from onnx import ModelProto, parser

from onnxplace.driver.candidates import Candidate, Profiled, Strategy, predict
from onnxplace.driver.explaining import explain_subjects, find_subjects
from onnxplace.errors import UsageError
from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.model import Model
from onnxplace.pipeline.pipeline import Pipeline, make_pass
from onnxplace.problem import device_seconds
from onnxplace.simulation.simulator import simulate
from onnxplace.state import State
from onnxplace.target.target import Device, Target
from tests.support.chains import mlp

# Two towers, which two devices share; the nodes that read `w` may be kept together.
TOWERS = """
<ir_version: 8, opset_import: ["": 18]>
g (float[64, 64] x, float[64, 64] z) => (y) <float[64, 64] w = {WEIGHT}>
{
    [left] a = MatMul(x, w)
    [left_act] b = Relu(a)
    [right] c = MatMul(z, w)
    [right_act] d = Tanh(c)
    [sum] y = Add(b, d)
}
""".replace("WEIGHT", ", ".join("0.5" for _ in range(64 * 64)))


def build(proto: ModelProto, memory_bytes: int = 1 << 30, options: str = "join=never") -> tuple[State, Candidate]:
    """Return a profiled model, and the placement of whole operators on two devices."""
    target = Target((Device("cpu:0", memory_bytes), Device("cpu:1", memory_bytes)))
    front = Pipeline.parse("optimize,profile{estimate=true}").passes
    state, _ = Pipeline(front).run(State(target).with_facts(bind(load(proto), {}, {})))
    passes = Pipeline.parse(f"coplace{{{options}}},fuse,m-etf,split").passes
    return state, predict(Strategy("placed", "placed", passes), Profiled(front, state, passes, make_pass("emit")))


def simulate_moved(placed: Candidate, names: list[str]):
    """Return the step with nodes on the other one of two devices."""
    state = placed.state
    device = state[Placement].device.copy()
    device[[state[Profile].graph.names.index(name) for name in names]] ^= 1
    seconds = device_seconds(state[Profile], state.target)
    return simulate(state[Profile].graph, seconds, state.target, device, state[Schedule].order)


def test_steps_on_other_devices_are_simulated_and_the_kept_one_is_the_schedule_itself():
    state, placed = build(parser.parse_model(TOWERS))
    (explanation,) = explain_subjects(state, find_subjects(state[Model], ["right"]), [placed])
    kept, other = explanation.devices
    assert [kept.is_kept, other.is_kept] == [True, False]
    assert kept.step_seconds == pytest.approx(placed.state[Schedule].simulation.makespan_seconds)
    moved = simulate_moved(placed, ["right"])
    assert (other.step_seconds, other.transfers) == (moved.makespan_seconds, len(moved.transfers))
    assert other.transfer_bytes == int(state[Profile].graph.value_bytes[moved.transfers.value].sum())
    assert (explanation.together, explanation.reason, explanation.layouts) == (1, "", ())


def test_nodes_that_must_be_together_move_together():
    state, placed = build(parser.parse_model(TOWERS), options="join=never,colocate=left|right")
    (explanation,) = explain_subjects(state, find_subjects(state[Model], ["w"]), [placed])
    assert (explanation.node, explanation.together) == ("left", 2)
    assert explanation.reason
    assert explanation.devices[1].step_seconds == simulate_moved(placed, ["left", "right"]).makespan_seconds


def test_a_device_without_the_memory_is_named():
    state, placed = build(mlp(layers=2, rows=8), 5 << 20)  # 4 MiB of weights in each layer
    (explanation,) = explain_subjects(state, find_subjects(state[Model], ["layer0_up"]), [placed])
    kept, other = explanation.devices
    assert kept.problem == ""
    assert other.problem.startswith(f"{other.device} lacks ")


def test_names_are_those_of_nodes_first_then_of_values():
    state, _ = build(parser.parse_model(TOWERS))
    subjects = find_subjects(state[Model], ["left", "b", "z", "y"])
    names = [node.name for node in state[Model].nodes]
    assert [(names[item.node], item.value) for item in subjects] == [
        ("left", ""),
        ("left_act", "b"),
        ("right", "z"),
        ("sum", "y"),
    ]
    with pytest.raises(UsageError, match="did you mean 'left_act'"):
        find_subjects(state[Model], ["left", "left-act"])
    assert explain_subjects(state, (), []) == ()
