"""Compare a bundle with the unsplit model, for `onnxplace.verify` and the command of this name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from onnxplace.bundle.bundle import Bundle
from onnxplace.errors import ExecutionError, FeedError, ModelError, UsageError
from onnxplace.feeds.dimensions import drop_derived_sizes
from onnxplace.feeds.feeds import Array
from onnxplace.machine.hardware import available_cores
from onnxplace.machine.ort_sessions import use_custom_operators, uses_optimisations, without_optimisations
from onnxplace.measure.compare import ModelComparison, OutputDifference, find_worst, list_precisions
from onnxplace.measure.difference_causes import Explanation, find_cause
from onnxplace.measure.size_comparison import (
    Compare,
    SizeComparison,
    compare_in_child,
    compare_other_sizes,
    compare_size,
    may_be_rounding,
)
from onnxplace.measure.step_inputs import StepInputs, choose_step_inputs, list_switches
from onnxplace.pipeline.pipeline import Observer
from onnxplace.runtime.interface import CopyStatus, make_no_outputs_error
from onnxplace.session.inference_session import InferenceSession, load
from onnxplace.utils.groups import group_pairs
from onnxplace.utils.keywords import checks_arguments
from onnxplace.utils.quantities import format_first, format_object

# Calls that are compared for a bundle with states: each of the later ones reads states of the one before.
STEPS_WITH_STATES = 3
# The same for each plan of several: one is for prompts, of which a model takes few in a row.
STEPS_OF_PLANS = 2


@dataclass(frozen=True, repr=False)
class Verification:
    """How a bundle compares with the unsplit model; the fields are those of `onnxplace verify --json`."""

    equal: bool
    """Whether all outputs agree, at all sizes that the model takes."""
    outputs: tuple[OutputDifference, ...]
    """The largest difference of each output over all sizes and steps."""
    steps: int
    """Number of calls, each with the states of the one before."""
    optimised: bool
    """Whether ONNX Runtime's optimisations were on: docs/correctness.md says when they are not."""
    sizes: tuple[SizeComparison, ...]
    """The sizes that were tried, the given or compiled ones first."""
    precisions: Mapping[str, str]
    """The type in which each device computes float32, the least precise first, which sets the tolerance of floats."""
    copies: tuple[CopyStatus, ...] = ()
    """The copies of the bundle, if the session has several."""
    explanation: Explanation | None = None
    """Where the first difference comes from; None if no output differs."""

    def __repr__(self) -> str:
        outputs = [f"{item.name}: max abs error {item.max_abs_error:.3g}" for item in self.outputs]
        sizes = [f"{item.text or 'fixed sizes'}: {item.result}" for item in self.sizes]
        verdict = f"Verification: {'equal' if self.equal else 'DIFFERS'}"
        return format_object(verdict, format_first(outputs), format_first(sizes))


@checks_arguments
def verify(
    bundle: Bundle | str | Path,
    *,
    against: str | Path | None = None,
    inputs: Mapping[str, Array] | str | Path | None = None,
    shape: Mapping[str, int] | None = None,
    steps: int | None = None,
    sizes: int = 3,
    seed: int = 0,
    custom_op_libraries: Sequence[str | Path] = (),
    session_options: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> Verification:
    """Compare a bundle with the unsplit model, as `onnxplace verify` does, at several sizes.

    Args:
        bundle: A bundle, or its path; every file of it is hashed.
        against: The model's file; by default the unsplit model in the bundle.
        inputs: Arrays by input name, or their file from numpy.savez; by default random ones.
        shape: Sizes of symbolic dimensions, {"batch": 8}.
        steps: Calls that pass states on; by default 3 if the bundle has states, and 2 if it has plans, too.
        sizes: Number of other sizes to compare, of each dimension that neither `shape` nor `inputs` gives.
        seed: Seed of random inputs.
        custom_op_libraries: Shared libraries with operators that ONNX Runtime does not have.
        session_options: Arguments of `InferenceSession`, such as {"runtime": "mpi", "hosts": "localhost:2"}.
        observer: Called before each part with its name, its position from 0 and their number.

    Raises:
        OnnxplaceError: one of the files cannot be used, or the model or the bundle fails with these inputs.

    >>> onnxplace.verify("model.bundle", against="model.onnx").equal  # doctest: +SKIP
    True
    """
    opened = load(bundle.path if isinstance(bundle, Bundle) else bundle, "all")
    length = STEPS_OF_PLANS if opened.manifest.plans else STEPS_WITH_STATES
    count = (length if opened.manifest.states else 1) if steps is None else steps
    if count < 1:
        raise UsageError("U005", f"expected 1 step or more, got {count}", where="steps", hint="leave it out")
    file = inputs if isinstance(inputs, (str, Path)) else None
    options = {"runtime": "onnxruntime", "warmup": True, **(session_options or {})}
    copies: tuple[CopyStatus, ...] = ()
    given = inputs is not None or bool(shape)

    def compare_plan(plan: Bundle, cores: Sequence[int]) -> list[SizeComparison]:
        nonlocal copies
        first = choose_step_inputs(plan, inputs, shape or {}, seed)
        opening = partial(_open_comparison, plan, against, options, cores, uses_optimisations(), count)
        with _adapt_hints(file), opening() as (compare, session):
            if opened.manifest.sizes:
                own = compare_size(compare, first, first.sizes)
            else:
                own = SizeComparison(first.sizes, compare(first))
            copies = session.list_copies()
        with _adapt_hints(file), compare_in_child(opening, plan.path, against) as compare:
            fixed = (shape or {}) if inputs is None else first.sizes
            return [own, *compare_other_sizes(compare, first, sizes, fixed)]

    def compare_on(cores: Sequence[int]) -> tuple[SizeComparison, ...]:
        if not (manifest := opened.manifest).sizes:
            return tuple(compare_plan(opened, cores))
        alone, comparisons = replace(opened, manifest=manifest.model_copy(update={"plans": ()})), list[SizeComparison]()
        for index, plan in enumerate((alone, *opened.plans[1:])):
            with suppress(FeedError):  # it is for other sizes
                own = compare_plan(plan, cores)
                comparisons += [
                    replace(item, plan=index if manifest.plans else None) for item in own if item.refused_by != "bundle"
                ]
        # Then the session chooses plans, and moves states from one to another.
        known = [{}] if given else [drop_derived_sizes(item.dimensions) for item in manifest.sizes if item.weight]
        chosen = [choose_step_inputs(opened, inputs, {**item, **(shape or {})}, seed) for item in known]
        is_switching, shown = bool(manifest.states) and not given, min(count, STEPS_OF_PLANS)
        opening = _open_comparison(opened, against, options, cores, uses_optimisations(), shown)
        with _adapt_hints(file), opening as (compare, _):
            runs = list_switches(chosen) if is_switching else chosen
            return (*comparisons, *(compare_size(compare, item, item.sizes) for item in runs))

    with use_custom_operators(custom_op_libraries):
        comparisons, optimised, explanation = compare_on(available_cores()), True, None
        if not _all_equal(comparisons) and may_be_rounding(opened, comparisons):
            if observer:
                observer("comparing without optimisations", 0, 1)
            with without_optimisations():
                unoptimised = compare_on(available_cores()[:1])
            if _all_equal(unoptimised):
                comparisons, optimised = unoptimised, False
        if differing := next((item for item in comparisons if item.result == "differs"), None):
            plan = opened.plans[differing.plan or 0]
            first = choose_step_inputs(plan, inputs, differing.sizes, seed)
            explanation = find_cause(plan, against, first, differing.steps)
    outputs = (output for item in comparisons for step in item.steps for output in step)
    by_name = group_pairs((output.name, output) for output in outputs)  # a plan may have parts of states
    worst = map(find_worst, by_name.values())
    is_equal, precisions = _all_equal(comparisons), list_precisions(*opened.plans)
    return Verification(is_equal, tuple(worst), count, optimised, comparisons, precisions, copies, explanation)


@contextmanager
def _open_comparison(
    bundle: Bundle,
    against: str | Path | None,
    options: Mapping[str, Any],
    cores: Sequence[int],
    optimised: bool,
    count: int,
) -> Iterator[tuple[Compare, InferenceSession]]:
    """Open bundle and unsplit model, on these cores; yield what compares `count` steps, and the session."""
    with nullcontext() if optimised else without_optimisations(), InferenceSession(bundle, **options) as session:
        comparison = ModelComparison(bundle, against, cores, [item.name for item in bundle.outputs])
        yield lambda steps: _compare_copies(session, comparison, steps, count, options["runtime"]), session


@contextmanager
def _adapt_hints(inputs: str | Path | None) -> Iterator[None]:
    """Replace hints of errors: the unsplit model has the same inputs."""
    try:
        yield
    except ExecutionError as problem:
        if problem.code != "X001":
            raise
        default = "the unsplit model runs with the same inputs: compile it again, and report this if it fails again"
        hint = problem.hint if "--steps" in problem.hint else default
        raise type(problem)(problem.code, problem.message, where=problem.where, hint=hint) from problem
    except ModelError as problem:
        if problem.code != "M017" or inputs is None or "--steps" in problem.hint:
            raise
        hint = f"it is the unsplit model that fails: check the inputs in {inputs}"
        raise type(problem)(problem.code, problem.message, where=problem.where, hint=hint) from None


def _compare_copies(
    session: InferenceSession, comparison: ModelComparison, steps: StepInputs, count: int, runtime: str
) -> list[list[OutputDifference]]:
    """Return the largest differences of each output in each step; every copy of the bundle does all steps."""
    by_copy = []
    for _ in range(max(len(session.list_copies()), 1)):
        # Requests take turns over the copies, and so do conversations.
        user = session.conversation() if session.list_copies() and session.bundle.manifest.states else session
        user.reset_state()

        def run_bundle(feeds: Mapping[str, Any], user: InferenceSession = user) -> Mapping[str, Any]:
            outputs = user.submit(feeds, comparison.names).result().outputs
            if not outputs:
                raise make_no_outputs_error(runtime, "verify")
            return outputs

        by_copy.append(comparison.compare(run_bundle, steps, count))
    return [list(map(find_worst, zip(*steps))) for steps in zip(*by_copy)]


def _all_equal(comparisons: Sequence[SizeComparison]) -> bool:
    return all(item.result in ("equal", "skipped") for item in comparisons)
