"""Trained parameters come back into modules of torch, and the examples of training run."""

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra [torch]")

import onnxplace
from onnxplace.errors import UsageError
from onnxplace_training import Trainer, export_training_step

ROOT = Path(__file__).parents[4]
PIPELINE = "optimize,profile{estimate=true},coplace{join=never},m-topo,split,emit"


class Tied(torch.nn.Module):
    """Tied weights, running statistics and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(6)
        self.last = torch.nn.Linear(6, 3)
        self.last.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.second(torch.tanh(self.first(x))))))


@pytest.fixture
def case(tmp_path):
    torch.manual_seed(0)
    module = Tied()
    optimizer = torch.optim.SGD([item for item in module.parameters() if item.requires_grad], lr=0.1)
    batch = {"x": torch.randn(8, 6), "target": torch.randn(8, 3)}

    def compute_loss(module, x, target):
        return ((module(x) - target) ** 2).mean()

    step = export_training_step(module, compute_loss, optimizer, batch)
    bundle = onnxplace.compile(
        step, tmp_path / "step.bundle", devices="cpu:0,cpu:1", shape={"batch": 8}, pipeline=PIPELINE, trial=False
    )
    return module, optimizer, compute_loss, batch, bundle


def test_trained_parameters_and_statistics_come_back_into_a_module(case, tmp_path):
    module, optimizer, compute_loss, batch, bundle = case
    other = copy.deepcopy(module)
    with Trainer(bundle) as trainer:
        losses = [trainer.step(batch).loss for _ in range(5)]
        trainer.save(tmp_path / "c.safetensors")
        trainer.load(tmp_path / "c.safetensors")
        trainer.load_into(other)  # also from a file, whose arrays are read-only
    expected = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = compute_loss(module, **batch)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert other.second.weight is other.first.weight
    for name, value in module.state_dict().items():
        np.testing.assert_allclose(other.state_dict()[name].numpy(), value.numpy(), rtol=1e-3, atol=1e-6, err_msg=name)


def test_a_module_of_another_kind_is_refused_and_stays_as_it_is(case):
    *_, bundle = case
    with Trainer(bundle) as trainer:
        with pytest.raises(UsageError, match=r"L041.*expected a torch.nn.Module, got int"):
            trainer.load_into(3)
        with pytest.raises(UsageError, match=r"L041.*the module has no"):
            trainer.load_into(torch.nn.Linear(6, 6))
        other = Tied()
        other.norm = torch.nn.BatchNorm1d(7)
        before = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(UsageError, match=r"L041.*has the shape \[7\] in the module, expected \[6\]"):
            trainer.load_into(other)
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_a_step_with_statistics_of_its_batch_is_not_exported_for_inference(case, tmp_path):
    *_, bundle = case
    with (
        Trainer(bundle) as trainer,
        pytest.raises(UsageError, match=r"L040.*it normalises by statistics of its batch") as caught,
    ):
        trainer.export(tmp_path / "model.onnx")
    assert "load_into" in caught.value.hint


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_cnn", "train_gpt"])
def test_the_examples_train_as_torch_does(name, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra [train]")
    command = [sys.executable, ROOT / "examples" / f"{name}.py", "--steps", "6", "--plot", tmp_path / "losses.png"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert "largest relative difference" in result.stdout
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
