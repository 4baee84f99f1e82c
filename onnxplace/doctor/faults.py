"""Check failures: nodes that fail, timeouts, and closing while requests are in flight."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from onnxplace.bundle import Bundle
from onnxplace.doctor.context import (
    WAIT_SECONDS,
    CheckContext,
    CheckFailedError,
    Finding,
    compile_placed,
    parse_model,
    require,
    require_same,
)
from onnxplace.errors import ExecutionError, RunTimeoutError
from onnxplace.feeds import Array

if TYPE_CHECKING:
    from onnxplace.api import InferenceSession

# Adding two numbers to three fails on every device; GPUs check no index.
_FAILING = """
faults (float[m] p, float[n] q) => (float[m] t, float[n] w) {
    s = Add(p, pair)
    t = Neg(s)
    u = Neg(q)
    w = Add(u, pair)
}
"""
_ON_FIRST = "s|u"
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
IN_FLIGHT = 8


def check_faults(context: CheckContext) -> Finding:
    """Let nodes fail on each device, let a run exceed its time, and close a session with requests in flight."""
    _check_failing_nodes(context)
    recovery_seconds = 0.0
    for number, (device, other) in enumerate(context.directions):
        folder = context.folder / f"loop-{number}"
        bundle = compile_placed(parse_model(_LOOP), folder, context.make_target(), {"spin": device, "last": other})
        recovery_seconds = max(recovery_seconds, _check_timeout(bundle, device))
        _check_close(bundle)
    detail = (
        f"errors name {' and '.join(dict.fromkeys(context.ids))}; runs after errors and timeouts are right "
        f"(after at most {recovery_seconds:.2g} s); closing waits for requests in flight"
    )
    return Finding(detail, {"seconds_after_timeout": recovery_seconds})


def _check_failing_nodes(context: CheckContext) -> None:
    from onnxplace.api import InferenceSession

    first, last = context.ids[0], context.ids[-1]
    places = {_ON_FIRST: first, ".*": last}
    model = parse_model(_FAILING, pair=_PAIR)
    bundle = compile_placed(model, context.folder / "faults", context.make_target(), places, m=2, n=2)
    with InferenceSession(bundle) as session:
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


def _check_timeout(bundle: Bundle, device: str) -> float:
    """Return how long the next run took after a run that had exceeded its time."""
    from onnxplace.api import InferenceSession

    with InferenceSession(bundle) as session:
        try:
            session.run(None, _make_feeds(_ENDLESS_ROUNDS), timeout=TIMEOUT_SECONDS)
        except RunTimeoutError:
            began = time.perf_counter()
            _check_run(session, f"the request after a timeout on {device}")
            return time.perf_counter() - began
    raise CheckFailedError(f"an endless run on {device} returned")


def _check_run(session: InferenceSession, what: str) -> None:
    (y,) = session.run(None, _make_feeds(_SHORT_ROUNDS))
    require_same(y, _X, what)


def _check_close(bundle: Bundle) -> None:
    from onnxplace.api import InferenceSession

    session = InferenceSession(bundle)
    futures = [session.submit(_make_feeds(_SHORT_ROUNDS)) for _ in range(IN_FLIGHT)]
    session.close()
    require(all(future.done() for future in futures), "close did not wait for the requests in flight")
    for future in futures:
        require_same(future.result().outputs["y"], _X, "a request in flight at close")
    with suppress(ExecutionError):
        session.run(None, _make_feeds(1))
        raise CheckFailedError("a closed session accepted a request")


def _make_feeds(rounds: int) -> dict[str, Array]:
    return {"limit": np.array(rounds, np.int64), "x": _X}
