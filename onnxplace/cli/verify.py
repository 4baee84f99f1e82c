"""The command `onnxplace verify`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxplace.cli.help import GroupedCommand
from onnxplace.cli.shared_options import (
    against_option,
    bundle_options,
    note_left_out_copies,
    parse_shape,
    print_json,
    print_text,
    show_progress,
)
from onnxplace.errors import format_name, format_names

if TYPE_CHECKING:
    from onnxplace.measure.compare import OutputDifference
    from onnxplace.measure.size_comparison import SizeComparison
    from onnxplace.session.verification import Verification


@click.command(cls=GroupedCommand)
@bundle_options
@against_option
@click.option(
    "--steps", type=click.IntRange(1), metavar="N",
    help="Calls that pass states on  [default: 3 if it has states, 2 if it has plans, too]",
)  # fmt: skip
@click.option(
    "--sizes", default=3, show_default=True, type=click.IntRange(0), metavar="N",
    help="Other sizes to compare, of each symbolic dimension that neither --shape nor --inputs gives.",
)  # fmt: skip
def verify(bundle: Path, shape: str, json_: bool, **options: Any) -> None:
    """Compare BUNDLE with the unsplit model at several sizes.

    Exit 1 if they differ, or if BUNDLE refuses sizes that the model takes. Both carry their states on. Outputs that
    depend on random numbers are named: for these, only type, shape and finiteness must agree.
    """
    from onnxplace.session.verification import verify as compare

    with show_progress(json_, "comparing") as display:
        result = compare(bundle, shape=parse_shape(shape), observer=display, **options)
    with suppress(BrokenPipeError):  # the exit code still tells the result
        if json_:
            outputs = [vars(item) for item in result.outputs]
            tried = [
                {"sizes": dict(item.sizes), "result": item.result, "message": item.message, "plan": item.plan}
                for item in result.sizes
            ]
            counts = {"steps": result.steps, "optimised": result.optimised, "precisions": result.precisions}
            counts |= {"explanation": result.explanation and vars(result.explanation)}
            print_json({"equal": result.equal, "outputs": outputs, **counts, "sizes": tried})
        else:
            _print_differences(result)
    note_left_out_copies(result.copies)
    if not result.equal:
        raise SystemExit(1)


def _print_differences(result: Verification) -> None:
    """Print the differences of each output, and the way they were compared."""
    for item in result.outputs:
        is_drawn = item.random_nodes or math.isinf(item.own_error)
        verdict = "DIFFERS" if not item.equal else "random" if is_drawn else "equal "
        tolerance = f", allowed is {item.tolerance:g}, as {item.tolerance_type} is the coarsest type on the way to it"
        place = "" if item.equal else tolerance * bool(item.tolerance) + _find_first(result.sizes, item.name)
        print_text(f"{verdict} {format_name(item.name)}  {_format_error(item)}{place}")
    if result.explanation:
        print_text(f"{result.explanation.message}\nhint: {result.explanation.hint}")
    _print_sizes(result.sizes)
    device, precision = next(iter(result.precisions.items()), ("", "float32"))
    if precision != "float32":
        print_text(f"compared within {precision}'s precision, because {device} computes in it")
    if result.steps > 1:
        print_text(f"{result.steps} steps, each with the states of the one before")
    if not result.optimised:
        print_text(
            "compared with ONNX Runtime's optimisations off: with them, values are rounded otherwise where a fusion "
            "was cut, as between two levels of optimisation of the unsplit model (docs/correctness.md)"
        )


def _find_first(comparisons: Sequence[SizeComparison], name: str) -> str:
    """Return where an output differs first, among several sizes or steps."""
    unequal = (
        [f"with {item.text}"] * (len(comparisons) > 1) + [f"in step {number}"] * (len(item.steps) > 1)
        for item in comparisons
        for number, step in enumerate(item.steps, 1)
        if not all(output.equal for output in step if output.name == name)
    )
    words = " ".join(next(unequal))
    return f", first {words}" if words else ""


def _print_sizes(comparisons: Sequence[SizeComparison]) -> None:
    """Print the sizes that were tried, and those that the bundle or the model refuses."""
    for item in comparisons:
        if item.result == "refused":
            print_text(f"REFUSED with {item.text}, which the model takes: {item.message}")
        elif item.is_fatal:
            print_text(f"skipped with {item.text}: {item.message}")
    if taken := [item.text for item in comparisons if item.text and not item.refused_by]:
        print_text(f"compared with {'; '.join(taken)}")
    if skipped := [item.text for item in comparisons if item.result == "skipped" and not item.is_fatal]:
        print_text(f"skipped, as the model refuses them: {'; '.join(skipped)}")


def _format_error(difference: OutputDifference) -> str:
    """Return the error of an output, or why it has none."""
    if not difference.random_nodes:
        if math.isinf(difference.own_error):
            from onnxplace.measure.compare import UNREPEATABLE

            return UNREPEATABLE
        relative = f"relative to its largest value {difference.max_rel_error:.3g}"
        place = f" at {list(difference.index)}" if difference.index and not difference.equal else ""
        return f"max abs error {difference.max_abs_error:.3g}{place}, {relative}"
    nodes = format_names(difference.random_nodes)
    if difference.equal:
        return f"depends on random numbers of {nodes}: type, shape and finiteness agree, elements are not compared"
    return f"depends on random numbers of {nodes}, and differs in type, shape or finiteness too"
