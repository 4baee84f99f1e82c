"""What it costs to go to another CPU device and back: python benchmarks/hops.py.

A chain of 100 nodes, once on one device in one segment, once alternating between two, for several sizes of the value
that crosses. The difference per hop is one hand-off, one copy and one call of a segment.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper

import onnxplace
from onnxplace.compare import alternate

NODES = 100


def chain(elements: int) -> ModelProto:
    """Return a chain of negations of one vector of float32."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [elements]) for name in ("v0", f"v{NODES}")]
    nodes = [helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"], name=f"n{i}") for i in range(NODES)]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def compiled(elements: int, folder: Path, name: str, devices: list[str]) -> onnxplace.Bundle:
    """Compile the chain with node i on `devices[i % len(devices)]`."""
    wanted = folder / f"{name}.json"
    wanted.write_text(json.dumps({f"n{i}": devices[i % len(devices)] for i in range(NODES)}))
    text = f'profile{{estimate=true}},coplace{{join=never,device_map="{wanted}"}},m-topo,split,emit'
    return onnxplace.compile(chain(elements), folder / name, devices="cpu:0,cpu:1", pipeline=text)


def main() -> None:
    """Print a row per size."""
    print("| bytes that cross | one segment us | alternating us | per hop us |\n|---|---|---|---|")
    for elements in (64, 16384, 262144):
        with tempfile.TemporaryDirectory() as folder:
            one = compiled(elements, Path(folder), "one", ["cpu:0"])
            two = compiled(elements, Path(folder), "two", ["cpu:0", "cpu:1"])
            feeds = {"v0": np.ones(elements, np.float32)}
            with onnxplace.InferenceSession(one) as a, onnxplace.InferenceSession(two) as b:
                times = alternate({"one": partial(a.run, None, feeds), "two": partial(b.run, None, feeds)}, 30)
        whole, apart = times["one"].median_seconds * 1e6, times["two"].median_seconds * 1e6
        print(f"| {elements * 4} | {whole:.0f} | {apart:.0f} | {(apart - whole) / (NODES - 1):.0f} |", flush=True)


if __name__ == "__main__":
    main()
