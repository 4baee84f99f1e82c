"""The command `onnxplace verify`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxplace.cli.completion import BUNDLE_PATH
from onnxplace.cli.shared_options import (
    against_option,
    as_json,
    inputs_option,
    make_no_outputs_error,
    note_left_out_copies,
    parse_shape,
    print_json,
    print_text,
    seed_option,
    shape_option,
    show_progress,
    with_operator_libraries,
    with_runtime,
)
from onnxplace.errors import ExecutionError, ModelError, format_name, format_names

if TYPE_CHECKING:
    from onnxplace.api import InferenceSession
    from onnxplace.bundle import Bundle
    from onnxplace.evaluation import OutputDifference, SizeComparison, StepInputs

    StepFunction = Callable[[Mapping[str, Any]], Mapping[str, Any]]

# Calls that are compared for a bundle with states: each of the later ones reads states of the one before.
STEPS_WITH_STATES = 3


@click.command()
@click.argument("bundle", type=BUNDLE_PATH)
@against_option
@inputs_option
@shape_option
@with_runtime
@click.option(
    "--steps", type=click.IntRange(1), metavar="N", help="Calls that pass states on  [default: 3 if it has states]"
)
@click.option(
    "--sizes", default=3, show_default=True, type=click.IntRange(0), metavar="N",
    help="Other sizes to compare, of each symbolic dimension that neither --shape nor --inputs gives.",
)  # fmt: skip
@seed_option
@with_operator_libraries
@as_json
def verify(
    bundle: Path,
    against: Path | None,
    inputs: Path | None,
    shape: str,
    session_options: Mapping[str, Any],
    steps: int | None,
    sizes: int,
    seed: int,
    json_: bool,
) -> None:
    """Compare BUNDLE with the unsplit model at several sizes.

    Exit 1 if they differ, or if BUNDLE refuses sizes that the model takes. Both carry their states on. Outputs that
    depend on random numbers are named: for these, only type, shape and finiteness must agree.
    """
    from onnxplace.api import InferenceSession, load
    from onnxplace.evaluation import (
        SizeComparison,
        choose_step_inputs,
        compare_other_sizes,
        open_reference,
        rounds_to_few_values,
    )
    from onnxplace.machine import available_cores, without_optimisations

    opened = load(bundle, "all")
    count = steps or (STEPS_WITH_STATES if opened.manifest.states else 1)

    def compare_on(cores: Sequence[int]) -> list[SizeComparison]:
        given_sizes = parse_shape(shape)
        first = choose_step_inputs(opened, inputs, given_sizes, seed)
        with _adapt_hints(inputs), InferenceSession(opened, **session_options) as session:
            run_model = open_reference(opened, against, cores)

            def compare(items: StepInputs) -> list[list[OutputDifference]]:
                return _compare_copies(session, opened, run_model, items, count, session_options["runtime"])

            comparisons = [SizeComparison(first.sizes, compare(first))]
            fixed = first.sizes if inputs else given_sizes
            comparisons += compare_other_sizes(compare, first, sizes, fixed)
            note_left_out_copies(session.list_copies())
        return comparisons

    with show_progress(json_, "comparing") as display:
        comparisons, optimised = compare_on(available_cores()), True
        if not _all_equal(comparisons) and rounds_to_few_values(opened):
            if display:
                display("comparing without optimisations", 0, 1)
            with without_optimisations():
                unoptimised = compare_on(available_cores()[:1])
            if _all_equal(unoptimised):
                comparisons, optimised = unoptimised, False
    equal = _all_equal(comparisons)
    with suppress(BrokenPipeError):  # the exit code still tells the result
        if json_:
            differences = [step for item in comparisons for step in item.steps]
            outputs = [_replace_non_finite(vars(item)) for item in _find_worst(differences)]
            tried = [
                {"sizes": dict(item.sizes), "result": item.result, "message": item.message} for item in comparisons
            ]
            print_json({"equal": equal, "outputs": outputs, "steps": count, "optimised": optimised, "sizes": tried})
        else:
            _print_differences(comparisons, optimised)
    if not equal:
        raise SystemExit(1)


@contextmanager
def _adapt_hints(inputs: Path | None) -> Iterator[None]:
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
    session: InferenceSession, bundle: Bundle, run_model: StepFunction, steps: StepInputs, count: int, runtime: str
) -> list[list[OutputDifference]]:
    """Return the largest differences of each output in each step; every copy of the bundle does all steps."""
    from onnxplace.evaluation import StateCarrier, compare_outputs, find_bundle_lineages
    from onnxplace.utils import report_progress

    names = [item.name for item in bundle.outputs]
    lineages = find_bundle_lineages(bundle)
    by_copy = []
    for _ in range(max(len(session.list_copies()), 1)):
        # Requests take turns over the copies, and so do conversations.
        user = session.conversation() if session.list_copies() and bundle.manifest.states else session
        user.reset_state()
        reference = StateCarrier(run_model, bundle)

        def run_bundle(feeds: Mapping[str, Any], user: InferenceSession = user) -> Mapping[str, Any]:
            outputs = user.submit(feeds, names).result().outputs
            if not outputs:
                raise make_no_outputs_error(runtime, "verify")
            return outputs

        differences = []
        for number in range(count):
            feeds = steps.feeds(number)
            with steps.explained(number):
                differences.append(compare_outputs(run_bundle, reference, feeds, names, lineages))
            report_progress(number + 1, count)
            if number == 0:
                steps.learn(reference.states)
        by_copy.append(differences)
    return [_find_worst(items) for items in zip(*by_copy)]


def _print_differences(comparisons: Sequence[SizeComparison], optimised: bool) -> None:
    """Print the differences of each output, and the way they were compared."""
    count, worst = len(comparisons[0].steps), _find_worst([step for item in comparisons for step in item.steps])
    for index, item in enumerate(worst):
        verdict = "DIFFERS" if not item.equal else "random" if item.random_nodes else "equal "
        place = "" if item.equal else _find_first(comparisons, index)
        print_text(f"{verdict} {format_name(item.name)}  {_format_error(item)}{place}")
    _print_sizes(comparisons)
    if count > 1:
        print_text(f"{count} steps, each with the states of the one before")
    if not optimised:
        print_text(
            "compared with ONNX Runtime's optimisations off: with them, quantised values are rounded otherwise "
            "where a fusion was cut (docs/correctness.md)"
        )


def _find_first(comparisons: Sequence[SizeComparison], index: int) -> str:
    """Return where an output differs first, among several sizes or steps."""
    unequal = (
        [f"with {item.text}"] * (len(comparisons) > 1) + [f"in step {number}"] * (len(item.steps) > 1)
        for item in comparisons
        for number, step in enumerate(item.steps, 1)
        if not step[index].equal
    )
    words = " ".join(next(unequal))
    return f", first {words}" if words else ""


def _print_sizes(comparisons: Sequence[SizeComparison]) -> None:
    """Print the sizes that were tried, and those that the bundle or the model refuses."""
    for item in comparisons:
        if item.result == "refused":
            print_text(f"REFUSED with {item.text}, which the model takes: {item.message}")
    if taken := [item.text for item in comparisons if item.sizes and not item.refused_by]:
        print_text(f"compared with {'; '.join(taken)}")
    if skipped := [item.text for item in comparisons if item.result == "skipped"]:
        print_text(f"skipped, as the model refuses them: {'; '.join(skipped)}")


def _format_error(difference: OutputDifference) -> str:
    """Return the error of an output, or why it has none."""
    if not difference.random_nodes:
        relative = f"relative to its largest value {difference.max_rel_error:.3g}"
        return f"max abs error {difference.max_abs_error:.3g}, {relative}"
    nodes = format_names(difference.random_nodes)
    if difference.equal:
        return f"depends on random numbers of {nodes}: type, shape and finiteness agree, elements are not compared"
    return f"depends on random numbers of {nodes}, and differs in type, shape or finiteness too"


def _all_equal(comparisons: Sequence[SizeComparison]) -> bool:
    return all(item.result in ("equal", "skipped") for item in comparisons)


def _find_worst(differences: Sequence[Sequence[OutputDifference]]) -> list[OutputDifference]:
    """Return the largest difference of each output over all steps."""
    return [max(items, key=lambda item: (not item.equal, item.max_rel_error)) for items in zip(*differences)]


def _replace_non_finite(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with None for numbers that JSON does not have."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in entry.items()
    }
