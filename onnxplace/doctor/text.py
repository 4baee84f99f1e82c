"""A report as text for people."""

from __future__ import annotations

from collections import Counter

from onnxplace.doctor.privacy import hide_private
from onnxplace.doctor.report import EXIT_CHECK, DoctorReport
from onnxplace.report import format_table

# Characters of a detail in the table; failures are shown whole below it.
MAX_DETAIL = 100


def format_report(report: DoctorReport) -> str:
    """Return the table of checks, then failures and skipped checks in full, then the verdict."""
    results = [item for item in report.checks if (item.check, item.status) != (EXIT_CHECK, "ok")]
    rows = [(item.status, item.check, " ".join(item.devices), f"{item.seconds:.1f} s") for item in results]
    lines = format_table(("result", "check", "on", "time"), rows, left=3).splitlines()
    details = [hide_private(item.detail) for item in results]
    short = ["", *(text if len(text) <= MAX_DETAIL else f"{text[:MAX_DETAIL]}..." for text in details)]
    table = [f"{line}  {text}".rstrip() for line, text in zip(lines, short)]
    rest = [
        f"{item.status} {item.check} {' '.join(item.devices)}: {text}".replace(" :", ":")
        for item, text in zip(results, details)
        if item.status == "failed" or len(text) > MAX_DETAIL
    ]
    counts = Counter(item.status for item in results)
    verdict = ", ".join(f"{counts[status]} {status}" for status in ("ok", "failed", "skipped") if counts[status])
    end = f"{'interrupted: ' if report.interrupted else ''}{verdict}, in {report.seconds:.0f} s"
    return "\n".join([*table, *(["", *rest] if rest else []), "", end])
