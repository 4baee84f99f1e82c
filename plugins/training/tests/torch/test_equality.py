"""Exported steps compute what torch computes: models and optimisers, over many steps."""

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed; .ci/training has it")

from plugins.training.tests.support import torch_models
from plugins.training.tests.support.torch_models import OPTIMIZERS
from plugins.training.tests.support.torch_steps import compare_training

MODELS = ("mlp", "cnn", "gpt", "two_tower", "lstm")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_parameters_are_those_of_torch(name, optimizer):
    # Max pooling: docs/training.md, "What to expect of equality".
    compare_training(getattr(torch_models, name)(), optimizer, steps=50, follows=name == "cnn").check()
