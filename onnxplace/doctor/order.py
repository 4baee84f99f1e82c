"""Check that enqueued work keeps its order: chains between two devices, with many requests in flight."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future

import numpy as np

from onnxplace.doctor.context import (
    WAIT_SECONDS,
    CheckContext,
    Finding,
    compile_placed,
    parse_model,
    require_same,
)
from onnxplace.feeds import Array
from onnxplace.runtime import Result

ROWS, COLUMNS = 64, 256
CHAIN_NODES = 24
MAX_IN_FLIGHT = 16
MIN_REQUESTS = 4 * MAX_IN_FLIGHT
MAX_SECONDS = 10.0
# Products with a permutation matrix are exact, also with 10 bits of mantissa, if values are whole and this small.
MAX_VALUE = 1000


def check_order(context: CheckContext) -> Finding:
    """Run chains of permutations that alternate between the devices; each request has inputs and answers of its own.

    A value that is read before it is complete, or after its memory is used again, has elements of another request or of
    another step, since no two steps and no two requests have equal values.
    """
    from onnxplace.api import InferenceSession

    random = np.random.default_rng(1)
    permutations = [random.permutation(COLUMNS) for _ in range(CHAIN_NODES)]
    weights = {f"p{step}": np.eye(COLUMNS, dtype=np.float32)[:, order] for step, order in enumerate(permutations)}
    middle, last = CHAIN_NODES // 2, CHAIN_NODES
    nodes = " ".join(f"v{step + 1} = MatMul(v{step}, p{step})" for step in range(CHAIN_NODES))
    shape = f"float[{ROWS}, {COLUMNS}]"
    model = parse_model(f"order ({shape} v0) => ({shape} v{middle}, {shape} v{last}) {{ {nodes} }}", **weights)
    places = {f"v{step + 1}": context.ids[0] if step % 2 == 0 else context.ids[-1] for step in range(CHAIN_NODES)}
    bundle = compile_placed(model, context.folder / "order", context.make_target(), places)

    def compute(value: Array, steps: int) -> Array:
        for order in permutations[:steps]:
            value = value[:, order]
        return value

    def compare(number: int, value: Array, future: Future[Result]) -> None:
        outputs = future.result(WAIT_SECONDS).outputs
        for steps in (middle, last):
            what = f"request {number} of {MAX_IN_FLIGHT} in flight, after {steps} steps"
            require_same(outputs[f"v{steps}"], np.ascontiguousarray(compute(value, steps)), what)

    pending: deque[tuple[int, Array, Future[Result]]] = deque()
    number, began = 0, time.perf_counter()
    with InferenceSession(bundle, max_in_flight=MAX_IN_FLIGHT) as session:
        while number < MIN_REQUESTS or time.perf_counter() - began < min(context.seconds, MAX_SECONDS):
            value = random.integers(-MAX_VALUE, MAX_VALUE, (ROWS, COLUMNS)).astype(np.float32)
            # Zeros have two signs, and products do not keep them.
            value[value == 0] = 1
            pending.append((number, value, session.submit({"v0": value})))
            number += 1
            if len(pending) == MAX_IN_FLIGHT:
                compare(*pending.popleft())
        for entry in pending:
            compare(*entry)
    seconds = time.perf_counter() - began
    rate = number / seconds
    detail = f"{number} requests of {CHAIN_NODES} steps, {MAX_IN_FLIGHT} in flight, all exact; {rate:.0f} requests/s"
    return Finding(detail, {"requests": number, "requests_per_second": rate})
