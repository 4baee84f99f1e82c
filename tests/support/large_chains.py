"""Chains of matrix products whose weights exceed the memory of their device, so that some stream."""

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

import onnxplace

LAYERS, WIDTH = 6, 512
PIPELINE = "optimize,profile{estimate=true},coplace,fuse,stream{pool=2.5MiB},split,emit"
MAX_MEMORY = "6MiB"
"""Of 6 MiB of weights, with values and a pool of 2.5 MiB, some have to stream."""


def write_chain(path: Path, *, layers: int = LAYERS, width: int = WIDTH, external: bool = False) -> Path:
    """Write a chain of products with weights of 1 MiB each; `external`: in a file beside it."""
    random, lines = np.random.default_rng(0), []
    for layer in range(layers):
        source, result = (f"x{layer}" if layer else "x"), (f"x{layer + 1}" if layer < layers - 1 else "y")
        lines += [f"[product{layer}] p{layer} = MatMul({source}, w{layer})", f"[tanh{layer}] {result} = Tanh(p{layer})"]
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        chain (float[rows, {width}] x) => (float[rows, {width}] y) {{ {" ".join(lines)} }}"""
    )
    for layer in range(layers):
        array = random.standard_normal((width, width)).astype(np.float32) / np.float32(np.sqrt(width))
        model.graph.initializer.append(numpy_helper.from_array(array, f"w{layer}"))
    onnx.save(model, path, save_as_external_data=external, location=f"{path.name}.data")
    return path


def compile_chain(model: Path, output: Path, **options: object) -> onnxplace.Bundle:
    """Compile a chain for one CPU device, with weights that stream; nothing is measured."""
    settings = {"devices": "cpu:0", "max_memory": MAX_MEMORY, "shape": {"rows": 2}, "pipeline": PIPELINE} | options
    return onnxplace.compile(model, output, **settings)


def feed_chain() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((2, WIDTH)).astype(np.float32)}
