"""A bundle of two copies of a model, and the requests that they take."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnxplace
from onnxplace.target.target import Device, Target
from tests.conftest import branches

COPIES = "optimize,profile{estimate=true},coplace{join=never},single,split,replicate{routes=cpu:1},emit"


def compile_copies(folder: Path, cores: int = 1) -> onnxplace.Bundle:
    """Compile a model of one segment, with a route on each of two devices."""
    onnx.save(branches(), folder / "m.onnx")
    target = Target(tuple(Device(name, 1 << 30, cores=cores) for name in ("cpu:0", "cpu:1")))
    return onnxplace.compile(folder / "m.onnx", folder / "b", target=target, shape={"batch": 2}, pipeline=COPIES)


def make_feeds(number: int) -> dict[str, Any]:
    return {"x": np.full((2, 64), number, "f4")}
