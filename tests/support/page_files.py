"""The files that pages of the documentation take for granted: small models, bundles, cost graphs and inputs."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import parser

import models
import onnxplace
from onnxplace.cost_graph.cost_graphs import parse_cost_graph, write_cost_graph
from onnxplace.driver.place import place_cost_graph
from tests.conftest import FAST_PIPELINE, branches

ROOT = Path(__file__).parents[2]
COST_GRAPH = {
    "devices": [{"id": number, "memory_bytes": 1_000_000} for number in (0, 1)],
    "comm": {"coef_us_per_byte": 0.0001, "intercept_us": 5},
    "nodes": [
        {"id": number, "name": name, "compute_time_us": 100, "output_bytes": 100}
        for number, name in enumerate(("encode", "text", "image", "join"))
    ],
    "edges": [{"src": a, "dst": b, "bytes": 100} for a, b in ((0, 1), (0, 2), (1, 3), (2, 3))],
}
TARGET = """
[[devices]]
id = "cuda:0"
memory_bytes = 8000000000
operations_per_second = 1e13
memory_bytes_per_second = 3e11

[[devices]]
id = "cuda:1"
memory_bytes = 8000000000
operations_per_second = 1e13
memory_bytes_per_second = 3e11
"""
BERT = """
<ir_version: 8, opset_import: ["": 17]>
bert (float[batch, 64] x) => (float[batch, 64] y)
<float[64, 64] w_first, float[64, 64] w_second>
{
    ["layer.0/intermediate/dense"] a = MatMul(x, w_first)
    ["layer.0/intermediate/act"] b = Relu(a)
    ["layer.0/output/dense"] c = MatMul(b, w_second)
    ["classifier/act"] y = Tanh(c)
}
"""
CONV = """
<ir_version: 8, opset_import: ["": 17]>
conv (float[1, 2, 8, 8] x, float[2, 2, 3, 3] w) => (float[1, 2, 6, 6] conv1_out) { [conv1] conv1_out = Conv(x, w) }
"""
CUSTOM = """
<ir_version: 9, opset_import: ["": 18, "ai.onnx.contrib": 1]>
custom (float[2, 3] x) => (float[2, 3] y)
{
    n, p = ai.onnx.contrib.NegPos(x)
    y = Add(n, p)
}
"""


def link_operators(path: Path) -> None:
    """Put the library of operators of onnxruntime-extensions there."""
    from onnxruntime_extensions import get_library_path

    path.symlink_to(get_library_path())


def fix_batch(model: onnx.ModelProto, size: int) -> onnx.ModelProto:
    """Return the model with `size` in place of its symbolic dimension."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = size
    return model


def make_bert() -> onnx.ModelProto:
    """Return a chain whose nodes have names like those of an exported BERT."""
    model = parser.parse_model(BERT)
    del model.graph.initializer[:]
    for name in ("w_first", "w_second"):
        weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    return model


def compile_fast(model: onnx.ModelProto, path: Path, **shape: int) -> None:
    """Write a bundle of two CPU devices without measuring anything."""
    onnxplace.compile(model, path, devices="cpu:0,cpu:1", shape=shape, pipeline=FAST_PIPELINE)


def write_graph(path: Path) -> None:
    """Write a cost graph in the format that the name of the file says."""
    graph = parse_cost_graph(COST_GRAPH)
    write_cost_graph(path, graph, place_cost_graph(graph, "m-etf"))


def compress_graph(path: Path) -> None:
    """Write a compressed cost graph."""
    path.write_bytes(gzip.compress(json.dumps(COST_GRAPH).encode()))


def save_arrays(path: Path, **arrays: Any) -> None:
    """Write an .npz file."""
    np.savez(path, **arrays)


FILES: Mapping[str, Callable[[Path], None]] = {
    "model.onnx": lambda path: onnx.save(branches(), path),
    "fixed/model.onnx": lambda path: onnx.save(fix_batch(branches(), 8), path),
    "sequences/model.onnx": lambda path: onnx.save(
        models.build("transformer", layers=1, hidden=32, heads=4, vocab=50), path
    ),
    "bert.onnx": lambda path: onnx.save(make_bert(), path),
    "decoder.onnx": lambda path: onnx.save(
        models.build("decoder", layers=1, hidden=32, heads=4, vocab=50, positions=256), path
    ),
    "model.bundle": lambda path: compile_fast(branches(), path, batch=8),
    "a.bundle": lambda path: compile_fast(branches(), path, batch=8),
    "b.bundle": lambda path: compile_fast(branches(seed=1), path, batch=8),
    "feeds.npz": lambda path: save_arrays(path, x=np.ones((8, 64), np.float32)),
    "graph.json": lambda path: path.write_text(json.dumps(COST_GRAPH)),
    "graph.json.gz": compress_graph,
    "graph.graphml": write_graph,
    "mine.json": lambda path: path.write_text('{"0": 0, "1": 0, "2": 1, "3": 0}'),
    "cluster.toml": lambda path: path.write_text(TARGET),
    "device_map.json": lambda path: path.write_text('{"": 0}'),
    "libops.so": link_operators,
    "conv/model.onnx": lambda path: onnx.save(parser.parse_model(CONV), path),
    "custom/model.onnx": lambda path: onnx.save(parser.parse_model(CUSTOM), path),
    "examples": lambda path: shutil.copytree(ROOT / "examples", path, symlinks=True),
    "benchmarks": lambda path: shutil.copytree(ROOT / "benchmarks", path),
}


def copy_file(name: str, store: Path, folder: Path) -> None:
    """Put a file of `FILES` into a folder; it is made once, and kept in `store`."""
    kept = store / name.replace("/", "-") / Path(name).name
    if not kept.exists():
        kept.parent.mkdir(parents=True)
        FILES[name](kept)
    (shutil.copytree if kept.is_dir() else shutil.copy)(kept, folder / Path(name).name)
