"""The command `onnxplace run`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
from onnxplace.utils import format_milliseconds, require_different_files, require_writable, write_file

if TYPE_CHECKING:
    from onnxplace.bundle import Bundle
    from onnxplace.evaluation import StepInputs
    from onnxplace.runtime import CopyStatus


@dataclass(frozen=True)
class RunPlan:
    """The options of the command, without those of inputs."""

    session_options: Mapping[str, Any]
    """Arguments of `InferenceSession`: the runtime, and where it runs."""
    repeat: int
    timeout: float | None
    outputs: Path | None
    """The file for the outputs."""
    trace: Path | None
    """The file for the timeline."""

    @property
    def runtime(self) -> str:
        """Return the name of the runtime."""
        return str(self.session_options["runtime"])


@dataclass(frozen=True)
class RunSummary:
    """The outputs of the first run, and the time of a run."""

    outputs: Mapping[str, Any]
    """The outputs by name, without carried states."""
    seconds: float
    """The time of the first run, or the median of later ones."""
    copies: tuple[CopyStatus, ...]
    """The copies of the bundle, if there are several."""


@click.command(cls=GroupedCommand)
@bundle_options
@click.option("--outputs", type=PATH, metavar="F.npz", help="Write the outputs to a file.")
@click.option("--repeat", default=1, show_default=True, type=click.IntRange(1), help="Number of runs.")
@click.option("--timeout", type=float, metavar="SECONDS", help="Abandon a run that takes longer, with exit code 4.")
@click.option("--trace", type=PATH, metavar="F.json", help="Write a timeline and the predicted one, for Perfetto.")
def run(bundle: Path, inputs: Path | None, shape: str, seed: int, json_: bool, **options: Any) -> None:
    """Run BUNDLE on the given or on random inputs.

    Later runs carry states on.
    """
    from onnxplace.evaluation import choose_step_inputs
    from onnxplace.feeds import require_storable
    from onnxplace.session import load

    plan = RunPlan(**options)
    require_different_files(outputs=plan.outputs, trace=plan.trace)
    for path in filter(None, (plan.outputs, plan.trace)):
        require_writable(path, bundle, *([inputs] if inputs else []))
    opened = load(bundle)
    if plan.outputs:
        require_storable(opened.returned_outputs)
    steps = choose_step_inputs(opened, inputs, parse_shape(shape), seed)
    with show_progress(json_, "running"):
        summary = _run_steps(opened, steps, plan)
    described = {name: _describe_value(value) for name, value in summary.outputs.items()}
    if json_:
        timing = {"runtime": plan.runtime, "seconds": summary.seconds, "runs": plan.repeat}
        copies = {"copies": [asdict(copy) for copy in summary.copies]} if summary.copies else {}
        print_json({"bundle": str(bundle), **timing, "outputs": described, **copies})
    else:
        for name, entry in described.items():
            print_text(f"{format_name(name)}  {entry['dtype']} {entry['shape']}")
        print_text(_format_seconds(summary.seconds, plan))
    note_core_shortage(opened, plan.runtime)
    note_left_out_copies(summary.copies)


def _run_steps(bundle: Bundle, steps: StepInputs, plan: RunPlan) -> RunSummary:
    """Run the bundle several times, and write the outputs of the first run; trace one more run."""
    from statistics import median

    from onnxplace.feeds import write_npz
    from onnxplace.runtime import make_no_outputs_error
    from onnxplace.session import InferenceSession
    from onnxplace.utils import report_progress

    states = {item.output: item.input for item in bundle.manifest.states}
    with InferenceSession(bundle, trace=plan.trace is not None, **plan.session_options) as session:
        returned_states = (
            [*states] if plan.repeat > 1 or plan.trace else []
        )  # the inputs of later runs need their shapes
        result = session.run_timed(steps.first, returned_states, timeout=plan.timeout)
        if plan.outputs and not result.outputs:
            raise make_no_outputs_error(plan.runtime, "--outputs")
        outputs = {name: value for name, value in result.outputs.items() if name not in states}
        if plan.outputs:
            write_npz(plan.outputs, outputs)
        steps.learn({name: result.outputs[output] for output, name in states.items() if output in result.outputs})
        later_seconds = []
        for number in range(1, plan.repeat):
            with steps.explained(number):
                later_seconds.append(session.run_timed(steps.feeds(number), timeout=plan.timeout).seconds)
            report_progress(number + 1, plan.repeat)
        if plan.trace:
            session.run(None, steps.feeds(plan.repeat), timeout=plan.timeout)
            write_file(plan.trace, lambda stream: stream.write(json.dumps(session.trace(last=1)).encode()))
        copies = session.list_copies()
    return RunSummary(outputs, median(later_seconds) if later_seconds else result.seconds, copies)


def _describe_value(value: Any) -> dict[str, Any]:
    """Return the type and shape of an array, a sequence, or None."""
    import numpy as np

    return {
        "dtype": str(getattr(value, "dtype", type(value).__name__)),
        "shape": list(np.shape(value) if hasattr(value, "shape") else [len(value or ())]),
    }


def _format_seconds(seconds: float, plan: RunPlan) -> str:
    """Return a line with the time of a run, and its kind."""
    simulated = plan.runtime == "simulated"
    suffix = "" if simulated else " (the first run; try --repeat 20)"
    if plan.repeat > 1:
        suffix = f" (median of {plan.repeat - 1} after the first)"
    return f"{'predicted' if simulated else 'took'} {format_milliseconds(seconds)}{suffix}"
