"""Export a training step of a PyTorch module as one ONNX model: forward, backward and the optimiser's update."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onnxplace.errors import UsageError, format_names
from onnxplace.torch.assembly import StepAssembly
from onnxplace.torch.checks import (
    WHERE,
    check_batch,
    check_callables,
    check_options,
    check_parameters,
    read_example,
)
from onnxplace.torch.optimizers import plan_optimizer
from onnxplace.torch.step_trace import Problem, StepModule, trace_step

if TYPE_CHECKING:
    from onnx import ModelProto


def export_training_step(
    module: nn.Module,
    loss: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    example: Mapping[str, Any] | Sequence[Any],
    *,
    gradient_accumulation: int = 1,
    loss_scale: float | None = None,
    clip: float | None = None,
    dynamic_batch: bool = True,
) -> ModelProto:
    """Return an ONNX model that does one step of training: it computes what torch computes.

    Inputs are the batch, `learning_rate`, `step` (1 in the first step), `seed` if there is dropout, and the states:
    parameters, moments and buffers, with their values of now as defaults. Outputs are `loss`, metrics, and the new
    value of each state, such as `layers.0.weight.new`. The model's metadata describes all of them.

    >>> step = export_training_step(module, nn.CrossEntropyLoss(), optimizer, (x, y))  # doctest: +SKIP

    Args:
        module: any module; its mode counts: call `module.eval()` on parts whose dropout or statistics shall not change.
        loss: with an example `(x, y)`, a criterion: the step computes `loss(module(x), y)`. With a mapping as example,
            any function: `loss(module, **example)`. It returns a scalar, or `(scalar, {name: metric})`.
        optimizer: `SGD`, `Adam` or `AdamW`; parameters that it does not have are constants of the model. If it has done
            steps, its moments and the number of steps are kept.
        example: a batch. Its values do not matter, its shapes and types do.
        gradient_accumulation: the step splits its batch into so many equal parts, one after the other, and averages
            their losses and gradients: as a loop in torch that calls `backward` for each part and then `step` once.
        loss_scale: the backward pass begins with this number, and gradients are divided by it.
        clip: the largest norm of all gradients together; the norm before is the metric `gradient_norm`.
        dynamic_batch: the first axis of the batch may have any size in each step, not only that of the example.

    Raises:
        UsageError: The loss is no scalar, the optimiser is another one, types or options that cannot be exported.
        ModelError: An operator that ONNX does not have, or code that depends on data; the message names the module.
    """
    check_callables(module, loss)
    check_options(gradient_accumulation, loss_scale, clip)
    batch, is_criterion = read_example(module, example)
    check_batch(batch, gradient_accumulation)
    problem = state_problem(module, loss, optimizer, batch, is_criterion, dynamic_batch=dynamic_batch)
    check_parameters(problem.trained, {**problem.frozen, **problem.buffers})
    scale = (loss_scale or 1.0) / gradient_accumulation
    problem = split_problem(problem, gradient_accumulation, scale)
    known = {id(tensor): user_name(name) for name, tensor in {**problem.trained, **problem.frozen}.items()}
    plan = plan_optimizer(optimizer, known)
    note_frozen(problem)
    trace = trace_step(problem)
    note_unused(problem, trace.results.gradients)
    assembly = StepAssembly(problem, trace, plan, batch, gradient_accumulation, loss_scale, clip)
    return assembly.build()


def user_name(key: str) -> str:
    """Return the name of a tensor for users.

    >>> user_name("module.layers.0.weight"), user_name("loss.temperature")
    ('layers.0.weight', 'loss.temperature')
    """
    return key.removeprefix("module.")


def state_problem(
    module: nn.Module,
    loss: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, torch.Tensor],
    is_criterion: bool,
    *,
    dynamic_batch: bool,
) -> Problem:
    """Sort the tensors of module and loss into trained, frozen and buffers."""
    problem = Problem(module, loss, is_criterion, {}, {}, {}, batch, dynamic_batch, 1.0)
    whole = StepModule(problem)
    given = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    parameters = dict(whole.named_parameters())
    trained = {key: tensor for key, tensor in parameters.items() if tensor.requires_grad and id(tensor) in given}
    names = [user_name(key) for key in (*parameters, *dict(whole.named_buffers()))]
    if len(set(names)) < len(names):
        hint = "rename the part of the module that is called 'loss'"
        raise UsageError("L010", "module and loss have tensors of equal names", where=WHERE, hint=hint)
    frozen = {key: tensor for key, tensor in parameters.items() if key not in trained}
    buffers = dict(whole.named_buffers())
    return Problem(module, loss, is_criterion, trained, frozen, buffers, batch, dynamic_batch, 1.0)


def split_problem(problem: Problem, parts: int, scale: float) -> Problem:
    """Return the problem of one micro-batch, with the scale of its loss."""
    from dataclasses import replace

    sizes = [tensor.shape[0] for tensor in problem.batch.values() if tensor.dim()]
    batch = {
        name: tensor[: tensor.shape[0] // parts] if tensor.dim() and tensor.shape[0] == sizes[0] else tensor
        for name, tensor in problem.batch.items()
    }
    return replace(problem, batch=batch, gradient_seed=scale)


def note_frozen(problem: Problem) -> None:
    """Warn about parameters that the optimiser does not have, though they could be trained."""
    forgotten = [user_name(name) for name, tensor in problem.frozen.items() if tensor.requires_grad]
    if forgotten:
        text = f"parameters that the optimiser does not have stay as they are: {format_names(forgotten)}"
        warnings.warn(text, stacklevel=3)


def note_unused(problem: Problem, gradients: Mapping[str, Any]) -> None:
    """Warn about parameters that have no influence on the loss; torch does not update them either."""
    unused = [user_name(name) for name in problem.trained if gradients[name] is None]
    if len(unused) == len(problem.trained):
        message = "the loss does not depend on any trained parameter"
        raise UsageError("L006", message, where=WHERE, hint="do not detach() what the loss needs")
    if unused:
        text = f"the loss does not depend on these parameters, which stay as they are: {format_names(unused)}"
        warnings.warn(text, stacklevel=3)
