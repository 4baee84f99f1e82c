"""`onnxplace run` and `verify`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from onnxplace._cli_options import (
    against_option,
    as_json,
    inputs_option,
    parse_shape,
    print_json,
    runtime_option,
    say_too_few_cores,
    seed_option,
    shape_option,
    with_operator_libraries,
)
from onnxplace.errors import UsageError

if TYPE_CHECKING:
    from onnxplace._steps import Steps
    from onnxplace.bundle import Bundle
    from onnxplace.compare import OutputDifference


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@inputs_option
@click.option("--outputs", type=click.Path(path_type=Path), metavar="F.npz", help="Write the outputs there.")
@click.option("--repeat", default=1, show_default=True, type=click.IntRange(1), help="How often to run.")
@shape_option
@runtime_option
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
    seed: int,
    json_: bool,
) -> None:
    """Run BUNDLE, on random inputs unless real ones are given. States are fed to the first run and carried on."""
    from statistics import median

    import numpy as np

    from onnxplace._steps import steps_of
    from onnxplace.api import InferenceSession, load
    from onnxplace.files import require_place, write_file

    for path in filter(None, (outputs, trace)):
        require_place(path)
    opened = load(bundle)
    say_too_few_cores(opened, runtime)
    steps = steps_of(opened, inputs, parse_shape(shape), seed)
    kept = {item.output: item.input for item in opened.manifest.states}
    with InferenceSession(opened, runtime=runtime, trace=trace is not None) as session:
        again = [*kept] if repeat > 1 or trace else []  # to see how states grow
        result = session.submit(steps.first, again).result()
        if outputs and not result.outputs:
            raise _computes_nothing(runtime, "--outputs")
        steps.learn({name: result.outputs[output] for output, name in kept.items() if output in result.outputs})
        taken = []
        for number in range(1, repeat):
            with steps.explained(number):
                taken.append(session.submit(steps.feeds(number)).result().seconds)
        if trace:
            session.run(None, steps.feeds(repeat))
            write_file(trace, lambda stream: stream.write(json.dumps(session.trace()).encode()))
    found = {name: value for name, value in result.outputs.items() if name not in kept}
    if outputs:
        _write_npz(outputs, found)
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
        from onnxplace.report import milliseconds

        for name, about in summary.items():
            click.echo(f"{name}  {about['dtype']} {about['shape']}")
        click.echo(
            f"{'predicted' if runtime == 'simulated' else 'took'} {milliseconds(seconds)}"
            + (f" (median of {repeat - 1} after the first)" if repeat > 1 else _first_run(runtime))
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
    """Run the same inputs through BUNDLE and the unsplit model; exit 1 if they differ. Each carries its states on."""
    from onnxplace._steps import steps_of
    from onnxplace.api import load
    from onnxplace.compare import rounds_to_few_values
    from onnxplace.machine import cores
    from onnxplace.sessions import unoptimised

    opened = load(bundle, "all")
    count = steps or (3 if opened.manifest.states else 1)

    def compared(used: Sequence[int]) -> list[list[OutputDifference]]:
        return _compared(opened, against, runtime, steps_of(opened, inputs, parse_shape(shape), seed), count, used)

    found, rounding = compared(cores()), False
    if not _all_equal(found) and rounds_to_few_values(opened):
        with unoptimised():
            again = compared(cores()[:1])
        if _all_equal(again):
            found, rounding = again, True
    equal = _all_equal(found)
    if json_:
        outputs = [_finite(vars(item)) for item in _worst(found)]
        print_json({"equal": equal, "outputs": outputs, "steps": len(found), "optimised": not rounding})
    else:
        for item, of_steps in zip(_worst(found), zip(*found)):
            wrong = [number for number, at in enumerate(of_steps, 1) if not at.equal]
            place = f", first in step {wrong[0]}" if wrong and len(found) > 1 else ""
            click.echo(
                f"{'equal ' if item.equal else 'DIFFERS'} {item.name}  max abs error {item.max_abs_error:.3g}, "
                f"relative to its largest value {item.max_rel_error:.3g}{place}"
            )
        if len(found) > 1:
            click.echo(f"{len(found)} steps, each with the states of the one before")
        if rounding:
            click.echo(
                "compared with ONNX Runtime's optimisations off: with them, quantised values are rounded otherwise "
                "where a fusion was cut (docs/correctness.md)"
            )
    if not equal:
        raise SystemExit(1)


def _compared(
    bundle: Bundle, against: Path | None, runtime: str, steps: Steps, count: int, used: Sequence[int]
) -> list[list[OutputDifference]]:
    """Return the differences of each output in each step; the unsplit model computes on the cores `used`."""
    from onnxplace._steps import Carrying
    from onnxplace.api import InferenceSession
    from onnxplace.compare import reference
    from onnxplace.compare import verify as compare

    names = [item.name for item in bundle.outputs]
    want = Carrying(reference(bundle, against, used), bundle)
    found: list[list[OutputDifference]] = []
    with InferenceSession(bundle, runtime=runtime) as session:
        if not session.submit(steps.first).result().outputs:
            raise _computes_nothing(runtime, "verify")
        for number in range(count):
            feeds = steps.feeds(number)
            with steps.explained(number):
                found.append(compare(lambda f: session.submit(f, names).result().outputs, want, feeds, names))
            if number == 0:
                steps.learn(want.states)
    return found


def _all_equal(found: Sequence[Sequence[OutputDifference]]) -> bool:
    return all(item.equal for step in found for item in step)


def _worst(steps: Sequence[Sequence[OutputDifference]]) -> list[OutputDifference]:
    """Return, for each output, what is farthest off in any step."""
    return [max(items, key=lambda item: (not item.equal, item.max_rel_error)) for items in zip(*steps)]


def _first_run(runtime: str) -> str:
    return "" if runtime == "simulated" else " (the first run; try --repeat 20)"


def _write_npz(path: Path, outputs: Mapping[str, Any]) -> None:
    """Write outputs by name, whatever the names are; sequences as one array per element, `name.0`, `name.1`."""
    import zipfile

    import numpy as np

    arrays: dict[str, Any] = {}
    for name, value in outputs.items():
        parts = {f"{name}.{i}": part for i, part in enumerate(value)} if isinstance(value, list) else {name: value}
        arrays |= {key: np.asarray(part) for key, part in parts.items() if part is not None}

    def fill(stream: BinaryIO) -> None:
        with zipfile.ZipFile(stream, "w") as archive:
            for key, array in arrays.items():
                text = array.astype(str) if array.dtype == object else array
                with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, text, allow_pickle=False)

    from onnxplace.files import write_file

    write_file(path, fill)


def _finite(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record in which numbers that JSON does not have are None."""
    return {key: None if value in (float("inf"), float("-inf")) else value for key, value in entry.items()}


def _computes_nothing(runtime: str, what: str) -> UsageError:
    return UsageError("U045", f"runtime {runtime!r} computes no outputs", where=what, hint="use --runtime onnxruntime")
