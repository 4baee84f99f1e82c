"""What cannot be exported is said: which module, which operator, what to do."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; .ci/training has it")

from torch import nn

from onnxplace.errors import ModelError, UsageError
from onnxplace_training import export_training_step

X, Y = torch.randn(4, 6), torch.randn(4, 6)


class Layer(nn.Module):
    """A linear layer and a function."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function

    def forward(self, value):
        return self.function(self.linear(value))


def export(module=None, loss=None, optimizer=None, example=(X, Y), **options):
    module = nn.Linear(6, 6) if module is None else module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1) if optimizer is None else optimizer
    return export_training_step(module, nn.MSELoss() if loss is None else loss, optimizer, example, **options)


def use_value(value):
    return value * 2 if value.sum() > 0 else value


def write_at_mask(value):
    changed = value.clone()
    changed[value > 0] = value.mean()
    return changed


MODULES = {
    "L002 operator": (lambda x: torch.fft.rfft(x).abs(), "L002", r"module '1'.*_fft_r2c"),
    "L002 gradient": (lambda x: x.prod(-1), "L002", r"module '1'.*cumprod.default in its gradient"),
    "L002 mask": (write_at_mask, "L002", r"module '1'.*index_put.default cannot be.*with a mask.*where\(\)"),
    "L002 distribution": (lambda x: x[:, torch.randperm(6)], "L002", r"module '1'.*randperm.*this distribution"),
    "L003 item": (lambda x: x * x.sum().item(), "L003", r"module '1'"),
    "L003 condition": (use_value, "L003", r"module '1'.*depends on the values"),
    "L003 own mistake": (lambda x: x @ torch.ones(5, 5), "L003", r"module '1'.*code fails"),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_that_cannot_be_written_are_named(name):
    function, code, pattern = MODULES[name]
    module = nn.Sequential(nn.Linear(6, 6), Layer(function))
    with pytest.raises(ModelError, match=pattern) as caught:
        export(module, lambda output, target: output.abs().mean())
    assert caught.value.code == code
    assert caught.value.hint


def test_the_size_of_the_batch_may_not_decide():
    module = Layer(lambda x: x * 2 if x.shape[0] > 5 else x)
    with pytest.raises(UsageError, match="L003") as caught:
        export(module)
    assert "dynamic_batch=False" in caught.value.hint
    export(module, dynamic_batch=False)


REFUSALS = {
    "loss of a batch": ({"loss": nn.MSELoss(reduction="none")}, "L005"),
    "whole loss": ({"loss": lambda o, t: (o > 0).sum()}, "L005"),
    "no tensor": ({"loss": lambda o, t: 3.0}, "L005"),
    "metric": ({"loss": lambda o, t: (o.mean(), {"n": 3})}, "L005"),
    "detached": ({"loss": lambda o, t: o.detach().mean()}, "L005"),
    "no module": ({"module": 3, "optimizer": 3}, "L010"),
    "no loss": ({"loss": 3}, "L010"),
    "no batch": ({"example": X}, "L010"),
    "one tensor": ({"example": (X,)}, "L010"),
    "number": ({"example": (X, 3)}, "L010"),
    "complex": ({"example": (X, Y.to(torch.complex64))}, "L010"),
    "reserved": ({"example": {"step": X}, "loss": lambda m, step: m(step).mean()}, "L010"),
    "no parts": ({"gradient_accumulation": 0}, "U005"),
    "unequal parts": ({"gradient_accumulation": 3}, "U005"),
    "clip": ({"clip": -1.0}, "U005"),
    "scale": ({"loss_scale": float("inf")}, "U005"),
    "half": ({"module": nn.Linear(6, 6).half(), "example": (X.half(), Y.half())}, "L002"),
    "double": ({"module": nn.Linear(6, 6).double(), "example": (X.double(), Y.double())}, "L002"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_arguments_are_refused(name):
    options, code = REFUSALS[name]
    with pytest.raises(UsageError) as caught:
        export(**options)
    assert caught.value.code == code
    assert caught.value.where


def test_other_optimisers_and_foreign_parameters_are_refused():
    module = nn.Linear(6, 6)
    with pytest.raises(UsageError, match=r"L002.*RMSprop"):
        export(module, optimizer=torch.optim.RMSprop(module.parameters()))
    with pytest.raises(UsageError, match=r"L010.*neither the module"):
        export(module, optimizer=torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1))


def test_a_failed_export_leaves_torch_as_it_was():
    attention = nn.functional.scaled_dot_product_attention
    module = nn.Sequential(nn.Linear(6, 6), Layer(use_value))
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    with pytest.raises(ModelError):
        export(module)
    assert nn.functional.scaled_dot_product_attention is attention
    assert torch._C._get_mkldnn_enabled()
    assert not torch.compiler.is_compiling()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert all(torch.equal(before[name], parameter) for name, parameter in module.named_parameters())
