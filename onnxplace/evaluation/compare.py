"""Does a bundle compute what the model computes, and how fast: `compare_outputs` and `bench`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxplace.bundle import WHOLE_MODEL_FILE, Bundle
from onnxplace.errors import ModelError
from onnxplace.feeds import Array, describe_input
from onnxplace.machine import open_session, pin_thread, run_whole_model, session_options
from onnxplace.model import Lineage, is_quantising, output_lineages

if TYPE_CHECKING:
    from onnx import ModelProto

# Relative to the largest magnitude of the reference output: cutting a model changes which nodes ONNX Runtime fuses,
# and with it the order of floating-point sums (docs/correctness.md).
TOLERANCE = {"float16": 2e-2, "bfloat16": 5e-2, "float32": 1e-3, "float64": 1e-6}
# Types of few bits may be off by one step at their largest magnitude.
TOLERANCE |= {"float8_e4m3fn": 0.125, "float8_e4m3fnuz": 0.125, "float8_e5m2": 0.25, "float8_e5m2fnuz": 0.25}
TOLERANCE |= {"float4_e2m1fn": 0.34}


@dataclass(frozen=True)
class OutputDifference:
    """How far one output is from the reference."""

    name: str
    equal: bool
    max_abs_error: float
    max_rel_error: float
    """Largest error over the largest magnitude of the reference."""
    random_nodes: tuple[str, ...] = ()
    """Nodes that draw random numbers on which it depends, if these are why elements differ.

    Then `equal` is about type, shape and finiteness, and both errors are infinite.
    """


def compare_output(name: str, got: Any, want: Any, lineage: Lineage | None = None) -> OutputDifference:
    """Compare an output with its reference: whole numbers, truths and strings exactly, floats within tolerance.

    The tolerance is that of the coarsest type the `lineage` has, or the output itself. Where the elements of an output
    that depends on random numbers differ, only their type, shape and finiteness are compared.
    """
    lineage = lineage or Lineage()
    result = _compare_values(name, got, want, lineage)
    if result.equal or not lineage.random_nodes:
        return result
    alike = _has_same_form(got, want, lineage.shape_is_drawn)
    return OutputDifference(name, alike, float("inf"), float("inf"), tuple(sorted(lineage.random_nodes)))


def _compare_values(name: str, got: Any, want: Any, lineage: Lineage) -> OutputDifference:
    if isinstance(want, (list, tuple)) and isinstance(got, (list, tuple)):
        parts = [_compare_values(name, g, w, lineage) for g, w in zip(got, want)]
        return _summarise_parts(name, parts, len(got) == len(want))
    if isinstance(want, Mapping) and isinstance(got, Mapping):
        parts = [_compare_values(name, got[key], want[key], lineage) for key in want if key in got]
        return _summarise_parts(name, parts, got.keys() == want.keys())
    if _is_array(want) != _is_array(got) or want is None or got is None:
        return OutputDifference(name, want is None and got is None, 0.0, 0.0)
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return OutputDifference(name, False, float("inf"), float("inf"))
    own = str(want.real.dtype)
    if own not in TOLERANCE:
        return _compare_exactly(name, got, want)
    allowed = max(TOLERANCE.get(kind, 0.0) for kind in (own, *lineage.types))
    if not np.issubdtype(want.dtype, np.inexact):  # of the package ml_dtypes: numpy knows nothing of them
        got, want = got.astype(np.float32), want.astype(np.float32)
    return _compare_floats(name, got, want, allowed)


def _is_array(value: Any) -> bool:
    return value is not None and not isinstance(value, (list, tuple, Mapping))


def _summarise_parts(name: str, parts: Sequence[OutputDifference], complete: bool) -> OutputDifference:
    """Return the difference of an output from those of its parts; `complete`: both have the same ones."""
    return OutputDifference(
        name,
        complete and all(part.equal for part in parts),
        max((part.max_abs_error for part in parts), default=0.0),
        max((part.max_rel_error for part in parts), default=0.0),
    )


def _compare_exactly(name: str, got: Array, want: Array) -> OutputDifference:
    """Compare whole numbers, truths and texts; texts are as far from each other as can be."""
    if bool((got == want).all()):
        return OutputDifference(name, True, 0.0, 0.0)
    if want.dtype.kind not in "iub":
        return OutputDifference(name, False, float("inf"), float("inf"))
    exact = _compare_floats(name, got.astype(np.float64), want.astype(np.float64), 0.0)
    return replace(exact, equal=False)


def _compare_floats(name: str, got: Array, want: Array, allowed: float) -> OutputDifference:
    odd = ~np.isfinite(want)
    same_odd = bool(np.array_equal(got[odd], want[odd], equal_nan=True)) and bool((np.isfinite(got) == ~odd).all())
    error = np.abs(got[~odd].astype(np.complex128 if np.iscomplexobj(want) else np.float64) - want[~odd]).max(
        initial=0.0
    )
    scale = float(np.abs(want[~odd]).max(initial=0.0))
    relative = float(error) / scale if scale > 0 else float(error)
    return OutputDifference(name, same_odd and relative <= allowed, float(error), relative)


def _has_same_form(got: Any, want: Any, any_shape: bool) -> bool:
    """Return whether two outputs have the same type and shape, and `got` is finite if `want` is."""
    if isinstance(want, (list, tuple)) and isinstance(got, (list, tuple)):
        return (any_shape or len(got) == len(want)) and all(_has_same_form(g, w, any_shape) for g, w in zip(got, want))
    if not _is_array(want) or not _is_array(got):
        return type(got) is type(want)
    got, want = np.asarray(got), np.asarray(want)
    if got.dtype != want.dtype or (got.shape != want.shape and not any_shape):
        return False
    return str(want.real.dtype) not in TOLERANCE or bool(np.isfinite(got).all() or not np.isfinite(want).all())


def open_reference(
    bundle: Bundle, against: str | Path | None, all_cores: Sequence[int]
) -> Callable[[Mapping[str, Array]], dict[str, Any]]:
    """Return a function that runs the unsplit model: the bundle's own copy of it, or the file `against`."""
    model = Path(against) if against else bundle.file(WHOLE_MODEL_FILE)
    if not os.path.isfile(model):
        what = "it is a folder, not a model" if os.path.isdir(model) else "there is no such file"
        raise ModelError("M001", what, where=str(model))
    entries = {} if against else bundle.session_entries
    with pin_thread(all_cores):
        session = open_session(model, session_options(all_cores, entries=entries), where=str(model))
    names = [output.name for output in session.get_outputs()]
    _require_same_interface(bundle, session, str(model))

    def run(feeds: Mapping[str, Array]) -> dict[str, Any]:
        with pin_thread(all_cores):
            return dict(zip(names, run_whole_model(session, names, feeds, str(model))))

    return run


def rounds_to_few_values(bundle: Bundle) -> bool:
    """Return whether the model quantises, so that the last bit of a float can become a whole step of an output."""
    return is_quantising(_load_whole_model(bundle))


def lineages_of_bundle(bundle: Bundle) -> dict[str, Lineage]:
    """Return what each output of the model comes from, by name."""
    return output_lineages(_load_whole_model(bundle), {item.input: item.output for item in bundle.manifest.states})


def _load_whole_model(bundle: Bundle) -> ModelProto:
    """Return the bundle's copy of the model, without its weights."""
    import onnx

    return onnx.load(bundle.file(WHOLE_MODEL_FILE), load_external_data=False)


def _require_same_interface(bundle: Bundle, session: Any, where: str) -> None:
    """Raise ModelError if a model does not take and give what the bundle does."""
    hint = "the bundle was compiled from another model"
    gives = {output.name for output in session.get_outputs()}
    if missing := sorted({item.name for item in bundle.outputs} - gives):
        raise ModelError("M030", f"it has no output {', '.join(missing)}", where=where, hint=hint)
    theirs = {item.name: item for item in session.get_inputs()}
    ours = {item.name: item for item in bundle.inputs if not item.optional}
    if other := sorted(theirs.keys() ^ ours.keys()):
        raise ModelError("M030", f"its inputs differ: {', '.join(other)}", where=where, hint=hint)
    for name, item in ours.items():
        fixed = [size for size in theirs[name].shape if isinstance(size, int)]
        same_rank = item.shape is None or not theirs[name].shape or len(theirs[name].shape) == len(item.shape)
        if (
            theirs[name].type != item.dtype
            or not same_rank
            or any(
                isinstance(a, int) and isinstance(b, int) and a != b
                for a, b in zip(theirs[name].shape, item.shape or fixed)
            )
        ):
            theirs_text = f"{theirs[name].type} {theirs[name].shape}"
            raise ModelError(
                "M030", f"its input {name!r} is {theirs_text}, not {describe_input(item)}", where=where, hint=hint
            )


def compare_outputs(
    run: Callable[[Mapping[str, Array]], Mapping[str, Any]],
    want: Callable[[Mapping[str, Array]], Mapping[str, Any]],
    feeds: Mapping[str, Array],
    names: Sequence[str],
    origins: Mapping[str, Lineage] | None = None,
) -> list[OutputDifference]:
    """Run the same feeds through both and compare output by output; `origins` are the lineages of outputs.

    What is wanted is computed first, so that feeds which do not fit the model are reported as such.
    """
    expected = want(feeds)
    got = run(feeds)
    return [compare_output(name, got[name], expected[name], (origins or {}).get(name)) for name in names]


TURN_SECONDS, MIN_TURNS = 0.02, 3


@dataclass(frozen=True)
class Timings:
    """How long something took, over several runs."""

    median_seconds: float
    p90_seconds: float
    runs: int

    def per(self, count: int) -> Timings:
        """Return the time of each of `count` things that were timed as one."""
        return Timings(self.median_seconds / count, self.p90_seconds / count, self.runs)


def time_in_turns(calls: Mapping[str, Callable[[], object]], repeat: int, warm_ups: int = 2) -> dict[str, Timings]:
    """Time several calls `repeat` times each, in turn, so that a machine that changes speed changes it for all.

    A turn is one call, or as many short ones as make `TURN_SECONDS`, though a third of all at most: caches then hold
    what the call needs, as where it is made again and again.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}

    def turn(count: int) -> None:
        for name, call in calls.items():
            for _ in range(count):
                began = time.perf_counter()
                call()
                taken[name].append(time.perf_counter() - began)

    for _ in range(warm_ups):
        turn(1)
    slowest = max((times[-1] for times in taken.values() if times), default=TURN_SECONDS)
    most = max(min(repeat // MIN_TURNS, round(TURN_SECONDS / max(slowest, 1e-9))), 1)
    for done in range(0, repeat, most):
        turn(min(most, repeat - done))
    counted = {name: times[warm_ups:] for name, times in taken.items()}
    return {name: Timings(float(np.median(t)), float(np.quantile(t, 0.9)), len(t)) for name, t in counted.items()}
