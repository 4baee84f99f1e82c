"""What differs between two bundles, or two saved plans, of one model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from onnxplace.bundle import Bundle
from onnxplace.driver.planning import Plan, PlannedStrategy
from onnxplace.errors import UsageError, format_name
from onnxplace.reports import Comparison, Quantity, compare_pages, compare_quantities, describe_bundle
from onnxplace.utils import format_bytes, format_milliseconds, read_json

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
    best = [plan.find_best()[0] for plan in plans]
    names = [f"{name}: {item.describe() if item else 'nothing fits'}" for name, item in zip("AB", best)]
    sentence = f"Least latency in {names[0]}; in {names[1]}."
    listed = [{item.name: item for item in plan.strategies} for plan in plans]
    rows = [
        compare_quantities(label, *(own.get(label, Quantity("", "–")) for own in figures))
        for name in dict.fromkeys((*listed[0], *listed[1]))
        for figures in [[dict(_list_figures(own[name])) if name in own else {} for own in listed]]
        for label in dict.fromkeys((*figures[0], *figures[1]))
    ]
    return Comparison(sentence, tuple(rows))


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


def _list_figures(item: PlannedStrategy) -> Iterator[tuple[str, Quantity]]:
    """Yield the latency, time between results and memory of a strategy, by label; nothing if it does not fit."""
    if item.step_seconds is not None:
        figures = (
            ("latency", item.step_seconds, format_milliseconds(item.step_seconds)),
            ("a result every", item.interval_seconds, format_milliseconds(item.interval_seconds or 0.0)),
            ("memory", item.peak_bytes, format_bytes(item.peak_bytes or 0)),
        )
        for what, value, text in figures:
            label = f"{item.name}: {what}"
            yield label, Quantity(label, text, value, lower_is_better=True)
