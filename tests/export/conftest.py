"""Fixtures of the tests of exports."""

from __future__ import annotations

import json

import onnx
import pytest
from onnx import parser

from decoder import decoder
from onnxplace.bundle.bundle import Bundle
from onnxplace.driver.compile import compile_model

DECODER_SHAPE = {"batch": 1, "seq": 3, "past": 5}
SUMS = """
<ir_version: 9, opset_import: ["": 18]>
sums (float[3] x, float[3] total) => (float[3] sum, float[3] y)
<float[3] total = {1, 2, 3}> { sum = Add(x, total) y = Identity(sum) }
"""


@pytest.fixture(scope="session")
def sums_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle whose state `total` has an initial value: read it, do not alter it."""
    return compile_model(
        parser.parse_model(SUMS),
        tmp_path_factory.mktemp("sums") / "bundle",
        devices="cpu:0,cpu:1",
        state={"sum": "total"},
        pipeline="profile{estimate=true},coplace,single,split,emit",
    ).bundle


@pytest.fixture(scope="session")
def decoder_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A small decoder in two stages, whose cache is carried from call to call: read it, do not alter it."""
    folder = tmp_path_factory.mktemp("decoder")
    onnx.save(decoder(layers=2, hidden=32, heads=2, vocab=40, positions=64), folder / "model.onnx")
    device_map = {
        "decoder/block_0/.*|embedding/.*|mask/.*": "cpu:0",
        "decoder/block_1/.*|decoder/final.*|logits": "cpu:1",
    }
    return compile_model(
        folder / "model.onnx",
        folder / "bundle",
        devices="cpu:0,cpu:1",
        shape=DECODER_SHAPE,
        state={"present.*": "past.*"},
        pipeline=f"optimize,profile{{estimate=true}},coplace{{device_map={json.dumps(json.dumps(device_map))}}},m-etf,split,emit",
    ).bundle
