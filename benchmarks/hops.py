"""The cost of a hop to another CPU device: python benchmarks/hops.py.

A chain of 100 nodes, once on one device in one segment, once alternating between two, for several sizes of the value
that crosses. The difference per hop is one hand-off, one copy and one call of a segment.

A first table shows the overhead of a call of a bundle over a session of ONNX Runtime with the same segment, by `run`,
which runs the first device in the calling thread, and by `submit`, which leaves all to the workers: a chain with one
input and one output, the transformer of the examples with 8 tokens, and the decoder with nine inputs and outputs. The
overhead of `run` is also that of all turns: the median of the differences between neighbours. Others are lower
quartiles, since others may use the machine. `--calls` prints this table only.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper

import onnxplace
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.machine.hardware import available_cores
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.measure.compare import time_in_turns

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import models

NODES = 100
ROUNDS, IN_A_ROW = 60, 15


def chain(elements: int) -> ModelProto:
    """Return a chain of negations of one vector of float32."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [elements]) for name in ("v0", f"v{NODES}")]
    nodes = [helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"], name=f"n{i}") for i in range(NODES)]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def compile_chain(elements: int, folder: Path, name: str, devices: list[str]) -> onnxplace.Bundle:
    """Compile the chain with node i on `devices[i % len(devices)]`."""
    device_map = folder / f"{name}.json"
    device_map.write_text(json.dumps({f"n{i}": devices[i % len(devices)] for i in range(NODES)}))
    text = f'profile{{estimate=true}},coplace{{join=never,device_map="{device_map}"}},m-topo,split,emit'
    return onnxplace.compile(chain(elements), folder / name, devices="cpu:0,cpu:1", pipeline=text)


def measure_calls() -> None:
    """Print the overhead of calls over the session in the bundle."""
    columns = ("model", "devices", "segments", "session us", "run us", "more", "by turns", "submit us", "more")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compare_calls("chain", [compile_chain(64, folder, "chain", ["cpu:0"])])
        transformer, size = models.build("transformer"), {"batch": 1, "seq": 8}
        bundle = onnxplace.compile(transformer, folder / "tr", devices="cpu:0", shape=size, placer="single")
        compare_calls("transformer", [bundle])
        model, shape = models.build("decoder"), {"batch": 2, "seq": 1, "past": 64}
        half = {f"decoder/block_{i}.*": f"cpu:{i // 2}" for i in range(4)} | {".*": "cpu:0"}
        (folder / "half.json").write_text(json.dumps(half))
        pipeline = f'optimize,profile{{estimate=true}},coplace{{device_map="{folder / "half.json"}"}},m-topo,split,emit'
        one = onnxplace.compile(model, folder / "one", devices="cpu:0", shape=shape, placer="single")
        two = onnxplace.compile(model, folder / "two", devices="cpu:0,cpu:1", shape=shape, pipeline=pipeline)
        compare_calls("decoder", [one, two])
    print()


def compare_calls(model: str, bundles: Sequence[onnxplace.Bundle]) -> None:
    """Print a row per bundle; the first has one segment, whose session is the reference."""
    one = bundles[0]
    session = open_session(one.file(one.manifest.segments[0].file), make_session_options(available_cores()))
    feeds = random_feeds(one.inputs, one.manifest.dimensions)
    plain = partial(session.run, [item.name for item in session.get_outputs()], feeds)
    for bundle in bundles:
        with onnxplace.InferenceSession(bundle) as opened:
            run = partial(opened.run, None, feeds)
            by_round = measure_rounds({"plain": plain, "run": run, "submit": make_submit(opened, feeds)})
        microseconds = {key: float(np.quantile(rounds, 0.25)) for key, rounds in by_round.items()}
        more = {key: f"{us:.0f} | {us - microseconds['plain']:+.1f}" for key, us in microseconds.items()}
        by_turns = np.median(np.quantile(by_round["run"], 0.25, axis=1) - np.quantile(by_round["plain"], 0.25, axis=1))
        counts = f"{len(bundle.target.devices)} | {len(bundle.manifest.segments)}"
        row = f"{counts} | {microseconds['plain']:.0f} | {more['run']} | {by_turns:+.1f} | {more['submit']}"
        print(f"| {model} | {row} |", flush=True)


def make_submit(session: onnxplace.InferenceSession, feeds: Mapping[str, np.ndarray]) -> Callable[[], object]:
    """Return a call that leaves all work to workers."""
    return lambda: session.submit(feeds).result()


def measure_rounds(timed: Mapping[str, Callable[[], object]]) -> dict[str, np.ndarray]:
    """Time calls in turn; return microseconds by round and by call of a round.

    Each call is timed several times in a row with warm caches.
    """
    microseconds = {name: np.zeros((ROUNDS, IN_A_ROW)) for name in timed}
    for index in range(ROUNDS):
        for name, call in timed.items():
            call()
            for number in range(IN_A_ROW):
                start = time.perf_counter()
                call()
                microseconds[name][index, number] = (time.perf_counter() - start) * 1e6
    return microseconds


def main() -> None:
    """Print a table of calls, then a row per size."""
    measure_calls()
    if "--calls" in sys.argv[1:]:
        return
    print("| bytes that cross | one segment us | alternating us | per hop us |\n|---|---|---|---|")
    for elements in (64, 16384, 262144):
        with tempfile.TemporaryDirectory() as folder:
            one = compile_chain(elements, Path(folder), "one", ["cpu:0"])
            two = compile_chain(elements, Path(folder), "two", ["cpu:0", "cpu:1"])
            feeds = {"v0": np.ones(elements, np.float32)}
            with onnxplace.InferenceSession(one) as a, onnxplace.InferenceSession(two) as b:
                times = time_in_turns({"one": partial(a.run, None, feeds), "two": partial(b.run, None, feeds)}, 30)
        plain, alternating = times["one"].median_seconds * 1e6, times["two"].median_seconds * 1e6
        print(
            f"| {elements * 4} | {plain:.0f} | {alternating:.0f} | {(alternating - plain) / (NODES - 1):.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
