"""Training steps on two devices: python benchmarks/microbatches.py [STEP.onnx:BATCH ...] [--turns 5] [--steps 12].

Each step is compiled for two CPU devices of one core: one device, whole operators placed, split operators, stages of
2, 4 and 8 micro-batches, and what `--objective step` chose. Then the bundles take turns, `--steps` steps each, with the
states carried on. The table has the measured step, its speed-up over one device in the same run, and the prediction by
the costs of nodes. Without arguments, the steps are those of `tests/support/training_models.py`: a transformer, two
towers and a multilayer perceptron. Exported ones are files with the size of their batch, as in gpt.onnx:8. Nothing else
should run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import onnx
from _tables import report_progress

import onnxplace
from onnxplace.driver.compile import compile_model
from onnxplace.errors import OnnxplaceError
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.reports.text import format_table
from tests.support.training_models import make_mlp, make_transformer, make_two_tower

DEVICES = "cpu:0,cpu:1"
FRONT = "optimize,profile"
PIPELINES: Mapping[str, str] = {
    "one device": "coplace{join=never},single",
    "whole operators placed": "coplace{join=never},fuse,auto",
    "sharded 2 ways": "shard{ways=2,exact=true,fixed=true},coplace{join=never},fuse,auto{seconds=0.5}",
    **{
        f"{count} micro-batches, {schedule}": (
            f"microbatch{{count={count}}},coplace{{join=never}},pipelined{{schedule={schedule}}}"
        )
        for count in (2, 4, 8)
        for schedule in ("1f1b", "gpipe")
    },
}
HEADER = ("step", "what", "measured, ms", "speed-up", "predicted, ms", "error", "chosen by --objective step")


def list_builtin(folder: Path) -> list[tuple[Path, int]]:
    """Write the steps of the tests' builder in sizes that keep a core busy; return their files and batches."""
    models = {
        "transformer": (make_transformer("adamw", layers=4, width=256, heads=4, tokens=128, batch=16), 16),
        "two_tower": (make_two_tower("adamw", width=512, depth=4, batch=256), 256),
        "mlp": (make_mlp("adamw", widths=(256, 1024, 1024, 1024, 64), batch=256), 256),
    }
    for name, (model, _) in models.items():
        onnx.save(model, folder / f"{name}.onnx")
    return [(folder / f"{name}.onnx", batch) for name, (_, batch) in models.items()]


def compile_all(model: Path, batch: int, folder: Path) -> tuple[dict[str, onnxplace.Bundle], str]:
    """Return a bundle for each way to use the devices that is possible, and the name of what the objective chose."""
    options: dict[str, Any] = {"devices": DEVICES, "shape": {"batch": batch}, "trial": False, "force": True}
    bundles = {}
    for index, (what, pipeline) in enumerate(PIPELINES.items()):
        report_progress(f"{model.stem}: compiling {what}")
        text = f"{FRONT},{pipeline},split,emit"
        try:
            path = folder / f"{model.stem}-{index}"
            bundles[what] = compile_model(model, path, pipeline=text, **options).bundle
        except OnnxplaceError as problem:
            print(f"{model.stem}, {what}: {problem.message}", file=sys.stderr)
    chosen = compile_model(model, folder / f"{model.stem}-chosen", objective="step", **{**options, "trial": True})
    notes = [item.message for item in chosen.diagnostics if item.code in ("P044", "C004")]
    kept = next(
        (note.rpartition("kept ")[2].partition(":")[0] for note in notes if "kept " in note),
        chosen.bundle.manifest.placer,
    )
    return bundles, kept


def draw_feeds(bundle: onnxplace.Bundle) -> dict[str, Any]:
    """Return a random batch; states start from their initial values."""
    training = bundle.manifest.training
    assert training is not None
    states = {state.input for state in bundle.manifest.states}
    counted = {name for name in (training.learning_rate, training.step, training.seed) if name}
    inputs = [item for item in bundle.inputs if item.name not in states | counted]
    feeds: dict[str, Any] = dict(random_feeds(inputs, bundle.manifest.dimensions, 0))
    feeds |= {name: 1 for name in (training.step, training.seed) if name}
    return feeds


def measure(model: Path, batch: int, folder: Path, turns: int, steps: int) -> list[tuple[str, ...]]:
    """Return the rows of a training step."""
    bundles, kept = compile_all(model, batch, folder)
    times: dict[str, list[float]] = {what: [] for what in bundles}
    with ExitStack() as stack:
        sessions = {what: stack.enter_context(onnxplace.InferenceSession(item)) for what, item in bundles.items()}
        feeds = {what: draw_feeds(item) for what, item in bundles.items()}
        for turn in range(turns + 1):
            for what, session in sessions.items():
                report_progress(f"{model.stem}: turn {turn}, {what}")
                for step in range(steps):
                    began = time.perf_counter()
                    session.run(["loss"], feeds[what])
                    if turn and step:  # the first turn, and the first step after another bundle, warm up
                        times[what].append(time.perf_counter() - began)
    alone = median(times["one device"])
    rows: list[tuple[str, ...]] = []
    for what, bundle in bundles.items():
        seconds, predicted = median(times[what]), bundle.manifest.predicted.step_seconds
        error = f"{predicted / seconds - 1:+.0%}"
        figures = f"{seconds * 1e3:.1f}", f"{alone / seconds:.2f}", f"{predicted * 1e3:.1f}", error
        rows.append((f"{model.stem}, batch {batch}", what, *figures, kept if what == "one device" else ""))
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="STEP.onnx:BATCH")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", type=Path, help="keep the bundles there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        given = [text.rpartition(":") for text in arguments.models]
        models = [(Path(path), int(batch)) for path, _, batch in given] or list_builtin(folder)
        rows = [
            row for model, batch in models for row in measure(model, batch, folder, arguments.turns, arguments.steps)
        ]
    print(format_table(HEADER, rows))


if __name__ == "__main__":
    main()
