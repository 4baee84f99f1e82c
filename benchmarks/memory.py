"""Memory of a process that runs a bundle: python benchmarks/memory.py [--models NAMES] [--placers m-etf,m-topo].

Each model is compiled for one device (`cpu:0`) and, with each placer, for two (`cpu:0,cpu:1`). Each bundle is opened
and run in its own process. Linux reports the peak memory while it opened sessions, and while it ran (VmHWM: anonymous
memory and pages of files). `beyond` is the difference to RUNTIME_BYTES in onnxplace/machine/hardware.py, which the
first row, a model of one node, measures. `multiple` is the ratio of that to the weights and values that limits bound.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
from step_times import SHAPES

import models
import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.machine.hardware import RUNTIME_BYTES
from onnxplace.measure.memory_use import MEMORY_RUNS, ProcessMemory, measure_process_memory

HEADER = (
    "model", "devices", "placer", "segments", "weights MiB", "weights and values MiB", "opening MiB", "running MiB",
    "beyond MiB", "multiple",
)  # fmt: skip
ONE_NODE = '<ir_version: 8, opset_import: ["": 17]> one (float[4] x) => (float[4] y) { y = Relu(x) }'


@dataclass(frozen=True)
class Case:
    """A model compiled in one way, and its measured memory."""

    model: str
    placer: str
    bundle: Bundle
    taken: ProcessMemory


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
    peak_bytes = sum(device.peak_bytes for device in manifest.devices)
    beyond_bytes = taken.running_bytes - RUNTIME_BYTES
    weights_bytes = sum(device.weights_bytes for device in manifest.devices)
    sizes = (weights_bytes, peak_bytes, taken.opening_bytes, taken.running_bytes, beyond_bytes)
    return [
        case.model, str(len(manifest.devices)), case.placer, str(len(manifest.segments)),
        *(f"{size / 2**20:.0f}" for size in sizes), f"{beyond_bytes / peak_bytes:.2f}",
    ]  # fmt: skip


def main() -> None:
    """Print the table and the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="default: all examples")
    parser.add_argument("--placers", default="m-etf,m-topo")
    parser.add_argument("--runs", type=int, default=MEMORY_RUNS)
    options = parser.parse_args()
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="onnxplace-bench-") as folder:
        print(f"| {' | '.join(format_row(compile_one_node(Path(folder))))} |", flush=True)
    for name in options.models.split(",") if options.models else models.MODELS:
        with tempfile.TemporaryDirectory(prefix="onnxplace-bench-") as folder:
            for case in compile_cases(name, options.placers.split(","), options.runs, Path(folder)):
                print(f"| {' | '.join(format_row(case))} |", flush=True)


if __name__ == "__main__":
    main()
