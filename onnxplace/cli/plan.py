"""The command `onnxplace plan`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxplace.cli.completion import PATH
from onnxplace.cli.help import GroupedCommand
from onnxplace.cli.shared_options import (
    announce_loop_compilation,
    as_json,
    model_options,
    parse_sizes,
    print_json,
    print_notes,
    print_text,
    show_progress,
    with_machine,
)
from onnxplace.errors import InfeasibleError, UsageError, format_count, format_name
from onnxplace.reports.text import format_table
from onnxplace.utils.quantities import format_bytes, format_milliseconds

if TYPE_CHECKING:
    from onnxplace.driver.explaining import Explanation
    from onnxplace.driver.machine_choice import Goals, MachineRow
    from onnxplace.driver.plan import Plan, PlannedStrategy
    from onnxplace.target.machines import Machine


@click.command(cls=GroupedCommand, short_help="Compare strategies for a model; write nothing.")
@click.argument("model", type=PATH, required=False)
@click.option(
    "--diff", nargs=2, type=PATH, metavar="A B", help="What two bundles, or two files of --json, decide differently."
)
@model_options
@with_machine(multiple=True)
@click.option("--price", type=PATH, metavar="F.toml", help="Your prices per hour, of machines.")
@click.option("--latency", metavar="20ms", help="Of machines, keep what answers in this time.")
@click.option("--rate", metavar="500/s", help="Of machines, keep what answers this many requests.")
@click.option("--fit", is_flag=True, help="Of machines, keep what fits into memory.")
@click.option("--stream", is_flag=True, help="The step for several limits, where weights stream to the device.")
@click.option(
    "--explain", multiple=True, metavar="NAME", help="Compare devices and layouts of a node, module or value; repeat."
)
@click.option("--costs", metavar="F", default="", help="Costs measured elsewhere: JSON or CSV.")
@click.option("--estimate", is_flag=True, help="Measure nothing: estimate all costs from operations and bytes.")
@as_json
def plan(
    model: Path | None, *, diff: tuple[Path, Path] | None, machine: tuple[str, ...], price: Path | None, fit: bool,
    latency: str | None, rate: str | None, shape: tuple[str, ...], inputs: Path | None, no_cache: bool, json_: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Predict latency, throughput and memory of MODEL for several ways to use the devices.

    The ways are: one device, whole operators placed, copies of the model, pipeline stages, copies of stages, and
    operators split over 2, 4, 8 devices, in copies or stages. Each row says what limits its latency, and a line says
    where fixed sizes would help. Nothing is written. Costs are measured where the devices are here, else estimated
    without the file of weights. The exit code is 3 if none of them fits the memory limits.

    With --diff, no model is read: what differs between two bundles, or two plans that were saved as JSON.

    With several --machine, or with goals or prices: one table, of the ways with least latency and with most requests.
    Without --rate, the cheapest machine is the one with the lowest price of an hour.
    """
    if (model is None) == (diff is None):
        message = "expected a model, or --diff with two bundles or plans"
        raise UsageError("U042", message, where="plan", hint="`onnxplace plan MODEL`, or `onnxplace plan --diff A B`")
    if diff:
        _print_difference(*diff, json_=json_)
        return
    assert model is not None
    from onnxplace.driver.machine_choice import list_machine_rows, parse_goals, read_prices
    from onnxplace.driver.plan import plan_model
    from onnxplace.driver.settings import require_one_target
    from onnxplace.feeds.npz import read_npz
    from onnxplace.target.machines import parse_machine

    require_one_target(options["devices"], options["target"], machine or None, options["providers"])
    machines = {item.name: item for item in map(parse_machine, machine)}
    if not machines and (price or latency or rate or fit):
        message = "--price, --latency, --rate and --fit choose between machines"
        raise UsageError("U042", message, hint="name machines: --machine 2xL4 --machine H100")
    goals = parse_goals(latency, rate)
    prices = read_prices(price, machines) if price else None
    arrays, sizes = read_npz(inputs) if inputs else None, parse_sizes(shape)
    announce_loop_compilation(json_)
    plans: dict[str, Plan] = {}
    with show_progress(json_, "reading the model") as observer:
        for name in machines or [None]:
            plans[name or ""] = plan_model(
                model, machine=name, shape=sizes, inputs=arrays, cache=not no_cache, observer=observer, **options
            )
    rows = list_machine_rows(plans, goals, prices)
    is_comparison = len(machines) > 1 or price or latency or rate or fit
    listed = [
        {**({"machine": name} if name else {}), **asdict(item), "diagnostics": item.diagnostics}
        for name, item in plans.items()
    ]
    if json_ and is_comparison:
        print_json({"goals": asdict(goals), "rows": [asdict(row) for row in rows], "machines": listed})
    elif json_:
        print_json(listed[0])
    elif is_comparison:
        missing = plans.keys() - {row.machine for row in rows} if not (fit and rows) else ()
        text = [_format_machines(rows, plans, machines, goals)] if rows else []
        text += [_explain_missing(name, plans[name]) for name in plans if name in missing]
        text += [line for name, item in plans.items() for line in _format_explanations(item, f" on {name}")]
        print_text("\n".join([*text, *([_recommend(rows, goals)] if rows else [])]))
    else:
        (name, first), *_ = plans.items()
        texts = [_format_plan(item, name) for item in (first, *first.others)]
        texts += [_format_sets(first, is_decoder=options["llm"] and len(sizes) < 2)] if first.others else []
        print_text("\n\n".join(texts))
    print_notes(list(dict.fromkeys(note for item in plans.values() for note in item.diagnostics)))
    if not rows:
        raise SystemExit(InfeasibleError.exit_code)


def _print_difference(first: Path, second: Path, *, json_: bool) -> None:
    """Print which of two plans to take, the figures that differ, and what they decide differently."""
    from onnxplace.driver.plan_differences import compare_plans

    result = compare_plans(first, second)
    if json_:
        print_json(asdict(result))
        return
    rows = [(row.label, *row.texts, row.difference) for row in result.rows if row.difference != "equal"]
    parts = [result.sentence, *([format_table(("", "A", "B", "difference"), rows)] if rows else [])]
    parts += [f"{table.caption}:\n{format_table(table.header, table.rows, left=9)}" for table in result.tables]
    print_text("\n\n".join(parts))


def _format_machines(
    rows: Sequence[MachineRow], plans: Mapping[str, Plan], machines: Mapping[str, Machine], goals: Goals
) -> str:
    cells = []
    for row in rows:
        item, device = row.strategy, machines[row.machine].to_target().devices[0]
        prices = (row.price_per_hour, row.requests_price) if row.price_per_hour is not None else ()
        costs = ["-" if price is None else f"{price:.4g}" for price in prices]
        memory = f"{format_bytes(item.peak_bytes or 0)} of {format_bytes(device.memory_bytes)}"
        basis, limit = "measured" if plans[row.machine].is_measured else "estimate", item.limited_by.partition(":")[0]
        cells.append((row.machine, item.name, str(item.devices), *item.times, memory, basis, *costs, limit))
    load = f"at {goals.rate:.4g}/s" if goals.rate else "at full load"
    header = ("machine", "strategy", "devices", "latency", "requests/s", "memory", "basis")
    prices_header = ("price/h", f"per million {load}") if rows[0].price_per_hour is not None else ()
    limits = _explain_limits((f"{row.machine}, {row.strategy.name}", row.strategy) for row in rows)
    limits += [f"{name}: {text}" for name, plan in plans.items() for text in plan.advice]
    table, first = format_table((*header, *prices_header, "limited by"), cells, left=2), plans[rows[0].machine]
    requests = " or ".join(item.request for item in (first, *first.others))
    return "\n".join([f"a request is {requests}", table, *limits, _ESTIMATES])


def _recommend(rows: Sequence[MachineRow], goals: Goals) -> str:
    """Return in one sentence the row with the lowest price per hour, or without prices the fastest one."""
    best = min(rows, key=lambda row: row.rank())
    price = best.price_per_hour
    which = "least latency" if price is None else "cheapest"
    goal = f" that meets {text}" if (text := goals.describe()) else ""
    goal += "" if price is None or goals.rate else ", by the price of an hour"
    cost = "" if price is None else f", {price:.4g} an hour, {best.requests_price:.4g} per million requests"
    return f"{which}{goal}: {best.machine}, {best.strategy.describe()}{cost}"


def _explain_limits(strategies: Iterable[tuple[str, PlannedStrategy]]) -> list[str]:
    """Return what limits the requests per second of named strategies, where it is not computing."""
    causes = {"Python": "Python, which hands each request to each device", "weights that stream": "weights that stream"}
    limited = defaultdict[str, list[str]](list)
    for name, item in strategies:
        if item.limit not in ("", "computes"):
            limited[causes.get(item.limit, f"what a device {item.limit}")].append(name)
    return [f"requests/s limited by {cause}: {'; '.join(names)}" for cause, names in limited.items()]


# What figures of machines that are not there are worth.
_ESTIMATES = "estimates: by published figures, none measured here; docs/machines.md says how far off they are"


def _explain_missing(name: str, plan: Plan) -> str:
    """Return why a machine has no row."""
    fastest, most = plan.find_best()
    if fastest is None or most is None:
        return f"{name} does not fit: {plan.strategies[0].problem}"
    return f"{name} does not meet the goals: at least {fastest.times[0]}, at most {most.times[1]} requests/s"


def _format_plan(plan: Plan, machine: str) -> str:
    """Return the strategies as a table; the best latency and the best throughput are marked."""
    fastest, most = plan.find_best()
    one_device = plan.strategies[0]
    rows = [_format_row(item, one_device.step_seconds, item is fastest, item is most) for item in plan.strategies]
    header = ("strategy", "devices", "latency", "speed-up", "requests/s", "memory", "weights", "limited by")
    problems = [f"{item.name}: {item.problem}" for item in plan.strategies if item.problem]
    doubt = ", unsure: other programs used the cores" if any(note.code == "C004" for note in plan.diagnostics) else ""
    basis = (
        f"costs measured on this machine{doubt}"
        if plan.is_measured
        else "costs are estimates: compare rows, not figures"
    )
    title = f"{format_name(plan.model)}{' on ' * bool(machine)}{machine}: {basis}\na request is {plan.request}"
    legend = "* least latency, ** most requests; memory: of the fullest device; limited by: most of the latency"
    limits = [*_explain_limits((item.name, item) for item in plan.strategies), *plan.advice]
    best = []
    if fastest and fastest.step_seconds and one_device.step_seconds:  # as `compile` reports it after a trial
        speedup = f", {one_device.step_seconds / fastest.step_seconds:.2f} times as fast as one device by prediction"
        best.append(f"least latency: {fastest.name}{'' if fastest is one_device else speedup}")
    estimates = [_ESTIMATES] if machine and not plan.is_measured else []
    curve = [
        (format_bytes(point.memory_bytes), *map(format_milliseconds, (point.step_seconds, point.waiting_seconds)))
        for point in plan.stream_curve
    ]
    curve_header = ("memory, with weights that stream", "step", "waits for weights")
    curves = [format_table(curve_header, curve)] if curve else []
    parts = [*best, *limits, *estimates, *problems, *curves, *_format_explanations(plan)]
    return "\n".join([title, format_table(header, rows), legend, *parts])


def _format_sets(plan: Plan, *, is_decoder: bool) -> str:
    """Return the table of sets of plans for several sizes, and what the best one gains.

    Of a decoder, the first size is a token, the second one a prompt.
    """
    if not plan.sets:
        return "no plans take all sizes together within the memory of the devices"
    requests = [f"size {number}: {item.request}" for number, item in enumerate((plan, *plan.others), 1)]
    sizes, rows, best = range(1, len(requests) + 1), list[tuple[str, ...]](), plan.sets[0].interval_seconds or 1.0
    header = [*(f"plan for size {number}" for number in sizes), *(f"step {number}" for number in sizes)]
    header = ["tokens", "prompt", "tokens/s", "first token"] if is_decoder else header
    for item in plan.sets:
        steps, mean = [format_milliseconds(step) for step in item.steps], item.interval_seconds or 0.0
        if is_decoder:
            steps = [f"{1 / item.steps[0]:.4g}", format_milliseconds(item.steps[1] + item.move_seconds)]
        times = (format_milliseconds(item.move_seconds), format_milliseconds(mean), f"{mean / best:.2f}")
        rows.append((*item.plans, *steps, *times, format_bytes(item.peak_bytes or 0)))
    table = format_table((*header, "move", "mean step", "to the first", "memory"), rows, left=len(requests))
    legend = (
        "the first is best; mean step: by how often each size is, with moves; memory: of the fullest device or pool"
    )
    return "\n".join(["sets of plans:", *requests, table, legend])


def _format_explanations(plan: Plan, where: str = "") -> Iterator[str]:
    """Yield lines that compare the devices and layouts of nodes and values."""
    for item in plan.explanations:
        subject = f"{item.op} {format_name(item.node)}"
        name = "" if item.name == item.node else f"{format_name(item.name)}, decided by "
        yield f"\n{name}{subject}{where}:"
        yield _compare_devices(item) if item.devices else "there is no other device"
        yield _compare_layouts(item) if item.layouts else "no strategy splits operators, so there is no other layout"


def _compare_devices(item: Explanation) -> str:
    """Return the table of devices, with the reason why some are impossible."""
    from onnxplace.reports.alternatives import describe_difference

    group = f"it and {format_count(item.together - 1, 'node')} more ({item.reason}) are" if item.reason else "it is"
    rows = [
        (
            other.device,
            describe_difference(other.step_seconds, item.devices[0].step_seconds, is_kept=other.is_kept),
            "" if other.step_seconds is None else f"{other.transfers}, {format_bytes(other.transfer_bytes)}",
            other.problem,
        )
        for other in item.devices
    ]
    title = f"{item.placed}: the simulated step if {group} on another device, and all others where they are"
    return f"{title}\n{format_table(('device', 'the step would be', 'transfers', ''), rows, left=4)}"


def _compare_layouts(item: Explanation) -> str:
    """Return the table of layouts, with what each forces on other nodes."""
    from onnxplace.reports.alternatives import LAYOUT_COLUMNS, describe_layouts

    title = f"{item.sharded}: the step with another layout, and all others chosen again, as the choice counts it"
    return f"{title}\n{format_table(LAYOUT_COLUMNS, describe_layouts(item.layouts), left=4)}"


def _format_row(item: PlannedStrategy, alone: float | None, is_fastest: bool, is_most: bool) -> tuple[str, ...]:
    if item.step_seconds is None:
        return (item.name, "-", "-", "-", "-", "-", "-", "-")
    latency, rate = item.times
    speedup = f"{alone / item.step_seconds:.2f}x" if alone else "-"
    times = (latency + (" *" if is_fastest else "  "), speedup, rate + (" **" if is_most else "   "))
    memory = (format_bytes(size or 0) for size in (item.peak_bytes, item.weight_bytes))
    return (item.name, str(item.devices), *times, *memory, item.limited_by)
