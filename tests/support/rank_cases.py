"""ONNX's conformance suite over MPI: each of two devices is a process, and values cross as messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import onnxplace
from tests.support.conformance import (
    Case,
    Outcome,
    compile_on_two_devices,
    fed_names,
    first_line,
    judge,
    require_similar,
)

START_SECONDS = 120


def rank_case(kind: str, name: str) -> Outcome:
    """Return what becomes of a case whose nodes are on two ranks in random order."""
    return judge(kind, name, list_rank_failures)


def list_rank_failures(found: Case) -> Iterator[str]:
    """Yield what goes wrong."""
    fed = [dict(zip(fed_names(found.model), given)) for given, _ in found.data_sets]
    with TemporaryDirectory(prefix="onnxplace-") as folder:
        try:
            bundle = compile_on_two_devices(found, fed[0], Path(folder) / "bundle")
            options = {"runtime": "mpi", "hosts": "localhost:2", "timeout": START_SECONDS}
            with onnxplace.InferenceSession(bundle, **options) as session:
                names = [item.name for item in session.get_outputs()]
                for feeds, (_, expected) in zip(fed, found.data_sets):
                    outputs = session.submit(feeds).result(START_SECONDS).outputs
                    require_similar(expected, [outputs[name] for name in names], found)
        except Exception as problem:  # noqa: BLE001 - whatever it is, it counts
            yield first_line(problem)
