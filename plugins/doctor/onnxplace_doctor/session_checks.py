"""Checks of sessions: the contract of runtimes, failures, and times, none of which is a failure."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from onnxplace.errors import ExecutionError, RunTimeoutError
from onnxplace.feeds.feeds import Array
from onnxplace.machine.hardware import available_cores
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.machine.repeated_runs import RepeatPolicy
from onnxplace.session.inference_session import InferenceSession
from onnxplace.testing.runtime_contract import check_runtime, parse_model
from onnxplace_doctor.check_context import (
    WAIT_SECONDS,
    CheckContext,
    CheckFailedError,
    CheckSkippedError,
    Finding,
    find_error,
    require,
    require_same,
)

if TYPE_CHECKING:
    from onnx import ModelProto


# ------------------------------------------------------------------------------------------------------------- contract


def check_contract(context: CheckContext) -> Finding:
    """Run the contract tests that plugins use, with the default runtime."""
    from onnxplace.pipeline.registry import find_plugin

    if any("{" in device for device in context.devices):
        raise CheckSkippedError("the contract tests take no options of devices")
    try:
        check_runtime(find_plugin("runtimes", "onnxruntime"), devices=context.ids)
    except AssertionError as problem:
        raise CheckFailedError(str(problem)) from None
    return Finding("requests, failures, cancellation, closing, states and conversations")


# ------------------------------------------------------------------------------------------------------------- failures


# Adding two numbers to three fails on every device; GPUs check no index.
_FAILING = """
faults (float[m] p, float[n] q) => (float[m] t, float[n] w) {
    s = Add(p, pair)
    t = Neg(s)
    u = Neg(q)
    w = Add(u, pair)
}
"""
_PAIR: Array = np.array([1, 2], np.float32)
_LOOP = """
loop (int64 limit, float[4] x) => (float[4] y) {
    [spin] spun = Loop (limit, , x) <body = round (int64 i, bool go, float[4] before) => (bool again, float[4] after) {
        again = Identity(go)
        after = Neg(before)
    }>
    [last] y = Neg(spun)
}
"""
_X = np.arange(1, 5, dtype=np.float32)
_ENDLESS_ROUNDS, _SHORT_ROUNDS = 1 << 62, 101
TIMEOUT_SECONDS = 0.3


def check_faults(context: CheckContext) -> Finding:
    """Let nodes fail on each device, and let a run exceed its time."""
    _check_failing_nodes(context)
    first, last = context.ids[0], context.ids[-1]
    directions = dict.fromkeys([(first, last), (last, first)])  # one for a single device
    recovery_seconds = max(_check_timeout(context, device, other) for device, other in directions)
    detail = (
        f"errors name {' and '.join(dict.fromkeys(context.ids))}; runs after errors and timeouts are right "
        f"(after at most {recovery_seconds:.2g} s)"
    )
    return Finding(detail, {"seconds_after_timeout": recovery_seconds})


def _check_failing_nodes(context: CheckContext) -> None:
    first, last = context.ids[0], context.ids[-1]
    model = parse_model(_FAILING, pair=_PAIR)
    with context.open_session(model, {"s|u": first, ".*": last}, m=2, n=2) as session:
        for device, bad_input in ((first, "p"), (last, "q")):
            good = {"p": np.array([3, 4], np.float32), "q": np.array([5, 6], np.float32)}
            bad = {**good, bad_input: np.zeros(3, np.float32)}
            before, failing, after = (session.submit(feeds) for feeds in (good, bad, good))
            _require_error(failing.exception(WAIT_SECONDS), device)
            for future in (before, after):
                outputs = future.result(WAIT_SECONDS).outputs
                _compare(outputs["t"], outputs["w"], good, f"a request next to one that fails on {device}")
            with suppress(ExecutionError):
                session.run(None, bad)
                raise CheckFailedError(f"a run with a failing node on {device} returned outputs")
            t, w = session.run(None, good)
            _compare(t, w, good, f"the request after one that failed on {device}")


def _require_error(problem: BaseException | None, device: str) -> None:
    require(
        isinstance(problem, ExecutionError), f"expected ExecutionError from a failing node on {device}, got {problem!r}"
    )
    require(device in str(problem), f"the error of a failing node does not name its device {device}: {problem}")


def _compare(t: Array, w: Array, feeds: dict[str, Array], what: str) -> None:
    require_same(t, -(feeds["p"] + _PAIR), what)
    require_same(w, _PAIR - feeds["q"], what)


def _check_timeout(context: CheckContext, device: str, other: str) -> float:
    """Return how long the next run took after a run that had exceeded its time."""
    endless, short = ({"limit": np.array(rounds), "x": _X} for rounds in (_ENDLESS_ROUNDS, _SHORT_ROUNDS))
    with context.open_session(parse_model(_LOOP), {"spin": device, "last": other}) as session:
        try:
            session.run(None, endless, timeout=TIMEOUT_SECONDS)
        except RunTimeoutError:
            began = time.perf_counter()
            (y,) = session.run(None, short)
            require_same(y, _X, f"the request after a timeout on {device}")
            return time.perf_counter() - began
    raise CheckFailedError(f"an endless run on {device} returned")


# ---------------------------------------------------------------------------------------------------------------- times


# Sizes of values that `link` sends, and its least duration.
LINK_SIZES = (1, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 32 << 20)
MIN_LINK_SECONDS = 1.0
# Of `call`, with a bundle and again with a plain session.
MAX_CALLS, MAX_CALL_SECONDS = 500, 0.5
# Of the model of `prediction`: two branches of some products.
WIDTH, DEPTH, ROWS = 512, 4, 64
SIDES = ("left", "right")
# Relative to the largest value; products may use 10 bits of mantissa.
TOLERANCE = 2e-2


def check_call(context: CheckContext) -> Finding:
    """Time a call of a model of one node, through onnxplace and in a plain session of ONNX Runtime on the host."""
    feeds = {"x": np.ones(16, np.float32)}
    model = parse_model("call (float[16] x) => (float[16] y) { y = Neg(x) }")
    plain = open_session(model.SerializeToString(), make_session_options(available_cores()[:1]))
    policy = RepeatPolicy(MAX_CALLS, min(context.seconds / 4, MAX_CALL_SECONDS), 0.0)
    with context.open_session(model, {".*": context.ids[0]}) as session:
        seconds, plain_seconds = (
            policy.run(partial(run, None, feeds), pool=False)[0].seconds for run in (session.run, plain.run)
        )
    detail = f"{seconds * 1e6:.0f} us; plain session on the host {plain_seconds * 1e6:.0f} us"
    return Finding(detail, {"call_seconds": seconds, "plain_host_session_seconds": plain_seconds})


def check_link(context: CheckContext) -> Finding:
    """Measure the link between two devices in both directions, and calls on each, as `devices --calibrate` does."""
    from onnxplace_doctor.calibrator import calibrate

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
                **{key: getattr(item.link, key) for key in ("latency_seconds", "bytes_per_second", "via")},
                "points": [{key: getattr(p, key) for key in ("bytes", "seconds", "outlier")} for p in item.fit.points],
            }
            for name, item in links.items()
        },
        "cut_seconds": {device: costs.segment_seconds for device, costs in result.call_costs.items()},
        "notes": list(result.notes),
    }
    return Finding("; ".join(parts), figures)


def check_prediction(context: CheckContext) -> Finding:
    """Compile a model with a branch on each device by measured costs; compare predicted and measured step."""
    from onnx.reference import ReferenceEvaluator

    from onnxplace.driver.compile import compile_model
    from onnxplace.measure.trial import run_trials

    first, last = context.ids[0], context.ids[-1]
    model = _make_branches()
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
    (expected,) = cast("list[Array]", ReferenceEvaluator(model).run(None, {"x": x}))
    error = find_error(y, expected, TOLERANCE, "the error of its output")
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


def _make_branches() -> ModelProto:
    """Return a model of two branches whose sum is its output."""
    random, weights, nodes = np.random.default_rng(2), dict[str, Array](), []
    for side in SIDES:
        value = "x"
        for step in range(DEPTH):
            weight, product = f"{side}_weight{step}", f"{side}_product{step}"
            weights[weight] = (random.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32)
            nodes.append(f"{product} = MatMul({value}, {weight})")
            value = f"{side}_value{step}"
            nodes.append(f"{value} = Tanh({product})")
    shape, last = f"float[{ROWS}, {WIDTH}]", ", ".join(f"{side}_value{DEPTH - 1}" for side in SIDES)
    return parse_model(f"prediction ({shape} x) => ({shape} y) {{ {' '.join(nodes)} y = Add({last}) }}", **weights)
