"""Check limits of memory: a model that is too large for one device, and fits on two."""

from __future__ import annotations

import numpy as np

from onnxplace.doctor.context import (
    CheckContext,
    CheckFailedError,
    Finding,
    compile_placed,
    parse_model,
    require,
    require_same,
)
from onnxplace.errors import InfeasibleError
from onnxplace.report import format_bytes
from onnxplace.target import Target

# The two weights are permutation matrices of this size, so that products are exact.
SIZE = 2048
WEIGHT_BYTES = 4 * SIZE**2
LIMIT_BYTES = WEIGHT_BYTES * 3 // 2


def check_memory(context: CheckContext) -> Finding:
    """Compile a model whose two weights exceed the limit of each device alone, and run it on both."""
    from onnxplace.api import InferenceSession

    first, last = context.ids[0], context.ids[-1]
    target = context.make_target(LIMIT_BYTES)
    orders = [np.random.default_rng(seed).permutation(SIZE) for seed in range(2)]
    weights = {f"p{step}": np.eye(SIZE, dtype=np.float32)[:, order] for step, order in enumerate(orders)}
    text = f"memory (float[4, {SIZE}] x) => (float[4, {SIZE}] y) {{ h = MatMul(x, p0) y = MatMul(h, p1) }}"
    model = parse_model(text, **weights)
    for number, device in enumerate(target.devices):
        try:
            compile_placed(model, context.folder / f"one-{number}", Target((device,)), {".*": device.id})
        except InfeasibleError as problem:
            require(device.id in str(problem), f"the refusal does not name {device.id}: {problem}")
        else:
            raise CheckFailedError(
                f"{device.id} with {format_bytes(LIMIT_BYTES)} accepted {format_bytes(2 * WEIGHT_BYTES)} of weights"
            )
    bundle = compile_placed(model, context.folder / "two", target, {"h": first, "y": last})
    x = np.arange(1, 4 * SIZE + 1, dtype=np.float32).reshape(4, SIZE) % 1000 + 1
    with InferenceSession(bundle) as session:
        for _ in range(3):
            (y,) = session.run(None, {"x": x})
            require_same(y, np.ascontiguousarray(x[:, orders[0]][:, orders[1]]), "the model on both devices")
    detail = (
        f"{format_bytes(2 * WEIGHT_BYTES)} of weights: refused by one device with {format_bytes(LIMIT_BYTES)}, "
        "exact on two"
    )
    return Finding(detail)
