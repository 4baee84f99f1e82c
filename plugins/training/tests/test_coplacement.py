"""Groups of training steps: what is compared, what is kept, and what the user hears of it."""

import json
import re
from dataclasses import replace

import numpy as np
import onnx
import pytest

import onnxplace
from onnxplace.driver import candidates
from onnxplace.driver.candidates import Candidate, Profiled, Strategy
from onnxplace.driver.choose import decide, make_latency_objective
from onnxplace.driver.compile import compile_model
from onnxplace.errors import InfeasibleError
from onnxplace.facts import Placement, Segments
from onnxplace.model.loading import load
from onnxplace.model.state_binding import bind_states
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target.target import Device, Link, Target
from onnxplace_training.step_strategies import GROUPINGS, choose_cutting, choose_shortest
from tests.support.training_models import (
    RECURRENT,
    ReferenceTrainer,
    draw_batch,
    make_mlp,
    make_transformer,
    make_two_tower,
    remove_metadata,
)


def make_state(proto: onnx.ModelProto, *, bytes_per_second: float = 1e9, memory_bytes: int = 1 << 30) -> State:
    """Return a profiled step on two devices of estimated speed."""
    devices = tuple(
        Device(f"cpu:{index}", memory_bytes, operations_per_second=1e9, memory_bytes_per_second=1e10)
        for index in range(2)
    )
    links = tuple(Link(a.id, b.id, 1e-6, bytes_per_second) for a in devices for b in devices if a is not b)
    state = State(Target(devices, links)).with_facts(bind_states(load(proto), ()))
    return Pipeline.parse("optimize,profile{estimate=true}").run(state)[0]


def place(state: State, placer: str, join: str = "worth") -> Candidate:
    rest = Pipeline.parse(f"coplace{{join={join}}},fuse,{placer},split").passes
    objective = make_latency_objective(whole=GROUPINGS, may_shard=False)
    (kept,) = decide(objective, Profiled((), state, rest, Pipeline.parse("emit").passes[0]))
    return kept


def grouped(name: str, milliseconds: float, sent: int) -> Candidate:
    class Fixed(Candidate):
        step_seconds = milliseconds / 1e3  # type: ignore[assignment]
        sent_bytes = sent  # type: ignore[assignment]

    state = State(Target((Device("cpu:0", 1),)))
    return Fixed(Strategy(name, "placed", ()), Profiled((), state, (), Pipeline.parse("emit").passes[0]), state)


@pytest.mark.parametrize(
    ("steps", "one_device", "kept"),
    [
        ([("a", 10.0, 100), ("b", 10.4, 50), ("c", 12.0, 1)], 20.0, "b"),  # hardly longer, and sends less
        ([("a", 10.0, 100), ("b", 10.6, 50)], 20.0, "a"),  # clearly longer
        ([("a", 10.0, 100), ("b", 10.4, 50)], 10.2, "a"),  # one device would be faster than that
        ([("a", 10.0, 100), ("b", 10.4, 50)], 9.0, "a"),
        ([("a", 10.0, 100), ("b", 10.0, 100)], 20.0, "a"),
    ],
)
def test_the_shortest_step_is_kept_unless_another_sends_less_and_is_hardly_longer(steps, one_device, kept):
    assert choose_shortest([grouped(*step) for step in steps], one_device / 1e3).name == kept


@pytest.mark.parametrize(
    ("steps", "one_device", "kept"),
    [
        ([("a", 10.0, 90), ("b", 12.5, 30), ("c", 12.4, 20), ("d", 12.0, 31)], 20.0, "c"),
        ([("a", 10.0, 90), ("b", 12.6, 30)], 20.0, "a"),  # too much longer
        ([("a", 10.0, 90), ("b", 12.0, 30)], 12.1, "a"),  # hardly shorter than one device
        ([("a", 10.0, 90), ("b", 9.0, 60)], 20.0, "b"),
    ],
)
def test_for_published_placers_a_third_of_the_traffic_counts_more_than_the_step(steps, one_device, kept):
    assert choose_cutting([grouped(*step) for step in steps], one_device / 1e3).name == kept


def test_groups_cut_the_traffic_of_m_etf_and_the_bundle_records_them():
    state = make_state(make_two_tower("adamw", width=256, depth=4, batch=64))
    free, _ = Pipeline.parse("coplace{parameters=free},fuse,m-etf,split").run(state)
    kept = place(state, "m-etf")
    assert 3 * kept.sent_bytes <= replace(kept, state=free).sent_bytes
    alone, _ = Pipeline.parse("single,split").run(state)
    assert kept.step_seconds < replace(kept, state=alone).step_seconds
    (note,) = [note for note in kept.state.diagnostics if note.code == "P046"]
    assert "training step: one device " in note.message
    assert "placed with free nodes " in note.message
    assert ": kept " in note.message
    again, _ = Pipeline.parse(str(kept.pipeline).removesuffix(",emit")).run(state)
    np.testing.assert_array_equal(again[Placement].device, kept.state[Placement].device)


def test_a_step_that_several_devices_would_only_slow_down_stays_on_one():
    state = make_state(make_mlp("adam"), bytes_per_second=1e3)
    placed = place(state, "auto{seconds=0,proposals=300}", "never").state
    assert len(set(placed[Placement].device.tolist())) == 1
    assert len(placed[Segments].segments) == 1


def test_where_the_usual_groups_do_not_fit_nodes_are_free(monkeypatch):
    state = make_state(make_mlp("sgd"))
    real = candidates.predict

    def refuse_usual_groups(strategy, *more):
        if strategy.passes[0].parameters == "together":
            raise InfeasibleError("P002", "too large")
        return real(strategy, *more)

    monkeypatch.setattr(candidates, "predict", refuse_usual_groups)
    kept = place(state, "fit", "never")
    assert "parameters=free" in str(kept.pipeline)
    assert kept.state[Placement].placer == "fit"


# ------------------------------------------------------------------------------------------------- by the command


def test_the_command_says_what_it_recognised(run_cli, tmp_path):
    onnx.save(make_transformer("adam"), tmp_path / "step.onnx")
    result = run_cli(
        *("compile", tmp_path / "step.onnx", "-o", tmp_path / "out", "--devices", "cpu:0,cpu:1", "--placer", "m-etf"),
        "--no-trial",
    )
    assert result.code == 0, result
    assert "training step with the loss 'loss': 24 parameters, 48 moments, 0 buffers, 24 gradients\n" in result.out
    assert re.search(
        r"\n  nodes: \d+ forward, (\d+) backward \(\1 with their forward node\), \d+ update; \d+ of", result.out
    )
    assert "P046" in result.err


def test_states_alone_are_enough_and_json_has_all_counts(run_cli, tmp_path):
    onnx.save(remove_metadata(make_mlp("adamw")), tmp_path / "step.onnx")
    result = run_cli(
        *("compile", tmp_path / "step.onnx", "-o", tmp_path / "out", "--devices", "cpu:0,cpu:1", "--placer", "m-topo"),
        *("--state", "*.new=*", "--no-trial", "--json"),
    )
    assert result.code == 0, result
    training = json.loads(result.out)["training"]
    assert training["loss"] == "loss"
    assert (training["learning_rate"], training["step"]) == ("learning_rate", "step")
    assert training["parameters"][0]["gradient"] == "layers.0.weight.gradient"
    assert [len(item["moments"]) for item in training["parameters"]] == [2] * 6
    nodes = training["nodes"]
    assert nodes["backward"] == nodes["owned_backward"] > 0
    assert nodes["of_one_parameter"] > nodes["update"] / 2
    assert onnxplace.Bundle.open(tmp_path / "out").manifest.training.model_dump(mode="json") == training


def test_a_loss_per_row_is_said_where_only_states_are_given(run_cli, tmp_path):
    model = remove_metadata(make_mlp("sgd"))
    model.graph.output[0].name = "mean_loss"
    for node in model.graph.node:
        node.output[:] = ["mean_loss" if name == "loss" else name for name in node.output]
    model.graph.node.append(onnx.helper.make_node("Expand", ["mean_loss", "rows"], ["loss"], name="per_row"))
    model.graph.initializer.append(onnx.helper.make_tensor("rows", onnx.TensorProto.INT64, [1], [4]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, [4]))
    del model.graph.output[0]
    onnx.save(model, tmp_path / "step.onnx")
    result = run_cli(
        *("compile", tmp_path / "step.onnx", "-o", tmp_path / "out", "--devices", "cpu:0,cpu:1", "--placer", "m-etf"),
        *("--state", "*.new=*", "--no-trial"),
    )
    assert result.code == 0, result
    assert "the model is not taken for a training step: expected the output 'loss' to be a scalar" in result.err
    assert "it has the shape [4]" in result.err
    assert "training step with" not in result.out


def test_a_model_with_states_that_does_not_learn_has_no_training_record(tmp_path):
    compiled = compile_model(
        onnx.parser.parse_model(RECURRENT),
        tmp_path / "out",
        devices="cpu:0,cpu:1",
        state=["hidden_new=hidden", "cell_new=cell"],
        trial=False,
    )
    assert compiled.bundle.manifest.training is None
    assert not [note for note in compiled.diagnostics if note.code == "P046"]


@pytest.mark.parametrize(
    "placer", ["auto{seconds=0.2}", "m-etf", "m-sct", "m-topo", "multilevel{seconds=0.2}", "single"]
)
@pytest.mark.sampled(3)
def test_every_placer_gives_a_step_that_computes_what_the_model_computes(placer, tmp_path):
    proto = make_transformer("adamw", layers=1)
    bundle = compile_model(proto, tmp_path / "out", devices="cpu:0,cpu:1", placer=placer, trial=False).bundle
    reference = ReferenceTrainer(proto)
    initial = dict(reference.states)
    with onnxplace.InferenceSession(bundle) as session:
        for count in range(1, 4):
            feeds = draw_batch(proto, count)
            more = {"step": np.array(count), "learning_rate": np.float32(0.01), **(initial if count == 1 else {})}
            (loss,) = session.run(["loss"], {**feeds, **more})
            assert float(loss) == pytest.approx(reference.step(feeds), rel=1e-5)
