"""Does a bundle compute what the model computes, and how fast: `verify` and `bench`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxplace.bundle import WHOLE, Bundle
from onnxplace.errors import ModelError
from onnxplace.feeds import Array
from onnxplace.sessions import open_session, pinned, run_whole, session_options

# Relative to the largest magnitude of the reference output: cutting a model changes which nodes ONNX Runtime fuses,
# and with it the order of floating-point sums (docs/correctness.md).
TOLERANCE = {"float16": 2e-2, "bfloat16": 5e-2, "float32": 1e-3, "float64": 1e-6}


@dataclass(frozen=True)
class OutputDifference:
    """How far one output is from the reference."""

    name: str
    equal: bool
    max_abs_error: float
    max_rel_error: float
    """Largest error over the largest magnitude of the reference."""


def difference(name: str, got: Any, want: Any) -> OutputDifference:
    """Compare an output with its reference: whole numbers, truths and strings exactly, floats within tolerance."""
    if isinstance(want, (list, tuple)) and isinstance(got, (list, tuple)):
        parts = [difference(name, g, w) for g, w in zip(got, want)]
        return OutputDifference(
            name,
            len(got) == len(want) and all(part.equal for part in parts),
            max((part.max_abs_error for part in parts), default=0.0),
            max((part.max_rel_error for part in parts), default=0.0),
        )
    if isinstance(want, Mapping) or want is None or got is None:
        return OutputDifference(name, got == want, 0.0, 0.0)
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return OutputDifference(name, False, float("inf"), float("inf"))
    if not np.issubdtype(want.dtype, np.inexact):
        return OutputDifference(name, bool((got == want).all()), 0.0, 0.0)
    return _float_difference(name, got, want)


def _float_difference(name: str, got: Array, want: Array) -> OutputDifference:
    odd = ~np.isfinite(want)
    same_odd = bool(np.array_equal(got[odd], want[odd], equal_nan=True)) and bool((np.isfinite(got) == ~odd).all())
    error = np.abs(got[~odd].astype(np.complex128 if np.iscomplexobj(want) else np.float64) - want[~odd]).max(
        initial=0.0
    )
    scale = float(np.abs(want[~odd]).max(initial=0.0))
    relative = float(error) / scale if scale > 0 else float(error)
    allowed = TOLERANCE.get(str(want.real.dtype), 1e-3)
    return OutputDifference(name, same_odd and relative <= allowed, float(error), relative)


def reference(
    bundle: Bundle, against: str | Path | None, all_cores: Sequence[int]
) -> Callable[[Mapping[str, Array]], dict[str, Any]]:
    """Return a function that runs the unsplit model: the bundle's own copy of it, or the file `against`."""
    model = Path(against) if against else bundle.file(WHOLE)
    if not model.is_file():
        raise ModelError("M001", "there is no such file", where=str(model))
    with pinned(all_cores):
        session = open_session(model, session_options(all_cores), where=str(model))
    names = [output.name for output in session.get_outputs()]
    missing = {item.name for item in bundle.outputs} - set(names)
    if missing:
        raise ModelError(
            "M030",
            f"it has no output {', '.join(sorted(missing))}",
            where=str(model),
            hint="the bundle was compiled from another model",
        )

    def run(feeds: Mapping[str, Array]) -> dict[str, Any]:
        with pinned(all_cores):
            return dict(zip(names, run_whole(session, names, feeds, str(model))))

    return run


def verify(
    run: Callable[[Mapping[str, Array]], Mapping[str, Any]],
    want: Callable[[Mapping[str, Array]], Mapping[str, Any]],
    feeds: Mapping[str, Array],
    names: Sequence[str],
) -> list[OutputDifference]:
    """Run the same feeds through both and compare output by output."""
    got, expected = run(feeds), want(feeds)
    return [difference(name, got[name], expected[name]) for name in names]


@dataclass(frozen=True)
class Times:
    """How long something took, over several runs."""

    median_seconds: float
    p90_seconds: float
    runs: int


def alternate(calls: Mapping[str, Callable[[], object]], repeat: int, warm_ups: int = 2) -> dict[str, Times]:
    """Time several calls in turn, A B C A B C ..., so that a machine that changes speed changes it for all."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(repeat + warm_ups):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            if round_number >= warm_ups:
                taken[name].append(time.perf_counter() - began)
    return {name: Times(float(np.median(t)), float(np.quantile(t, 0.9)), len(t)) for name, t in taken.items()}
