"""Export a training step of a PyTorch module as one ONNX model: forward, backward and the optimiser's update."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from onnxplace.errors import UsageError, format_names, format_value
from onnxplace_training.torch.assembly import StepAssembly, short
from onnxplace_training.torch.optimizers import plan_optimizer
from onnxplace_training.torch.step_trace import Problem, StepModule, trace_step
from onnxplace_training.torch.translation import ONNX_TYPES

if TYPE_CHECKING:
    from onnx import ModelProto


# ------------------------------------------------------------------------------------------ checks of what a user gives


WHERE = "export_training_step"
# Inputs of a step that are not part of the batch.
RESERVED = ("learning_rate", "step", "seed", "loss", "gradient_norm")


def read_example(module: nn.Module, example: Any) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the tensors of a batch by name, and whether the last one is the target of a criterion.

    Raises:
        UsageError: It is not a mapping or sequence of tensors of types that ONNX Runtime has.
    """
    is_criterion = not isinstance(example, Mapping)
    if is_criterion:
        if not isinstance(example, Sequence) or isinstance(example, str) or len(example) < 2:
            message = f"expected a mapping from names to tensors, or (inputs, ..., target), got {format_value(example)}"
            raise UsageError("L010", message, where=f"{WHERE}: example", hint="for example (images, labels)")
        example = dict(zip(name_inputs(module, len(example)), example))
    batch = {str(name): as_tensor(str(name), value) for name, value in example.items()}
    clash = [name for name in batch if name in RESERVED or name.endswith((".new", ".gradient"))]
    if clash:
        message = f"inputs of the batch cannot have the names {format_names(clash)}, which the step uses itself"
        raise UsageError("L010", message, where=f"{WHERE}: example", hint="rename them in the mapping")
    return batch, is_criterion


def name_inputs(module: nn.Module, count: int) -> list[str]:
    """Return names for the inputs of a criterion's batch: the parameters of `forward`, then `target`."""
    parameters = inspect.signature(module.forward).parameters.values()
    names = [item.name for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    names = [f"{name}_input" if name in (*RESERVED, "target") else name for name in names]
    names += [f"input_{index}" for index in range(len(names), count - 1)]
    return [*names[: count - 1], "target"]


def as_tensor(name: str, value: Any) -> torch.Tensor:
    """Return an input of the batch as tensor."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        message = f"expected a tensor for {name!r}, got {type(value).__name__}"
        raise UsageError("L010", message, where=f"{WHERE}: example", hint="give numbers as torch.tensor(number)")
    if value.dtype not in ONNX_TYPES:
        message = f"{name!r} has type {value.dtype}, which ONNX Runtime does not have"
        raise UsageError("L010", message, where=f"{WHERE}: example", hint="use float32 or int64")
    return value


def check_options(gradient_accumulation: Any, loss_scale: Any, clip: Any) -> None:
    """Raise UsageError for options that mean nothing."""
    if not isinstance(gradient_accumulation, int) or gradient_accumulation < 1:
        message = f"expected a whole number of at least 1, got {format_value(gradient_accumulation)}"
        raise UsageError("U005", message, where=f"{WHERE}: gradient_accumulation", hint="it splits the batch")
    for name, value in (("loss_scale", loss_scale), ("clip", clip)):
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            message = f"expected a positive number or None, got {format_value(value)}"
            raise UsageError("U005", message, where=f"{WHERE}: {name}")


def check_batch(batch: Mapping[str, torch.Tensor], parts: int) -> None:
    """Raise UsageError if the batch cannot be split into micro-batches."""
    sizes = [tensor.shape[0] for tensor in batch.values() if tensor.dim()]
    if parts > 1 and (not sizes or sizes[0] % parts or sizes[0] < parts):
        size = f"a batch of {sizes[0]}" if sizes else "no batch axis"
        message = f"the example has {size}, which cannot be split into {parts} equal micro-batches"
        raise UsageError("U005", message, where=f"{WHERE}: gradient_accumulation", hint="use a multiple as batch size")


def check_parameters(trained: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise UsageError for parameters of types in which steps are not exported."""
    wrong = [name for name, tensor in trained.items() if tensor.dtype != torch.float32]
    if wrong:
        dtype = trained[wrong[0]].dtype
        message = f"expected trained parameters in float32, got {dtype} for {format_names(wrong)}"
        hint = "module.float() makes them float32; torch.autocast inside the loss computes in half precision"
        raise UsageError("L002", message, where=WHERE, hint=hint)
    unknown = [name for name, tensor in tensors.items() if tensor.dtype not in ONNX_TYPES]
    if unknown:
        dtype = tensors[unknown[0]].dtype
        message = f"{format_names(unknown)} have types that ONNX Runtime does not have, such as {dtype}"
        raise UsageError("L002", message, where=WHERE, hint="use float32 or int64; complex numbers as two tensors")


def check_callables(module: Any, loss: Callable[..., Any]) -> None:
    """Raise UsageError if the module is no module or the loss cannot be called."""
    if not isinstance(module, nn.Module):
        message = f"expected a torch.nn.Module, got {type(module).__name__}"
        raise UsageError("L010", message, where=f"{WHERE}: module", hint="arguments: module, loss, optimizer, example")
    if not callable(loss):
        message = f"expected a function or a module for the loss, got {type(loss).__name__}"
        raise UsageError("L010", message, where=f"{WHERE}: loss", hint="such as torch.nn.CrossEntropyLoss()")


# ----------------------------------------------------------------------------------------------------------- the export


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
    part, scale = take_micro_batch(batch, gradient_accumulation), (loss_scale or 1.0) / gradient_accumulation
    problem = Problem(module, loss, is_criterion, {}, {}, {}, part, dynamic_batch, gradient_seed=scale)
    problem = sort_tensors(problem, optimizer)
    check_parameters(problem.trained, {**problem.frozen, **problem.buffers})
    known = {id(tensor): short(name) for name, tensor in {**problem.trained, **problem.frozen}.items()}
    plan = plan_optimizer(optimizer, known)
    note_frozen(problem)
    trace = trace_step(problem)
    note_unused(problem, trace.results.gradients)
    assembly = StepAssembly(problem, trace, plan, batch, gradient_accumulation, loss_scale, clip)
    return assembly.build()


def sort_tensors(problem: Problem, optimizer: torch.optim.Optimizer) -> Problem:
    """Sort the tensors of module and loss into trained, frozen and buffers."""
    whole = StepModule(problem)
    given = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    parameters, buffers = dict(whole.named_parameters()), dict(whole.named_buffers())
    trained = {key: tensor for key, tensor in parameters.items() if tensor.requires_grad and id(tensor) in given}
    names = [short(key) for key in (*parameters, *buffers)]
    if len(set(names)) < len(names):
        hint = "rename the part of the module that is called 'loss'"
        raise UsageError("L010", "module and loss have tensors of equal names", where=WHERE, hint=hint)
    frozen = {key: tensor for key, tensor in parameters.items() if key not in trained}
    return replace(problem, trained=trained, frozen=frozen, buffers=buffers)


def take_micro_batch(batch: Mapping[str, torch.Tensor], parts: int) -> dict[str, torch.Tensor]:
    """Return the first part of a batch."""
    sizes = [tensor.shape[0] for tensor in batch.values() if tensor.dim()]
    return {
        name: tensor[: tensor.shape[0] // parts] if tensor.dim() and tensor.shape[0] == sizes[0] else tensor
        for name, tensor in batch.items()
    }


def note_frozen(problem: Problem) -> None:
    """Warn about parameters that the optimiser does not have, though they could be trained."""
    forgotten = [short(name) for name, tensor in problem.frozen.items() if tensor.requires_grad]
    if forgotten:
        text = f"parameters that the optimiser does not have stay as they are: {format_names(forgotten)}"
        warnings.warn(text, stacklevel=3)


def note_unused(problem: Problem, gradients: Mapping[str, Any]) -> None:
    """Warn about parameters that have no influence on the loss; torch does not update them either."""
    unused = [short(name) for name in problem.trained if gradients[name] is None]
    if len(unused) == len(problem.trained):
        message = "the loss does not depend on any trained parameter"
        raise UsageError("L005", message, where=WHERE, hint="do not detach() what the loss needs")
    if unused:
        text = f"the loss does not depend on these parameters, which stay as they are: {format_names(unused)}"
        warnings.warn(text, stacklevel=3)
