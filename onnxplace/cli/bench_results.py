"""Results of `onnxplace bench`: predicted figures next to measured ones, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from onnxplace.bundle import Bundle
from onnxplace.errors import format_name
from onnxplace.evaluation import DeviceUsage, Timings
from onnxplace.report import format_bytes, format_milliseconds, format_table
from onnxplace.traces import Difference, TimelineComparison


def build_json(bundle: Bundle, times: Mapping[str, Timings], usage: DeviceUsage) -> dict[str, Any]:
    """Return the figures as `--json` prints them, without timelines and copies."""
    predicted, seconds = bundle.manifest.predicted, times["bundle"].median_seconds
    return {
        **{name: vars(item) for name, item in times.items()},
        "ratio": seconds / times["model"].median_seconds,
        "ratio_one_device": seconds / times["one_device"].median_seconds,
        "predicted_seconds": predicted.step_seconds,
        "predicted_interval_seconds": predicted.interval_seconds,
        **({"requests_per_second": _compute_rates(bundle, times)} if "in_flight" in times else {}),
        "predicted_one_device_seconds": predicted.single_device_seconds,
        "devices": [asdict(device) for device in usage.devices],
        "links": [asdict(link) for link in usage.links],
        "process": asdict(usage.process),
    }


def format_summary(bundle: Bundle, times: Mapping[str, Timings], usage: DeviceUsage) -> str:
    """Compare measured with predicted figures, on one screen."""
    steps = "\n".join([_format_steps(bundle, times), *_format_rates(bundle, times)])
    tables = [steps, _format_devices(usage)]
    return "\n\n".join([*tables, _format_links(usage)] if usage.links else tables)


def _format_steps(bundle: Bundle, times: Mapping[str, Timings]) -> str:
    """Return a table of steps.

    The baseline is one session with all cores.
    """
    predicted = bundle.manifest.predicted
    base = times["model"].median_seconds
    used = sum(1 for device in bundle.manifest.devices if device.nodes)
    labels = {
        "bundle": f"bundle on {used} devices" if used != 1 else "bundle on 1 device",
        "in_flight": "the same, per result with several in flight",
        "one_device": "one session, one device's cores",
        "model": "one session, all cores",
    }
    predictions = {
        "bundle": format_milliseconds(predicted.step_seconds),
        "one_device": format_milliseconds(predicted.single_device_seconds),
        "in_flight": format_milliseconds(predicted.interval_seconds),
    }
    rows = [
        (
            labels[name],
            format_milliseconds(times[name].median_seconds),
            format_milliseconds(times[name].p90_seconds),
            predictions.get(name, "-"),
            f"{times[name].median_seconds / base:.2f}x",
        )
        for name in labels
        if name in times
    ]
    return format_table(("", "median", "p90", "predicted", "/ all cores"), rows)


def _compute_rates(bundle: Bundle, times: Mapping[str, Timings]) -> dict[str, float]:
    """Return requests per second: measured with several in flight, predicted, and of one session with all cores."""
    seconds = {
        "measured": times["in_flight"].median_seconds,
        "predicted": bundle.manifest.predicted.interval_seconds,
        "all_cores": times["model"].median_seconds,
    }
    return {name: 1 / value if value > 0 else 0.0 for name, value in seconds.items()}


def _format_rates(bundle: Bundle, times: Mapping[str, Timings]) -> list[str]:
    """Return a line with requests per second, if they were measured."""
    if "in_flight" not in times:
        return []
    rates = _compute_rates(bundle, times)
    texts = f"{rates['measured']:.4g}, predicted {rates['predicted']:.4g}"
    return [f"requests/s with several in flight: {texts}; one session with all cores: {rates['all_cores']:.4g}"]


def _format_devices(usage: DeviceUsage) -> str:
    """Return a table of busy times and memory, with the whole process."""
    process = usage.process
    rows = [
        (
            device.id,
            format_milliseconds(device.busy_seconds),
            format_milliseconds(device.predicted_busy_seconds),
            _format_size(device.peak_bytes),
            _format_size(device.predicted_peak_bytes),
        )
        for device in usage.devices
    ]
    for phase, measured, predicted in (
        ("opening", process.opening_bytes, process.predicted_opening_bytes),
        ("running", process.running_bytes, process.predicted_running_bytes),
    ):
        rows.append((f"process, {phase}", "-", "-", _format_size(measured), _format_size(predicted)))
    return format_table(("", "busy", "predicted", "process peak", "predicted"), rows)


def _format_links(usage: DeviceUsage) -> str:
    """Return a table of transfers between devices in one step."""
    rows = [
        (
            f"{link.source} -> {link.destination}",
            str(link.values),
            _format_size(link.bytes),
            _format_size(link.predicted_bytes),
            format_milliseconds(link.seconds),
            format_milliseconds(link.predicted_seconds),
        )
        for link in usage.links
    ]
    return format_table(("", "values", "size", "predicted", "time", "predicted"), rows)


def format_comparison(comparison: TimelineComparison, in_flight: int) -> str:
    """Return the busy shares of devices, and the largest differences between measured and predicted timelines."""
    shares = ", ".join(
        f"{item.device} {item.share:.0%} (predicted {item.predicted_share:.0%})" for item in comparison.devices
    )
    lines = [f"busy with {in_flight} in flight, over {comparison.requests} requests: {shares}"]
    for kind, preposition, item in (("segment", "on", comparison.segment), ("value", "to", comparison.transfer)):
        if item is not None:
            lines.append(
                f"largest difference: {kind} {format_name(item.name)} {preposition} {_format_difference(item)}"
            )
    return "\n".join(lines)


def _format_difference(item: Difference) -> str:
    predicted, measured = format_milliseconds(item.predicted_seconds), format_milliseconds(item.seconds)
    return f"{item.device}: predicted {predicted}, measured {measured}"


def _format_size(size: int | None) -> str:
    """Format an amount of memory; a dash if it is unknown."""
    return "-" if size is None else format_bytes(size)
