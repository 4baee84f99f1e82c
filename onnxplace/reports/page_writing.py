"""Write reports to files, and show them in notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxplace.bundle import Bundle
from onnxplace.pipeline import Observer
from onnxplace.reports.differences import compare_pages
from onnxplace.reports.page_data import describe_bundle
from onnxplace.reports.page_records import Comparison, PageData
from onnxplace.reports.page_rendering import embed_page, render_page, require_report_packages
from onnxplace.utils import require_different_files, require_writable, write_file


@dataclass(frozen=True, repr=False)
class Report:
    """A report about a bundle, or about two side by side, which a notebook shows.

    The fields are those of `onnxplace report --json`.
    """

    output: Path | None
    """The file of the page, if one was written."""
    pages: tuple[PageData, ...]
    """The data of the page, for each bundle."""
    comparison: Comparison | None = None
    """Of two bundles, which one to take, and what differs."""

    def __repr__(self) -> str:
        return f"Report: {(self.comparison or self.pages[0].verdict).sentence}"

    def _repr_html_(self) -> str | None:
        return embed_page(self.pages)


def write_report(
    bundle: Bundle | str | Path,
    other: Bundle | str | Path | None = None,
    *,
    output: str | Path | None = None,
    trace: str | Path | None = None,
    observer: Observer | None = None,
) -> Report:
    """Describe a bundle as `onnxplace report` does, and write the page to a file if one is named.

    Args:
        bundle: A bundle, or its path.
        other: Another one, to show both side by side.
        output: The file of the page; needs the extra `[report]`.
        trace: The file of `onnxplace run --trace`, whose times are shown next to the predicted ones of `bundle`.
        observer: Called before each bundle with its name, its position from 0 and their number.

    Raises:
        OnnxplaceError: one of the files cannot be used, or packages of the extra `[report]` are missing.

    >>> onnxplace.report("model.bundle", output="report.html").pages[0].bound.step_seconds  # doctest: +SKIP
    0.0718
    """
    given = [item for item in (bundle, other) if item is not None]
    paths = [item.path if isinstance(item, Bundle) else Path(item) for item in given]
    source, path = Path(trace) if trace else None, Path(output) if output else None
    if path:
        require_report(path, *paths, source)
    pages = []
    for index, item in enumerate(given):
        if observer:
            observer(paths[index].name, index, len(given))
        pages.append(describe_bundle(item if isinstance(item, Bundle) else Bundle.open(item), source))
    if path:
        write_page(path, pages)
    return Report(path, tuple(pages), compare_pages(*pages) if len(pages) > 1 else None)


def show_bundle(bundle: Bundle) -> str | None:
    """Return the report about a bundle as an element for notebooks; None without the extra `[report]`."""
    return embed_page([describe_bundle(bundle)])


def require_report(path: Path, *inputs: Path | None, **outputs: Path | None) -> None:
    """Raise UsageError before any work if a report cannot be written to `path`, or its packages are missing.

    Args:
        path: The file of the report.
        inputs: Files and bundles that the command reads, or None.
        outputs: By option, other files and folders that it writes, or None.
    """
    require_report_packages()
    require_different_files(**outputs, report=path)
    require_writable(path, *(item for item in (*inputs, *outputs.values()) if item))


def write_page(path: Path, pages: Sequence[PageData]) -> None:
    """Write the report about one bundle or placement, or about two next to each other."""
    content = render_page(pages).encode()
    write_file(path, lambda stream: stream.write(content))
