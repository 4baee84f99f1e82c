"""Bundles with two plans, whose steps are written by hand, so that each size has its plan for certain."""

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, parser

import onnxplace
from onnxplace.bundle.manifest import SizeRecord
from onnxplace.driver.join_plans import join_plans
from onnxplace.driver.plan_memory import PlanMemory, fits_together

# `total` adds up, `log` grows. `pick` may name what is not there, so that a run can fail; `limit` may be endless.
TOTALS = """
<ir_version: 8, opset_import: ["" : 17]>
totals (float[n] x, int64[1] pick, int64 limit, float[1] total, float[m] log)
    => (float[n] y, float[1] picked, float[1] mean, float[1] total_next, float[k] log_next) {
    [sum] summed = ReduceSum<keepdims = 1>(x)
    [add] total_next = Add(total, summed)
    [append] log_next = Concat<axis = 0>(log, x)
    [mean] mean = ReduceMean<keepdims = 1>(log_next)
    [pick] picked = Gather(x, pick)
    [spin] spun = Loop (limit, , x) <body = round (int64 i, bool go, float[n] before) => (bool again, float[n] after) {
        again = Identity(go)
        after = Identity(before)
    }>
    [out] y = Mul(spun, total_next)
}
"""
STATES = ("total_next=total", "log_next=log")
START = {"total": np.zeros(1, "f4"), "log": np.zeros(0, "f4")}

# Without states.
ROWS = """
<ir_version: 8, opset_import: ["" : 17]>
rows (float[batch, 4] x, int64[1] pick, int64 limit) => (float[batch, 4] y, float[batch, 1] picked) {
    [twice] doubled = Add(x, x)
    [spin] spun = Loop (limit, , x) <body = round (int64 i, bool go, float[batch, 4] before)
        => (bool again, float[batch, 4] after) {
        again = Identity(go)
        after = Identity(before)
    }>
    [out] y = Mul(doubled, spun)
    [pick] picked = Gather<axis = 1>(doubled, pick)
}
"""

# Without a loop, too, so that requests can be joined.
PLAIN = """
<ir_version: 8, opset_import: ["" : 17]>
plain (float[batch, 4] x) => (float[batch, 4] y) {
    [twice] doubled = Add(x, x)
    [out] y = Mul(doubled, x)
}
"""

ALONE = {".*": "cpu:0"}
APART = {"append|mean|out": "cpu:1", ".*": "cpu:0"}
TURNED = {"append|mean|out": "cpu:0", ".*": "cpu:1"}

ENDLESS = 1 << 62

# The first plan is faster at small sizes, the second one at large ones, each by so much that no measurement changes it.
SMALL, LARGE = 1, 8


def records(dimension: str, factor: float = 1e6) -> list[SizeRecord]:
    """Return the steps of two plans at a small and a large size."""
    return [
        SizeRecord(dimensions={dimension: SMALL}, seconds=(1e-3, 1e-3 * factor), weight=1),
        SizeRecord(dimensions={dimension: LARGE}, seconds=(1e-3 * factor, 1e-3), weight=1),
    ]


def join_maps(
    folder: Path, model: ModelProto, dimension: str, sizes: list[SizeRecord], *maps: dict[str, str], **options: object
) -> onnxplace.Bundle:
    """Compile a model once for each device map, and join the bundles as plans of the first one."""
    folder.mkdir(exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    bundles = []
    for number, device_map in enumerate(maps):
        file = folder / f"map{number}.json"
        file.write_text(json.dumps(device_map))
        coplace = f"coplace{{join=never,device_map={json.dumps(str(file))}}}"
        pipeline = f"optimize,profile{{estimate=true}},{coplace},m-etf,split,emit"
        shape = {dimension: LARGE, **({"m": 4} if "state" in options else {})}
        bundles.append(
            onnxplace.compile(
                folder / "model.onnx",
                folder / f"bundle{number}",
                shape=shape,
                pipeline=pipeline,
                **{"devices": ("cpu:0", "cpu:1"), **options},
            )
        )
    has_room = fits_together([PlanMemory.of(item) for item in bundles], sum)
    return onnxplace.load(join_plans(bundles, {"plans_overlap": has_room}, sizes).path)


def join_totals(folder: Path, *maps: dict[str, str], factor: float = 1e6) -> onnxplace.Bundle:
    """Return a bundle with states and two plans, by the size of `x`."""
    return join_maps(
        folder, parser.parse_model(TOTALS), "n", records("n", factor), *(maps or (ALONE, APART)), state=STATES
    )


def join_rows(folder: Path, text: str = ROWS) -> onnxplace.Bundle:
    """Return a bundle without states and with two plans, by its batch."""
    return join_maps(folder, parser.parse_model(text), "batch", records("batch"), ALONE, APART)


def feed(size: int, number: int = 1, pick: int = 0, limit: int = 1, **more: np.ndarray) -> dict[str, np.ndarray]:
    """Return inputs of the totals; a `pick` beyond the size lets the run fail."""
    x = np.arange(number, number + size, dtype="f4")
    return {"x": x, "pick": np.array([pick]), "limit": np.array(limit), **more}


def feed_rows(batch: int, limit: int = 1, pick: int = 0) -> dict[str, np.ndarray]:
    """Return inputs of the rows."""
    return {"x": np.ones((batch, 4), "f4"), "pick": np.array([pick]), "limit": np.array(limit)}


class Totals:
    """The same totals in numpy."""

    def __init__(self) -> None:
        self.total, self.log = np.zeros(1, "f4"), np.zeros(0, "f4")

    def step(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `y` and `mean`."""
        self.total = self.total + x.sum(keepdims=True)
        self.log = np.concatenate([self.log, x])
        return x * self.total, self.log.mean(keepdims=True)

    def require(self, outputs, x: np.ndarray) -> None:
        """Require the outputs `y`, `picked` and `mean` of a step with `x`."""
        y, mean = self.step(x)
        np.testing.assert_allclose(outputs[0], y, rtol=1e-5)
        np.testing.assert_allclose(outputs[2], mean, rtol=1e-5)
