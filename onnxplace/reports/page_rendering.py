"""Write reports: one HTML file that loads nothing from elsewhere, or an element for notebooks.

The page allows only the scripts whose hashes it names, so that no text from a model can become one. The plotting
library is BokehJS, whose code is taken from the installed Python package `bokeh`. dagre lays out the picture of the
graph; its code is in `page/dagre.min.js`, with its licence.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from onnxplace._version import __version__
from onnxplace.bundle.bundle import Bundle
from onnxplace.errors import UsageError
from onnxplace.pipeline.pipeline import Observer
from onnxplace.reports.differences import compare_pages
from onnxplace.reports.page_data import describe_bundle
from onnxplace.reports.page_records import Comparison, MemoryCurve, PageData
from onnxplace.utils.files import require_different_files, require_writable, write_file
from onnxplace.utils.quantities import format_bytes, format_time

# Template, style and scripts of the page.
PAGE_FOLDER = Path(__file__).parent / "page"
STYLES = ("page.css",)
SCRIPTS = (
    "tables.js", "charts.js", "details.js", "timeline.js", "memory.js", "layers.js", "graph.js", "perfetto.js",
    "theme.js", "page.js",
)  # fmt: skip
LAYOUT_SCRIPT = "dagre.min.js"
BOKEH_SCRIPTS = ("bokeh.min.js", "bokeh-api.min.js")
# Colours of devices, which repeat; page.css has them.
COLORS = 8
# Memory curves of further devices are folded.
SHOWN_CURVES = 4
# Curves that round to the same of these steps of width and height are drawn once.
PLOT_STEPS = 100
# Significant digits of times in the page.
DIGITS = 7


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


# ------------------------------------------------------------------------------------------------------------- the page


def list_missing_packages() -> list[str]:
    """Return the packages of the extra `[report]` that are not installed; nothing is imported."""
    return [name for name in ("jinja2", "bokeh") if find_spec(name) is None]


def require_report_packages() -> None:
    """Raise UsageError unless the packages of the extra `[report]` are there; nothing is imported."""
    if missing := list_missing_packages():
        are = "is" if len(missing) == 1 else "are"
        message = f"reports need {' and '.join(missing)}, which {are} not installed"
        raise UsageError("U110", message, where="report", hint="pip install 'onnxplace[report]'")


def render_page(pages: Sequence[PageData]) -> str:
    """Return the HTML of a report about one bundle or placement, or about several next to each other.

    Raises:
        UsageError: A package of the extra `[report]` is missing.
    """
    require_report_packages()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(PAGE_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": format_bytes, "time": format_time, "bar": _format_bar, "plots": group_memory}
    own = "\n".join(_read_page_file(name) for name in SCRIPTS)
    scripts = [*_read_libraries(), f'"use strict";\n(() => {{\n{own}}})();\n']
    return environment.get_template("page.html").render(
        pages=pages,
        comparison=compare_pages(pages[0], pages[1]) if len(pages) > 1 else None,
        title=" and ".join(dict.fromkeys(page.title for page in pages)),
        colors=COLORS,
        shown_curves=SHOWN_CURVES,
        version=__version__,
        styles=[_read_page_file(name) for name in STYLES],
        scripts=scripts,
        policy=_build_policy(scripts),
        data=_escape_json([_round_times(asdict(page)) for page in pages]),
    )


def embed_page(pages: Sequence[PageData]) -> str | None:
    """Return a report as an element for notebooks, a frame that cannot reach them; None without its packages."""
    if list_missing_packages():
        return None
    style = "width: 100%; height: 36em; border: 0"
    page = html.escape(render_page(pages))
    return f'<iframe title="onnxplace report" sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'


def group_memory(page: PageData) -> list[list[MemoryCurve]]:
    """Return the curves of memory by their plots: equal devices share one, if no difference would be visible."""
    groups = defaultdict[tuple[object, ...], list[MemoryCurve]](list)
    for curve in page.memory:
        axes = (curve.seconds, curve.seconds[-1] or 1.0), (curve.bytes, curve.peak_bytes or 1)
        line = [round(PLOT_STEPS * value / end) for axis, end in axes for value in axis]
        sizes = format_bytes(curve.limit_bytes), format_bytes(curve.peak_bytes)
        groups[page.devices[curve.device].kind, sizes, *line].append(curve)
    return [*groups.values()]


def _read_page_file(name: str) -> str:
    return (PAGE_FOLDER / name).read_text(encoding="utf-8")


def _read_libraries() -> list[str]:
    """Return the scripts of BokehJS, which are found without importing bokeh, and of dagre."""
    spec = find_spec("bokeh")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "server" / "static" / "js"
    scripts = [(folder / name).read_text(encoding="utf-8").replace("\r\n", "\n") for name in BOKEH_SCRIPTS]
    scripts.append(_read_page_file(LAYOUT_SCRIPT))
    # Inside a script element, such a text would end it.
    return [script.replace("</script", "<\\/script").replace("<!--", "<\\!--") for script in scripts]


def _build_policy(scripts: Sequence[str]) -> str:
    """Return the page's Content Security Policy: only these scripts run, and nothing is loaded."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _escape_json(data: object) -> str:
    """Return JSON that cannot end the script element around it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _round_times(value: Any) -> Any:
    """Return data with floating-point numbers shortened."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _round_times(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (str, int)):
            return value
        return [_round_times(item) for item in value]
    return value


def _format_bar(part: float, whole: float) -> str:
    """Return the length of a bar in percent, for a style."""
    share = part / whole if whole > 0 else 0.0
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"
