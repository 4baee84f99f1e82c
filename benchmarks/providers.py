"""Several providers for the processor: python benchmarks/providers.py MODEL ... [--providers openvino] [--max-error E].

A model is an ONNX file without symbolic sizes, `mlp` (six products of 1024 by 1024 with Relu, 128 rows), or the name
of an architecture of `benchmarks/zoo.py`, which torch exports to the folder `--exports` unless it is there. Each is
compiled for two CPU devices with further providers. Then these take turns: the bundle, one session of ONNX Runtime
with all cores, and one session of each other provider with all cores, which computes float32 in float32. Prints the
median times, how many times as fast as the best session the bundle is (the median of the turns), its largest error
relative to the largest value of an output, and the devices that run it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnx
from onnx import helper, numpy_helper

sys.path.insert(0, str(Path(__file__).parent))
from _tables import format_milliseconds, report_progress
from _zoo_models import ZOO, export

import onnxplace
from onnxplace.errors import OnnxplaceError
from onnxplace.feeds.feeds import Array
from onnxplace.machine.hardware import available_cores, local_target
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.model.loading import load
from onnxplace.utils.differences import relative_error

Run = Callable[[], list[Array]]


def open_plain(model: Path, device_id: str, names: list[str], feeds: dict[str, Array]) -> Run:
    """Return a function that runs a model in one session on all cores."""
    (device,) = local_target(device_id).devices
    session = open_session(model, make_session_options(available_cores()), device.address)
    return lambda: list(session.run(names, feeds))


def measure_turns(runs: dict[str, Run], seconds: float) -> dict[str, list[float]]:
    """Return the times of functions that take turns, each several times in a row, after some that do not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = None
    while end is None or perf_counter() < end:
        for name, run in runs.items():
            run()
            begin = perf_counter()
            for _ in range(3):
                run()
            times[name].append((perf_counter() - begin) / 3)
        if end is None:
            end = perf_counter() + seconds
            times = {name: [] for name in runs}
    return times


def build_mlp(path: Path) -> None:
    """Write six products with Relu."""
    random, nodes, weights, value = np.random.default_rng(0), [], [], "x"
    for layer in range(6):
        weight = random.standard_normal((1024, 1024), dtype=np.float32) / np.float32(1024**0.5)
        weights.append(numpy_helper.from_array(weight, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{layer}"], [f"m{layer}"], f"product{layer}"))
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [f"r{layer}"], f"relu{layer}"))
        value = f"r{layer}"
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (128, 1024)) for name in ("x", value)]
    graph = helper.make_graph(nodes, "mlp", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)


def find_model(name: str, exports: Path) -> tuple[Path, dict[str, int], dict[str, Array]]:
    """Return the file of a model, the sizes of its symbolic axes, and inputs."""
    if name in ZOO:
        path = exports / f"{name}.onnx"
        if not path.exists():
            export(ZOO[name], ZOO[name].exporters[0], path)
        return path, dict(ZOO[name].sizes[0]), ZOO[name].feeds(0)
    path = Path(name)
    if name == "mlp":
        path = exports / "mlp.onnx"
        build_mlp(path)
    return path, {}, dict(load(path).feeds(0))


def compare(name: str, options: argparse.Namespace, folder: Path) -> str:
    """Return a row of the table for a model."""
    report_progress(f"compile {name}")
    model, sizes, feeds = find_model(name, options.exports or folder)
    symbols = {axis for item in onnx.load(model, load_external_data=False).graph.input for axis in list_symbols(item)}
    settings = {"devices": options.devices, "providers": options.providers, "max_error": options.max_error}
    shape = {axis: size for axis, size in sizes.items() if axis in symbols}
    bundle = onnxplace.compile(model, folder / f"{model.stem}.bundle", shape=shape or None, inputs=feeds, **settings)
    with ExitStack() as stack:
        session = stack.enter_context(onnxplace.InferenceSession(bundle.path))
        names = [item.name for item in session.get_outputs()]
        runs: dict[str, Run] = {"bundle": lambda: session.run(names, feeds)}
        runs["onnxruntime"] = open_plain(model, "cpu:0", names, feeds)
        for provider in options.providers.split(","):
            runs[provider] = open_plain(model, f"{provider}/cpu:0", names, feeds)
        error = max(map(relative_error, runs["bundle"](), runs["onnxruntime"]()))
        report_progress(f"measure {name}")
        times = measure_turns(runs, options.seconds)
    best = np.min([times[key] for key in runs if key != "bundle"], axis=0)
    ratio = float(np.median(best / np.array(times["bundle"])))
    homes = dict.fromkeys(segment.device for segment in bundle.manifest.segments)
    medians = [format_milliseconds(float(np.median(times[key]))) for key in runs]
    return f"| {model.stem} | {' | '.join(medians)} | {ratio:.2f}x | {error:.1e} | {', '.join(homes)} |"


def list_symbols(value: onnx.ValueInfoProto) -> list[str]:
    """Return the symbolic axes of an input."""
    return [axis.dim_param for axis in value.type.tensor_type.shape.dim if axis.dim_param]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--providers", default="openvino")
    parser.add_argument("--devices", default="cpu:0,cpu:1")
    parser.add_argument("--max-error", type=float)
    parser.add_argument("--seconds", type=float, default=6.0, help="time of the turns of each model")
    parser.add_argument("--exports", type=Path, help="folder of exported architectures")
    options = parser.parse_args()
    names = ["bundle", "onnxruntime, all cores", *(f"{name}, all cores" for name in options.providers.split(","))]
    print(f"| model | {' ms | '.join(names)} ms | speed-up over the best session | error | devices |")
    print("|---" * (len(names) + 4) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            try:
                print(compare(model, options, Path(folder)), flush=True)
            except OnnxplaceError as problem:
                print(f"| {model} | {problem.code} {problem.message} |", flush=True)


if __name__ == "__main__":
    main()
