"""What differs between two bundles, or two saved plans, of one model."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from onnxplace.bundle.bundle import Bundle
from onnxplace.driver.plan import Plan
from onnxplace.errors import UsageError, format_name
from onnxplace.reports.differences import compare_figures, compare_pages
from onnxplace.reports.page_data import describe_bundle
from onnxplace.reports.page_records import Comparison, Quantity
from onnxplace.utils.files import read_json
from onnxplace.utils.quantities import format_bytes, format_milliseconds

_WHERE = "--diff"


def compare_plans(first: Path, second: Path) -> Comparison:
    """Return which of two plans to take, and what they decide differently.

    Args:
        first: A bundle, or the output of `onnxplace plan --json` in a file.
        second: Another one of the same kind.

    Raises:
        BundleError: a bundle cannot be read.
        UsageError: a file is not a plan, the kinds differ, or they are of different models.
    """
    if first.is_dir() != second.is_dir():
        message = "expected two bundles, or two files of `onnxplace plan --json`"
        raise UsageError("U042", message, where=_WHERE, hint="a plan and a bundle have no figures in common")
    if first.is_dir():
        bundles = [Bundle.open(path) for path in (first, second)]
        _require_same_model(*(item.manifest.model for item in bundles))
        return compare_pages(*map(describe_bundle, bundles))
    plans = [_read_plan(path) for path in (first, second)]
    _require_same_model(*(item.model for item in plans))
    best = [item.describe() if (item := plan.find_best()[0]) else "nothing fits" for plan in plans]
    sentence = f"Least latency in A: {best[0]}; in B: {best[1]}."
    return Comparison(sentence, compare_figures(*map(_list_figures, plans)))


def _require_same_model(first: str, second: str) -> None:
    if first != second:
        message = f"A is of the model {format_name(first)!r}, B of {format_name(second)!r}"
        raise UsageError("U005", message, where=_WHERE, hint="compare two of one model")


def _read_plan(path: Path) -> Plan:
    """Return a plan from a file of `onnxplace plan --json`."""
    data = read_json(path, "U005", "a plan")
    try:
        return TypeAdapter(Plan).validate_python(data)
    except ValidationError as problem:
        error = problem.errors()[0]
        message = f"not a plan: {'.'.join(map(str, error['loc']))}: {error['msg']}"
        hint = "write one with `onnxplace plan MODEL --json > plan.json`, for one machine"
        raise UsageError("U005", message, where=format_name(str(path)), hint=hint) from None


def _list_figures(plan: Plan) -> list[Quantity]:
    """Return the latency, the time between results and the memory of each strategy that fits."""
    return [
        Quantity(f"{item.name}: {what}", text, value, lower_is_better=True)
        for item in plan.strategies
        if item.step_seconds is not None
        for what, value, text in (
            ("latency", item.step_seconds, format_milliseconds(item.step_seconds)),
            ("a result every", item.interval_seconds, format_milliseconds(item.interval_seconds or 0.0)),
            ("memory", item.peak_bytes, format_bytes(item.peak_bytes or 0)),
        )
    ]
