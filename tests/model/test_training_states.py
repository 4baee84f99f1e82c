"""States that a training step's metadata binds, and metadata that does not fit its model."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from onnxplace.errors import ModelError, UsageError
from onnxplace.model.loading import load
from onnxplace.model.state_binding import bind_states
from onnxplace.model_metadata import TRAINING_KEY
from tests.support.training_models import OPTIMIZERS, make_mlp

Edit = Callable[[dict[str, Any]], None]


def edit_metadata(model: ModelProto, edit: Edit) -> ModelProto:
    """Alter the description of a training step in a model's metadata."""
    record = json.loads(model.metadata_props[0].value)
    edit(record)
    model.metadata_props[0].value = json.dumps(record)
    return model


def write_loss_per_row(model: ModelProto) -> ModelProto:
    """Let a model return a loss for each row of its batch."""
    model.graph.node.append(helper.make_node("Expand", ["loss", "rows"], ["losses"], name="per_row"))
    model.graph.initializer.append(helper.make_tensor("rows", TensorProto.INT64, [1], [4]))
    model.graph.output.append(helper.make_tensor_value_info("losses", TensorProto.FLOAT, [4]))
    return edit_metadata(model, lambda record: record.update(loss="losses"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_in_the_metadata_are_bound_without_being_requested(optimizer):
    proto = make_mlp(optimizer)
    model = bind_states(load(proto), ())
    assert model.training is not None
    assert dict(model.states) == {state.input: state.output for state in model.training.list_states()}
    assert dict(model.states) == {name.removesuffix(".new"): name for name in model.states.values()}
    assert dict(bind_states(load(proto), ["layers.*.new=layers.*"]).states) == dict(model.states)


def test_a_requested_state_that_contradicts_the_metadata_is_refused():
    with pytest.raises(UsageError, match=r"'layers.1.bias' is bound twice: to output 'layers.1.bias.new' and to"):
        bind_states(load(make_mlp("sgd")), ["layers.0.bias.new=layers.1.bias"])


def swap_outputs(record: dict[str, Any]) -> None:
    first, second = record["parameters"][:2]
    first["output"], second["output"] = second["output"], first["output"]


CASES: dict[str, tuple[Edit, str, str]] = {
    "an input": (lambda record: record["parameters"][0].update(input="w"), "L040", "it names input 'w', which"),
    "an output": (lambda record: record["parameters"][0].update(output="w"), "L040", "it names output 'w', which"),
    "a loss": (
        lambda record: record.update(loss="los"),
        "L040",
        "it names output 'los', which the model does not have",
    ),
    "a metric": (lambda record: record.update(metrics=["hits"]), "L040", "it names output 'hits'"),
    "a rate": (lambda record: record.update(learning_rate="lr"), "L040", "it names input 'lr'"),
    "a gradient": (lambda record: record["parameters"][0].update(gradient="dw"), "L040", "it names value 'dw'"),
    "a result": (lambda record: record["inference"].update(outputs=["y"]), "L040", "it names value 'y'"),
    "an input bound twice": (
        lambda record: record["parameters"][1].update(input="layers.0.weight"),
        "S001",
        "input 'layers.0.weight' is bound twice: to output 'layers.0.weight.new' and to 'layers.0.bias.new'",
    ),
    "other shapes": (swap_outputs, "S001", "the output is layers.0.bias.new tensor(float) [16], the input takes"),
}


@pytest.mark.parametrize(("edit", "code", "message"), CASES.values(), ids=CASES)
def test_metadata_that_does_not_fit_the_model_is_refused(edit, code, message):
    model = load(edit_metadata(make_mlp("momentum"), edit))
    with pytest.raises(ModelError) as caught:
        bind_states(model, ())
    assert caught.value.code == code
    assert message in caught.value.message
    assert caught.value.where.startswith(f"mlp, metadata {TRAINING_KEY!r}")
    assert caught.value.hint


def test_a_loss_that_is_not_a_scalar_is_refused_with_its_shape():
    with pytest.raises(ModelError) as caught:
        bind_states(load(write_loss_per_row(make_mlp("sgd"))), ())
    assert str(caught.value).splitlines() == [
        "error[L005] mlp, output 'losses': expected the loss to be a scalar of floating-point type, got losses "
        "tensor(float) [4]",
        "  hint: reduce it to one number, such as its mean over the batch, and export the step again",
    ]


def test_a_loss_of_whole_numbers_is_refused():
    model = make_mlp("sgd")
    model.graph.node.append(helper.make_node("Cast", ["loss"], ["count"], to=TensorProto.INT64))
    model.graph.output.append(helper.make_tensor_value_info("count", TensorProto.INT64, []))
    with pytest.raises(ModelError, match=r"scalar of floating-point type, got count tensor\(int64\) \[\]"):
        bind_states(load(edit_metadata(model, lambda record: record.update(loss="count"))), ())


def test_a_loss_of_unknown_shape_is_accepted():
    model = make_mlp("sgd")
    model.graph.output[0].ClearField("type")
    assert bind_states(load(model), ()).states


def test_profiling_feeds_of_a_training_step_are_those_of_its_first_step():
    model = make_mlp("adamw")
    feeds = bind_states(load(model), ()).feeds()
    initial = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    np.testing.assert_array_equal(feeds["layers.0.weight"], initial["layers.0.weight"])
    assert not feeds["layers.0.weight.exp_avg_sq"].any()
    assert feeds["learning_rate"] == np.float32(1e-2)
    assert feeds["step"] == 1
    assert feeds["x"].std() > 0


# ------------------------------------------------------------------------------------------------------ by the command


@pytest.mark.parametrize(("edit", "code", "message"), CASES.values(), ids=CASES)
def test_the_command_refuses_metadata_that_does_not_fit(run_cli, tmp_path, edit, code, message):
    onnx.save(edit_metadata(make_mlp("momentum"), edit), tmp_path / "step.onnx")
    result = run_cli("compile", tmp_path / "step.onnx", "-o", tmp_path / "out")
    assert result.code == 2
    assert f"error[{code}] mlp, metadata 'onnxplace.training'" in result.err
    assert message in result.err
    assert not (tmp_path / "out").exists()


def test_the_command_refuses_a_loss_per_row_and_metadata_of_a_newer_version(run_cli, tmp_path):
    onnx.save(write_loss_per_row(make_mlp("sgd")), tmp_path / "rows.onnx")
    result = run_cli("compile", tmp_path / "rows.onnx", "-o", tmp_path / "out")
    assert result.code == 2
    assert "error[L005] mlp, output 'losses': expected the loss to be a scalar" in result.err
    onnx.save(edit_metadata(make_mlp("sgd"), lambda record: record.update(version=2)), tmp_path / "newer.onnx")
    result = run_cli("compile", tmp_path / "newer.onnx", "-o", tmp_path / "out")
    assert result.code == 2
    assert "expected version 1 or older of the description of a training step, got 2" in result.err
    assert "hint: update onnxplace, or remove this metadata" in result.err
