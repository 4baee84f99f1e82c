"""Sessions of a provider on a core each, at once: python benchmarks/provider_cores.py [--rounds 30].

Two sessions of one thread each run alone and at once, in turns: in this process, where the calling threads are pinned
to a core each, and in processes of their own, which have that core only. `at once / alone` is 1 where they do not
disturb each other. The second table says what a call costs in a process of its own: a node that computes next to
nothing, with 4 bytes and with 1 MB in and out.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxplace.machine.hardware import available_cores
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options, pin_thread
from onnxplace.target.device_kinds import ISOLATE, DeviceAddress
from onnxplace.target.kind_table import find_kind

ROWS, WIDTH, LAYERS = 128, 2048, 6
# Options of OpenVINO that are said to keep threads apart.
TRIED_CONFIGURATIONS = ({"ENABLE_CPU_PINNING": "NO"}, {"NUM_STREAMS": "1", "SCHEDULING_CORE_TYPE": "ANY_CORE"})
Options = Mapping[str, str]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="openvino/cpu")
    parser.add_argument("--rounds", type=int, default=30)
    settings = parser.parse_args()
    kind = find_kind(settings.device)
    if problem := kind.find_problem(DeviceAddress(kind.name, 0)):
        raise SystemExit(f"{settings.device}:0: {problem}")
    rows = {}
    for precision in kind.options.get("precision", ("",)):
        own = {"precision": precision} if precision else {}
        tried: list[tuple[str, Options]] = [("one process", own), ("own processes", {**own, ISOLATE: "true"})]
        if settings.device == "openvino/cpu":
            tried[1:1] = [(f"one process, {_describe(item)}", _configure(own, item)) for item in TRIED_CONFIGURATIONS]
        for name, options in tried:
            rows[precision, name] = {ISOLATE: "false", **options}
    print("precision | where | alone ms | at once ms | at once / alone (shortest) | (medians)")
    for (precision, name), options in rows.items():
        alone, together = compare(kind.name, options, settings.rounds)
        shortest = [1e3 * min(map(min, series)) for series in (alone, together)]
        medians = [1e3 * float(np.median(series)) for series in (alone, together)]
        ratios = shortest[1] / shortest[0], medians[1] / medians[0]
        times = f"{shortest[0]:.1f} | {max(1e3 * min(item) for item in together):.1f}"
        print(f"{precision} | {name} | {times} | {ratios[0]:.2f} | {ratios[1]:.2f}", flush=True)
    print("\ncall | one process us | own process us | difference us (shortest of 300; median)")
    for size in (1, 1 << 18):
        seconds = [time_calls(kind.name, {ISOLATE: value}, size) for value in ("false", "true")]
        low, middle = ([1e6 * function(item) for item in seconds] for function in (min, np.median))
        texts = [f"{a:.0f} ({b:.0f})" for a, b in zip([*low, low[1] - low[0]], [*middle, middle[1] - middle[0]])]
        print(f"{4 * size} B in and out | {' | '.join(texts)}", flush=True)


def _describe(configuration: Options) -> str:
    return " ".join(f"{name}={value}" for name, value in configuration.items())


def _configure(options: Options, configuration: Options) -> Options:
    """Return options with a whole configuration of OpenVINO, which replaces that of onnxplace."""
    hint = {"float32": "f32", "bfloat16": "bf16"}[options["precision"]]
    entries = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": "1", **configuration}
    return {**options, "option.load_config": json.dumps({"CPU": entries})}


def compare(kind: str, options: Options, rounds: int) -> tuple[list[list[float]], list[list[float]]]:
    """Return the seconds of two sessions on a core each, by session: alone, and at once."""
    model, cores = build_model(), available_cores()
    if len(cores) < 2:
        raise SystemExit("needs two cores")
    feeds = {"x": np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype(np.float32)}
    orders: list[queue.SimpleQueue[bool]] = [queue.SimpleQueue(), queue.SimpleQueue()]
    ends: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()

    def work(index: int) -> None:
        with pin_thread(cores[index : index + 1]):
            session = open_on_core(model, kind, index, options)
            session.run(None, feeds)
            ends.put((index, 0.0))
            while orders[index].get():
                start = time.perf_counter()
                session.run(None, feeds)
                ends.put((index, time.perf_counter() - start))

    def run_on(busy: Sequence[int], seconds: list[list[float]]) -> None:
        for index in busy:
            orders[index].put(True)
        for _ in busy:
            index, elapsed = ends.get()
            seconds[index].append(elapsed)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
        ends.get(timeout=120)
    alone: list[list[float]] = [[], []]
    together: list[list[float]] = [[], []]
    for _ in range(rounds):
        for index in range(2):
            run_on([index], alone)
        run_on([0, 1], together)
    for order in orders:
        order.put(False)
    for thread in threads:
        thread.join()
    return alone, together


def open_on_core(model: bytes, kind: str, index: int, options: Options) -> Any:
    """Return a session of one thread on a core."""
    device = DeviceAddress(kind, index, options=options, cores=1)
    return open_session(model, make_session_options(available_cores()[index : index + 1]), device)


def build_model() -> bytes:
    """Return products with square weights, each followed by Relu."""
    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array((random.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32), f"w{layer}")
        for layer in range(LAYERS)
    ]
    nodes = []
    for layer in range(LAYERS):
        nodes.append(helper.make_node("MatMul", [f"y{layer - 1}" if layer else "x", f"w{layer}"], [f"m{layer}"]))
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [f"y{layer}"]))
    ends = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [ROWS, WIDTH]) for name in ("x", f"y{LAYERS - 1}")
    ]
    graph = helper.make_graph(nodes, "products", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def time_calls(kind: str, options: Options, size: int) -> list[float]:
    """Return the seconds of calls of a node with this many floats in and out."""
    text = f'<ir_version: 8, opset_import: ["": 17]> one (float[{size}] x) => (float[{size}] y) {{ y = Relu(x) }}'
    session = open_on_core(onnx.parser.parse_model(text).SerializeToString(), kind, 0, options)
    feeds = {"x": np.ones(size, np.float32)}
    call: Callable[[], object] = lambda: session.run(None, feeds)  # noqa: E731
    seconds = []
    for _ in range(320):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds[20:]


if __name__ == "__main__":
    main()
