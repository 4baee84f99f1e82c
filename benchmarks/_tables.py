"""Tables on stdout, progress on stderr: what the benchmarks print with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
"""Figures by name, in seconds and bytes; absent or None where there is none, a text where that says why."""


def milliseconds(seconds: float) -> str:
    """Write a time in ms: to a tenth, below 10 ms with three digits."""
    return f"{seconds * 1e3:.1f}" if seconds >= 1e-2 else f"{seconds * 1e3:.3g}"


def mebibytes(size: float) -> str:
    """Write a size in MiB."""
    return f"{size / 2**20:.0f}"


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
    "step_seconds": ("step ms", milliseconds),
    "bound_seconds": ("bound ms", milliseconds),
    "to_bound": ("to bound", "{:.2f}x".format),
    "gap": ("gap", "{:.2%}".format),
    "auto_seconds": ("auto ms", milliseconds),
    "to_auto": ("to auto", "{:.3f}x".format),
    "one_device_seconds": ("one device ms", milliseconds),
    "to_one_device": ("to one device", "{:.2f}x".format),
    "expert_seconds": ("expert ms", milliseconds),
    "baechi_seconds": ("Baechi ms", milliseconds),
    "to_baechi": ("to Baechi", "{:.2f}x".format),
    "best": ("our best with", str),
    "peak_bytes": ("peak MiB", mebibytes),
    "place_seconds": ("ms to place", milliseconds),
    "exponent": ("exponent", "{:.2f}".format),
    "last_exponent": ("of the last two", "{:.2f}".format),
}


def table(title: str, keys: Sequence[str], rows: Iterable[Row]) -> list[Row]:
    """Print a Markdown table, each row as soon as it is there; returns the rows. Other keys than COLUMNS hold times."""
    headings = [COLUMNS[key][0] if key in COLUMNS else f"{key} ms" for key in keys]
    print(f"\n## {title}\n\n| {' | '.join(headings)} |\n|{'---|' * len(keys)}", flush=True)
    kept = []
    for row in rows:
        print(f"| {' | '.join(_shown(row.get(key), key) for key in keys)} |", flush=True)
        kept.append(row)
    return kept


def _shown(value: Any, key: str) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return COLUMNS[key][1](value) if key in COLUMNS else milliseconds(value)


def progress(text: str) -> None:
    """Say on stderr what is being done."""
    print(text, file=sys.stderr, flush=True)


def over(a: Any, b: Any) -> float | None:
    """Return a / b, None if there is no such ratio."""
    return a / b if isinstance(a, float) and isinstance(b, float) and b else None
