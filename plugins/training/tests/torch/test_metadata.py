"""Names and metadata of exported steps, and steps compiled for two devices."""

from collections import Counter

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; .ci/training has it")

import onnxplace
from onnxplace.model_metadata import TRAINING_KEY, read_training_step
from onnxplace_training import export_training_step
from plugins.training.tests.support import torch_models
from plugins.training.tests.support.torch_models import OPTIMIZERS
from plugins.training.tests.support.torch_steps import PlainTrainer


def export(case, optimizer="adamw", **options):
    return export_training_step(
        case.module, case.loss, OPTIMIZERS[optimizer](case.module.parameters()), case.example(), **options
    )


def read_node(node):
    return {entry.key.removeprefix("onnxplace."): entry.value for entry in node.metadata_props}


@pytest.fixture(scope="module")
def gpt():
    return export(torch_models.gpt(layers=2))


def test_the_record_names_all_states(gpt):
    onnx.checker.check_model(gpt, full_check=True)
    step = read_training_step({p.key: p.value for p in gpt.metadata_props}, "step")
    assert step.loss == "loss"
    assert step.learning_rate == "learning_rate"
    assert (step.step, step.seed, step.metrics) == ("step", "", ("accuracy",))
    assert step.inference.inputs == ("tokens",)
    assert step.inference.outputs == ("output",)
    names = {parameter.name: parameter for parameter in step.parameters}
    assert "head.weight" not in names  # tied to the embedding
    weight = names["layers.0.up.weight"]
    assert weight.output == "layers.0.up.weight.new"
    assert weight.gradient == "layers.0.up.weight.gradient"
    assert [moment.output for moment in weight.moments] == [
        "layers.0.up.weight.exp_avg.new",
        "layers.0.up.weight.exp_avg_sq.new",
    ]
    assert step.optimizer["name"] == "adamw"
    values = {name for node in gpt.graph.node for name in node.output}
    assert {parameter.gradient for parameter in step.parameters} <= values


def test_batches_have_a_symbolic_size_and_states_have_defaults(gpt):
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in gpt.graph.input}
    assert shapes["tokens"] == ["batch", 6]
    without = set(shapes) - {tensor.name for tensor in gpt.graph.initializer}
    assert without == {"tokens", "labels", "step"}


def test_nodes_have_phases_modules_and_owners(gpt):
    nodes = [(node, read_node(node)) for node in gpt.graph.node]
    phases = Counter(entry["phase"] for _, entry in nodes)
    assert set(phases) == {"forward", "backward", "update"}
    modules = {entry.get("module") for _, entry in nodes}
    assert {"embedding", "layers.0.up", "layers.1.attention", "norm", "head"} <= modules
    backward = {entry.get("module") for _, entry in nodes if entry["phase"] == "backward"}
    assert {"layers.0.up", "layers.1.attention", "norm", "head"} <= backward
    producer = {name: entry for node, entry in nodes for name in node.output}
    for name in ("layers.0.up.weight", "layers.1.down.bias", "position"):
        assert producer[f"{name}.gradient"]["parameter"] == name
        assert producer[f"{name}.gradient"]["phase"] == "backward"
        assert producer[f"{name}.new"]["parameter"] == name
        assert producer[f"{name}.new"]["phase"] == "update"
    # The first layers' gradients pass through all others: those nodes work for several parameters.
    assert any(entry["phase"] == "backward" and "parameter" not in entry for _, entry in nodes)


def test_forward_nodes_do_not_depend_on_backward_ones(gpt):
    late = set()
    for node in gpt.graph.node:
        phase = read_node(node)["phase"]
        if phase == "forward":
            assert not late.intersection(node.input)
        else:
            late.update(node.output)


def name_batch(trainer, batch, count):
    """The feeds of a step: its batch, its number and the seed."""
    named = batch if isinstance(batch, dict) else dict(zip(trainer.batch_names, batch))
    feeds = {key: value.numpy() for key, value in named.items() if key in trainer.batch_names}
    return feeds | {key: np.array(value) for key, value in (("step", count), ("seed", 7)) if trainer.record[key]}


@pytest.mark.parametrize("name", ["cnn", "gpt", "two_tower"])
def test_a_bundle_for_two_devices_computes_the_same_steps(name, tmp_path):
    case = torch_models.gpt(dropout=0.1) if name == "gpt" else getattr(torch_models, name)()
    model = export(case)
    trainer = PlainTrainer(model)
    onnx.save(model, tmp_path / "step.onnx")
    bundle = onnxplace.compile(
        tmp_path / "step.onnx",
        tmp_path / "step.bundle",
        devices="cpu:0,cpu:1",
        pipeline="optimize,profile,coplace,fuse,m-topo,split,emit",
        shape={"batch": case.batch},
        inputs=name_batch(trainer, case.draw(case.batch), 1),
        trial=False,
    )
    with onnxplace.InferenceSession(bundle) as session:
        for count in range(1, 6):
            batch = case.draw(case.batch)
            (loss,) = session.run(["loss"], name_batch(trainer, batch, count))
            np.testing.assert_allclose(loss, trainer.step(batch)["loss"], rtol=2e-5)


def test_optimize_keeps_names_and_metadata(gpt, tmp_path):
    from onnxplace.machine.hardware import local_target
    from onnxplace.model.loading import load
    from onnxplace.model.lowering import bind
    from onnxplace.model.model import Model
    from onnxplace.pipeline.pipeline import Pipeline
    from onnxplace.state import State

    onnx.save(gpt, tmp_path / "step.onnx")
    state = State(target=local_target("cpu:0")).with_facts(bind(load(tmp_path / "step.onnx"), {"batch": 4}, {}))
    state, _ = Pipeline.parse("optimize").run(state)
    nodes = state[Model].nodes
    assert len(nodes) > 0.8 * len(gpt.graph.node)
    assert all(read_node(node).get("phase") for node in nodes)
    values = {name for node in nodes for name in node.output}
    step = read_training_step({TRAINING_KEY: gpt.metadata_props[0].value}, "step")
    assert {parameter.gradient for parameter in step.parameters} <= values
