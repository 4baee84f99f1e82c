"""Metadata of training steps, and the training steps that tests build."""

import json

import numpy as np
import onnx
import pytest

from onnxplace.errors import ModelError
from onnxplace.model.loading import load
from onnxplace.model_metadata import TRAINING_KEY, read_training_step
from tests.support.training_models import (
    MOMENTS,
    OPTIMIZERS,
    ReferenceTrainer,
    draw_batch,
    make_mlp,
    make_recurrent,
    make_transformer,
    make_two_tower,
)

MAKERS = {"mlp": make_mlp, "transformer": make_transformer, "two_tower": make_two_tower, "recurrent": make_recurrent}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_gradients_of_built_steps_are_those_of_finite_differences(maker):
    """One step of plain descent moves each parameter by its gradient, which differences of losses confirm."""
    model = maker("sgd")
    onnx.checker.check_model(model, full_check=True)
    feeds, rate, width = draw_batch(model), 1.0, 1e-2
    trainer = ReferenceTrainer(model)
    start = dict(trainer.states)
    trainer.step(feeds, learning_rate=np.array(rate, dtype=np.float32))
    random = np.random.default_rng(1)
    for name, values in start.items():
        direction = random.normal(size=values.shape).astype(np.float32)
        direction /= np.linalg.norm(direction)
        slope = float(((start[name] - trainer.states[name]) / rate * direction).sum())
        losses = []
        for sign in (1, -1):
            probe = ReferenceTrainer(model)
            probe.states = {**start, name: values + sign * width * direction}
            losses.append(probe.step(feeds))
        assert (losses[0] - losses[1]) / (2 * width) == pytest.approx(slope, rel=0.02, abs=2e-4), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_built_steps_reduce_their_loss(optimizer):
    model = make_mlp(optimizer)
    trainer, feeds = ReferenceTrainer(model), draw_batch(model)
    losses = [trainer.step(feeds) for _ in range(60)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_metadata_of_a_model_is_read_with_it(optimizer):
    step = load(make_mlp(optimizer)).training
    assert step is not None
    assert (step.loss, step.learning_rate) == ("loss", "learning_rate")
    assert [item.name for item in step.parameters][:2] == ["layers.0.weight", "layers.0.bias"]
    assert tuple(moment.name for moment in step.parameters[0].moments) == MOMENTS[optimizer]
    names = [item.input for item in step.list_states()]
    assert len(names) == len(set(names)) == 6 * (1 + len(MOMENTS[optimizer]))


def test_a_model_without_metadata_is_no_training_step():
    assert load(make_mlp(has_metadata=False)).training is None
    assert read_training_step({"other": "1"}, "model") is None


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("{", "L040", "it is malformed: Invalid JSON"),
        ('{"loss": "loss"}', "L040", "at 'parameters': Field required"),
        ('{"loss": "loss", "parameters": []}', "L040", "at 'parameters'"),
        ('{"loss": 3, "parameters": [{"name": "w", "input": "w", "output": "n"}]}', "L040", "at 'loss'"),
        (json.dumps({"version": 2, "loss": "l", "parameters": [{"name": "w", "input": "w", "output": "n"}]}), "L040",
         "expected version 1 or older of the description of a training step, got 2"),
        (json.dumps({"version": 2, "losses": ["l"]}), "L040", "got 2"),
    ],
)  # fmt: skip
def test_malformed_metadata_is_refused(text, code, message):
    with pytest.raises(ModelError) as caught:
        read_training_step({TRAINING_KEY: text}, "step.onnx")
    assert caught.value.code == code
    assert message in str(caught.value)
    assert "step.onnx" in str(caught.value)
