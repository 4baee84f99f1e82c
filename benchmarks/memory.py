"""Predicted and measured memory: python benchmarks/memory.py [--models NAMES] [--placers m-etf,m-topo]
[--parts].

Each model is compiled for one device (`cpu:0`) and, with each placer, for two (`cpu:0,cpu:1`). Each bundle is opened
and run in its own process. Linux reports the peak memory while it opened sessions, and while it ran (VmHWM: anonymous
memory and pages of files). Errors are of the whole process; `beyond` is the difference to a process that runs a model
of one node, the first row: RUNTIME_BYTES in
onnxplace/machine/hardware.py comes from it.
`--parts`: the memory of each device in its own process, as `onnxplace bench` shows it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
from step_times import SHAPES

import models
import onnxplace
from onnxplace.bundle import Bundle
from onnxplace.evaluation import MEMORY_RUNS, ProcessMemory, measure_process_memory, measure_usage
from onnxplace.feeds import random_feeds
from onnxplace.machine import RUNTIME_BYTES

HEADER = (
    "model", "devices", "placer", "segments", "weights MiB", "opening, predicted MiB", "measured MiB",
    "running, predicted MiB", "measured MiB", "error of the peak", "error running", "beyond, predicted MiB",
    "measured MiB",
)  # fmt: skip
PARTS = ("model", "placer", "device", "predicted MiB", "measured MiB", "error")
ONE_NODE = '<ir_version: 8, opset_import: ["": 17]> one (float[4] x) => (float[4] y) { y = Relu(x) }'


@dataclass(frozen=True)
class Case:
    """A model compiled in one way, and its measured memory."""

    model: str
    placer: str
    bundle: Bundle
    taken: ProcessMemory

    @property
    def error(self) -> float:
        """Return the relative error of the peak, opening included."""
        predicted = self.bundle.manifest.predicted
        peak_bytes = max(self.taken.opening_bytes, self.taken.running_bytes)
        return max(predicted.opening_bytes, predicted.running_bytes) / peak_bytes - 1

    @property
    def running_error(self) -> float:
        return self.bundle.manifest.predicted.running_bytes / self.taken.running_bytes - 1


def list_parts(name: str, case: Case) -> tuple[list[list[str]], list[float]]:
    """Return the memory of each device as rows, and the errors of the predictions."""
    feeds = random_feeds(case.bundle.inputs, case.bundle.manifest.dimensions)
    rows, errors = [], []
    for use in measure_usage(case.bundle, feeds, 1, True).devices:
        if use.peak_bytes and use.predicted_peak_bytes:
            errors.append(use.predicted_peak_bytes / use.peak_bytes - 1)
            sizes = [f"{size / 2**20:.1f}" for size in (use.predicted_peak_bytes, use.peak_bytes)]
            rows.append([name, case.placer, use.id, *sizes, f"{errors[-1]:+.0%}"])
    return rows, errors


def compile_cases(name: str, placers: Sequence[str], runs: int, folder: Path) -> Iterator[Case]:
    """Compile a model in every way and measure it."""
    path = folder / f"{name}.onnx"
    models.save(models.build(name), path)
    for devices, placer in (("cpu:0", "single"), *(("cpu:0,cpu:1", placer) for placer in placers)):
        bundle = onnxplace.compile(
            path, folder / f"{name}-{placer}", devices=devices, shape=SHAPES.get(name), placer=placer
        )  # fmt: skip
        yield Case(name, placer, bundle, measure(bundle, runs))


def compile_one_node(folder: Path) -> Case:
    """Compile and measure a model of one node."""
    import onnx

    onnx.save(onnx.parser.parse_model(ONE_NODE), folder / "one.onnx")
    bundle = onnxplace.compile(folder / "one.onnx", folder / "one", devices="cpu:0", placer="single")
    return Case("(one node)", "single", bundle, measure(bundle, 1))


def measure(bundle: Bundle, runs: int) -> ProcessMemory:
    """Open and run a bundle in a new process."""
    return measure_process_memory(bundle, random_feeds(bundle.inputs, bundle.manifest.dimensions), runs)


def format_row(case: Case) -> list[str]:
    """Return a case as a row of the table."""
    manifest, taken = case.bundle.manifest, case.taken
    predicted = manifest.predicted
    numbers = (
        sum(device.weights_bytes for device in manifest.devices),
        predicted.opening_bytes, taken.opening_bytes, predicted.running_bytes, taken.running_bytes,
    )  # fmt: skip
    mebibytes = [f"{number / 2**20:.0f}" for number in numbers]
    beyond = [f"{(number - RUNTIME_BYTES) / 2**20:.1f}" for number in (predicted.running_bytes, taken.running_bytes)]
    return [
        case.model, str(len(manifest.devices)), case.placer, str(len(manifest.segments)), *mebibytes,
        f"{case.error:+.1%}", f"{case.running_error:+.1%}", *beyond,
    ]  # fmt: skip


def summarise(measured_cases: Sequence[Case]) -> str:
    """Return the median and extreme errors."""
    lines = []
    for name, errors in (
        ("peak", [case.error for case in measured_cases]), ("running", [case.running_error for case in measured_cases])
    ):  # fmt: skip
        lines.append(f"{name}: {format_spread(errors)}")
    return "\n".join(lines)


def format_spread(errors: Sequence[float]) -> str:
    """Return the median and extremes of errors, and the number within the goal."""
    return (
        f"median of absolute errors {np.median(np.abs(errors)):.1%}, from {min(errors):+.1%} "
        f"to {max(errors):+.1%}; {sum(-0.05 <= e <= 0.15 for e in errors)} of {len(errors)} within -5 to +15 %"
    )


def main() -> None:
    """Print the table and the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="default: all examples")
    parser.add_argument("--placers", default="m-etf,m-topo")
    parser.add_argument("--parts", action="store_true", help="each device's part too")
    parser.add_argument("--runs", type=int, default=MEMORY_RUNS)
    options = parser.parse_args()
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}", flush=True)
    measured_cases: list[Case] = []
    part_rows: list[list[str]] = []
    part_errors: list[float] = []
    with tempfile.TemporaryDirectory(prefix="onnxplace-bench-") as folder:
        print(f"| {' | '.join(format_row(compile_one_node(Path(folder))))} |", flush=True)
    for name in options.models.split(",") if options.models else models.MODELS:
        with tempfile.TemporaryDirectory(prefix="onnxplace-bench-") as folder:
            for case in compile_cases(name, options.placers.split(","), options.runs, Path(folder)):
                print(f"| {' | '.join(format_row(case))} |", flush=True)
                measured_cases.append(case)
                if options.parts:
                    rows, errors = list_parts(name, case)
                    part_rows, part_errors = part_rows + rows, part_errors + errors
    if measured_cases:
        print(f"\n{summarise(measured_cases)}")
    if part_rows:
        lines = [f"| {' | '.join(cells)} |" for cells in part_rows]
        print("\n".join(["", f"| {' | '.join(PARTS)} |", "|---|---|---|---|---|---|", *lines]))
        print(f"\nparts: {format_spread(part_errors)}")


if __name__ == "__main__":
    main()
