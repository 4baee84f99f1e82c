"""The command `onnxplace plan`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxplace.cli.completion import complete_devices
from onnxplace.cli.help import GroupedCommand
from onnxplace.cli.shared_options import (
    announce_loop_compilation,
    as_json,
    describe_note,
    parse_shape,
    print_json,
    print_notes,
    print_text,
    shape_option,
    show_progress,
)
from onnxplace.errors import InfeasibleError, format_name

if TYPE_CHECKING:
    from onnxplace.driver import Plan, PlannedStrategy


@click.command(cls=GroupedCommand, short_help="Compare strategies for a model; write nothing.")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--devices",
    shell_complete=complete_devices,
    metavar="cuda:0,cuda:1",
    help="Devices of this machine  [default: all GPUs, else cpu:0,cpu:1]",
)
@click.option(
    "--target",
    type=click.Path(path_type=Path),
    metavar="F.toml",
    help="Devices and links from a file, of this or another machine (docs/target.md).",
)
@click.option("--max-memory", metavar="16GiB", help="Limit of each device; or cuda:0=16GiB,cpu:0=64GiB.")
@shape_option
@click.option("--state", multiple=True, metavar="OUT=IN", help="Outputs that are inputs of the next call.")
@click.option("--costs", metavar="F", default="", help="Costs measured elsewhere: JSON or CSV.")
@click.option("--no-cache", is_flag=True, help="Measure all costs again.")
@click.option("--estimate", is_flag=True, help="Measure nothing: estimate all costs from operations and bytes.")
@as_json
def plan(
    model: Path,
    *,
    devices: str | None,
    target: Path | None,
    max_memory: str | None,
    shape: str,
    state: tuple[str, ...],
    costs: str,
    no_cache: bool,
    estimate: bool,
    json_: bool,
) -> None:
    """Predict latency, throughput and memory of MODEL for several ways to use the devices.

    The ways are: one device, whole operators placed, copies of the model, pipeline stages, copies of stages, and
    operators split over 2, 4, 8 devices, in copies or stages. Nothing is written. Costs are measured where the devices
    are here, else estimated. The exit code is 3 if none of them fits the memory limits.
    """
    from onnxplace.driver import plan_model

    announce_loop_compilation(json_)
    with show_progress(json_, "reading the model") as observer:
        result = plan_model(
            model,
            devices=devices,
            target=target,
            max_memory=max_memory,
            shape=parse_shape(shape),
            state=state,
            costs=costs,
            cache=not no_cache,
            estimate=estimate,
            observer=observer,
        )
    if json_:
        print_json({**asdict(result), "diagnostics": [describe_note(note) for note in result.diagnostics]})
    else:
        print_text(_format_plan(result))
    print_notes(result.diagnostics)
    if all(item.step_seconds is None for item in result.strategies):
        raise SystemExit(InfeasibleError.exit_code)


def _format_plan(plan: Plan) -> str:
    """Return the strategies as a table; the best latency and the best throughput are marked."""
    from onnxplace.reports import format_table

    fitting = [item for item in plan.strategies if item.step_seconds is not None]
    fastest = min(fitting, key=lambda item: item.step_seconds or 0.0, default=None)
    most = min(fitting, key=lambda item: item.interval_seconds or 0.0, default=None)
    alone = next((item.step_seconds for item in plan.strategies if item.step_seconds is not None), None)
    rows = [_format_row(item, alone, item is fastest, item is most) for item in plan.strategies]
    header = ("strategy", "devices", "latency", "speed-up", "requests/s", "memory", "weights")
    problems = [f"{item.name}: {item.problem}" for item in plan.strategies if item.problem]
    basis = "costs measured on this machine" if plan.is_measured else "costs are estimates: compare rows, not figures"
    return "\n".join(
        [
            f"{format_name(plan.model)}: {basis}",
            format_table(header, rows),
            "* least latency, ** most requests; memory and weights: of the device that needs most",
            *problems,
        ]
    )


def _format_row(item: PlannedStrategy, alone: float | None, is_fastest: bool, is_most: bool) -> tuple[str, ...]:
    from onnxplace.reports import format_bytes, format_milliseconds

    if item.step_seconds is None or item.interval_seconds is None:
        return (item.name, "-", "-", "-", "-", "-", "-")
    speedup = f"{alone / item.step_seconds:.2f}x" if alone else "-"
    return (
        item.name,
        str(item.devices),
        format_milliseconds(item.step_seconds) + (" *" if is_fastest else "  "),
        speedup,
        f"{1 / item.interval_seconds:.4g}" + (" **" if is_most else "   ") if item.interval_seconds > 0 else "-",
        format_bytes(item.peak_bytes or 0),
        format_bytes(item.weight_bytes or 0),
    )
