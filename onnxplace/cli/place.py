"""`onnxplace place`: cost graphs without ONNX."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from onnxplace.cli.completion import PATH, EntryChoice
from onnxplace.cli.help import GroupedCommand
from onnxplace.cli.report import report_option
from onnxplace.cli.shared_options import (
    announce_loop_compilation,
    as_json,
    budget_option,
    objective_option,
    placer_option,
    print_json,
    print_notes,
    print_text,
    show_progress,
    with_machine,
)
from onnxplace.errors import UsageError, format_count, format_name
from onnxplace.reports.text import format_table
from onnxplace.utils.files import require_writable
from onnxplace.utils.quantities import format_bytes, format_milliseconds

if TYPE_CHECKING:
    from onnxplace.cost_graph.data import CostGraph
    from onnxplace.driver.place import PlacementResult


@click.command(cls=GroupedCommand, short_help="Place a cost graph; no ONNX needed.")
@click.argument("graph", type=PATH)
@click.option(
    "-o", "--output", type=PATH, metavar="F.graphml",
    help="Write the placed graph as GraphML, with the device, start and finish of each node.",
)  # fmt: skip
@click.option(
    "--graph-format", type=EntryChoice("graph_formats", "json"), help="Of GRAPH  [default: what its name ends in; json]"
)
@placer_option
@objective_option
@budget_option
@click.option("--seed", type=click.IntRange(0), metavar="N", help="For placers that search.")
@click.option("--devices", type=click.IntRange(1), metavar="N", help="How many; default: as many as the graph names.")
@with_machine()
@click.option("--max-memory", metavar="16GiB", help="Per device; default: what the graph says.")
@click.option("--links", type=click.Choice(["duplex", "parallel", "sequential"]), default="duplex", show_default=True)
@click.option(
    "--groups",
    type=click.Choice(["none", "given", "coplace", "given+coplace"]),
    help="Nodes that must share a device: the graph's own, those with a single reader (Baechi), both, or none  "
    "[default: given; for m-topo, m-etf, m-sct given+coplace, as published]",
)
@click.option("--fuse/--no-fuse", default=None, help="Contract groups before placing  [default: if they are coplaced]")
@click.option("--forward-only", is_flag=True, help="Backward nodes follow the forward node they belong to.")
@click.option(
    "--post-adjust",
    type=click.Choice(["compute", "memory", "majority"]),
    help="Place without groups, then move each to the device with most of its seconds, bytes or nodes.",
)
@click.option(
    "--placement",
    type=PATH,
    metavar="F.json",
    help="Place nothing, score this: {node id: device id}, or what --json printed.",
)
@click.option("--strict", is_flag=True, help="Fail instead of leaving a device unused.")
@report_option
@as_json
def place(
    *, graph: Path, output: Path | None, graph_format: Any, devices: int | None, max_memory: str | None, links: Any,
    machine: str | None, placement: Path | None, budget: float | None, strict: bool, report: Path | None, json_: bool,
    **options: Any
) -> None:  # fmt: skip
    """Place the cost graph GRAPH (JSON, .graphml, or one of them with .gz; docs/cost-graphs.md); no ONNX needed.

    Prints how long a step takes and what each device holds; --json also prints the device of each node.
    """
    from onnxplace.cost_graph.cost_graphs import read_cost_graph, require_graph_format, write_cost_graph
    from onnxplace.driver.place import (
        apply_target,
        evaluate_placement,
        place_cost_graph,
        read_placement,
        replace_devices,
    )
    from onnxplace.driver.settings import choose_target, require_one_target
    from onnxplace.target.parsing import parse_bytes

    require_one_target(devices, None, machine)
    target = choose_target(None, None, None, machine) if machine is not None else None
    if placement and (excluded := [_name_option(name) for name in ("budget", *options) if _is_given(name)]):
        message = f"--placement is scored as it is: it excludes {', '.join(excluded)}"
        raise UsageError("U042", message, hint="leave one of them out")
    if output:
        require_graph_format(output)
        require_writable(output, graph, *([placement] if placement else []))
    if report:
        from onnxplace.reports.page_rendering import require_report

        require_report(report, graph, placement, output=output)
    announce_loop_compilation(json_)
    memory_bytes = parse_bytes(max_memory) if max_memory else None
    with show_progress(json_, "reading the graph") as display:
        cost_graph = read_cost_graph(graph, graph_format, len(target.devices) if target else devices)
        limits = {item.id: memory_bytes for item in target.devices} if target and memory_bytes is not None else {}
        target = target.limiting(limits) if target else None
        cost_graph = apply_target(cost_graph, target) if target else replace_devices(cost_graph, devices, memory_bytes)
        if display:
            display("placing", 0, 1)
        if placement:
            result = evaluate_placement(cost_graph, read_placement(placement), links=links, strict=strict)
        else:
            result = place_cost_graph(cost_graph, links=links, budget_seconds=budget, strict=strict, **options)
    if output:
        write_cost_graph(output, cost_graph, result)
    if report:
        _write_report(report, result)
    paths = {name: str(path) for name, path in (("output", output), ("report", report)) if path}
    if json_:
        omitted = ("start_seconds", "finish_seconds", "device", "schedule", "graph")
        entries = {name: value for name, value in vars(result).items() if name not in omitted}
        entries |= {"peak_bytes": result.peak_bytes.tolist(), "placement": dict(result.placement)}
        print_json({**entries, "passes": [vars(timing) for timing in result.passes], **paths})
    else:
        print_text(format_placement(result, cost_graph))
        for path in paths.values():
            print_text(f"written to {path}")
    print_notes(result.diagnostics)


def _write_report(path: Path, result: PlacementResult) -> None:
    """Write the page about a placement."""
    from onnxplace.reports.page_data import describe_placement
    from onnxplace.reports.page_rendering import write_page

    options = {
        _name_option(name): str(value)
        for name, value in click.get_current_context().params.items()
        if name not in ("graph", "report", "json_") and _is_given(name)
    }
    write_page(path, [describe_placement(result.describe(options))])


def _is_given(option: str) -> bool:
    """Return whether the user gave an option of this command."""
    return click.get_current_context().get_parameter_source(option) is ParameterSource.COMMANDLINE


def _name_option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def format_placement(result: PlacementResult, graph: CostGraph) -> str:
    """Format a placement of a cost graph and its costs for one screen."""
    counts = Counter(result.placement.values())
    rows = [
        (str(name), str(counts[name]), format_bytes(int(peak)), format_bytes(device.memory_bytes))
        for name, peak, device in zip(graph.device_ids, result.peak_bytes, graph.target.devices)
    ]
    gap = result.makespan_seconds / result.lower_bound_seconds - 1 if result.lower_bound_seconds else 0.0
    return "\n".join(
        [
            f"{format_name(graph.name)}: {format_count(len(graph.ids), 'node')}, placer {result.placer}, "
            f"{format_milliseconds(result.seconds)} to place",
            format_table(("device", "nodes", "peak", "limit"), rows),
            f"step {format_milliseconds(result.makespan_seconds)}, {gap:.1%} above a bound of "
            f"{format_milliseconds(result.lower_bound_seconds)}" + ("" if result.feasible else "; DOES NOT FIT"),
        ]
    )
