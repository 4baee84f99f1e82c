"""The command `onnxplace memory-stats`."""

from __future__ import annotations

from pathlib import Path

import click

from onnxplace.cli.completion import PATH
from onnxplace.cli.shared_options import as_json, format_json, print_json, print_text


@click.command(name="memory-stats", short_help="Add ONNX Runtime's statistics of memory to costs.")
@click.argument("stats", type=PATH)
@click.option(
    "--costs", type=PATH, required=True, metavar="F.json", help="Costs, as --save-costs and bundles have them."
)
@click.option("-o", "--output", type=PATH, required=True, metavar="F.json", help="The costs with the memory of nodes.")
@as_json
def memory_stats(stats: Path, costs: Path, output: Path, *, json_: bool) -> None:
    """Add to costs what nodes take while they run, as ONNX Runtime has measured it.

    STATS is the table that a session writes with the option session.collect_node_memory_stats_to_file and
    enable_mem_pattern=False. Its temporary allocations become the `workspace_bytes` of nodes, which limits of memory
    count (docs/costs.md). Collect it without optimisations, so that nodes keep their names.
    """
    from onnxplace.errors import InputError, format_count, format_names
    from onnxplace.utils.files import format_path, read_json, require_writable, write_file
    from onnxplace_formats.memory_stats import add_workspace, read_stats

    require_writable(output, stats, costs)
    hint = "bundles hold one as costs.json, and compile writes one with --save-costs F.json"
    if costs.suffix.lower() == ".csv":
        raise InputError("C011", "expected costs as JSON, not CSV", where=format_path(costs), hint=hint)
    data = read_json(costs, "C011", "a cost file")
    nodes = data.get("nodes") if isinstance(data, dict) else None
    if not isinstance(nodes, dict) or not all(isinstance(node, dict) for node in nodes.values()):
        raise InputError("C011", "not a cost file", where=format_path(costs), hint=hint)
    matched, others = add_workspace(data, read_stats(stats))
    if not matched:
        message = f"no node of the costs is in these statistics, which have {format_names(others)}"
        raise InputError("C011", message, where=format_path(stats), hint="collect them with this model")
    write_file(output, lambda stream: stream.write(format_json(data).encode()))
    if json_:
        print_json({"path": output, "nodes": matched, "unknown": list(others)})
        return
    print_text(f"{output}: {format_count(matched, 'node')} with memory of ONNX Runtime")
    if others:
        print_text(f"no node of the costs: {format_names(others)}")
