"""The command `onnxplace verify`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxplace.cli.completers import BUNDLE_PATH
from onnxplace.cli.options import (
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
    from onnxplace.evaluation import OutputDifference, StateCarrier, StepInputs

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
    seed: int,
    json_: bool,
) -> None:
    """Compare BUNDLE with the unsplit model on equal inputs.

    Exit 1 if they differ. Both carry their states on. Outputs that depend on random numbers are named: for these, only
    type, shape and finiteness must agree.
    """
    from onnxplace.api import load
    from onnxplace.evaluation import choose_step_inputs, rounds_to_few_values
    from onnxplace.machine import available_cores, without_optimisations

    opened = load(bundle, "all")
    count = steps or (STEPS_WITH_STATES if opened.manifest.states else 1)

    def compare_on(cores: Sequence[int]) -> list[list[OutputDifference]]:
        with _adapt_hints(inputs):
            step_inputs = choose_step_inputs(opened, inputs, parse_shape(shape), seed)
            return _compare_steps(opened, against, session_options, step_inputs, count, cores)

    with show_progress(json_, "comparing") as display:
        differences, optimised = compare_on(available_cores()), True
        if not _all_equal(differences) and rounds_to_few_values(opened):
            if display:
                display("comparing without optimisations", 0, 1)
            with without_optimisations():
                unoptimised = compare_on(available_cores()[:1])
            if _all_equal(unoptimised):
                differences, optimised = unoptimised, False
    equal = _all_equal(differences)
    with suppress(BrokenPipeError):  # the exit code still tells the result
        if json_:
            outputs = [_replace_non_finite(vars(item)) for item in _find_worst(differences)]
            print_json({"equal": equal, "outputs": outputs, "steps": len(differences), "optimised": optimised})
        else:
            _print_differences(differences, optimised)
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


def _compare_steps(
    bundle: Bundle,
    against: Path | None,
    options: Mapping[str, Any],
    steps: StepInputs,
    count: int,
    cores: Sequence[int],
) -> list[list[OutputDifference]]:
    """Return the largest differences of each output in each step; every copy of the bundle does all steps.

    The bundle is opened with these options, and the unsplit model runs on `cores`.
    """
    from onnxplace.api import InferenceSession
    from onnxplace.evaluation import StateCarrier, open_reference

    by_copy = []
    with InferenceSession(bundle, **options) as session:
        run_model = open_reference(bundle, against, cores)
        for _ in range(max(len(session.list_copies()), 1)):
            # Requests take turns over the copies, and so do conversations.
            user = session.conversation() if session.list_copies() and bundle.manifest.states else session
            reference = StateCarrier(run_model, bundle)
            by_copy.append(_compare_copy(user, bundle, reference, steps, count, options["runtime"]))
        note_left_out_copies(session.list_copies())
    return [_find_worst(items) for items in zip(*by_copy)]


def _compare_copy(
    session: InferenceSession,
    bundle: Bundle,
    reference: StateCarrier,
    steps: StepInputs,
    count: int,
    runtime: str,
) -> list[list[OutputDifference]]:
    """Return the differences of each output in each step of one copy of a bundle."""
    from onnxplace.evaluation import compare_outputs, find_bundle_lineages
    from onnxplace.utils import report_progress

    names = [item.name for item in bundle.outputs]
    lineages = find_bundle_lineages(bundle)
    differences: list[list[OutputDifference]] = []

    def run_bundle(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        outputs = session.submit(feeds, names).result().outputs
        if not outputs:
            raise make_no_outputs_error(runtime, "verify")
        return outputs

    for number in range(count):
        feeds = steps.feeds(number)
        with steps.explained(number):
            differences.append(compare_outputs(run_bundle, reference, feeds, names, lineages))
        report_progress(number + 1, count)
        if number == 0:
            steps.learn(reference.states)
    return differences


def _print_differences(differences: Sequence[Sequence[OutputDifference]], optimised: bool) -> None:
    """Print the differences of each output, and the way they were compared."""
    for worst, by_step in zip(_find_worst(differences), zip(*differences)):
        unequal = [number for number, item in enumerate(by_step, 1) if not item.equal]
        place = f", first in step {unequal[0]}" if unequal and len(differences) > 1 else ""
        verdict = "DIFFERS" if not worst.equal else "random" if worst.random_nodes else "equal "
        print_text(f"{verdict} {format_name(worst.name)}  {_format_error(worst)}{place}")
    if len(differences) > 1:
        print_text(f"{len(differences)} steps, each with the states of the one before")
    if not optimised:
        print_text(
            "compared with ONNX Runtime's optimisations off: with them, quantised values are rounded otherwise "
            "where a fusion was cut (docs/correctness.md)"
        )


def _format_error(difference: OutputDifference) -> str:
    """Return the error of an output, or why it has none."""
    if not difference.random_nodes:
        relative = f"relative to its largest value {difference.max_rel_error:.3g}"
        return f"max abs error {difference.max_abs_error:.3g}, {relative}"
    nodes = format_names(difference.random_nodes)
    if difference.equal:
        return f"depends on random numbers of {nodes}: type, shape and finiteness agree, elements are not compared"
    return f"depends on random numbers of {nodes}, and differs in type, shape or finiteness too"


def _all_equal(differences: Sequence[Sequence[OutputDifference]]) -> bool:
    return all(item.equal for step in differences for item in step)


def _find_worst(differences: Sequence[Sequence[OutputDifference]]) -> list[OutputDifference]:
    """Return the largest difference of each output over all steps."""
    return [max(items, key=lambda item: (not item.equal, item.max_rel_error)) for items in zip(*differences)]


def _replace_non_finite(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with None for numbers that JSON does not have."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in entry.items()
    }
