"""Checks of what a user gives to the export, before anything is traced."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from onnxplace.errors import UsageError, format_names, format_value
from onnxplace.torch.values import ONNX_TYPES

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
        raise UsageError("L011", message, where=f"{WHERE}: gradient_accumulation", hint="it splits the batch")
    for name, value in (("loss_scale", loss_scale), ("clip", clip)):
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            message = f"expected a positive number or None, got {format_value(value)}"
            raise UsageError("L011", message, where=f"{WHERE}: {name}")


def check_batch(batch: Mapping[str, torch.Tensor], parts: int) -> None:
    """Raise UsageError if the batch cannot be split into micro-batches."""
    sizes = [tensor.shape[0] for tensor in batch.values() if tensor.dim()]
    if parts > 1 and (not sizes or sizes[0] % parts or sizes[0] < parts):
        size = f"a batch of {sizes[0]}" if sizes else "no batch axis"
        message = f"the example has {size}, which cannot be split into {parts} equal micro-batches"
        raise UsageError("L011", message, where=f"{WHERE}: gradient_accumulation", hint="use a multiple as batch size")


def check_parameters(trained: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise UsageError for parameters of types in which steps are not exported."""
    wrong = [name for name, tensor in trained.items() if tensor.dtype != torch.float32]
    if wrong:
        dtype = trained[wrong[0]].dtype
        message = f"expected trained parameters in float32, got {dtype} for {format_names(wrong)}"
        hint = "module.float() makes them float32; torch.autocast inside the loss computes in half precision"
        raise UsageError("L012", message, where=WHERE, hint=hint)
    unknown = [name for name, tensor in tensors.items() if tensor.dtype not in ONNX_TYPES]
    if unknown:
        message = (
            f"{format_names(unknown)} have types that ONNX Runtime does not have, such as {tensors[unknown[0]].dtype}"
        )
        raise UsageError("L012", message, where=WHERE, hint="use float32 or int64; complex numbers as two tensors")


def check_callables(module: Any, loss: Callable[..., Any]) -> None:
    """Raise UsageError if the module is no module or the loss cannot be called."""
    if not isinstance(module, nn.Module):
        message = f"expected a torch.nn.Module, got {type(module).__name__}"
        raise UsageError("L010", message, where=f"{WHERE}: module", hint="arguments: module, loss, optimizer, example")
    if not callable(loss):
        message = f"expected a function or a module for the loss, got {type(loss).__name__}"
        raise UsageError("L010", message, where=f"{WHERE}: loss", hint="such as torch.nn.CrossEntropyLoss()")
