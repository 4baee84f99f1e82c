"""Bundles that run for a given number of rounds, to test timeouts, interrupts and closing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from onnx import ModelProto, parser

import onnxplace
from onnxplace.target.target import Target

# `limit` rounds on one device, then one node on the other; both devices have an output.
ENDLESS = """
<ir_version: 8, opset_import: ["" : 17]>
endless (int64 limit, float[4] x) => (float[4] y, float[4] z)
{
    [spin] spun = Loop (limit, , x) <body = round (int64 i, bool go, float[4] before) => (bool again, float[4] after) {
        again = Identity(go)
        after = Neg(before)
    }>
    [other] z = Neg(x)
    [last] y = Neg(spun)
}
"""
ENDLESS_ROUNDS = np.array(1 << 62, dtype=np.int64)
X = np.arange(4, dtype=np.float32)


def endless_model() -> ModelProto:
    return parser.parse_model(ENDLESS)


def endless_bundle(
    folder: Path,
    spin: str = "cpu:1",
    last: str = "cpu:0",
    other: str = "cpu:0",
    devices: str | None = "cpu:0,cpu:1",
    target: Target | None = None,
) -> onnxplace.Bundle:
    """Return a bundle whose loop is on `spin`; by default that is not the first device."""
    device_map = folder / "map.json"
    device_map.write_text(json.dumps({"spin": spin, "last": last, "other": other}))
    pipeline = f'profile{{estimate=true}},coplace{{join=never,device_map="{device_map}"}},m-topo,split,emit'
    return onnxplace.compile(
        endless_model(), folder / "endless.bundle", devices=devices, target=target, pipeline=pipeline
    )


def feeds(rounds: int | None = 3) -> dict[str, np.ndarray]:
    """Return feeds for a number of rounds; None for practically endless ones."""
    return {"limit": ENDLESS_ROUNDS if rounds is None else np.array(rounds, dtype=np.int64), "x": X}


def expected(rounds: int) -> list[np.ndarray]:
    return [X if rounds % 2 else -X, -X]
