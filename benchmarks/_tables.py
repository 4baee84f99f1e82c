"""Print tables on stdout and progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
"""Figures by name, in seconds and bytes; a missing one is absent, None, or a text with the reason."""


def format_milliseconds(seconds: float) -> str:
    """Format a time in ms: to a tenth, below 10 ms with three digits."""
    return f"{seconds * 1e3:.1f}" if seconds >= 1e-2 else f"{seconds * 1e3:.3g}"


def format_mebibytes(size: float) -> str:
    """Format a size in MiB."""
    return f"{size / 2**20:.0f}"


def format_megabytes(size: float) -> str:
    """Format a size, or a rate, in MB."""
    return f"{size / 1e6:.0f}"


def format_gibibytes(size: float) -> str:
    """Format a size in GiB."""
    return f"{size / 2**30:.2f}"


COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "graph": ("graph", str),
    "model": ("model", str),
    "family": ("family", str),
    "nodes": ("nodes", str),
    "placer": ("placer", str),
    "groups": ("groups", str),
    "devices": ("devices", str),
    "links": ("links", str),
    "memory": ("memory", str),
    "step_seconds": ("step ms", format_milliseconds),
    "bound_seconds": ("bound ms", format_milliseconds),
    "to_bound": ("to bound", "{:.2f}x".format),
    "gap": ("gap", "{:.2%}".format),
    "auto_seconds": ("auto ms", format_milliseconds),
    "speedup_auto": ("speed-up over auto", "{:.3f}x".format),
    "one_device_seconds": ("one device ms", format_milliseconds),
    "speedup_one_device": ("speed-up over one device", "{:.2f}x".format),
    "expert_seconds": ("expert ms", format_milliseconds),
    "baechi_seconds": ("Baechi ms", format_milliseconds),
    "speedup_baechi": ("speed-up over Baechi", "{:.2f}x".format),
    "taken": ("taken by the NPU", "{:.0%}".format),
    "speedup_best": ("speed-up over the best of the others", "{:.3f}x".format),
    "best": ("our best with", str),
    "peak_bytes": ("peak MiB", format_mebibytes),
    "session": ("session", str),
    "tokens": ("tokens", str),
    "allowed_bytes": ("allowed GiB", format_gibibytes),
    "streamed_bytes": ("streams GiB", format_gibibytes),
    "host_weight_bytes": ("on the CPU GiB", format_gibibytes),
    "step_bytes": ("reads MB a step", format_megabytes),
    "bytes_per_second": ("MB/s of the step", format_megabytes),
    "read_rate": ("MB/s of reading alone", format_megabytes),
    "to_reading": ("of that", "{:.0%}".format),
    "speedup_mapped": ("speed-up over mapping", "{:.2f}x".format),
    "anonymous_bytes": ("process, anonymous MiB", format_mebibytes),
    "group_bytes": ("peak of the group MiB", format_mebibytes),
    "limit_bytes": ("limit MiB", format_mebibytes),
    "computing_seconds": ("computing alone ms", format_milliseconds),
    "streaming_seconds": ("streaming alone ms", format_milliseconds),
    "resident_anonymous_bytes": ("all resident MiB", format_mebibytes),
    "predicted_seconds": ("predicted ms", format_milliseconds),
    "to_predicted": ("predicted / measured", "{:.2f}".format),
    "equal": ("outputs", str),
    "overhead": ("overhead over the larger of computing and streaming", "{:.2f}".format),
    "overhead_alone": ("overhead over the better bundle for one size", "{:.3f}".format),
    "sizes": ("sizes", str),
    "kind": ("kind", str),
    "plan": ("plan", str),
    "within": ("within its limit", str),
    "files": ("files", str),
    "opening_cpu_speedup": ("speed-up", "{:.3f}x".format),
    "steps_speedup": ("speed-up", "{:.3f}x".format),
    "place_seconds": ("ms to place", format_milliseconds),
    "exponent": ("exponent", "{:.2f}".format),
    "last_exponent": ("of the last two", "{:.2f}".format),
}


def print_table(title: str, keys: Sequence[str], rows: Iterable[Row]) -> list[Row]:
    """Print a Markdown table row by row; return the rows.

    Keys that are not in COLUMNS hold times.
    """
    headings = [COLUMNS[key][0] if key in COLUMNS else f"{key} ms" for key in keys]
    print(f"\n## {title}\n\n| {' | '.join(headings)} |\n|{'---|' * len(keys)}", flush=True)
    printed_rows = []
    for row in rows:
        print(f"| {' | '.join(_format_cell(row.get(key), key) for key in keys)} |", flush=True)
        printed_rows.append(row)
    return printed_rows


def _format_cell(value: Any, key: str) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return COLUMNS[key][1](value) if key in COLUMNS else format_milliseconds(value)


def report_progress(text: str) -> None:
    """Print the current step on stderr."""
    print(text, file=sys.stderr, flush=True)


def divide(a: Any, b: Any) -> float | None:
    """Return a / b; None if one is not a number, or b is 0."""
    return a / b if isinstance(a, float) and isinstance(b, float) and b else None
