"""Helpers of the difficult cases of splitting: models in ONNX text, compared in every split."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper, parser

from onnxplace.bundle.bundle import Bundle
from tests.support.random_models import Feeds, reference
from tests.support.random_placements import RandomPlacement, assert_same, compiled_with

X = np.array([[1, -2, 3], [-4, 5, -6]], dtype=np.float32)
HEADER = '<ir_version: 9, opset_import: ["": 18]>'
ALTERNATING = RandomPlacement((0, 1))


Check = Callable[..., list[Bundle]]


def parsed(model: str | ModelProto) -> ModelProto:
    """Return a model from ONNX text, with the usual header unless it has its own."""
    if isinstance(model, ModelProto):
        return model
    return parser.parse_model(model if model.lstrip().startswith("<") else HEADER + model)


def check_elsewhere(model: str, folder: Path, feeds: Feeds) -> None:
    """Compile and compare like `check`, with the bundle in a process of its own, which may crash."""
    bundle = compiled_with(parsed(model), ALTERNATING, folder, optimized=False)
    inputs, outputs = folder / "given.npz", folder / "made.npz"
    np.savez(inputs, **feeds)
    command = [sys.executable, "-m", "onnxplace", "run", bundle.path, "--inputs", inputs, "--outputs", outputs]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    with np.load(outputs) as results:
        assert_same([results[item.name] for item in bundle.outputs], reference(parsed(model), [feeds])[0])


def weight(array: np.ndarray, name: str) -> TensorProto:
    return numpy_helper.from_array(array, name)


TRUE_AND_FALSE: tuple[Feeds, ...] = ({"x": X, "c": np.array(True)}, {"x": X, "c": np.array(False)})
