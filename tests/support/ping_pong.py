"""A model with states whose values cross between devices in both directions, and its reference in numpy.

Each device has several segments. Sums of small whole numbers are exact, so results are compared for equality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from onnx import parser

import onnxplace
from onnxplace.target.target import Device, Target
from tests.support.state_checks import pipeline

PING_PONG = """
<ir_version: 8, opset_import: ["" : 17]>
ping_pong (float[4] x, int64[n] pick, float[4] total, float[4] log)
    => (float[4] y, float[2] picked, float[4] total_next, float[4] log_next)
    <float[2] pair = {1, 2}> {
    [add] total_next = Add(total, x)
    [append] log_next = Sub(log, total_next)
    [mix] mixed = Add(log_next, x)
    [back] turned = Neg(mixed)
    [pick] chosen = Gather(turned, pick)
    [pair] picked = Add(chosen, pair)
    [out] y = Sub(turned, total_next)
}
"""
# On two devices or three, `y` goes to and fro.
PLACES = {
    2: {"append|back": "cpu:1", ".*": "cpu:0"},
    3: {"append": "cpu:1", "back": "cpu:2", ".*": "cpu:0"},
}
# A sum with three of them fails on every device, while GPUs check no index of a Gather.
PAIR = np.array([1, 2], "f4")
STATELESS = PING_PONG.replace("ping_pong", "stateless")


def compile_ping_pong(
    folder: Path, devices: int = 2, stateless: bool = False, names: Sequence[str] = ("cpu:0", "cpu:1", "cpu:2")
) -> onnxplace.Bundle:
    """Compile the model for two or three devices.

    Args:
        folder: Where to write it.
        devices: How many parts it has.
        stateless: Makes its states plain inputs and outputs.
        names: The device of each part; one device may have several.
    """
    places = {pattern: names[int(place[-1])] for pattern, place in PLACES[devices].items()}
    model = parser.parse_model(STATELESS if stateless else PING_PONG)
    return onnxplace.compile(
        model,
        folder / f"{model.graph.name}-{devices}.bundle",
        target=Target(tuple(Device(name, 1 << 30) for name in dict.fromkeys(names[:devices]))),
        shape={"n": 1},
        state=() if stateless else ("*_next=*",),
        pipeline=pipeline(folder, places),
    )


def make_feeds(number: int, *, fails: bool = False, **states: np.ndarray) -> dict[str, np.ndarray]:
    """Return inputs; `fails` lets one node fail."""
    x = np.array([number, -number, number + 1, 2], "f4")
    return {"x": x, "pick": np.array([number % 4] * (3 if fails else 1), "i8"), **states}


def make_start(number: int = 0) -> dict[str, np.ndarray]:
    """Return initial states."""
    return {"total": np.full(4, number, "f4"), "log": np.full(4, -number, "f4")}


@dataclass
class PingPong:
    """The same model in numpy."""

    states: dict[str, np.ndarray] = field(default_factory=dict)

    def step(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return all outputs of one run, and keep the states."""
        inputs = {**self.states, **feeds}
        total = inputs["total"] + inputs["x"]
        log = inputs["log"] - total
        turned = -(log + inputs["x"])
        self.states = {"total": total, "log": log}
        picked = turned[inputs["pick"]] + PAIR
        return {"y": turned - total, "picked": picked, "total_next": total, "log_next": log}
