"""The command `onnxplace infer-specs`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from onnxplace.cli.completion import PATH, complete_devices, complete_machines
from onnxplace.cli.shared_options import (
    as_json,
    describe_note,
    parse_shape,
    print_json,
    print_notes,
    print_text,
    shape_option,
    show_progress,
)


@click.command(name="infer-specs", short_help="Complete the sharding specifications of a model.")
@click.argument("model", type=PATH)
@click.option("-o", "--output", type=PATH, metavar="F.onnx", required=True, help="The file of the completed model.")
@click.option(
    "--machine",
    metavar="8xH100-NVLink",
    shell_complete=complete_machines,
    help="Estimate times for these devices, as `onnxplace machines` lists them  [default: H100s of one host]",
)
@click.option(
    "--devices", shell_complete=complete_devices, metavar="cuda:0,cuda:1", help="Or for devices of this machine."
)
@click.option("--target", type=PATH, metavar="F.toml", help="Or for those of a file (docs/target.md).")
@shape_option
@click.option("--force", is_flag=True, help="Replace the file, and copies of weights, if they exist.")
@as_json
def infer_specs(
    model: Path, *, output: Path, machine: str | None, devices: str | None, target: Path | None, shape: str,
    force: bool, json_: bool,
) -> None:  # fmt: skip
    """Write MODEL with sharding specifications on all nodes, inferred from those of a few.

    MODEL has a device configuration of ONNX, and some of its nodes say how their values are split over its devices.
    These are kept. All other values get the layouts with which the estimated step is shortest. Nothing is measured, and
    nothing but specifications is added. In another folder, files of weights are copied to it.
    """
    from onnxplace.driver.settings import choose_target
    from onnxplace.errors import format_count
    from onnxplace.reports.text import format_table
    from onnxplace.utils.quantities import format_milliseconds
    from onnxplace_formats.spec_inference import infer_specs as infer

    sizes = parse_shape(shape)
    is_named = not (machine is None and devices is None and target is None)
    with show_progress(json_, "choosing layouts"):
        chosen = choose_target(devices, target, None, machine) if is_named else None
        result = infer(model, output, target=chosen, shape=sizes, force=force)
    if json_:
        print_json({**asdict(result), "diagnostics": [describe_note(note) for note in result.diagnostics]})
    else:
        given = f"specifications of {format_count(result.given, 'node')} were given"
        print_text(f"{result.output}: {given}, {format_count(result.completed, 'more node')} have some now")
        if result.kinds:
            rows = [(kind.op, kind.layout, str(kind.count)) for kind in result.kinds]
            print_text(format_table(("operator", "layout", "nodes"), rows, left=2))
            print_text(f"estimated step on {result.devices} devices: {format_milliseconds(result.step_seconds)}")
    print_notes(result.diagnostics)
