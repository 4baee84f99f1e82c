"""Seconds and memory of each pass on models with many nodes or many bytes.

    python benchmarks/big_models.py --structure 1000,20000,100000
    python benchmarks/big_models.py --gigabytes 6 --folder /scratch
    python benchmarks/big_models.py --pooling

`--structure`: transformers and unrolled recurrent networks of so many nodes with tiny weights; costs are estimated,
so that nothing is measured, and each pass is timed. `--gigabytes`: a transformer with that much external data
(written to the folder, removed afterwards), compiled for two devices that hold 0.6 of it each: as a copy, with
`--link-weights`, and with costs measured in pieces, each in a process of its own whose anonymous memory is sampled.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _large_graphs import HEADS, build_recurrent, build_transformer, make_weight
from _tables import print_table, report_progress
from onnx import ModelProto, TensorProto

from onnxplace.bundle.bundle import Bundle
from onnxplace.machine.hardware import local_target
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind, build_op_graph, infer_static_shapes, value_bytes
from onnxplace.passes.profiling.chunks import measure_chunks
from onnxplace.passes.profiling.node_measurement import MeasurementOptions
from onnxplace.passes.profiling.repeated_layers import node_kinds, pool_by_kind
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target.device_kinds import DeviceAddress

# Passes with measured and with estimated costs.
MEASURED = "optimize,profile{repeat=3},coplace{join=never},fuse,m-etf,split,emit"
PIPELINE = "optimize,profile{estimate=true},coplace{join=never},fuse,m-etf,split,emit"


# ---------------------------------------------------------------------------------------------- many nodes

FAMILIES: dict[str, Callable[[int], ModelProto]] = {
    "transformer": lambda nodes: build_transformer(max(nodes // 39, 1), 8, 4, make_weight),
    "recurrent": lambda nodes: build_recurrent(max(nodes // 57, 1), 8, 8),
}


def measure_structure(sizes: Sequence[int], folder: Path, *, sessions: bool) -> None:
    """Print a table per family: seconds of load, passes and sessions; then exponents."""
    for family, make in FAMILIES.items():
        rows = []
        for size in (200, *sizes):  # the first size compiles loops
            path = folder / f"{family}.onnx"
            path.write_bytes(make(size).SerializeToString())
            report_progress(f"{family}, {size} nodes")
            rows.append(_time_passes(path, folder / "bundle", sessions=sessions))
            path.unlink()
        columns = [key for key in rows[0] if key not in ("nodes", "total")]
        print_table(f"{family}: ms per pass", ["nodes", *columns, "total"], rows[1:])
        _print_exponents(rows[1:], [key for key in columns if not key.startswith("session")])


def _time_passes(path: Path, bundle: Path, *, sessions: bool) -> dict[str, Any]:
    """Return the seconds of load and of each pass."""
    start = time.perf_counter()
    model = bind(load(path), {"batch": 1}, {})
    row: dict[str, Any] = {"nodes": len(model.nodes), "load": time.perf_counter() - start}
    steps = Pipeline.parse(PIPELINE.replace("emit", f"emit{{path={bundle},force=true}}"))
    _, timings = steps.run(State(local_target("cpu:0,cpu:1")).with_facts(model))
    row |= {timing.name: timing.seconds for timing in timings}
    start = time.perf_counter()
    Bundle.open(bundle)
    row["open"] = time.perf_counter() - start
    row["total"] = sum(value for key, value in row.items() if key != "nodes")
    shutil.rmtree(bundle)
    for level in ("none", "all") if sessions else ():
        start = time.perf_counter()
        open_session(path, make_session_options([0], level))
        row[f"session {level}"] = time.perf_counter() - start
    return row


def _print_exponents(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Print the exponent of each step over the nodes of the last two sizes, slowest first."""
    if len(rows) < 2:
        return
    before, last = rows[-2:]
    ratio = math.log(last["nodes"] / before["nodes"])
    exponents = {key: math.log(last[key] / before[key]) / ratio for key in columns}
    slowest = sorted(columns, key=lambda key: -last[key])
    print(f"\nslowest: {slowest[0]} with {last[slowest[0]]:.2f} of {last['total']:.2f} s at {last['nodes']} nodes")
    print("exponents: " + ", ".join(f"{key} {exponents[key]:.2f}" for key in slowest))


# ---------------------------------------------------------------------------------------------- equal nodes


def measure_pooling() -> None:
    """Print the error of kernel times against those of 60 runs.

    Compares times as measured with medians over equal kernels. Also prints the time of equal layers if one is measured.
    """
    model = bind(load(build_transformer(8, 256, 64, make_weight)), {"batch": 1}, {})
    kinds = node_kinds(model, infer_static_shapes(model))
    reference = MeasurementOptions(DeviceAddress("cpu", 0), (0,), 60, 30.0).measure(model, model.feeds())[0]
    graph = build_op_graph(model, value_bytes(model, infer_static_shapes(model)))
    layers = [range(first, min(first + 39, len(graph))) for first in range(0, len(graph), 39)]
    layer_seconds = measure_chunks(
        model, graph, kinds, layers, model.feeds(), MeasurementOptions(DeviceAddress("cpu", 0), (0,), 9, 30.0)
    ).seconds.sum()
    print(
        f"\nlayer by layer {layer_seconds * 1e3:.1f} ms, in one session {1e3 * (reference.whole_seconds or 0):.1f} ms"
    )
    reference_seconds = np.bincount(reference.unit, reference.seconds)
    significant = reference_seconds > reference_seconds.sum() / 1000
    print("\n| runs | error of a kernel, measured | of equal kernels' median |\n|---|---|---|")
    for runs in (3, 3, 9, 9, 60):
        found = MeasurementOptions(DeviceAddress("cpu", 0), (0,), runs, 30.0).measure(model, model.feeds())[0]
        errors = []
        for seconds in (found.seconds, pool_by_kind(found.seconds, found.unit, found.ran, kinds)):
            pooled = np.bincount(reference.unit, seconds * (reference_seconds.sum() / seconds.sum()))
            errors.append(
                float(np.median(np.abs(pooled / np.where(significant, reference_seconds, 1.0) - 1)[significant]))
            )
        print(f"| {runs} | {errors[0]:.1%} | {errors[1]:.1%} |")


# ---------------------------------------------------------------------------------------------- many bytes


class ExternalWeights:
    """External data in one file; weights of equal shape have different bytes."""

    def __init__(self, path: Path) -> None:
        self.path, self.count = path, 0
        self.pattern = np.random.default_rng(0).standard_normal(1 << 22).astype(np.float32) * 0.02
        path.unlink(missing_ok=True)

    def __call__(self, name: str, shape: Sequence[int]) -> TensorProto:
        """Append a weight and return the tensor that refers to it."""
        left, self.count = math.prod(shape), self.count + 1
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
        with self.path.open("ab") as stream:
            stream.write(bytes(-stream.tell() % 64))
            entries = {"location": self.path.name, "offset": stream.tell(), "length": 4 * left}
            stream.write(np.float32(self.count).tobytes())
            left -= 1
            while left:
                piece = self.pattern[:left]
                stream.write(piece.data)
                left -= len(piece)
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))
        return tensor


def measure_large(gigabytes: float, folder: Path) -> None:
    """Print seconds, anonymous memory and traffic of compiling a large transformer, per pass."""
    layers = 48
    width = int(math.sqrt(gigabytes * 1e9 / 4 / 12 / layers)) // HEADS * HEADS
    path = folder / "large.onnx"
    report_progress(f"writing {gigabytes} GB")
    path.write_bytes(
        build_transformer(layers, width, 16, ExternalWeights(folder / "large.weights")).SerializeToString()
    )
    model_bytes = path.stat().st_size + (folder / "large.weights").stat().st_size
    print(f"\n{layers} layers of width {width}, {model_bytes / 1e9:.2f} GB")
    variants: dict[str, dict[str, Any]] = {
        "copied": {"pipeline": PIPELINE},
        "linked": {"pipeline": PIPELINE, "link_weights": True},
        "linked, costs measured in pieces": {"pipeline": MEASURED, "link_weights": True},
    }
    for title, options in variants.items():
        bundle = folder / "large.bundle"
        report_progress(title)
        limit = f"{int(0.6 * model_bytes)}B"  # so that it needs both devices
        arguments = {"model": str(path), "output": str(bundle), "max_memory": limit, **options}
        command = [sys.executable, __file__, "--child", json.dumps(arguments)]
        process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ)
        columns = "| pass | s | anonymous MiB, peak | read MB | written MB |"
        print(f"\n### weights {title}\n\n{columns}\n|---|---|---|---|---|")
        for row in json.loads(process.stdout):
            print(
                f"| {row['pass']} | {row['seconds']:.2f} | {row['anonymous_bytes'] / 2**20:.0f} "
                f"| {row['read_bytes'] / 1e6:.0f} | {row['written_bytes'] / 1e6:.0f} |"
            )
        manifest = Bundle.open(bundle).manifest
        bundle_bytes = sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())
        print(
            f"\nbundle: {bundle_bytes / 1e9:.3f} GB, {bundle_bytes / model_bytes:.4f} of the model, "
            f"{len(manifest.segments)} segments"
        )
        for note in manifest.diagnostics:
            print(f"{note.code}: {note.message}", flush=True)
        shutil.rmtree(bundle)


def compile_in_child(arguments: dict[str, Any]) -> None:
    """Compile in this process; print a JSON list with the resources of each pass."""
    from onnxplace.driver.compile import compile_model

    watch = ResourceWatch()

    def observer(name: str, index: int, count: int) -> None:
        watch.begin(name)

    watch.begin("load")
    model = arguments.pop("model")
    compile_model(model, devices="cpu:0,cpu:1", shape={"batch": 1}, observer=observer, **arguments)
    print(json.dumps(watch.end()))


class ResourceWatch:
    """Seconds, peak anonymous memory and traffic between two marks, from /proc (Linux)."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)

    def begin(self, name: str) -> None:
        self._close()
        counters = self._counters()
        self.rows.append(
            {"pass": name, "anonymous_bytes": _read_status("RssAnon"), "began": time.perf_counter(), **counters}
        )
        if len(self.rows) == 1:
            self.thread.start()

    def end(self) -> list[dict[str, Any]]:
        self._close()
        self.over.set()
        self.thread.join()
        return self.rows

    def _close(self) -> None:
        if self.rows:
            row = self.rows[-1]
            row["seconds"] = time.perf_counter() - row.pop("began")
            row.update({key: value - row[key] for key, value in self._counters().items()})

    def _counters(self) -> dict[str, int]:
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return {"read_bytes": int(counts["rchar"]), "written_bytes": int(counts["wchar"])}

    def _sample(self) -> None:
        while not self.over.wait(0.005):
            row = self.rows[-1]
            row["anonymous_bytes"] = max(row["anonymous_bytes"], _read_status("RssAnon"))


def _read_status(key: str) -> int:
    """Return a size from /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Run the selected measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--structure", metavar="NODES", help="numbers of nodes, such as 1000,20000,100000")
    parser.add_argument("--sessions", action="store_true", help="also time ONNX Runtime's own session over the model")
    parser.add_argument("--pooling", action="store_true", help="whether equal nodes should cost the same")
    parser.add_argument("--gigabytes", type=float, metavar="N", help="size of the external data")
    parser.add_argument("--folder", type=Path, help="where to write [a temporary folder]")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        compile_in_child(options.child)
        return
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="onnxplace-") as folder:
        if options.structure:
            measure_structure(
                [int(size) for size in options.structure.split(",")], Path(folder), sessions=options.sessions
            )
        if options.pooling:
            measure_pooling()
        if options.gigabytes:
            measure_large(options.gigabytes, Path(folder))


if __name__ == "__main__":
    main()
