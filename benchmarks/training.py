"""Training steps on several devices: python benchmarks/training.py equality|speed|traffic [MODEL ...] [--steps 200].

`equality`: small models with each optimiser train on 2 and 3 CPU devices with each placer, next to torch: the largest
relative difference of losses and of parameters, and whether a run that is saved and resumed equals one that is not.
`speed`: larger models are compiled for two CPU devices of one core, and take turns with one session on one core.
`traffic`: what crosses between the devices in a step as m-ETF places it, with and without co-placement of training.

Nothing else should run meanwhile. Needs `pip install -e '.[cpu,dev,torch]'`. docs/training.md holds the latest tables.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
import torch
from _tables import report_progress
from sharding import run_command

import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.errors import InfeasibleError
from onnxplace_training import Trainer, export_training_step
from plugins.training.tests.support.torch_models import OPTIMIZERS, TrainingCase, cnn, gpt, lstm, mlp, two_tower

if TYPE_CHECKING:
    from onnx import ModelProto

SMALL: Mapping[str, Callable[[], TrainingCase]] = {
    "mlp": mlp,
    "cnn": cnn,
    "gpt": gpt,
    "two_tower": two_tower,
    "lstm": lstm,
}
LARGE: Mapping[str, Callable[[], TrainingCase]] = {
    "mlp": lambda: mlp(width=1024, depth=8, classes=10, batch=128),
    "cnn": lambda: cnn(width=48, size=32, batch=16),
    "gpt": lambda: gpt(vocabulary=512, tokens=128, width=256, layers=4, heads=4, batch=8),
    "two_tower": lambda: two_tower(width=512, depth=6, batch=128),
    "lstm": lambda: lstm(inputs=64, width=128, steps=16, batch=32),
}
# With options that keep a compile short where a placer searches.
PLACERS = (
    "auto{seconds=0.5}",
    "single",
    "m-topo",
    "m-etf",
    "m-sct",
    "multilevel",
    "stages{seconds=0.5}",
    "pipelined",
    "fit",
    "exact{seconds=1}",
)
MAX_LOSS_DIFFERENCE, MAX_PARAMETER_DIFFERENCE = 1e-4, 1e-3


@dataclass(frozen=True)
class TorchRun:
    """A training run in torch, and the step that was exported before it."""

    step: ModelProto
    batches: Sequence[Mapping[str, Any]]
    losses: Sequence[float]
    parameters: Mapping[str, Any]


def list_devices(count: int) -> str:
    """Return the names of CPU devices.

    >>> list_devices(2)
    'cpu:0,cpu:1'
    """
    return ",".join(f"cpu:{index}" for index in range(count))


def name_batch(example: Any, step: ModelProto) -> dict[str, Any]:
    """Return a batch as arrays by input name, in the order of the step's inputs."""
    if isinstance(example, Mapping):
        return {name: tensor.numpy() for name, tensor in example.items()}
    return {value.name: tensor.numpy() for value, tensor in zip(step.graph.input, example)}


def compute_loss(case: TrainingCase, module: torch.nn.Module, example: Any) -> torch.Tensor:
    """Return the loss of a batch as torch computes it."""
    result = case.loss(module, **example) if isinstance(example, Mapping) else case.loss(module(example[0]), example[1])
    return result[0] if isinstance(result, tuple) else result


def train_in_torch(case: TrainingCase, optimizer_name: str, steps: int) -> TorchRun:
    """Export a step, then train the module in torch."""
    torch.manual_seed(0)
    module = copy.deepcopy(case.module)
    optimizer = OPTIMIZERS[optimizer_name](module.parameters())
    step = export_training_step(module, case.loss, optimizer, case.example())
    batches, losses = [], []
    for _ in range(steps):
        example = case.draw(case.batch)
        batches.append(name_batch(example, step))
        optimizer.zero_grad()
        loss = compute_loss(case, module, example)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    parameters = {name: tensor.detach().numpy() for name, tensor in module.named_parameters()}
    return TorchRun(step, batches, losses, parameters)


def train_bundle(bundle: Bundle, run: TorchRun, folder: Path) -> tuple[float, float, bool]:
    """Train a bundle on the batches of a torch run.

    Returns the largest relative difference of a loss, the largest difference of a parameter relative to the largest
    element of its tensor, and whether a run that is saved in its middle and resumed ends with the same bits.
    """
    half, checkpoint = len(run.batches) // 2, folder / "half.safetensors"
    losses = []
    with Trainer(bundle) as trainer:
        for number, batch in enumerate(run.batches):
            if number == half:
                trainer.save(checkpoint)
            losses.append(trainer.step(batch).loss)
        ended = trainer.state_dict()
    with Trainer(bundle) as trainer:
        trainer.load(checkpoint)
        resumed_losses = [trainer.step(batch).loss for batch in run.batches[half:]]
        resumed = trainer.state_dict()
    is_equal = resumed_losses == losses[half:] and all(np.array_equal(resumed[key], ended[key]) for key in ended)
    loss_difference = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(losses, run.losses))
    parameter_difference = max(
        float(np.abs(ended[name] - values).max()) / max(float(np.abs(values).max()), 1e-6)
        for name, values in run.parameters.items()
        if name in ended
    )
    return loss_difference, parameter_difference, is_equal


def check_equality(name: str, steps: int, folder: Path) -> Iterator[list[str]]:
    """Yield a row per optimiser and number of devices: the worst of all placers."""
    for optimizer_name in OPTIMIZERS:
        run = train_in_torch(SMALL[name](), optimizer_name, steps)
        for count in (2, 3):
            worst_loss, worst_parameter, all_equal, refused = 0.0, 0.0, True, list[str]()
            for placer in PLACERS:
                report_progress(f"{name}, {optimizer_name}, {count} devices, {placer}")
                try:
                    bundle = onnxplace.compile(
                        run.step, folder / "equal.bundle", devices=list_devices(count), placer=placer, trial=False,
                        force=True, shape={"batch": run.batches[0][next(iter(run.batches[0]))].shape[0]},
                    )  # fmt: skip
                except InfeasibleError as problem:
                    refused.append(f"{placer}: {problem.code}")
                    continue
                loss, parameter, is_equal = train_bundle(bundle, run, folder)
                worst_loss, worst_parameter = max(worst_loss, loss), max(worst_parameter, parameter)
                all_equal &= is_equal
            is_right = worst_loss <= MAX_LOSS_DIFFERENCE and worst_parameter <= MAX_PARAMETER_DIFFERENCE and all_equal
            yield [
                name, optimizer_name, str(count), str(len(PLACERS) - len(refused)), f"{worst_loss:.1e}",
                f"{worst_parameter:.1e}", "yes" if all_equal else "NO", "yes" if is_right else "NO",
            ]  # fmt: skip


def write_step(name: str, optimizer_name: str, folder: Path) -> tuple[Path, int]:
    """Export the step of a large model; return its file and its batch."""
    import onnx

    torch.manual_seed(0)
    case, file = LARGE[name](), folder / f"{name}-{optimizer_name}.onnx"
    if not file.exists():
        report_progress(f"{name}: exporting")
        step = export_training_step(
            case.module, case.loss, OPTIMIZERS[optimizer_name](case.module.parameters()), case.example()
        )
        onnx.save(step, file)
    return file, case.batch


# Name of a way to use two devices -> options of compile.
WAYS: Mapping[str, tuple[str, ...]] = {
    "chosen for the step": ("--objective", "step"),
    "default": (),
    "placed": ("--placer", "auto"),
    "sharded": ("--shard", "2"),
}


def measure_speed(name: str, optimizer_name: str, folder: Path, repeat: int) -> Iterator[list[str]]:
    """Yield a row per way to use two devices: step times in turns with one device, and the error of the prediction."""
    file, batch = write_step(name, optimizer_name, folder)
    for way, options in WAYS.items():
        report_progress(f"{name}: {way}")
        bundle = folder / f"{name}.bundle"
        compiled = run_command(
            "compile", str(file), "-o", str(bundle), "--force", "--devices", list_devices(2), "--shape",
            f"batch={batch}", *options,
        )  # fmt: skip
        bench = run_command("bench", str(bundle), "--repeat", str(repeat), "--no-memory")
        one, several = bench["one_device"]["median_seconds"], bench["bundle"]["median_seconds"]
        predicted = compiled["predicted"]["step_seconds"]
        yield [
            name, way, f"{one * 1e3:.1f}", f"{several * 1e3:.1f}", f"{one / several:.2f}",
            f"{predicted / several - 1:+.0%}", f"{compiled['transfer_bytes'] / 2**20:.1f}", str(compiled["segments"]),
        ]  # fmt: skip


def measure_traffic(name: str, optimizer_name: str, folder: Path) -> Iterator[list[str]]:
    """Yield rows of m-ETF's placement without and with co-placement of training."""
    file, batch = write_step(name, optimizer_name, folder)
    for count in (2, 3):
        for grouping, options in GROUPINGS.items():
            pipeline = f"optimize,profile,coplace{options},fuse,m-etf,split,emit"
            compiled = run_command(
                "compile", str(file), "-o", str(folder / "traffic.bundle"), "--force", "--no-trial", "--devices",
                list_devices(count), "--shape", f"batch={batch}", "--pipeline", pipeline,
            )  # fmt: skip
            predicted = compiled["predicted"]
            yield [
                name, str(count), grouping, f"{compiled['transfer_bytes'] / 2**20:.1f}", str(compiled["transfers"]),
                f"{predicted['step_seconds'] * 1e3:.1f}", f"{predicted['single_device_seconds'] * 1e3:.1f}",
            ]  # fmt: skip


GROUPINGS: Mapping[str, str] = {
    "none": "{parameters=free}",
    "by parameter": "",
    "by parameter, backward with forward": "{backward=follow}",
}
HEADERS: Mapping[str, Sequence[str]] = {
    "equality": ("model", "optimiser", "devices", "placers", "loss", "parameters", "resumed equal", "holds"),
    "speed": ("model", "way", "one device, ms", "two devices, ms", "speed-up", "prediction", "MiB", "segments"),
    "traffic": ("model", "devices", "groups", "MiB", "values", "step, ms", "one device, ms"),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=HEADERS)
    parser.add_argument("models", nargs="*", default=tuple(SMALL))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--folder", type=Path, help="where models are exported to and kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    header = HEADERS[options.what]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.models:
            if options.what == "equality":
                rows = check_equality(name, options.steps, folder)
            elif options.what == "speed":
                rows = measure_speed(name, options.optimizer, folder, options.repeat)
            else:
                rows = measure_traffic(name, options.optimizer, folder)
            for row in rows:
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
