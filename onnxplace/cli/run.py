"""`onnxplace run` and `verify`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxplace.cli.options import (
    against_option,
    as_json,
    inputs_option,
    note_core_shortage,
    parse_shape,
    print_json,
    runtime_option,
    seed_option,
    shape_option,
    with_operator_libraries,
)
from onnxplace.errors import ExecutionError, ModelError, UsageError, listed

if TYPE_CHECKING:
    from onnxplace.bundle import Bundle
    from onnxplace.evaluation import OutputDifference, StepInputs


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@inputs_option
@click.option("--outputs", type=click.Path(path_type=Path), metavar="F.npz", help="Write the outputs there.")
@click.option("--repeat", default=1, show_default=True, type=click.IntRange(1), help="How often to run.")
@shape_option
@runtime_option
@click.option("--timeout", type=float, metavar="SECONDS", help="Give up a run that takes longer, with exit code 4.")
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="F.json", help="Write a timeline for Perfetto or Chrome."
)
@seed_option
@with_operator_libraries
@as_json
def run(
    bundle: Path,
    inputs: Path | None,
    outputs: Path | None,
    repeat: int,
    shape: str,
    runtime: str,
    trace: Path | None,
    timeout: float | None,
    seed: int,
    json_: bool,
) -> None:
    """Run BUNDLE, on random inputs unless real ones are given. States are fed to the first run and carried on."""
    from statistics import median

    import numpy as np

    from onnxplace.api import InferenceSession, load
    from onnxplace.evaluation import choose_step_inputs
    from onnxplace.feeds import require_storable, write_npz
    from onnxplace.utils import require_place, write_file

    for path in filter(None, (outputs, trace)):
        require_place(path, bundle, *([inputs] if inputs else []))
    opened = load(bundle)
    if outputs:
        require_storable(opened.returned)
    note_core_shortage(opened, runtime)
    steps = choose_step_inputs(opened, inputs, parse_shape(shape), seed)
    kept = {item.output: item.input for item in opened.manifest.states}
    with InferenceSession(opened, runtime=runtime, trace=trace is not None) as session:
        again = [*kept] if repeat > 1 or trace else []  # to see how states grow
        result = session.run_timed(steps.first, again, timeout=timeout)
        if outputs and not result.outputs:
            raise _make_no_outputs_error(runtime, "--outputs")
        steps.learn({name: result.outputs[output] for output, name in kept.items() if output in result.outputs})
        taken = []
        for number in range(1, repeat):
            with steps.explained(number):
                taken.append(session.run_timed(steps.feeds(number), timeout=timeout).seconds)
        if trace:
            session.run(None, steps.feeds(repeat), timeout=timeout)
            write_file(trace, lambda stream: stream.write(json.dumps(session.trace()).encode()))
    found = {name: value for name, value in result.outputs.items() if name not in kept}
    if outputs:
        write_npz(outputs, found)
    seconds = median(taken) if taken else result.seconds
    summary = {
        name: {
            "dtype": str(getattr(v, "dtype", type(v).__name__)),
            "shape": list(np.shape(v) if hasattr(v, "shape") else [len(v or ())]),
        }
        for name, v in found.items()
    }
    if json_:
        print_json({"bundle": str(bundle), "runtime": runtime, "seconds": seconds, "runs": repeat, "outputs": summary})
    else:
        from onnxplace.report import format_milliseconds

        for name, about in summary.items():
            click.echo(f"{name}  {about['dtype']} {about['shape']}")
        click.echo(
            f"{'predicted' if runtime == 'simulated' else 'took'} {format_milliseconds(seconds)}"
            + (f" (median of {repeat - 1} after the first)" if repeat > 1 else _mark_first_run(runtime))
        )


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@against_option
@inputs_option
@shape_option
@runtime_option
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
    runtime: str,
    steps: int | None,
    seed: int,
    json_: bool,
) -> None:
    """Run the same inputs through BUNDLE and the unsplit model; exit 1 if they differ. Each carries its states on.

    Outputs that depend on random numbers are named; of these, only type, shape and finiteness must agree.
    """
    from onnxplace.api import load
    from onnxplace.evaluation import choose_step_inputs, rounds_to_few_values
    from onnxplace.machine import available_cores, without_optimisations

    opened = load(bundle, "all")
    count = steps or (3 if opened.manifest.states else 1)

    def compared(used: Sequence[int]) -> list[list[OutputDifference]]:
        with _adapt_hints(inputs):
            return _compare_steps(
                opened, against, runtime, choose_step_inputs(opened, inputs, parse_shape(shape), seed), count, used
            )

    found, rounding = compared(available_cores()), False
    if not _all_equal(found) and rounds_to_few_values(opened):
        with without_optimisations():
            again = compared(available_cores()[:1])
        if _all_equal(again):
            found, rounding = again, True
    equal = _all_equal(found)
    with suppress(BrokenPipeError):  # the exit code is an answer too
        if json_:
            outputs = [_replace_non_finite(vars(item)) for item in _find_worst(found)]
            print_json({"equal": equal, "outputs": outputs, "steps": len(found), "optimised": not rounding})
        else:
            _print_differences(found, rounding)
    if not equal:
        raise SystemExit(1)


@contextmanager
def _adapt_hints(inputs: Path | None) -> Iterator[None]:
    """Give advice that fits `verify`: it has run the unsplit model with the same inputs already."""
    try:
        yield
    except ExecutionError as problem:
        if problem.code != "X001":
            raise
        own = "the unsplit model runs with the same inputs: compile it again, and report this if it fails again"
        hint = problem.hint if "--steps" in problem.hint else own
        raise type(problem)(problem.code, problem.message, where=problem.where, hint=hint) from problem
    except ModelError as problem:
        if problem.code != "M017" or inputs is None or "--steps" in problem.hint:
            raise
        hint = f"it is the unsplit model that fails: check the inputs in {inputs}"
        raise type(problem)(problem.code, problem.message, where=problem.where, hint=hint) from None


def _compare_steps(
    bundle: Bundle, against: Path | None, runtime: str, steps: StepInputs, count: int, used: Sequence[int]
) -> list[list[OutputDifference]]:
    """Return the differences of each output in each step; the unsplit model computes on the cores `used`."""
    from onnxplace.api import InferenceSession
    from onnxplace.evaluation import StateCarrier, compare_outputs as compare, lineages_of_bundle, open_reference

    names = [item.name for item in bundle.outputs]
    origins = lineages_of_bundle(bundle)
    want = StateCarrier(open_reference(bundle, against, used), bundle)
    found: list[list[OutputDifference]] = []
    with InferenceSession(bundle, runtime=runtime) as session:

        def run(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
            outputs = session.submit(feeds, names).result().outputs
            if not outputs:
                raise _make_no_outputs_error(runtime, "verify")
            return outputs

        for number in range(count):
            feeds = steps.feeds(number)
            with steps.explained(number):
                found.append(compare(run, want, feeds, names, origins))
            if number == 0:
                steps.learn(want.states)
    return found


def _print_differences(found: Sequence[Sequence[OutputDifference]], rounding: bool) -> None:
    """Print the differences of each output in each step, and how they were compared."""
    for item, of_steps in zip(_find_worst(found), zip(*found)):
        wrong = [number for number, at in enumerate(of_steps, 1) if not at.equal]
        place = f", first in step {wrong[0]}" if wrong and len(found) > 1 else ""
        verdict = "DIFFERS" if not item.equal else "random" if item.random_nodes else "equal "
        click.echo(f"{verdict} {item.name}  {_format_error(item)}{place}")
    if len(found) > 1:
        click.echo(f"{len(found)} steps, each with the states of the one before")
    if rounding:
        click.echo(
            "compared with ONNX Runtime's optimisations off: with them, quantised values are rounded otherwise "
            "where a fusion was cut (docs/correctness.md)"
        )


def _format_error(item: OutputDifference) -> str:
    """Return in words how far an output is off, or why its elements cannot be compared."""
    if not item.random_nodes:
        relative = f"relative to its largest value {item.max_rel_error:.3g}"
        return f"max abs error {item.max_abs_error:.3g}, {relative}"
    nodes = listed(item.random_nodes)
    if item.equal:
        return f"depends on random numbers of {nodes}: type, shape and finiteness agree, elements are not compared"
    return f"depends on random numbers of {nodes}, and differs in type, shape or finiteness too"


def _all_equal(found: Sequence[Sequence[OutputDifference]]) -> bool:
    return all(item.equal for step in found for item in step)


def _find_worst(steps: Sequence[Sequence[OutputDifference]]) -> list[OutputDifference]:
    """Return, for each output, what is farthest off in any step."""
    return [max(items, key=lambda item: (not item.equal, item.max_rel_error)) for items in zip(*steps)]


def _mark_first_run(runtime: str) -> str:
    return "" if runtime == "simulated" else " (the first run; try --repeat 20)"


def _replace_non_finite(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record in which numbers that JSON does not have are None."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in entry.items()
    }


def _make_no_outputs_error(runtime: str, what: str) -> UsageError:
    return UsageError("U045", f"runtime {runtime!r} computes no outputs", where=what, hint="use --runtime onnxruntime")
