"""A model with states that sums up its inputs, and its reference in numpy."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import parser

import onnxplace
from onnxplace.target.target import Device, Target

# `total` adds up, `log` doubles and grows; the rows that `pick` takes may not be there, so that a run can fail.
SUMS = """
<ir_version: 8, opset_import: ["" : 17]>
sums (float[n] x, int64[1] pick, float[n] total, float[m] log)
    => (float[n] y, float[1] picked, float[n] total_next, float[k] log_next) {
    [add] total_next = Add(total, x)
    [double] doubled = Add(log, log)
    [append] log_next = Concat<axis = 0>(doubled, x)
    [mean] middle = ReduceMean<keepdims = 1>(log_next)
    [pick] picked = Gather(x, pick)
    [out] y = Add(total_next, middle)
}
"""


STATES = ("total_next=total", "log_next=log")


APART = {"double|append|mean": "cpu:1", ".*": "cpu:0"}


START = {"total": np.zeros(2, "f4"), "log": np.zeros(0, "f4")}


def sums() -> onnx.ModelProto:
    return parser.parse_model(SUMS)


def pipeline(folder: Path, device_map: dict[str, str]) -> str:
    file = folder / "map.json"
    file.write_text(json.dumps(device_map))
    coplace = f"coplace{{join=never,device_map={json.dumps(str(file))}}}"
    return f"optimize,profile{{estimate=true}},{coplace},m-etf,split,emit"


def compile_sums(folder: Path, devices: tuple[str, str] = ("cpu:0", "cpu:1")) -> onnxplace.Bundle:
    """Compile the sums for two devices: `total` on the first one, `log` on the second one."""
    names = {"cpu:0": devices[0], "cpu:1": devices[1]}
    onnx.save(sums(), folder / "sums.onnx")
    return onnxplace.compile(
        folder / "sums.onnx",
        folder / "sums.bundle",
        devices=tuple(dict.fromkeys(devices)),
        shape={"n": 2, "m": 6},
        state=STATES,
        pipeline=pipeline(folder, {pattern: names[device] for pattern, device in APART.items()}),
    )


@dataclass
class Reference:
    """The same sums in numpy."""

    total: np.ndarray
    log: np.ndarray

    def step(self, x: np.ndarray) -> np.ndarray:
        self.total = self.total + x
        self.log = np.concatenate([self.log + self.log, x])
        return self.total + self.log.mean(keepdims=True)


def new_reference() -> Reference:
    return Reference(np.zeros(2, "f4"), np.zeros(0, "f4"))


def feeds(number: int, **more: np.ndarray) -> dict[str, np.ndarray]:
    return {"x": np.array([number, number + 1], "f4"), "pick": np.zeros(1, "i8"), **more}


ON_ONE = Target((Device("cpu:0", 1 << 30),))
