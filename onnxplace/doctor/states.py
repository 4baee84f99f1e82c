"""Check carried states: several conversations at once, over the same weights."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from onnxplace.doctor.context import WAIT_SECONDS, CheckContext, Finding, compile_placed, parse_model, require_same
from onnxplace.feeds import Array
from onnxplace.runtime import Result

CONVERSATIONS, STEPS = 4, 60
# A state on each device, and a value that crosses in both directions.
_MODEL = """
states (float[64] x, float[64] total, float[64] log) => (float[64] y, float[64] total_next, float[64] log_next) {
    total_next = Add(total, x)
    log_next = Sub(log, total_next)
    mixed = Add(log_next, x)
    y = Neg(mixed)
}
"""


def check_states(context: CheckContext) -> Finding:
    """Run conversations whose requests overlap, and compare each answer and the last states with numpy.

    Sums of small whole numbers are exact.
    """
    from onnxplace.api import InferenceSession

    first, last = context.ids[0], context.ids[-1]
    places = {"total_next|y": first, "log_next|mixed": last}
    bundle = compile_placed(
        parse_model(_MODEL), context.folder / "states", context.make_target(), places, state=("*_next=*",)
    )
    references = [
        (np.full(64, -number, np.float32), np.full(64, number, np.float32)) for number in range(CONVERSATIONS)
    ]
    with InferenceSession(bundle) as session:
        users = [session, *(session.conversation() for _ in range(CONVERSATIONS - 1))]
        pending: list[tuple[int, int, Array, Future[Result]]] = []
        for step in range(STEPS):
            for number, user in enumerate(users):
                x = np.arange(step + number, step + number + 64, dtype=np.float32)
                total, log = references[number]
                feeds = {"x": x} if step else {"x": x, "total": total, "log": log}
                names = ["y", "total_next", "log_next"] if step == STEPS - 1 else ["y"]
                pending.append((number, step, x, user.submit(feeds, names)))
        for number, step, x, future in pending:
            total, log = references[number]
            total = total + x
            log = log - total
            references[number] = (total, log)
            outputs = future.result(WAIT_SECONDS).outputs
            what = f"conversation {number}, step {step}"
            require_same(outputs["y"], -(log + x), what)
            if step == STEPS - 1:
                require_same(outputs["total_next"], total, f"{what}, state on {first}")
                require_same(outputs["log_next"], log, f"{what}, state on {last}")
    return Finding(f"{CONVERSATIONS} conversations of {STEPS} steps at once, all exact")
