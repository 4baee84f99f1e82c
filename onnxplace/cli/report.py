"""The command `onnxplace report`, and the option `--report` of other commands."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from onnxplace.cli.completion import BUNDLE_PATH, PATH
from onnxplace.cli.shared_options import as_json, print_json, print_text, show_progress
from onnxplace.errors import UsageError

# Bundles that a page shows next to each other.
MAX_BUNDLES = 2

report_option = click.option(
    "--report", type=PATH, metavar="F.html",
    help="Also write a page that shows the result (docs/report.md); needs the extra [report].",
)  # fmt: skip


@click.command(short_help="Show a bundle as one HTML page; two side by side.")
@click.argument("bundles", metavar="BUNDLE [BUNDLE2]", nargs=-1, required=True, type=BUNDLE_PATH)
@click.option(
    "-o", "--output", type=PATH, metavar="F.html", help="The file to write  [default: report.html; none with --json]"
)
@click.option(
    "--trace", type=PATH, metavar="F.json",
    help="Show the timelines of `onnxplace run --trace F.json`, measured and predicted.",
)  # fmt: skip
@as_json
def report(bundles: tuple[Path, ...], *, output: Path | None, trace: Path | None, json_: bool) -> None:
    """Write one HTML file about BUNDLE that any browser opens, without a network.

    It says first how good the placement is, what limits it and what would help; of two bundles, which one to take. Then
    it shows the timeline, memory, graph, cut, layers, attempts, notes and options. --json prints the data of the page.
    """
    from onnxplace.reports.page_rendering import write_report
    from onnxplace.utils.quantities import format_bytes

    if len(bundles) > MAX_BUNDLES:
        message = f"expected one or two bundles, got {len(bundles)}"
        raise UsageError("U042", message, where="report", hint="write several reports")
    if trace and len(bundles) > 1:
        message = f"expected one bundle with a trace, got {len(bundles)}"
        raise UsageError("U042", message, where="--trace", hint="name one bundle, or leave --trace out")
    path = output or (None if json_ else Path("report.html"))
    with show_progress(json_, "reading the bundle") as observer:
        result = write_report(*bundles, output=path, trace=trace, observer=observer)
    if json_:
        data = {"output": str(path) if path else None, "pages": [asdict(page) for page in result.pages]}
        print_json(data | ({"comparison": asdict(result.comparison)} if result.comparison else {}))
    elif path:
        print_text((result.comparison or result.pages[0].verdict).sentence)
        print_text(f"written to {path} ({format_bytes(path.stat().st_size)}); open it in a browser")
