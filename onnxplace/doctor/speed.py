"""Measure calls, links and a small model; results must be right, but no time is a failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from onnxplace.doctor.context import CheckContext, CheckSkippedError, Finding, compile_placed, parse_model, require
from onnxplace.feeds import Array

if TYPE_CHECKING:
    from onnx import ModelProto

# Sizes of values that `link` sends, and its least duration.
LINK_SIZES = (1, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 32 << 20)
MIN_LINK_SECONDS = 1.0
MIN_CALLS = 50
# Of the model of `prediction`: two branches of some products.
WIDTH, DEPTH, ROWS = 512, 4, 64
SIDES = ("left", "right")
# Relative to the largest value; products may use 10 bits of mantissa.
TOLERANCE = 2e-2


def check_call(context: CheckContext) -> Finding:
    """Time a call of a model of one node, through onnxplace and in a plain session of ONNX Runtime on the host."""
    from onnxplace.api import InferenceSession
    from onnxplace.machine import available_cores, make_session_options, open_session

    device, x = context.ids[0], np.ones(16, np.float32)
    model = parse_model("call (float[16] x) => (float[16] y) { y = Neg(x) }")
    bundle = compile_placed(model, context.folder / "call", context.make_target(), {".*": device})
    plain = open_session(model.SerializeToString(), make_session_options(available_cores()[:1]))
    with InferenceSession(bundle) as session:
        calls = {"bundle": lambda: session.run(None, {"x": x}), "plain": lambda: plain.run(None, {"x": x})}
        seconds = _time_in_turns(calls, context.seconds / 2)
    detail = f"{seconds['bundle'] * 1e6:.0f} us; plain session on the host {seconds['plain'] * 1e6:.0f} us"
    return Finding(detail, {"call_seconds": seconds["bundle"], "plain_host_session_seconds": seconds["plain"]})


def _time_in_turns(calls: dict[str, Callable[[], object]], limit_seconds: float) -> dict[str, float]:
    """Return the median time of each call; they take turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    while len(samples[next(iter(calls))]) < MIN_CALLS or time.perf_counter() - began < min(limit_seconds, 1.0):
        for name, call in calls.items():
            before = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - before)
    return {name: float(np.median(times)) for name, times in samples.items()}


def check_link(context: CheckContext) -> Finding:
    """Measure the link between two devices in both directions, and calls on each, as `devices --calibrate` does."""
    from onnxplace.calibration import calibrate

    if len(context.ids) < 2:
        raise CheckSkippedError("there is one device")
    result = calibrate(context.make_target(), sizes=LINK_SIZES, seconds=max(context.seconds, MIN_LINK_SECONDS))
    links = {f"{item.link.source} -> {item.link.destination}": item for item in result.links}
    parts = [
        f"{name} {item.link.latency_seconds * 1e6:.0f} us, {item.link.bytes_per_second / 1e9:.1f} GB/s"
        for name, item in links.items()
    ]
    parts += [f"a cut on {device} {costs.segment_seconds * 1e6:.0f} us" for device, costs in result.call_costs.items()]
    figures = {
        "links": {
            name: {
                "latency_seconds": item.link.latency_seconds,
                "bytes_per_second": item.link.bytes_per_second,
                "via": item.link.via,
                "points": [
                    {"bytes": point.bytes, "seconds": point.seconds, "outlier": point.outlier}
                    for point in item.fit.points
                ],
            }
            for name, item in links.items()
        },
        "cut_seconds": {device: costs.segment_seconds for device, costs in result.call_costs.items()},
        "notes": list(result.notes),
    }
    return Finding("; ".join(parts), figures)


def check_prediction(context: CheckContext) -> Finding:
    """Compile a model with a branch on each device by measured costs; compare predicted and measured step."""
    from onnxplace.api import InferenceSession
    from onnxplace.driver import compile_model
    from onnxplace.evaluation import run_trials

    first, last = context.ids[0], context.ids[-1]
    model, weights = _make_branches()
    compiled = compile_model(
        model,
        context.folder / "prediction.bundle",
        target=context.make_target(),
        device_map={"left.*|y": first, "right.*": last},
        shard="off",
        cache=False,
        trial=False,
        budget_seconds=0.2,
    )
    x = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    with InferenceSession(compiled.bundle) as session:
        (y,) = session.run(None, {"x": x})
    expected = _compute_branches(x, weights)
    error = float(np.abs(y - expected).max() / np.abs(expected).max())
    require(error <= TOLERANCE, f"the error of its output is {error:.2g} of the largest value, allowed {TOLERANCE}")
    (trial,) = run_trials([compiled.bundle], {"x": x}, cached=False)
    predicted = compiled.bundle.manifest.predicted.step_seconds
    ratio = predicted / trial.step_seconds
    detail = f"predicted {predicted * 1e3:.3g} ms, measured {trial.step_seconds * 1e3:.3g} ms, ratio {ratio:.2f}"
    figures = {
        "predicted_seconds": predicted,
        "measured_seconds": trial.step_seconds,
        "waiting_share": trial.waiting,
        "relative_error": error,
    }
    return Finding(detail, figures)


def _make_branches() -> tuple[ModelProto, dict[str, Array]]:
    """Return a model of two branches whose sum is its output, and its weights by name."""
    random = np.random.default_rng(2)
    weights: dict[str, Array] = {
        f"{side}_weight{step}": (random.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32)
        for side in SIDES
        for step in range(DEPTH)
    }
    nodes = []
    for side in SIDES:
        value = "x"
        for step in range(DEPTH):
            nodes.append(f"{side}_product{step} = MatMul({value}, {side}_weight{step})")
            nodes.append(f"{side}_value{step} = Tanh({side}_product{step})")
            value = f"{side}_value{step}"
    shape = f"float[{ROWS}, {WIDTH}]"
    last = ", ".join(f"{side}_value{DEPTH - 1}" for side in SIDES)
    return parse_model(
        f"prediction ({shape} x) => ({shape} y) {{ {' '.join(nodes)} y = Add({last}) }}", **weights
    ), weights


def _compute_branches(x: Array, weights: dict[str, Array]) -> Array:
    """Return the output of that model by numpy."""
    total: Array = np.zeros((ROWS, WIDTH))
    for side in SIDES:
        value = x.astype(np.float64)
        for step in range(DEPTH):
            value = np.tanh(value @ weights[f"{side}_weight{step}"])
        total = total + value
    return total
