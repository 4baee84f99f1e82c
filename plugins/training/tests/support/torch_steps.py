"""Runs exported training steps in plain ONNX Runtime next to torch, and compares losses and parameters."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnx import ModelProto, numpy_helper

from onnxplace_training import export_training_step
from plugins.training.tests.support.torch_models import OPTIMIZERS, TrainingCase


@dataclass
class PlainTrainer:
    """Runs a step in one session of ONNX Runtime, with the states in numpy."""

    model: ModelProto
    seed: int = 7
    count: int = 0
    record: dict[str, Any] = field(init=False)
    states: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        content = self.model.SerializeToString()
        self.session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        self.record = json.loads(next(p.value for p in self.model.metadata_props if p.key == "onnxplace.training"))
        parameters = self.record["parameters"]
        entries = [*parameters, *(item for p in parameters for item in p["moments"]), *self.record["buffers"]]
        self.inputs = {entry["output"]: entry["input"] for entry in entries}
        initial = {tensor.name: numpy_helper.to_array(tensor) for tensor in self.model.graph.initializer}
        self.states = {name: initial[name] for name in self.inputs.values()}
        self.batch_names = [i.name for i in self.model.graph.input if i.name not in initial and i.name not in SCALARS]

    def step(self, batch: Any, **more: Any) -> dict[str, Any]:
        """Run one step; returns all outputs that are not states."""
        self.count += 1
        named = batch if isinstance(batch, Mapping) else dict(zip(self.batch_names, batch))
        feeds = {name: np.asarray(value) for name, value in named.items() if name in self.batch_names}
        if self.record["step"]:
            feeds["step"] = np.array(self.count)
        if self.record["seed"]:
            feeds["seed"] = np.array(self.seed)
        feeds |= {name: np.array(value, dtype=np.float32) for name, value in more.items()}
        names = [output.name for output in self.session.get_outputs()]
        results = dict(zip(names, self.session.run(names, {**feeds, **self.states})))
        self.states = {name: results[output] for output, name in self.inputs.items()}
        return {name: value for name, value in results.items() if name not in self.inputs}


SCALARS = ("learning_rate", "step", "seed")


@dataclass(frozen=True)
class Difference:
    """The largest relative differences of a training from torch's."""

    loss: float
    parameters: float
    worst: str

    def check(self) -> None:
        """Assert the promise: losses within 1e-4, parameters within 1e-3."""
        assert self.loss < 1e-4, self
        assert self.parameters < 1e-3, self


def compute_torch_step(
    case: TrainingCase, optimizer: torch.optim.Optimizer, batch: Any, *, parts: int = 1, clip: float | None = None
) -> float:
    """Do one step in torch; returns the mean loss of its micro-batches."""
    optimizer.zero_grad()
    total = 0.0
    for index in range(parts):
        if isinstance(batch, Mapping):
            loss = case.loss(case.module, **{k: v.chunk(parts)[index] if v.dim() else v for k, v in batch.items()})
        else:
            *arguments, target = (item.chunk(parts)[index] for item in batch)
            loss = case.loss(case.module(*arguments), target)
        loss = loss[0] if isinstance(loss, tuple) else loss
        (loss / parts).backward()
        total += loss.item() / parts
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(case.module.parameters(), clip)
    optimizer.step()
    return total


def compare_training(
    case: TrainingCase,
    optimizer: str | Callable[[Any], torch.optim.Optimizer] = "adamw",
    *,
    steps: int = 50,
    sizes: Sequence[int] = (),
    draws: Sequence[Any] = (),
    follows: bool = False,
    **options: Any,
) -> Difference:
    """Train in ONNX Runtime and in torch on the same batches, and return how far they are apart.

    Args:
        case: what is trained.
        optimizer: a name in `OPTIMIZERS`, or a function of the parameters.
        steps: how many.
        sizes: sizes of batches, in turn; the case's own if empty.
        draws: batches to use in place of drawn ones.
        follows: begin each step with torch's parameters and buffers. Where rounding decides which of two elements is
            the maximum, two runs of their own part.
        **options: of `export_training_step`.
    """
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    torch_optimizer = make(case.module.parameters())
    trainer = PlainTrainer(export_training_step(case.module, case.loss, torch_optimizer, case.example(), **options))
    torch.manual_seed(2)
    loss_difference, differences = 0.0, dict[str, float]()
    for index in range(steps):
        batch = draws[index] if draws else case.draw(sizes[index % len(sizes)] if sizes else case.batch)
        result = float(trainer.step(copy.copy(batch))["loss"])
        expected = compute_torch_step(
            case, torch_optimizer, batch, parts=options.get("gradient_accumulation", 1), clip=options.get("clip")
        )
        loss_difference = max(loss_difference, abs(result - expected) / max(abs(expected), 1e-3))
        if follows or index == steps - 1:
            for name, difference in compare_states(case.module, trainer).items():
                differences[name] = max(difference, differences.get(name, 0.0))
        if follows:
            copy_states(case.module, trainer)
    worst = max(differences, key=lambda name: differences[name])
    return Difference(loss_difference, differences[worst], worst)


def copy_states(module: torch.nn.Module, trainer: PlainTrainer) -> None:
    """Give a trainer the parameters and buffers of a module; moments stay its own."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for entry in (*trainer.record["parameters"], *trainer.record["buffers"]):
        trainer.states[entry["input"]] = tensors[entry["name"]].detach().numpy().copy()


def compare_states(module: torch.nn.Module, trainer: PlainTrainer) -> dict[str, float]:
    """Return the relative difference of each parameter and buffer, by name."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    differences = {}
    for entry in (*trainer.record["parameters"], *trainer.record["buffers"]):
        expected = tensors[entry["name"]].detach().double().numpy()
        error = np.abs(trainer.states[entry["input"]].astype(np.float64) - expected).max()
        differences[entry["name"]] = float(error / max(np.abs(expected).max(), 1e-3))
    return differences
