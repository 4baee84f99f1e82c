"""Serve many requests: joined into batches, as a stream, and as futures.

    python examples/serving.py

compiles a small `transformer` for two CPU devices, and answers the same requests in three ways. Each answer is compared
with that of one ONNX Runtime session.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transformer import transformer

Feeds = dict[str, NDArray[Any]]
SEQUENCE, VOCABULARY = 16, 200
TOLERANCE = 1e-4  # kernels may add in another order for another batch


def draw_requests(count: int, seed: int = 0) -> list[Feeds]:
    """Return requests of one to three texts."""
    random = np.random.default_rng(seed)
    requests = []
    for size in random.integers(1, 4, count):
        tokens = random.integers(0, VOCABULARY, (size, SEQUENCE))
        requests.append({"input_ids": tokens, "attention_mask": np.ones_like(tokens)})
    return requests


def check(name: str, answers: Iterable[NDArray[Any]], expected: list[NDArray[Any]]) -> None:
    """Print a line, or exit, if an answer is not the expected one."""
    differences = [float(np.abs(one - other).max()) for one, other in zip(answers, expected, strict=True)]
    print(f"{name}: {len(differences)} answers, largest difference {max(differences):.1e}")
    if max(differences) > TOLERANCE:
        raise SystemExit("the answers differ")


def main() -> None:
    """Answer requests with batches, a stream and futures; compare."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before ONNX Runtime is imported
    import onnxruntime

    import onnxplace

    model = transformer(layers=2, hidden=32, heads=2, vocab=VOCABULARY, positions=SEQUENCE)
    plain = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    requests = draw_requests(40)
    expected = [plain.run(None, request)[0] for request in requests]
    with tempfile.TemporaryDirectory() as folder:
        bundle = onnxplace.compile(
            model,
            Path(folder) / "transformer.bundle",
            devices="cpu:0,cpu:1",
            shape={"batch": 4, "seq": SEQUENCE},
            objective="throughput",
        )
        with (
            onnxplace.InferenceSession(bundle, batching=onnxplace.Batching(max_batch=8)) as session,
            ThreadPoolExecutor(8) as callers,
        ):
            results = callers.map(lambda request: session.run(None, request), requests)
            check("batches of the requests of 8 threads", (outputs[0] for outputs in results), expected)
        with onnxplace.InferenceSession(bundle, max_in_flight=4) as session:
            check("a stream", (outputs[0] for outputs in session.stream(requests, in_flight=4)), expected)
            futures = [session.submit(request) for request in requests]  # waits while four are in flight
            name = bundle.outputs[0].name
            check("futures", (future.result().outputs[name] for future in futures), expected)


if __name__ == "__main__":
    main()
