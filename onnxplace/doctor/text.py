"""A report as text for people."""

from __future__ import annotations

import textwrap
from collections import Counter

from onnxplace.doctor.privacy import hide_private
from onnxplace.doctor.report import EXIT_CHECK, DoctorReport
from onnxplace.report import format_table

# Characters of a line of a detail in the table.
MAX_DETAIL = 100


def format_report(report: DoctorReport) -> str:
    """Return the table of checks with their details, then failures again, then the verdict."""
    results = [item for item in report.checks if (item.check, item.status) != (EXIT_CHECK, "ok")]
    rows = [(item.status, item.check, " ".join(item.devices), f"{item.seconds:.1f} s") for item in results]
    lines = format_table(("result", "check", "on", "time"), rows, left=3).splitlines()
    details = [hide_private(item.detail) for item in results]
    indent = "\n" + " " * (len(lines[0]) + 2)
    wrapped = ["", *(indent.join(textwrap.wrap(text, MAX_DETAIL, break_on_hyphens=False)) for text in details)]
    table = [f"{line}  {text}".rstrip() for line, text in zip(lines, wrapped)]
    rest = [
        f"{item.status} {item.check} {' '.join(item.devices)}: {text}".replace(" :", ":")
        for item, text in zip(results, details)
        if item.status == "failed"
    ]
    counts = Counter(item.status for item in results)
    verdict = ", ".join(f"{counts[status]} {status}" for status in ("ok", "failed", "skipped") if counts[status])
    end = f"{'interrupted: ' if report.interrupted else ''}{verdict}, in {report.seconds:.0f} s"
    return "\n".join([*table, *(["", *rest] if rest else []), "", end])
