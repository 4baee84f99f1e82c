"""The command `onnxplace compile`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxplace.cli.completion import PATH, complete_pipeline
from onnxplace.cli.help import GroupedCommand
from onnxplace.cli.report import report_option
from onnxplace.cli.shared_options import (
    announce_loop_compilation,
    as_json,
    budget_option,
    model_options,
    objective_option,
    parse_sizes,
    placer_option,
    print_json,
    print_notes,
    print_text,
    seed_option,
    show_progress,
    with_machine,
    with_operator_libraries,
)
from onnxplace.cli.terminal import is_verbose

if TYPE_CHECKING:
    from onnxplace.driver.trials import Compiled

DETAILS = ("P040", "P060", "P062")
"""Notes that list candidates and layouts, of which the summary has the result: they are shown with `--verbose`."""


@click.command(cls=GroupedCommand, short_help="Profile, place and split a model; write a bundle.")
@click.argument("model", type=PATH)
@click.option(
    "-o", "--output", type=PATH, metavar="DIR", help="The folder of the bundle  [default: MODEL, ending in .bundle]"
)
@model_options
@with_machine()
@click.option("--costs", type=PATH, metavar="F", help="Costs measured elsewhere: JSON or CSV.")
@click.option("--save-costs", type=PATH, metavar="F", help="Write the costs to a file: JSON or CSV.")
@click.option(
    "--plans",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    metavar="N",
    help="Of several --shape, at most N plans.",
)
@click.option("--no-trial", is_flag=True, help="Do not run the compiled bundle.")
@placer_option
@objective_option
@budget_option
@click.option(
    "--pipeline",
    metavar="TEXT",
    shell_complete=complete_pipeline,
    help="All passes, such as 'optimize,profile{repeat=5},coplace,m-etf,split,emit'.",
)
@click.option(
    "--device-map",
    type=PATH,
    metavar="F",
    help='Your placement: {"encoder.*": "cpu:0"}, or a map of accelerate, Olive, ONNX or its Runtime (docs/export.md).',
)
@click.option(
    "--colocate", multiple=True, metavar="REGEX", help="Nodes with matching names or modules share a device; repeat."
)
@click.option(
    "--shard",
    default="auto",
    show_default=True,
    metavar="auto|off|N",
    help="Split operators over at most N devices; auto: where that is faster.",
)
@click.option(
    "--shard-map",
    metavar="JSON",
    help='How to split which nodes: \'{"layers.*": "columns"}\', a file, or a model with layouts (docs/sharding.md).',
)
@click.option(
    "--shard-metadata", is_flag=True, help="Write the layouts into segments/whole.onnx, as ONNX describes them."
)
@click.option(
    "--recompute",
    default="auto",
    show_default=True,
    metavar="auto|off|always|SIZE",
    help="Compute values again instead of keeping them; auto: where nothing fits otherwise; SIZE: as if on one device.",
)
@click.option(
    "--stream",
    default="auto",
    show_default=True,
    metavar="auto|off|always",
    help="Weights come in time for each run; auto: where no device holds the model; always: all that can.",
)
@click.option("--pool", metavar="2GiB", help="Memory of each device for weights that stream  [default: the best size]")
@click.option(
    "--max-error", type=float, metavar="1e-3", help="Largest error of an output, relative to its largest value."
)
@seed_option
@click.option("--strict", is_flag=True, help="Fail if a requested device is idle.")
@click.option(
    "--link-weights", is_flag=True, help="Leave the weights in the model's own files; DIR must be next to them."
)
@click.option("--force", is_flag=True, help="Replace the bundle if it exists.")
@report_option
@with_operator_libraries
@as_json
def compile(  # noqa: A001
    model: Path,
    *,
    json_: bool,
    target: Path | None,
    shape: tuple[str, ...],
    inputs: Path | None,
    pipeline: str | None,
    budget: float | None,
    no_cache: bool,
    no_trial: bool,
    report: Path | None,
    **options: Any,
) -> None:
    """Profile, place and split MODEL (.onnx, a folder with one, or .pt2 of torch.export); write a bundle.

    A bundle is a folder that `onnxplace run` takes.
    """
    from onnxplace.driver.compile import compile_model
    from onnxplace.feeds.npz import read_npz

    if report:
        _require_report(report, model, inputs, target, **options)
    announce_loop_compilation(json_)
    with show_progress(json_, "reading the model") as observer:
        compiled = compile_model(
            model,
            target=target,
            shape=parse_sizes(shape),
            inputs=read_npz(inputs) if inputs else None,
            pipeline=pipeline,
            budget_seconds=budget,
            cache=not no_cache,
            trial=not no_trial,
            observer=observer,
            **options,
        )
    if report:
        from onnxplace.reports.page_data import describe_bundle
        from onnxplace.reports.page_rendering import write_page

        write_page(report, [describe_bundle(compiled.bundle)])
    if json_:
        print_json({**_build_json(compiled), **({"report": str(report)} if report else {})})
    else:
        from onnxplace.reports.text import compile_summary

        print_text(compile_summary(compiled.bundle))
        if options["save_costs"]:
            print_text(f"costs: {options['save_costs']}")
        if report:
            print_text(f"report: {report}")
    print_notes([note for note in compiled.diagnostics if is_verbose() or note.code not in DETAILS])


def _require_report(report: Path, model: Path, *inputs: Path | None, **options: Any) -> None:
    """Raise UsageError before any work if the report cannot be written, or is another file of this command."""
    from onnxplace.driver.sources import find_in_folder
    from onnxplace.reports.page_rendering import require_report

    shard_map = options["shard_map"]
    files = (options["costs"], options["device_map"], None if not shard_map or "{" in shard_map else Path(shard_map))
    model = find_in_folder(model).origin if os.path.isdir(model) else model
    output = options["output"] or model.with_suffix(".bundle")
    require_report(report, model, *inputs, *files, output=output, save_costs=options["save_costs"])


def _build_json(compiled: Compiled) -> dict[str, Any]:
    manifest = compiled.bundle.manifest
    parts = {"model", "placer", "predicted", "trial", "repeats", "sharding", "training", "devices", "held"}
    return {
        "bundle": str(compiled.bundle.path),
        **manifest.model_dump(include=parts | {"plans", "sizes"}),
        "pipeline": compiled.pipeline,
        "unsure": manifest.is_unsure,
        "segments": len(manifest.segments),
        "transfers": manifest.transfers,
        "transfer_bytes": manifest.transfer_bytes,
        "passes": [{"name": timing.name, "seconds": timing.seconds} for timing in compiled.timings],
        "diagnostics": compiled.diagnostics,
    }
