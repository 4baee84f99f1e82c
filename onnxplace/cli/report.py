"""The command `onnxplace report`, and the option `--report` of other commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxplace.cli.completion import BUNDLE_PATH
from onnxplace.cli.shared_options import as_json, print_json, print_text, show_progress
from onnxplace.errors import UsageError

if TYPE_CHECKING:
    from onnxplace.report import PageData

# Bundles that a page shows next to each other.
MAX_BUNDLES = 2

report_option = click.option(
    "--report", type=click.Path(path_type=Path), metavar="F.html",
    help="Also write a page that shows the result (docs/report.md); needs the extra [report].",
)  # fmt: skip


@click.command(short_help="Show a bundle as one HTML page; two side by side.")
@click.argument("bundles", metavar="BUNDLE [BUNDLE2]", nargs=-1, required=True, type=BUNDLE_PATH)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="F.html",
    help="The file to write  [default: report.html; none with --json]",
)  # fmt: skip
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="F.json",
    help="Show the timelines of `onnxplace run --trace F.json`, measured and predicted.",
)  # fmt: skip
@as_json
def report(bundles: tuple[Path, ...], *, output: Path | None, trace: Path | None, json_: bool) -> None:
    """Write one HTML file about BUNDLE that any browser opens, without a network.

    It says first how good the placement is, what limits it and what would help; of two bundles, which one to take. Then
    it shows the timeline, memory, graph, cut, layers, attempts, notes and options. --json prints the data of the page.
    """
    from onnxplace.bundle import Bundle
    from onnxplace.report import build_page_json, compare_pages, describe_bundle, format_bytes

    if len(bundles) > MAX_BUNDLES:
        message = f"expected one or two bundles, got {len(bundles)}"
        raise UsageError("U042", message, where="report", hint="write several reports")
    if trace and len(bundles) > 1:
        message = f"expected one bundle with a trace, got {len(bundles)}"
        raise UsageError("U042", message, where="--trace", hint="name one bundle, or leave --trace out")
    path = output or (None if json_ else Path("report.html"))
    if path:
        require_report(path, *bundles, trace)
    with show_progress(json_, "reading the bundle") as observer:
        pages = []
        for index, item in enumerate(bundles):
            if observer:
                observer(item.name, index, len(bundles))
            pages.append(describe_bundle(Bundle.open(item), trace))
        if path:
            write_page(path, pages)
    comparison = compare_pages(*pages) if len(pages) == MAX_BUNDLES else None
    if json_:
        data = {"output": str(path) if path else None, "pages": [build_page_json(page) for page in pages]}
        print_json(data | ({"comparison": asdict(comparison)} if comparison else {}))
    elif path:
        print_text(comparison.sentence if comparison else pages[0].verdict.sentence)
        print_text(f"written to {path} ({format_bytes(path.stat().st_size)}); open it in a browser")


def require_report(path: Path, *inputs: Path | None, **outputs: Path | None) -> None:
    """Raise UsageError before any work if a report cannot be written to `path`, or its packages are missing.

    Args:
        path: The file of the report.
        inputs: Files and bundles that the command reads, or None.
        outputs: By option, other files and folders that it writes, or None.
    """
    from onnxplace.report import require_report_packages
    from onnxplace.utils import require_different_files, require_writable

    require_report_packages()
    require_different_files(**outputs, report=path)
    require_writable(path, *(item for item in (*inputs, *outputs.values()) if item))


def write_page(path: Path, pages: Sequence[PageData]) -> None:
    """Write the report about one bundle or placement, or about two next to each other."""
    from onnxplace.report import render_page
    from onnxplace.utils import write_file

    content = render_page(pages).encode()
    write_file(path, lambda stream: stream.write(content))
