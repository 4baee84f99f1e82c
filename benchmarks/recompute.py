"""Memory and time of a training step against its budget: python benchmarks/recompute.py [--model STEP.onnx].

The step is compiled for one device (`cpu:0`) and for two (`cpu:0,cpu:1`), with memory limits that are shares of what it
needs on one device. Each bundle runs in a process of its own, with states that stay from step to step. Linux reports
the peak memory of the process while steps run (VmHWM); `beyond` is without the RUNTIME_BYTES of a process without a
model.
Steps of all bundles are timed in turns. By default the model is a residual network with attention and AdamW, built
without torch; `--model` takes any training step with metadata, such as one of `onnxplace_training`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).parents[1]))

import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.driver.compile import compile_model
from onnxplace.driver.trials import Compiled
from onnxplace.errors import InfeasibleError
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.machine.hardware import RUNTIME_BYTES
from onnxplace.measure.memory_use import ProcessMemory, measure_process_memory
from tests.support.training_models import make_transformer

SHARES = (1.0, 0.8, 0.625, 0.5)
RUNS = 8
HEADER = (
    "devices", "limit of each", "limit MiB", "recomputed nodes", "segments", "peak of each MiB",
    "process MiB", "beyond MiB",
    "step, predicted ms", "measured ms", "equal loss",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A compiled step with its memory."""

    devices: str
    share: float
    limit_bytes: int
    compiled: Compiled | None
    memory: ProcessMemory | None = None

    @property
    def bundle(self) -> Bundle:
        assert self.compiled is not None
        return self.compiled.bundle


def draw_feeds(bundle: Bundle, batch: dict[str, int]) -> dict[str, Any]:
    """Return random feeds for the inputs that are no states."""
    states = {state.input for state in bundle.manifest.states}
    inputs = [item for item in bundle.inputs if item.name not in states and not item.optional]
    feeds = dict(random_feeds(inputs, {**bundle.manifest.dimensions, **batch}))
    for item in inputs:  # class and token numbers have to exist
        if item.dtype == "tensor(int64)":
            drawn = np.random.default_rng(0).integers(0, 8, feeds[item.name].shape)
            feeds[item.name] = drawn if drawn.ndim else np.array(1, dtype=np.int64)
    return feeds


def compile_case(path: Path, folder: Path, case: Case, shape: dict[str, int]) -> Case:
    """Return a case with its bundle, or without one if nothing fits."""
    name = f"{case.devices.count(',') + 1}-{case.share}.bundle"
    limit = str(case.limit_bytes) if case.limit_bytes else None
    try:
        compiled = compile_model(path, folder / name, devices=case.devices, max_memory=limit, shape=shape, shard="off")
    except InfeasibleError as problem:
        print(f"{case.devices} at {case.share:.0%}: {problem}", file=sys.stderr)
        return case
    memory = measure_process_memory(compiled.bundle, draw_feeds(compiled.bundle, shape), RUNS)
    return Case(case.devices, case.share, case.limit_bytes, compiled, memory)


def time_steps(cases: Sequence[Case], shape: dict[str, int]) -> tuple[list[float], list[list[float]]]:
    """Return the median time of a step of each bundle, run in turns, and its losses."""
    sessions = [onnxplace.InferenceSession(case.bundle.path) for case in cases]
    feeds = draw_feeds(cases[0].bundle, shape)
    times, losses = [list[float]() for _ in cases], [list[float]() for _ in cases]
    for _ in range(RUNS):
        for index, session in enumerate(sessions):
            start = time.perf_counter()
            losses[index].append(float(session.run(["loss"], feeds)[0]))
            times[index].append(time.perf_counter() - start)
    for session in sessions:
        session.close()
    return [float(np.median(times_of_one[2:])) for times_of_one in times], losses


def count_recomputed(case: Case) -> str:
    """Return how many nodes run a second time, by the note of the pass."""
    assert case.compiled is not None
    messages = [note.message for note in case.compiled.diagnostics if note.code == "L070"]
    return messages[-1].split()[0] if messages and messages[-1][0].isdigit() else "order" if messages else "0"


def format_row(case: Case, step_seconds: float, is_equal: bool) -> list[str]:
    """Return a row of the table."""
    manifest, memory = case.bundle.manifest, case.memory
    assert memory is not None
    predicted = manifest.predicted
    sizes = [f"{size / 2**20:.0f}" for size in (memory.running_bytes, memory.running_bytes - RUNTIME_BYTES)]
    peaks = ", ".join(f"{device.peak_bytes / 2**20:.1f}" for device in manifest.devices if device.nodes)
    return [
        case.devices, f"{case.share:.0%}", f"{case.limit_bytes / 2**20:.1f}" if case.limit_bytes else "-",
        count_recomputed(case), str(len(manifest.segments)), peaks, *sizes,
        f"{1e3 * predicted.step_seconds:.1f}", f"{1e3 * step_seconds:.1f}", "yes" if is_equal else "no",
    ]  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = options.model or folder / "step.onnx"
        shape: dict[str, int] = {"batch": options.batch} if options.model else {}
        if not options.model:
            model = make_transformer("adamw", layers=4, width=192, heads=4, tokens=64, batch=options.batch)
            onnx.save(model, path)
        whole = compile_case(path, folder, Case("cpu:0", 1.0, 0, None), shape)
        peak = whole.bundle.manifest.devices[0].peak_bytes
        cases = [whole]
        for devices in ("cpu:0", "cpu:0,cpu:1"):
            for share in SHARES[1:] if devices == "cpu:0" else SHARES:
                cases.append(compile_case(path, folder, Case(devices, share, int(share * peak), None), shape))
        cases = [case for case in cases if case.compiled is not None]
        seconds, losses = time_steps(cases, shape)
        print("| " + " | ".join(HEADER) + " |\n" + "|---" * len(HEADER) + "|")
        for case, step_seconds, own in zip(cases, seconds, losses):
            is_equal = bool(np.allclose(own, losses[0], rtol=1e-4))
            print("| " + " | ".join(format_row(case, step_seconds, is_equal)) + " |")


if __name__ == "__main__":
    main()
