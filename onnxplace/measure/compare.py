"""Compare a bundle with the unsplit model: outputs (`verify`), and times (`bench`).

Where outputs differ, the unsplit model is compared with itself, too: it may be as far from itself.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxplace.bundle.bundle import WHOLE_MODEL_FILE, Bundle
from onnxplace.bundle.bundle_routes import list_route_devices
from onnxplace.bundle.split_states import SplitStates
from onnxplace.errors import ModelError
from onnxplace.feeds.feeds import Array, Declared, describe_input
from onnxplace.machine.hardware import available_cores, find_precision
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import Level, make_session_options, pin_thread, uses_optimisations
from onnxplace.machine.ort_values import make_runner
from onnxplace.machine.repeated_runs import (
    MAX_SLOWDOWN,
    MIN_RUNS,
    find_least_reference_seconds,
    find_typical_seconds,
    time_reference,
)
from onnxplace.measure.step_inputs import StateCarrier, StepInputs
from onnxplace.model.lineage import Lineage, is_quantising, output_lineages
from onnxplace.target.target import PRECISIONS
from onnxplace.utils.differences import find_largest_error
from onnxplace.utils.progress import report_progress

if TYPE_CHECKING:
    from onnx import ModelProto

# Relative to the largest magnitude of the reference output: splitting a model changes which nodes ONNX Runtime fuses,
# and with it the order of floating-point sums (docs/correctness.md).
TOLERANCE = {"float16": 2e-2, "bfloat16": 5e-2, "float32": 1e-3, "float64": 1e-6}
# Types of few bits may differ by one step at their largest magnitude: 2^-3 for three bits of mantissa, 2^-2 for two,
# and from 4 to 6, the two largest numbers, for E2M1.
TOLERANCE |= {"float8_e4m3fn": 0.125, "float8_e4m3fnuz": 0.125, "float8_e5m2": 0.25, "float8_e5m2fnuz": 0.25}
TOLERANCE |= {"float4_e2m1fn": 0.34}
# Precision of devices -> the type with the same unit round-off, 2^-11 or 2^-8, whose tolerance it has.
_EQUALLY_PRECISE = {"tf32": "float16", "int8": "bfloat16"}


@dataclass(frozen=True)
class OutputDifference:
    """The difference of one output from the reference."""

    name: str
    equal: bool
    max_abs_error: float
    max_rel_error: float
    """Largest error over the largest magnitude of the reference."""
    random_nodes: tuple[str, ...] = ()
    """Nodes drawing random numbers that explain the differing elements; empty if none do.

    If there are any, `equal` is about type, shape and finiteness, and both errors are infinite.
    """
    own_error: float = 0.0
    """Largest absolute difference of the unsplit model from itself, measured where the output differs.

    It is infinite if two equal runs differ: then `equal` is about type and shape.
    """
    index: tuple[int, ...] = ()
    """Where the largest error is; empty where there is none, and for a scalar."""
    tolerance: float = 0.0
    """The largest relative error that counts as equal; 0 for types that have to be equal."""
    tolerance_type: str = ""
    """The coarsest type on the way to the output, which sets the tolerance."""


def compare_output(name: str, actual: Any, reference: Any, lineage: Lineage | None = None) -> OutputDifference:
    """Compare an output with its reference: floats within tolerance, all else exactly.

    The tolerance is that of the coarsest type among the `lineage` and the output itself. If elements differ in an
    output that depends on random numbers, only type, shape and finiteness are compared.

    >>> compare_output("y", np.float32([1, 2]), np.float32([1, 2])).equal
    True
    """
    lineage = lineage or Lineage()
    # Equal values are equal, however they came about; only others are excused by random numbers.
    result = _compare_values(name, actual, reference, lineage)
    if result.equal or not lineage.random_nodes:
        return result
    is_equal = _has_same_form(actual, reference, lineage.shape_is_drawn)
    return OutputDifference(name, is_equal, inf, inf, random_nodes=tuple(sorted(lineage.random_nodes)))


def _compare_values(name: str, actual: Any, reference: Any, lineage: Lineage) -> OutputDifference:
    """Compare two values of any ONNX type: sequences, maps, optionals and tensors."""
    if isinstance(actual, (list, tuple)) and isinstance(reference, (list, tuple)):
        parts = [_compare_values(name, a, b, lineage) for a, b in zip(actual, reference)]
        return _summarise_parts(name, parts, len(actual) == len(reference))
    if isinstance(actual, Mapping) and isinstance(reference, Mapping):
        parts = [_compare_values(name, actual[key], reference[key], lineage) for key in reference if key in actual]
        return _summarise_parts(name, parts, actual.keys() == reference.keys())
    if _is_array(reference) != _is_array(actual) or reference is None or actual is None:
        return OutputDifference(name, reference is None and actual is None, 0.0, 0.0)
    return _compare_arrays(name, np.asarray(actual), np.asarray(reference), lineage)


def _compare_arrays(name: str, actual: Array, reference: Array, lineage: Lineage) -> OutputDifference:
    """Compare floats within tolerance, others exactly; strings that differ have an infinite error."""
    dtype = str(reference.real.dtype)
    is_exact, has_form = dtype not in TOLERANCE, actual.shape == reference.shape and actual.dtype == reference.dtype
    is_equal = has_form and bool((actual == reference).all())
    if not has_form or (is_exact and reference.dtype.kind not in "iub"):
        error = 0.0 if is_equal else inf
        return OutputDifference(name, is_equal, error, error)
    error, relative, index = find_largest_error(actual, reference)
    difference = OutputDifference(name, is_equal, error, relative, index=index)
    if is_exact:
        return difference
    coarsest = max((dtype, *sorted(lineage.types & TOLERANCE.keys())), key=TOLERANCE.__getitem__)
    tolerance = TOLERANCE[coarsest]
    return replace(difference, equal=relative <= tolerance, tolerance=tolerance, tolerance_type=coarsest)


def _is_array(value: Any) -> bool:
    return value is not None and not isinstance(value, (list, tuple, Mapping))


def _summarise_parts(name: str, parts: Sequence[OutputDifference], complete: bool) -> OutputDifference:
    """Return an output's difference from those of its parts; `complete` if no part is missing or extra."""
    worst = find_worst([*parts, OutputDifference(name, True, 0.0, 0.0)])
    return replace(worst, equal=worst.equal and complete)


def find_worst(differences: Iterable[OutputDifference]) -> OutputDifference:
    """Return the largest of some differences; those within tolerance count as smaller than all others."""
    return max(differences, key=lambda item: (not item.equal, item.max_rel_error))


def _has_same_form(actual: Any, reference: Any, any_shape: bool) -> bool:
    """Return whether types and shapes are equal, and `actual` is finite if `reference` is."""
    if isinstance(actual, (list, tuple)) and isinstance(reference, (list, tuple)):
        parts = zip(actual, reference)
        return (any_shape or len(actual) == len(reference)) and all(_has_same_form(a, b, any_shape) for a, b in parts)
    if not _is_array(reference) or not _is_array(actual):
        return type(actual) is type(reference)
    actual, reference = np.asarray(actual), np.asarray(reference)
    has_same_shape = any_shape or actual.shape == reference.shape
    if actual.dtype != reference.dtype or not has_same_shape:
        return False
    is_exact = str(reference.real.dtype) not in TOLERANCE  # it has no infinite values
    return is_exact or bool(np.isfinite(actual).all() or not np.isfinite(reference).all())


def open_reference(
    bundle: Bundle, against: str | Path | None, all_cores: Sequence[int], level: Level | None = None
) -> Callable[[Mapping[str, Array]], dict[str, Any]]:
    """Return a function that runs the unsplit model: the bundle's copy, or the file `against`."""
    model = Path(against) if against else bundle.file(WHOLE_MODEL_FILE)
    if not os.path.isfile(model):
        message = "expected a model file, got a folder" if os.path.isdir(model) else "there is no such file"
        raise ModelError("M001", message, where=str(model))
    entries = {} if against else bundle.session_entries
    if bundle.manifest.streams:  # the model may be larger than the memory: map it, and make no second copy of weights
        entries = {**entries, "session.disable_prepacking": "1"}
    with pin_thread(all_cores):
        session = open_session(model, make_session_options(all_cores, level=level, entries=entries), where=str(model))
    names, run_whole = [output.name for output in session.get_outputs()], make_runner(session, str(model))
    # A plan of fixed sizes has a copy of the model of these, which is opened when they come first.
    fixed = {} if against else {tuple(item.shape for item in plan.inputs): plan for plan in bundle.plans[1:]}
    open_fixed = cache(lambda shapes: open_reference(fixed[shapes], None, all_cores, level))
    # The bundle's copy has the bundle's own parts of states, other files have whole states.
    split_states = SplitStates(bundle.manifest) if against else None
    _require_same_interface(bundle, session, str(model), split_states)

    def run(feeds: Mapping[str, Array]) -> dict[str, Any]:
        shapes = tuple(getattr(feeds.get(item.name), "shape", None) for item in bundle.inputs)
        if shapes in fixed:
            return open_fixed(shapes)(feeds)
        if split_states:
            feeds = split_states.join_feeds(feeds)
        with pin_thread(all_cores):
            outputs = dict(zip(names, run_whole(feeds)))
        return split_states.cut_outputs(outputs) if split_states else outputs

    return run


def rounds_to_few_values(bundle: Bundle) -> bool:
    """Return whether the model quantises, so that rounding can change an output by a whole step."""
    return is_quantising(_load_whole_model(bundle))


def find_bundle_lineages(bundle: Bundle) -> dict[str, Lineage]:
    """Return the lineage of each output of the model, by name.

    Of a computed one, it has the types in which the bundle's devices compute float32.
    """
    lineages = output_lineages(_load_whole_model(bundle), {item.input: item.output for item in bundle.manifest.states})
    lower = set(list_precisions(bundle).values()) - {"float32"}
    device_types = Lineage(frozenset(_EQUALLY_PRECISE.get(name, name) for name in lower))
    return {name: lineage | device_types if lineage.types else lineage for name, lineage in lineages.items()}


def list_precisions(*bundles: Bundle) -> dict[str, str]:
    """Return the precision of each device that computes, by its name, the least precise first."""
    used = {device for bundle in bundles for device in list_route_devices(bundle.manifest)}
    devices = [device for bundle in bundles for device in bundle.target.devices]
    precisions = {device.id: find_precision(device) for device in devices if device.id in used}
    return dict(sorted(precisions.items(), key=lambda item: -PRECISIONS.index(item[1])))


def _load_whole_model(bundle: Bundle) -> ModelProto:
    """Return the bundle's copy of the model, without its weights."""
    import onnx

    return onnx.load(bundle.file(WHOLE_MODEL_FILE), load_external_data=False)


def _require_same_interface(bundle: Bundle, session: Any, where: str, split_states: SplitStates | None) -> None:
    """Raise ModelError unless a model has the inputs and outputs of the bundle."""
    hint = "the bundle was compiled from another model"
    outputs = {output.name for output in session.get_outputs()}
    if split_states:
        outputs |= set(split_states.expand_names(outputs))
    if missing := sorted({item.name for item in bundle.outputs} - outputs):
        raise ModelError("M030", f"it has no output {', '.join(missing)}", where=where, hint=hint)
    model_inputs = {item.name: item for item in session.get_inputs()}
    bundle_inputs = _join_split_inputs(bundle, model_inputs, split_states)
    if unmatched := sorted(model_inputs.keys() ^ bundle_inputs.keys()):
        raise ModelError("M030", f"its inputs differ: {', '.join(unmatched)}", where=where, hint=hint)
    for name, declared in bundle_inputs.items():
        if not _is_same_input(model_inputs[name], declared):
            actual = f"{model_inputs[name].type} {model_inputs[name].shape}"
            message = f"its input {name!r} is {actual}, expected {describe_input(declared)}"
            raise ModelError("M030", message, where=where, hint=hint)


def _join_split_inputs(bundle: Bundle, whole: Mapping[str, Any], states: SplitStates | None) -> dict[str, Declared]:
    """Return the inputs that a bundle needs by name, with whole states in place of their parts."""
    inputs = {item.name: item for item in bundle.inputs if not item.optional}
    for name, parts in (states.whole_names if states else {}).items():
        part, *_ = [inputs.pop(item) for item in parts]
        # The split axis is longer than that of the part: it is taken from the model.
        sizes = whole[name].shape if name in whole else []
        shape = [size if isinstance(size, int) else str(size) for size in sizes]
        inputs[name] = replace(part, name=name, shape=tuple(shape))
    return inputs


def _is_same_input(item: Any, declared: Declared) -> bool:
    """Return whether a session's input has the declared type, rank and fixed sizes, as far as both are known."""
    same_rank = declared.shape is None or not item.shape or len(item.shape) == len(declared.shape)
    sizes = zip(item.shape, declared.shape or ())
    same_sizes = not any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in sizes)
    return bool(item.type == declared.dtype) and same_rank and same_sizes


def compare_outputs(
    run: Callable[[Mapping[str, Array]], Mapping[str, Any]],
    want: Callable[[Mapping[str, Array]], Mapping[str, Any]],
    feeds: Mapping[str, Array],
    names: Sequence[str],
    origins: Mapping[str, Lineage] | None = None,
) -> list[OutputDifference]:
    """Run the same feeds through both and compare output by output.

    The reference `want` runs first, so that feeds which do not fit the model are reported as such.

    Args:
        run: runs the bundle.
        want: runs the unsplit model.
        feeds: inputs of both.
        names: outputs to compare.
        origins: lineages of outputs, by name.
    """
    expected = want(feeds)
    got = run(feeds)
    return [compare_output(name, got[name], expected[name], (origins or {}).get(name)) for name in names]


# ------------------------------------------------------------------------- steps, and the unsplit model against itself


Differences = Sequence[Sequence[OutputDifference]]
"""By step, of each output."""
Run = Callable[[Mapping[str, Any]], Mapping[str, Any]]

# How the unsplit model runs once more: with other fusions and memory layouts, it rounds otherwise.
_OTHER_LEVELS: tuple[Level, ...] = ("none", "basic", "extended", "all")
# A bundle has its own fusions, so that it may be further off than the unsplit model is from itself.
MAX_OWN_ERRORS = 2.0
UNREPEATABLE = "two equal runs of the unsplit model differ in it, so that only type and shape are compared"
# The option of glibc's mallopt.
_M_PERTURB = -6
_FLOATS = ("tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)")


@contextmanager
def _fill_allocations() -> Iterator[None]:
    """Fill memory that is allocated inside with bytes other than zeros, where the C library can."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option:
        set_option(_M_PERTURB, 0xA5)
    try:
        yield
    finally:
        if set_option:
            set_option(_M_PERTURB, 0)


class ModelComparison:
    """Compares with the unsplit model, which is the file `against`, or else the bundle's copy."""

    def __init__(self, bundle: Bundle, against: str | Path | None, cores: Sequence[int], names: Sequence[str]) -> None:
        """Open the model on such cores, to compare these outputs."""
        self._bundle, self._against, self._cores, self.names = bundle, against, cores, names
        self._run_model, self._lineages = open_reference(bundle, against, cores), find_bundle_lineages(bundle)
        self._floats = {item.name for item in bundle.outputs if item.dtype in _FLOATS}

    def compare(self, run: Run, steps: StepInputs, count: int) -> Differences:
        """Return how far `run` is from the model in each step; where it differs, also how far the model is from itself.

        An output that the model computes otherwise in two equal runs counts as equal if its type and shape agree.
        """
        differences = self.compare_steps(run, steps, count)
        if all(item.equal for step in differences for item in step):
            return differences
        again = self.compare_steps(StateCarrier(self._run_model, self._bundle), steps, count)
        if all(item.equal for step in again for item in step):
            with _fill_allocations():  # memory that no kernel writes may hold the same twice
                run_model = open_reference(self._bundle, self._against, self._cores)
                again = self.compare_steps(StateCarrier(run_model, self._bundle), steps, count)
        others = []
        for level in _OTHER_LEVELS:
            run_model = open_reference(self._bundle, self._against, available_cores()[:1], level)
            others.append(self.compare_steps(StateCarrier(run_model, self._bundle), steps, count))
        return [[self._add_own_error(*items) for items in zip(*step)] for step in zip(differences, again, *others)]

    def compare_steps(self, run: Run, steps: StepInputs, count: int) -> Differences:
        """Return how far `run` is from the model in each step."""
        reference, differences = StateCarrier(self._run_model, self._bundle), []
        for number in range(count):
            with steps.explained(number):
                feeds = steps.feeds(number)
                differences.append(compare_outputs(run, reference, feeds, self.names, self._lineages))
            report_progress(number + 1, count)
            if number == 0:
                steps.learn(reference.states)
        return differences

    def _add_own_error(
        self, item: OutputDifference, again: OutputDifference, *others: OutputDifference
    ) -> OutputDifference:
        if item.equal or not again.equal:
            return replace(
                item, equal=item.equal or isfinite(item.max_abs_error), own_error=0.0 if again.equal else inf
            )
        errors = [other.max_abs_error for other in others if item.name in self._floats]
        own_error = max(filter(isfinite, errors), default=0.0)
        # Without optimisations, only sums that are split over devices have another order.
        has_split_sums = self._bundle.manifest.sharding is not None and not uses_optimisations()
        return replace(
            item, own_error=own_error, equal=has_split_sums and item.max_abs_error <= MAX_OWN_ERRORS * own_error
        )


# ------------------------------------------------------------------------------------------------------------- times


# Short calls are repeated within a turn up to this time; all of them take at least this many turns.
TURN_SECONDS, MIN_TURNS = 0.06, 3
# Threads of a session look for work for up to 50 ms after its last run: they would take cores from the next call.
SETTLING_SECONDS = 0.06


@dataclass(frozen=True)
class Timings:
    """Times of a call over several runs."""

    median_seconds: float
    p90_seconds: float
    runs: int
    samples: tuple[float, ...] = ()
    """Seconds of each run, in order, where calls took turns: runs at one position belong to one turn."""


@dataclass(frozen=True)
class Speedup:
    """How many times as fast one call is as another, from runs in turns; larger is better."""

    ratio: float
    """Of the medians."""
    low: float
    high: float
    """Eight of ten turns lie between `low` and `high`; `ratio` does, too."""

    def describe(self, base: str) -> str:
        """Return it in words; `base` is what it is compared with.

        >>> Speedup(0.5, 0.4, 0.6).describe("one device")
        'slower: 0.50 times as fast as one device (0.40 to 0.60 in eight of ten turns)'
        """
        turns = f"{self.low:.2f} to {self.high:.2f} in eight of ten turns"
        judgement = "" if self.low > 1 else "slower: " if self.high < 1 else "no clear difference: "
        return f"{judgement}{self.ratio:.2f} times as fast as {base} ({turns})"


def compute_speedup(slow: Timings, fast: Timings) -> Speedup:
    """Return how many times as fast `fast` is as `slow`; both were timed in the same turns.

    >>> compute_speedup(Timings(2.0, 2.0, 2, (2.0, 2.0)), Timings(1.0, 1.0, 2, (1.0, 1.0)))
    Speedup(ratio=2.0, low=2.0, high=2.0)
    """
    ratio = slow.median_seconds / max(fast.median_seconds, 1e-12)
    turns = np.array(slow.samples) / np.maximum(fast.samples, 1e-12)
    low, high = np.quantile(turns, (0.1, 0.9)).tolist() if len(turns) else (ratio, ratio)
    return Speedup(ratio, min(low, ratio), max(high, ratio))


def settle() -> None:
    """Keep a core busy until the threads of the last session have ended; after a pause, cores are slow for as long."""
    end = time.perf_counter() + SETTLING_SECONDS
    while time.perf_counter() < end:
        pass


def time_in_turns(calls: Mapping[str, Callable[[], object]], repeat: int, warm_ups: int = 2) -> dict[str, Timings]:
    """Time several calls `repeat` times each, in turn, so that changes of the machine's speed affect all.

    A turn repeats short calls for up to `TURN_SECONDS`, or for a third of all repetitions. So caches hold the call's
    data, as they do for a call in a loop. The medians are those of turns in which this core was as fast as it can be.

    >>> time_in_turns({"sleep": lambda: time.sleep(0.001)}, repeat=3)["sleep"].runs
    3
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    references: list[float] = []

    def take_turn(count: int) -> None:
        for name, call in calls.items():
            if len(calls) > 1:
                settle()
            for _ in range(count):
                began = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - began)
        references.extend([time_reference()] * count)

    for _ in range(warm_ups):
        take_turn(1)
    # The last warm-up tells how long a call takes.
    slowest = max((times[-1] for times in seconds.values() if times), default=TURN_SECONDS)
    calls_per_turn = max(min(repeat // MIN_TURNS, round(TURN_SECONDS / max(slowest, 1e-9))), 1)
    for finished in range(0, repeat, calls_per_turn):
        take_turn(min(calls_per_turn, repeat - finished))
        report_progress(finished + calls_per_turn, repeat)
    measured = {name: np.array(times[warm_ups:]) for name, times in seconds.items()}
    is_fast = np.array(references[warm_ups:]) <= MAX_SLOWDOWN * find_least_reference_seconds()
    counted = is_fast if is_fast.sum() >= MIN_RUNS else np.ones(len(is_fast), dtype=bool)
    return {
        name: Timings(
            find_typical_seconds(times[counted]), float(np.quantile(times, 0.9)), len(times), tuple(times.tolist())
        )
        for name, times in measured.items()
    }
