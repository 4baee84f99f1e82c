"""Figures of `compile` on a busy machine: python benchmarks/noise.py [--compiles 20] [--models two-tower,chain].

Each model is compiled for two CPU devices of one core each, again and again, while another program uses one core all
the time; all compiles share a cache. Prints, per model, the speed-ups over one device (of two equal devices, at most
2), how many compiles had a step below their bound, and how many marked their figures as unsure. Then the other program
ends, and the model is compiled once with this cache and once with an empty one: `kept` is the ratio of the two steps,
and of the two times of one device, so that a bad measurement that stays in the cache is seen.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
from step_times import SHAPES

import models
from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.manifest import Manifest
from onnxplace.machine.hardware import available_cores

LAYERS, WIDTH, ROWS = 8, 768, 64


def build_chain() -> onnx.ModelProto:
    """Return a chain of matrix products, from which two devices gain nothing."""
    random, nodes, weights, value = np.random.default_rng(0), [], [], "x"
    for layer in range(LAYERS):
        weight = random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
        weights.append(numpy_helper.from_array(weight, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{layer}"], [f"m{layer}"], f"product{layer}"))
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [f"r{layer}"], f"relu{layer}"))
        value = f"r{layer}"
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (ROWS, WIDTH)) for name in ("x", value)]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@contextmanager
def use_core(core: int) -> Iterator[None]:
    """Keep a core busy with another program."""
    program = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    busy = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


def compile_once(name: str, folder: Path, cache: Path) -> Manifest:
    """Compile in a process of its own; return the manifest."""
    model, target = folder / "model.onnx", folder / "model.bundle"
    command = ["compile", str(model), "-o", str(target), "--devices", "cpu:0,cpu:1", "--force"]
    command += ["--shape", ",".join(f"{key}={size}" for key, size in SHAPES[name].items())] if name in SHAPES else []
    environment = {**os.environ, "ONNXPLACE_CACHE_DIR": str(cache)}
    subprocess.run(
        [sys.executable, "-m", "onnxplace", *command],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    return Bundle.open(target).manifest


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiles", type=int, default=20, help="compiles of each model on the busy machine")
    parser.add_argument("--models", default="two-tower,chain", help="names of examples, or chain")
    arguments = parser.parse_args()
    print(f"{'model':<10} {'speed-ups':>12} {'<= bound':>8} {'unsure':>6} {'kept: step':>10} {'one device':>10}")
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path, cache = Path(folder, "model.onnx"), Path(folder, "cache")
            onnx.save(build_chain() if name == "chain" else models.build(name), path)
            with use_core(available_cores()[-1]):
                busy = [compile_once(name, Path(folder), cache) for _ in range(arguments.compiles)]
            kept = compile_once(name, Path(folder), cache)
            calm = compile_once(name, Path(folder), Path(folder, "empty"))
            speedups = [item.speedup or 0.0 for item in busy]
            below = sum(item.step_seconds <= item.predicted.lower_bound_seconds for item in busy)
            ratios = (
                kept.step_seconds / calm.step_seconds,
                (kept.predicted.single_device_seconds / calm.predicted.single_device_seconds),
            )
            unsure = f"{sum(item.is_unsure for item in busy)}+{kept.is_unsure}+{calm.is_unsure}"
            print(
                f"{name:<10} {f'{min(speedups):.2f}-{max(speedups):.2f}':>12} {below:>8} {unsure:>6} "
                f"{ratios[0]:>10.2f} {ratios[1]:>10.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
