"""The command `onnxplace run`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxplace.cli.completion import PATH
from onnxplace.cli.help import GroupedCommand
from onnxplace.cli.shared_options import (
    bundle_options,
    note_core_shortage,
    note_left_out_copies,
    parse_shape,
    print_json,
    print_text,
    show_progress,
)
from onnxplace.errors import format_name
from onnxplace.utils.files import require_different_files, require_writable, write_file
from onnxplace.utils.quantities import format_milliseconds

if TYPE_CHECKING:
    from onnxplace.measure.step_inputs import StepInputs
    from onnxplace.session.inference_session import InferenceSession


@click.command(cls=GroupedCommand)
@bundle_options
@click.option("--outputs", type=PATH, metavar="F.npz", help="Write the outputs to a file.")
@click.option("--repeat", default=1, show_default=True, type=click.IntRange(1), help="Number of runs.")
@click.option("--timeout", type=float, metavar="SECONDS", help="Abandon a run that takes longer, with exit code 4.")
@click.option("--trace", type=PATH, metavar="F.json", help="Write a timeline and the predicted one, for Perfetto.")
def run(
    bundle: Path, *, inputs: Path | None, shape: str, seed: int, session_options: Mapping[str, Any], json_: bool,
    outputs: Path | None, repeat: int, timeout: float | None, trace: Path | None
) -> None:  # fmt: skip
    """Run BUNDLE on the given or on random inputs.

    Later runs carry states on.
    """
    from onnxplace.feeds.npz import require_storable, write_npz
    from onnxplace.measure.step_inputs import choose_step_inputs
    from onnxplace.runtime.interface import make_no_outputs_error
    from onnxplace.session.inference_session import InferenceSession, load

    runtime = str(session_options["runtime"])
    require_different_files(outputs=outputs, trace=trace)
    for path in filter(None, (outputs, trace)):
        require_writable(path, bundle, *([inputs] if inputs else []))
    opened = load(bundle)
    if outputs:
        require_storable(opened.returned_outputs)
    steps = choose_step_inputs(opened, inputs, parse_shape(shape), seed)
    states = {item.output: item.input for item in opened.manifest.states}
    with (
        show_progress(json_, "running"),
        InferenceSession(opened, trace=trace is not None, **session_options) as session,
    ):
        # The inputs of later runs need the shapes of states.
        result = session.run_timed(steps.first, [*states] if repeat > 1 or trace else [], timeout=timeout)
        values = {name: value for name, value in result.outputs.items() if name not in states}
        if outputs:
            if not result.outputs:
                raise make_no_outputs_error(runtime, "--outputs")
            write_npz(outputs, values)
        steps.learn({name: result.outputs[output] for output, name in states.items() if output in result.outputs})
        seconds = _time_later_runs(session, steps, repeat, timeout) or result.seconds
        if trace:
            session.run(None, steps.feeds(repeat), timeout=timeout)
            write_file(trace, lambda stream: stream.write(json.dumps(session.trace(last=1)).encode()))
        copies = session.list_copies()
    described = {name: _describe_value(value) for name, value in values.items()}
    if json_:
        timing = {"runtime": runtime, "seconds": seconds, "runs": repeat}
        further: dict[str, Any] = {"copies": [asdict(copy) for copy in copies]} if copies else {}
        further |= {"plan": result.plan} if opened.manifest.plans else {}
        print_json({"bundle": str(bundle), **timing, "outputs": described, **further})
    else:
        for name, entry in described.items():
            print_text(f"{format_name(name)}  {entry['dtype']} {entry['shape']}")
        plan = f", the first by plan {result.plan}" if opened.manifest.plans else ""
        print_text(_format_seconds(seconds, runtime, repeat) + plan)
    note_core_shortage(opened, runtime)
    note_left_out_copies(copies)


def _time_later_runs(session: InferenceSession, steps: StepInputs, repeat: int, timeout: float | None) -> float | None:
    """Run the steps after the first; return their median time, None if there are none."""
    from statistics import median

    from onnxplace.utils.progress import report_progress

    seconds = []
    for number in range(1, repeat):
        with steps.explained(number):
            seconds.append(session.run_timed(steps.feeds(number), timeout=timeout).seconds)
        report_progress(number + 1, repeat)
    return median(seconds) if seconds else None


def _describe_value(value: Any) -> dict[str, Any]:
    """Return the type and shape of an array, a sequence, or None."""
    import numpy as np

    return {
        "dtype": str(getattr(value, "dtype", type(value).__name__)),
        "shape": list(np.shape(value) if hasattr(value, "shape") else [len(value or ())]),
    }


def _format_seconds(seconds: float, runtime: str, repeat: int) -> str:
    """Return a line with the time of a run, and its kind."""
    is_predicted = runtime == "simulated"
    suffix = "" if is_predicted else " (the first run; try --repeat 20)"
    if repeat > 1:
        suffix = f" (median of {repeat - 1} after the first)"
    return f"{'predicted' if is_predicted else 'took'} {format_milliseconds(seconds)}{suffix}"
