"""Devices and models of these tests."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser

import models
import onnxplace

OPENVINO = "openvino/cpu:0"


def place(
    model: onnx.ModelProto, folder: Path, devices: str, places: Mapping[str, str], **settings: Any
) -> onnxplace.Bundle:
    """Compile a model with each node on the device that a pattern of its name gives; costs are estimated."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "map.json").write_text(json.dumps(places))
    coplace = f"coplace{{join=never,device_map={json.dumps(str(folder / 'map.json'))}}}"
    pipeline = f"optimize,profile{{estimate=true}},{coplace},m-etf,split,emit"
    return onnxplace.compile(model, folder / "bundle", devices=devices, pipeline=pipeline, **settings)


def perceptron() -> onnx.ModelProto:
    """Return six products with Relu: `x` [batch, 256] to `r5` [batch, 256]."""
    values = ["x", *(f"r{index}" for index in range(6))]
    nodes = [f"[product{i}] p{i} = MatMul({values[i]}, w{i}) [relu{i}] {values[i + 1]} = Relu(p{i})" for i in range(6)]
    head = '<ir_version: 8, opset_import: ["": 17]> mlp (float[batch, 256] x) => (float[batch, 256] r5)'
    model, random = parser.parse_model(f"{head} {{ {' '.join(nodes)} }}"), np.random.default_rng(0)
    for index in range(6):
        weight = (random.standard_normal((256, 256)) / 16).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weight, f"w{index}"))
    return model


def transformer() -> onnx.ModelProto:
    return models.build("transformer", layers=2, hidden=64, vocab=100, positions=32)


def squeezenet() -> onnx.ModelProto:
    return models.build("squeezenet")
