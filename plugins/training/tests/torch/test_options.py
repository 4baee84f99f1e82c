"""Options of the export and of optimisers: micro-batches, clipping, scale, groups, states."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; .ci/training has it")

from torch import nn

from onnxplace_training import export_training_step
from plugins.training.tests.support import torch_models
from plugins.training.tests.support.torch_models import OPTIMIZERS
from plugins.training.tests.support.torch_steps import PlainTrainer, compare_training, compute_torch_step

UPDATES = {
    "dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True, maximize=True),
    "decoupled": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1, decoupled_weight_decay=True),
    "no betas": lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.0, 0.0)),
}


@pytest.mark.parametrize("name", UPDATES)
def test_options_of_optimisers(name):
    compare_training(torch_models.mlp(), UPDATES[name], steps=8).check()


def make_groups(parameters):
    weights = list(parameters)
    decayed, plain = weights[::2], weights[1::2]
    return torch.optim.AdamW(
        [{"params": decayed, "lr": 1e-3, "betas": (0.8, 0.95)}, {"params": plain, "lr": 5e-3, "weight_decay": 0.0}]
    )


def test_groups_of_parameters_have_options_of_their_own():
    compare_training(torch_models.mlp(), make_groups, steps=8).check()


def test_learning_rates_of_groups_stay_in_proportion_to_the_input():
    case = torch_models.mlp(depth=1)
    optimizer = make_groups(case.module.parameters())
    trainer = PlainTrainer(export_training_step(case.module, case.loss, optimizer, case.example()))
    for group in optimizer.param_groups:
        group["lr"] *= 3
    batch = case.draw(8)
    trainer.step(batch, learning_rate=3e-3)
    compute_torch_step(case, optimizer, batch)
    for name, parameter in case.module.named_parameters():
        np.testing.assert_allclose(trainer.states[name], parameter.detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", ["cnn", "gpt"])
def test_micro_batches_are_a_loop_of_backward_passes(model):
    """Also statistics of batch normalisation are those of the loop."""
    case = getattr(torch_models, model)()
    compare_training(case, "adamw", steps=6, gradient_accumulation=2, sizes=(case.batch, case.batch + 2)).check()


def test_a_batch_that_cannot_be_split_equally_fails():
    case = torch_models.mlp()
    optimizer = OPTIMIZERS["sgd"](case.module.parameters())
    model = export_training_step(case.module, case.loss, optimizer, case.example(), gradient_accumulation=4)
    with pytest.raises(Exception, match="reshaped"):
        PlainTrainer(model).step(case.draw(6))


def test_clipping_and_scale():
    case = torch_models.gpt()
    compare_training(case, "adamw", steps=8, clip=0.5, loss_scale=1024.0, gradient_accumulation=2).check()


def test_the_norm_of_gradients_is_a_metric():
    case = torch_models.mlp()
    optimizer = OPTIMIZERS["sgd"](case.module.parameters())
    trainer = PlainTrainer(export_training_step(case.module, case.loss, optimizer, case.example(), clip=0.1))
    batch = case.draw(8)
    result = trainer.step(batch)
    case.loss(case.module(batch[0]), batch[1]).backward()
    norm = torch.nn.utils.clip_grad_norm_(case.module.parameters(), 0.1)
    assert trainer.record["metrics"] == ["gradient_norm"]
    np.testing.assert_allclose(result["gradient_norm"], norm.item(), rtol=1e-5)


def test_metrics_of_the_loss_function_are_outputs():
    case = torch_models.gpt()
    optimizer = OPTIMIZERS["sgd"](case.module.parameters())
    trainer = PlainTrainer(export_training_step(case.module, case.loss, optimizer, case.example()))
    batch = case.draw(4)
    _, metrics = case.loss(case.module, **batch)
    np.testing.assert_allclose(trainer.step(batch)["accuracy"], metrics["accuracy"].item())


def test_fixed_batches_and_batches_of_one():
    compare_training(torch_models.gpt(), "adam", steps=4, dynamic_batch=False).check()
    compare_training(torch_models.gpt(), "adam", steps=4, sizes=(1, 4)).check()


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        # SGD does not count its steps: its first exported one is not the first of its momentum.
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, dampening=0.5),
    ],
)
def test_an_optimiser_that_has_done_steps_continues(make_optimizer):
    case = torch_models.mlp()

    def make(parameters):
        optimizer = make_optimizer(parameters)
        for _ in range(5):
            compute_torch_step(case, optimizer, case.draw(8))
        return optimizer

    compare_training(case, make, steps=6).check()


def test_frozen_parameters_are_constants():
    case = torch_models.mlp()
    case.module[0].weight.requires_grad_(False)
    compare_training(case, "adamw", steps=4).check()


def test_parameters_that_the_optimiser_lacks_are_reported_and_stay():
    case = torch_models.mlp()
    with pytest.warns(UserWarning, match=r"optimiser does not have.*2\.bias"):
        compare_training(case, lambda p: torch.optim.Adam([*p][:3], lr=1e-3), steps=4).check()


def test_parameters_without_influence_are_reported_and_stay():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, value):
            return self.used(value)

    module = Partly()
    case = torch_models.TrainingCase(module, nn.MSELoss(), lambda n: (torch.randn(n, 4), torch.randn(n, 4)), 4)
    with pytest.warns(UserWarning, match=r"does not depend.*unused\.weight"):
        compare_training(case, "adamw", steps=3).check()


def test_parameters_of_the_loss_are_trained_too():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(2.0))

        def forward(self, output, target):
            return nn.functional.cross_entropy(output * self.temperature, target)

    case, loss = torch_models.mlp(), Scaled()
    optimizer = torch.optim.SGD([*case.module.parameters(), *loss.parameters()], lr=0.1)
    trainer = PlainTrainer(export_training_step(case.module, loss, optimizer, case.example()))
    batch = case.draw(8)
    trainer.step(batch)
    loss(case.module(batch[0]), batch[1]).backward()
    optimizer.step()
    np.testing.assert_allclose(trainer.states["loss.temperature"], loss.temperature.item(), rtol=1e-5)


def test_buffers_that_are_assigned_are_states():
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("fixed", torch.ones(4))

        def forward(self, value):
            result = self.layer(value)
            self.mean = 0.9 * self.mean + 0.1 * result.detach().mean(0)
            return (result - self.mean) * self.fixed

    case = torch_models.TrainingCase(Average(), nn.MSELoss(), lambda n: (torch.randn(n, 4), torch.randn(n, 4)), 4)
    compare_training(case, "sgd", steps=4).check()
    optimizer = OPTIMIZERS["sgd"](case.module.parameters())
    model = export_training_step(case.module, case.loss, optimizer, case.example())
    assert [buffer["name"] for buffer in PlainTrainer(model).record["buffers"]] == ["mean"]
