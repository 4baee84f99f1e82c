"""Helpers of the tests of large models."""

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxplace.bundle.bundle import Bundle
from onnxplace.driver.compile import compile_model

SPLIT = "optimize,profile{estimate=true},coplace{join=never,device_map=MAP},m-etf,split,emit"


def chain(layers: int, width: int = 32) -> onnx.ModelProto:
    """Return `layers` x (MatMul, Add, Relu), each with weights of its own."""
    random = np.random.default_rng(0)
    nodes, weights, value = [], [], "x"
    for layer in range(layers):
        w = random.standard_normal((width, width)).astype(np.float32) / width
        weights += [numpy_helper.from_array(w, f"w{layer}"), numpy_helper.from_array(w[0], f"b{layer}")]
        nodes += [
            helper.make_node("MatMul", [value, f"w{layer}"], [f"m{layer}"], name=f"matmul{layer}"),
            helper.make_node("Add", [f"m{layer}", f"b{layer}"], [f"a{layer}"], name=f"add{layer}"),
            helper.make_node("Relu", [f"a{layer}"], [f"r{layer}"], name=f"relu{layer}"),
        ]
        value = f"r{layer}"
    inputs_and_outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", width]) for n in ("x", value)]
    graph = helper.make_graph(nodes, "chain", inputs_and_outputs[:1], inputs_and_outputs[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def saved(folder: Path, model: onnx.ModelProto, location: str = "model.weights") -> Path:
    """Write a model with all its weights in one file next to it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / location).parent.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location=location, size_threshold=0)
    return path


def both_devices(tmp_path: Path) -> str:
    """Return a pipeline that puts the first layer and the rest on two devices."""
    (tmp_path / "map.json").write_text(json.dumps({".*0": "cpu:0", ".*": "cpu:1"}))
    return SPLIT.replace("MAP", str(tmp_path / "map.json"))


def compiled(path: Path, tmp_path: Path, **options) -> Bundle:
    return compile_model(
        path, devices="cpu:0,cpu:1", shape={"batch": 2}, pipeline=both_devices(tmp_path), **options
    ).bundle
