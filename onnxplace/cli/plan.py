"""The command `onnxplace plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxplace.cli.completion import complete_devices
from onnxplace.cli.help import GroupedCommand
from onnxplace.cli.shared_options import (
    announce_loop_compilation,
    as_json,
    describe_note,
    llm_option,
    parse_shape,
    print_json,
    print_notes,
    print_text,
    shape_option,
    show_progress,
    with_machine,
)
from onnxplace.errors import InfeasibleError, UsageError, format_name

if TYPE_CHECKING:
    from onnxplace.driver import Goals, MachineRow, Plan, PlannedStrategy
    from onnxplace.target import Machine


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
@with_machine(multiple=True)
@click.option("--price", type=click.Path(path_type=Path), metavar="F.toml", help="Your prices per hour, of machines.")
@click.option("--latency", metavar="20ms", help="Of machines, keep what answers in this time.")
@click.option("--rate", metavar="500/s", help="Of machines, keep what answers so many requests.")
@click.option("--fit", is_flag=True, help="Of machines, keep what fits into memory.")
@click.option("--max-memory", metavar="16GiB", help="Limit of each device; or cuda:0=16GiB,cpu:0=64GiB.")
@shape_option
@click.option("--state", multiple=True, metavar="OUT=IN", help="Outputs that are inputs of the next call.")
@llm_option
@click.option("--costs", metavar="F", default="", help="Costs measured elsewhere: JSON or CSV.")
@click.option("--no-cache", is_flag=True, help="Measure all costs again.")
@click.option("--estimate", is_flag=True, help="Measure nothing: estimate all costs from operations and bytes.")
@as_json
def plan(
    model: Path,
    *,
    devices: str | None,
    target: Path | None,
    machine: tuple[str, ...],
    price: Path | None,
    latency: str | None,
    rate: str | None,
    fit: bool,
    max_memory: str | None,
    shape: str,
    state: tuple[str, ...],
    llm: bool,
    costs: str,
    no_cache: bool,
    estimate: bool,
    json_: bool,
) -> None:
    """Predict latency, throughput and memory of MODEL for several ways to use the devices.

    The ways are: one device, whole operators placed, copies of the model, pipeline stages, copies of stages, and
    operators split over 2, 4, 8 devices, in copies or stages. Nothing is written. Costs are measured where the devices
    are here, else estimated. The exit code is 3 if none of them fits the memory limits.

    With several --machine, or with goals or prices: one table, of the ways with least latency and with most requests.
    """
    from onnxplace.driver import list_machine_rows, parse_goals, plan_model, read_prices, require_one_target
    from onnxplace.target import parse_machine

    require_one_target(devices, target, machine or None)
    machines = {item.name: item for item in map(parse_machine, machine)}
    if not machines and (price or latency or rate or fit):
        message = "--price, --latency, --rate and --fit choose between machines"
        raise UsageError("U042", message, hint="name machines: --machine 2xL4 --machine H100")
    goals = parse_goals(latency, rate)
    prices = read_prices(price, machines) if price else None
    announce_loop_compilation(json_)
    plans: dict[str, Plan] = {}
    with show_progress(json_, "reading the model") as observer:
        for name in machines or [None]:
            plans[name or ""] = plan_model(
                model,
                devices=devices,
                target=target,
                machine=name,
                max_memory=max_memory,
                shape=parse_shape(shape),
                state=state,
                llm=llm,
                costs=costs,
                cache=not no_cache,
                estimate=estimate,
                observer=observer,
            )
    rows = list_machine_rows(plans, goals, prices)
    is_comparison = len(machines) > 1 or price or latency or rate or fit
    listed = [_build_json(name, item) for name, item in plans.items()]
    if json_ and is_comparison:
        print_json({"goals": asdict(goals), "rows": [asdict(row) for row in rows], "machines": listed})
    elif json_:
        print_json(listed[0])
    elif is_comparison:
        missing = plans.keys() - {row.machine for row in rows} if not (fit and rows) else ()
        text = [_format_machines(rows, plans, machines, goals)] if rows else []
        print_text("\n".join([*text, *(_explain_missing(name, plans[name]) for name in plans if name in missing)]))
    else:
        print_text(_format_plan(next(iter(plans.values())), next(iter(plans))))
    print_notes(list(dict.fromkeys(note for item in plans.values() for note in item.diagnostics)))
    if not rows:
        raise SystemExit(InfeasibleError.exit_code)


def _build_json(machine: str, plan: Plan) -> dict[str, Any]:
    notes = [describe_note(note) for note in plan.diagnostics]
    return {**({"machine": machine} if machine else {}), **asdict(plan), "diagnostics": notes}


def _format_machines(
    rows: Sequence[MachineRow], plans: Mapping[str, Plan], machines: Mapping[str, Machine], goals: Goals
) -> str:
    from onnxplace.reports import format_table
    from onnxplace.utils import format_bytes, format_milliseconds

    cells = []
    for row in rows:
        item, device = row.strategy, machines[row.machine].to_target().devices[0]
        prices = (row.price_per_hour, row.requests_price) if row.price_per_hour is not None else ()
        cells.append(
            (
                row.machine,
                item.name,
                str(item.devices),
                format_milliseconds(item.step_seconds or 0.0),
                _format_rate(1 / item.interval_seconds) if item.interval_seconds else "-",
                f"{format_bytes(item.peak_bytes or 0)} of {format_bytes(device.memory_bytes)}",
                "measured" if plans[row.machine].is_measured else "estimate",
                *("-" if price is None else f"{price:.4g}" for price in prices),
            )
        )
    load = f"at {goals.rate:.4g}/s" if goals.rate else "at full load"
    header = ("machine", "strategy", "devices", "latency", "requests/s", "memory", "basis")
    prices_header = ("price/h", f"per million {load}") if rows[0].price_per_hour is not None else ()
    return "\n".join([format_table((*header, *prices_header), cells, left=2), _ESTIMATES])


# What figures of machines that are not there are worth.
_ESTIMATES = "estimates: by published peak rates, not measured; docs/machines.md says how far off they are"


def _format_rate(rate: float) -> str:
    return f"{rate:.4g}" if rate < 1000 else f"{rate:.0f}"


def _explain_missing(name: str, plan: Plan) -> str:
    """Return why a machine has no row."""
    from onnxplace.utils import format_milliseconds

    fitting = [item for item in plan.strategies if item.step_seconds is not None]
    if not fitting:
        return f"{name} does not fit: {plan.strategies[0].problem}"
    latency = format_milliseconds(min(item.step_seconds or 0.0 for item in fitting))
    rate = max((1 / item.interval_seconds for item in fitting if item.interval_seconds), default=0.0)
    return f"{name} does not meet the goals: at least {latency}, at most {_format_rate(rate)} requests/s"


def _format_plan(plan: Plan, machine: str) -> str:
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
            f"{format_name(plan.model)}{' on ' * bool(machine)}{machine}: {basis}",
            format_table(header, rows),
            "* least latency, ** most requests; memory and weights: of the device that needs most",
            *([_ESTIMATES] if machine and not plan.is_measured else []),
            *problems,
        ]
    )


def _format_row(item: PlannedStrategy, alone: float | None, is_fastest: bool, is_most: bool) -> tuple[str, ...]:
    from onnxplace.utils import format_bytes, format_milliseconds

    if item.step_seconds is None or item.interval_seconds is None:
        return (item.name, "-", "-", "-", "-", "-", "-")
    speedup = f"{alone / item.step_seconds:.2f}x" if alone else "-"
    return (
        item.name,
        str(item.devices),
        format_milliseconds(item.step_seconds) + (" *" if is_fastest else "  "),
        speedup,
        _format_rate(1 / item.interval_seconds) + (" **" if is_most else "   ") if item.interval_seconds > 0 else "-",
        format_bytes(item.peak_bytes or 0),
        format_bytes(item.weight_bytes or 0),
    )
