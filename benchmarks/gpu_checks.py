"""Checks on a machine with NVIDIA GPUs: python benchmarks/gpu_checks.py [--examples NAMES] [--skip-large].

Prints the tables of docs/gpu.md: outputs of examples against a session on the CPU, the cost of a cut, the share that
copies reach of a plain loop of copies, predicted and measured steps, and a model whose weights are too large for one
logical device. Exits 2 without a GPU that ONNX Runtime can use, and 1 if an output differs.

One GPU is enough: it is divided into `cuda:0/0` and `cuda:0/1`. Between two GPUs, if there are two, cuts and copies are
measured too. Times are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnxplace
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.machine.hardware import available_cores
from onnxplace.measure.compare import compare_outputs, open_reference, time_in_turns
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.kind_table import find_kind, import_memory
from onnxplace.target.target import Device, Target

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
from step_times import SHAPES

import models

EXAMPLES = ("two-tower", "transformer", "decoder", "resnet50")
NODES = 100
COPY_BYTES = (4 << 10, 256 << 10, 4 << 20, 64 << 20)
COPIES = 20
LARGE_BYTES = 1 << 30
LARGE_LAYERS = 20
GOALS = "goals: a cut at most 15 us, copies at least 80 % of a plain loop, predicted steps within 15 %"


def list_usable_gpus() -> list[str]:
    """Return the ids of the GPUs that ONNX Runtime can use; prints why others cannot be used."""
    kind, usable = find_kind("cuda"), []
    for gpu in kind.list_hardware():
        problem = kind.find_problem(DeviceAddress("cuda", gpu.index))
        if problem is None:
            usable.append(f"cuda:{gpu.index}")
        else:
            print(f"cuda:{gpu.index} ({gpu.name}) cannot be used: {problem}", file=sys.stderr)
    return usable


def print_header(title: str, *headings: str) -> None:
    """Print the head of a table."""
    print(f"\n## {title}\n\n| {' | '.join(headings)} |\n|{'---|' * len(headings)}", flush=True)


def print_row(*cells: object) -> None:
    """Print a row of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def compile_chain(elements: int, folder: Path, devices: Sequence[str], memory_bytes: int) -> onnxplace.Bundle:
    """Compile a chain of negations of one vector; node i is on `devices[i % len(devices)]`."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [elements]) for name in ("v0", f"v{NODES}")]
    nodes = [helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"], name=f"n{i}") for i in range(NODES)]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    name = "-".join(devices).replace("/", "_").replace(":", "")
    device_map = folder / f"{name}.json"
    device_map.write_text(json.dumps({f"n{i}": devices[i % len(devices)] for i in range(NODES)}), encoding="utf-8")
    pipeline = f'profile{{estimate=true}},coplace{{join=never,device_map="{device_map}"}},m-topo,split,emit'
    target = Target(tuple(Device(device, memory_bytes) for device in dict.fromkeys(devices)))
    return onnxplace.compile(model, folder / name, target=target, pipeline=pipeline)


def verify_examples(names: Sequence[str], places: Sequence[Sequence[str]], memory_bytes: int) -> tuple[bool, list[Any]]:
    """Print how outputs of examples differ from the CPU's; return whether all are equal, and rows of steps."""
    print_header("Outputs against a session on the CPU", "model", "devices", "segments", "largest difference", "equal")
    all_equal, steps = True, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for example in names:
            path = folder / f"{example}.onnx"
            models.save(models.build(example), path)
            for number, devices in enumerate(places):
                target = Target(tuple(Device(device, memory_bytes) for device in devices))
                bundle = onnxplace.compile(
                    path, folder / f"{example}-{number}", target=target, shape=SHAPES.get(example)
                )
                feeds = random_feeds(bundle.inputs, bundle.manifest.dimensions)
                reference = open_reference(bundle, path, available_cores())
                with onnxplace.InferenceSession(bundle) as session:
                    run = lambda feeds, session=session: session.submit(feeds).result().outputs  # noqa: E731
                    differences = compare_outputs(run, reference, feeds, [item.name for item in bundle.outputs])
                    seconds = time_in_turns({"run": partial(session.run, None, feeds)}, 30)["run"].median_seconds
                equal = all(item.equal for item in differences)
                all_equal &= equal
                worst = max(item.max_rel_error for item in differences)
                print_row(example, ",".join(devices), len(bundle.manifest.segments), f"{worst:.1e}", equal)
                steps.append((example, ",".join(devices), bundle.manifest.predicted.step_seconds, seconds))
    return all_equal, steps


def print_steps(steps: Sequence[Any]) -> None:
    """Print predicted and measured steps."""
    print_header("Predicted and measured steps", "model", "devices", "predicted ms", "measured ms", "error")
    for example, devices, predicted, measured in steps:
        print_row(
            example, devices, f"{predicted * 1e3:.3g}", f"{measured * 1e3:.3g}", f"{predicted / measured - 1:+.0%}"
        )


def measure_cuts(pairs: Sequence[Sequence[str]], memory_bytes: int) -> None:
    """Print what each of 99 cuts adds to a chain of small nodes."""
    print_header(f"A cut, of {NODES - 1}", "devices", "bytes that cross", "one segment us", "cut us", "per cut us")
    for first, second in pairs:
        for elements in (64, 262144):
            with tempfile.TemporaryDirectory() as name:
                bundles = [
                    compile_chain(elements, Path(name), devices, memory_bytes) for devices in ([first], [first, second])
                ]
                feeds = {"v0": np.ones(elements, np.float32)}
                with onnxplace.InferenceSession(bundles[0]) as one, onnxplace.InferenceSession(bundles[1]) as cut:
                    calls = {"one": partial(one.run, None, feeds), "cut": partial(cut.run, None, feeds)}
                    times = {key: item.median_seconds * 1e6 for key, item in time_in_turns(calls, 30).items()}
            per_cut = (times["cut"] - times["one"]) / (NODES - 1)
            print_row(f"{first},{second}", elements * 4, f"{times['one']:.0f}", f"{times['cut']:.0f}", f"{per_cut:.1f}")


def measure_copies(devices: Sequence[str]) -> None:
    """Print the rates of our copies and of a plain loop of the driver's copies of the same sizes."""
    print_header("Copies", "from", "to", "bytes", "ours GB/s", "plain loop GB/s", "share")
    memories = [import_memory(find_kind(DeviceAddress.of(name).kind))(DeviceAddress.of(name), ()) for name in devices]
    first = memories[0]
    for size in COPY_BYTES:
        host = np.ones(size // 4, np.float32)
        value = first.receive(host, first)
        tensor, buffer = first.place(value), first.pool.take(size)
        driver, stream = first.driver, first.incoming.stream
        first.finish()
        upload = partial(lambda host: first.place(first.receive(host, first)), host)
        load = partial(driver.copy_to_device, tensor.address, buffer.address, size, stream)
        print_copy("host", devices[0], size, time_copies(upload, first), time_copies(load, first))
        download = partial(lambda value: first.read(first.send(value, None)), value)
        store = partial(driver.copy_to_host, buffer.address, tensor.address, size, stream)
        print_copy(devices[0], "host", size, time_copies(download, first), time_copies(store, first))
        for name, memory in zip(devices[1:], memories[1:]):
            if memory.device == first.device:
                continue  # nothing is copied
            target = memory.place(memory.receive(first.send(value, memory), first))
            memory.finish()
            ours = partial(lambda value, memory: memory.receive(first.send(value, memory), first), value, memory)
            plain = partial(
                driver.copy_to_peer, target.address, memory.device, tensor.address, first.device, size,
                memory.incoming.stream,
            )  # fmt: skip
            print_copy(devices[0], name, size, time_copies(ours, memory), time_copies(plain, memory))
    for memory in memories:
        memory.close()


def time_copies(copy: Callable[[], object], memory: Any) -> float:
    """Return the median seconds of a copy, of several rounds of several that are enqueued one after the other."""
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(COPIES):
            copy()
        memory.incoming.mark("copies")
        memory.finish()
        rounds.append((time.perf_counter() - began) / COPIES)
    return statistics.median(rounds)


def print_copy(source: str, destination: str, size: int, ours: float, plain: float) -> None:
    """Print a row of the table of copies."""
    rates = f"{size / ours / 1e9:.2f} | {size / plain / 1e9:.2f}"
    print_row(source, destination, size, rates, f"{plain / ours:.0%}")


def build_products(weights_bytes: int) -> ModelProto:
    """Return a chain of products whose weights have this size in all."""
    side = int((weights_bytes / 4 / LARGE_LAYERS) ** 0.5)
    count = LARGE_LAYERS
    random = np.random.default_rng(0)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, side]) for name in ("v0", f"v{count}")]
    nodes = [helper.make_node("MatMul", [f"v{i}", f"w{i}"], [f"v{i + 1}"], name=f"n{i}") for i in range(count)]
    weights = [
        numpy_helper.from_array(random.standard_normal((side, side), np.float32) / np.float32(side**0.5), f"w{i}")
        for i in range(count)
    ]
    graph = helper.make_graph(nodes, "products", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run_large_model(devices: Sequence[str], limit_bytes: int) -> bool:
    """Print whether a model whose weights exceed one device runs on two; return whether its outputs are equal."""
    weights_bytes = limit_bytes + limit_bytes // 4
    print_header("Weights larger than a device", "devices", "limit of each", "weights", "outcome")
    with tempfile.TemporaryDirectory() as name:
        path, limit = Path(name) / "products.onnx", f"{limit_bytes >> 20} MiB"
        models.save(build_products(weights_bytes), path, external=True)
        row = (limit, f"{weights_bytes >> 20} MiB")
        try:
            onnxplace.compile(path, Path(name) / "one", target=Target((Device(devices[0], limit_bytes),)))
            print_row(devices[0], *row, "unexpected: it fits")
        except onnxplace.InfeasibleError as problem:
            print_row(devices[0], *row, f"refused, as expected: {problem.code}")
        target = Target(tuple(Device(device, limit_bytes) for device in devices))
        bundle = onnxplace.compile(path, Path(name) / "two", target=target)
        feeds = random_feeds(bundle.inputs, bundle.manifest.dimensions)
        reference = open_reference(bundle, path, available_cores())
        with onnxplace.InferenceSession(bundle) as session:
            run = lambda feeds: session.submit(feeds).result().outputs  # noqa: E731
            differences = compare_outputs(run, reference, feeds, [item.name for item in bundle.outputs])
    equal = all(item.equal for item in differences)
    print_row(",".join(devices), *row, "equal to the CPU" if equal else "differs from the CPU")
    return equal


def main(arguments: Sequence[str]) -> int:
    """Run all checks; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--examples", default=",".join(EXAMPLES), help="models, separated by commas")
    parser.add_argument("--skip-large", action="store_true", help="leave out the model that is too large for a device")
    options = parser.parse_args(arguments)
    gpus = list_usable_gpus()
    if not gpus:
        print("no CUDA device here: nothing was run (`onnxplace devices` says why)", file=sys.stderr)
        return 2
    free = min(gpu.free_bytes for gpu in find_kind("cuda").list_hardware())
    memory, halves = free // 3, ("cuda:0/0", "cuda:0/1")
    pairs = [halves, *([gpus[:2]] if len(gpus) > 1 else [])]
    equal, steps = verify_examples(options.examples.split(","), [("cuda:0",), ("cuda:0", "cpu:0"), *pairs], memory)
    print_steps(steps)
    measure_cuts(pairs, memory)
    measure_copies(gpus[:2])
    if not options.skip_large:
        equal &= run_large_model(halves, min(LARGE_BYTES, memory))
    print(f"\n{GOALS}")
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
