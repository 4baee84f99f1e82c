"""Train by onnxplace and by torch on the same batches, and compare: a table, a picture, a resumed run."""

from __future__ import annotations

import copy
import math
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import onnxplace
from onnxplace_training import Trainer, export_training_step

TOLERANCE = 1e-4
"""Of losses, relative: parts of sums are added in another order."""
CHECKED_STEPS = 20
"""Later, training itself enlarges what rounding began."""


@dataclass(frozen=True)
class Task:
    """What is trained, and on which batches."""

    name: str
    module: nn.Module
    loss: Callable[..., torch.Tensor]
    draw: Callable[[int], Mapping[str, torch.Tensor]]
    """Returns the batch of a step."""
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Losses:
    """The losses of each step, and milliseconds per step."""

    onnxplace: list[float]
    torch: list[float]
    onnxplace_ms: float
    torch_ms: float

    def find_difference(self, steps: int | None = None) -> float:
        """Return the largest relative difference of the first steps, by default of all."""
        pairs = list(zip(self.onnxplace, self.torch))[:steps]
        return max((abs(a - b) / max(abs(b), 1e-9) for a, b in pairs), default=0.0)


def read_options(description: str, steps: int) -> Namespace:
    """Return the options that both examples have."""
    parser = ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps, help="number of steps (default: %(default)s)")
    parser.add_argument("--devices", default="cpu:0,cpu:1", help="default: %(default)s")
    parser.add_argument("--plot", type=Path, help="draw both losses (PNG, SVG or PDF)")
    return parser.parse_args()


def train_and_compare(task: Task, options: Namespace) -> nn.Module:
    """Train, print and draw the losses, and return the module with the trained parameters."""
    torch.set_num_threads(1)
    start = copy.deepcopy(task.module)
    optimizer = task.make_optimizer(task.module)
    step = export_training_step(task.module, task.loss, optimizer, task.draw(0))
    with tempfile.TemporaryDirectory() as folder:
        shape = {"batch": len(next(iter(task.draw(0).values())))}
        bundle = onnxplace.compile(step, Path(folder) / "step.bundle", devices=options.devices, shape=shape)
        print_plan(bundle)
        trained = copy.deepcopy(start)
        losses = Losses(*train_both(task, bundle, optimizer, options.steps, trained, Path(folder)))
    print_table(losses)
    if options.plot:
        draw_losses(options.plot, task.name, losses)
    if (difference := losses.find_difference(CHECKED_STEPS)) > TOLERANCE:
        raise SystemExit(f"the first losses differ by {difference:.2g}, expected at most {TOLERANCE:g}")
    return trained


def print_plan(bundle: onnxplace.Bundle) -> None:
    """Print where the nodes are, and the predicted step."""
    manifest = bundle.manifest
    nodes = ", ".join(f"{item.nodes} on {item.id}" for item in manifest.devices)
    print(f"nodes: {nodes}; {manifest.transfers} transfers")
    predicted = manifest.predicted
    two, one = predicted.step_seconds * 1e3, predicted.single_device_seconds * 1e3
    print(f"predicted step {two:.2f} ms, on one device {one:.2f} ms")


def train_both(
    task: Task, bundle: onnxplace.Bundle, optimizer: torch.optim.Optimizer, steps: int, trained: nn.Module, folder: Path
) -> tuple[list[float], list[float], float, float]:
    """Return the losses and milliseconds of both; half of onnxplace's steps are resumed from a checkpoint."""
    batches = [task.draw(number) for number in range(steps)]
    began = time.perf_counter()
    with Trainer(bundle) as trainer:
        losses = [result.loss for result in trainer.train(batches[: steps // 2])]
        trainer.save(folder / "checkpoint.safetensors")
    with Trainer(bundle) as trainer:
        trainer.load(folder / "checkpoint.safetensors")
        losses += [result.loss for result in trainer.train(batches[steps // 2 :])]
        trainer.load_into(trained)
    middle = time.perf_counter()
    expected = []
    for batch in batches:
        optimizer.zero_grad()
        loss = task.loss(task.module, **batch)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()
        expected.append(float(loss.detach()))
    count = max(steps, 1)
    return losses, expected, (middle - began) * 1e3 / count, (time.perf_counter() - middle) * 1e3 / count


def print_table(losses: Losses) -> None:
    """Print some of the losses next to each other."""
    count = len(losses.torch)
    print(f"{'step':>6} {'onnxplace':>12} {'torch':>12}")
    for number in sorted({round(part * (count - 1) / 9) for part in range(10)} if count else ()):
        print(f"{number + 1:>6} {losses.onnxplace[number]:>12.6f} {losses.torch[number]:>12.6f}")
    first, largest = losses.find_difference(CHECKED_STEPS), losses.find_difference()
    print(f"largest relative difference {largest:.2g}, of the first {CHECKED_STEPS} steps {first:.2g}")
    print(f"{losses.onnxplace_ms:.1f} ms a step, opening two sessions included")
    print(f"{losses.torch_ms:.1f} ms a step of torch with one thread")


def draw_losses(path: Path, title: str, losses: Losses) -> None:
    """Draw the losses of both in one picture."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(losses.torch) + 1)
    axes.plot(steps, losses.torch, linewidth=4, alpha=0.35, label="torch")
    axes.plot(steps, losses.onnxplace, linewidth=1.2, color="black", label="onnxplace, two devices")
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


def count_parameters(module: nn.Module) -> int:
    """Return the number of trained numbers of a module."""
    return sum(math.prod(item.shape) for item in module.parameters())
