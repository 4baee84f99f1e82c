"""Fixtures of the tests of exports."""

from __future__ import annotations

import json

import onnx
import pytest

from decoder import decoder
from onnxplace.bundle import Bundle
from onnxplace.driver import compile_model

DECODER_SHAPE = {"batch": 1, "seq": 3, "past": 5}


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
