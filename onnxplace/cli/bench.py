"""The command `onnxplace bench`: predicted figures next to measured ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxplace.cli.completion import PATH
from onnxplace.cli.help import GroupedCommand
from onnxplace.cli.shared_options import (
    FiniteNumber,
    against_option,
    bundle_options,
    note_left_out_copies,
    parse_shape,
    print_json,
    print_notes,
    print_text,
    show_progress,
)
from onnxplace.cli.terminal import print_aside
from onnxplace.errors import format_count, format_name
from onnxplace.reports.text import format_table
from onnxplace.utils.quantities import format_bytes, format_milliseconds

if TYPE_CHECKING:
    from onnxplace.bundle.bundle import Bundle
    from onnxplace.measure.device_usage import LinkUse, StreamUse
    from onnxplace.runtime.timelines import TimelineComparison
    from onnxplace.session.benchmark import Benchmark, Openings


@click.command(cls=GroupedCommand, short_help="Compare predictions with measurements: steps, memory.")
@bundle_options
@against_option
@click.option(
    "--repeat", default=20, show_default=True, type=click.IntRange(1), help="Rounds, after two for warming up."
)
@click.option(
    "--in-flight", default=1, show_default=True, type=int, metavar="N",
    help="Also time a result with N requests in flight.",
)  # fmt: skip
@click.option(
    "--trace", type=PATH, metavar="F.json", help="Write a timeline of requests and the predicted one, for Perfetto."
)
@click.option(
    "--no-memory", is_flag=True, help="Do not measure memory and opening, which needs a process for each device."
)
@click.option("--update", is_flag=True, help="Write the times of segments into BUNDLE: predictions then follow them.")
@click.option(
    "--min-speedup",
    type=FiniteNumber(min=0),
    metavar="S",
    help="Exit 1 if the bundle is less than S times as fast as one session with all cores, at any size.",
)
def bench(
    bundle: Path, *, shape: str, in_flight: int, no_memory: bool, min_speedup: float | None, json_: bool, **options: Any
) -> None:
    """Compare predictions for BUNDLE with measurements: steps, devices, links, memory.

    The bundle, one session with all cores, and one session with the cores of a single device take turns, at each size
    that BUNDLE was compiled for. All carry states on, plain sessions as arrays. Then a few traced steps show busy times
    and transfers. Separate processes show the peak memory of each device, and what opening takes, with the runtime
    onnxruntime only.
    """
    from onnxplace.session.benchmark import bench as measure
    from onnxplace.session.inference_session import load

    opened = load(bundle)
    with show_progress(json_, "timing steps", similar=True) as observer:
        result = measure(
            opened, shape=parse_shape(shape), in_flight=in_flight, memory=not no_memory, observer=observer, **options
        )
    with suppress(BrokenPipeError):  # the exit code still tells the result
        if json_:
            print_json(_build_json(result))
        else:
            print_text(_format_summary(opened.plans[result.plan], result, in_flight))
    print_notes(result.diagnostics)
    note_left_out_copies(result.copies)
    ratio = min((item.speedup.ratio for item in result.sizes), default=result.speedup.ratio)
    if min_speedup is not None and not ratio >= min_speedup:
        print_aside(f"the bundle is {ratio:.3f} times as fast as one session, expected at least {min_speedup}")
        raise SystemExit(1)


# -------------------------------------------------------------------------------------------------------------- results


def _build_json(result: Benchmark) -> dict[str, Any]:
    """Return the figures without those that were not asked for; notes are on stderr."""
    optional = ("in_flight", "requests_per_second", "streams", "copies", "opening", "diagnostics", "sizes")
    figures = {**asdict(result), "diagnostics": None, "sizes": list(map(_build_json, result.sizes))}
    return {key: value for key, value in figures.items() if value or key not in optional}


def _format_summary(bundle: Bundle, result: Benchmark, in_flight: int) -> str:
    """Compare measured with predicted figures, on one screen."""
    steps = _format_steps(bundle, result)
    if (rates := result.requests_per_second) is not None:
        predicted = "" if rates.predicted is None else f", predicted {rates.predicted:.4g}"
        steps += f"\nrequests/s with several in flight: {rates.measured:.4g}{predicted}; one session with all cores: "
        steps += f"{rates.all_cores:.4g}"
    tables = [_format_links(result.links)] if result.links else []
    tables += [_format_streams(result.streams)] if result.streams else []
    tables += [_format_openings(result.opening)] if result.opening else []
    tables += [_format_comparison(result.timeline, in_flight)] if result.timeline else []
    sizes = [_format_sizes(result.sizes)] if result.sizes else []
    return "\n\n".join([*sizes, steps, _format_devices(result), *tables, f"verdict: {result.verdict}"])


def _format_sizes(results: Sequence[Benchmark]) -> str:
    """Return a table with a step of the bundle at each size, and what the other tables are about."""
    rows = []
    for item in results:
        sizes = ",".join(f"{name}={size}" for name, size in item.dimensions.items())
        own, *others = (times.median_seconds for times in (item.bundle, item.one_device, item.model))
        columns = _format(format_milliseconds, own, item.predicted_seconds, *others)
        rows.append((sizes, str(item.plan), *columns, *(f"{other / own:.2f}x" for other in others)))
    header = ("size", "plan", "bundle", "predicted", "one device", "all cores", "vs one device", "vs all cores")
    return f"{format_table(header, rows)}\n\nat {rows[0][0]}, by plan {rows[0][1]}:"


def _format_steps(bundle: Bundle, result: Benchmark) -> str:
    """Return a table of steps, with the speed-ups over one device's session and over one with all cores."""
    used = sum(1 for device in bundle.manifest.devices if device.nodes)
    rows = [
        (f"bundle on {format_count(used, 'device')}", result.bundle, result.predicted_seconds),
        ("the same, per result with several in flight", result.in_flight, result.predicted_interval_seconds),
        ("one session, one device's cores", result.one_device, result.predicted_one_device_seconds),
        ("one session, all cores", result.model, None),
    ]
    cells = [
        (
            label,
            *_format(format_milliseconds, times.median_seconds, times.p90_seconds, predicted),
            *(f"{base.median_seconds / times.median_seconds:.2f}x" for base in (result.one_device, result.model)),
        )
        for label, times, predicted in rows
        if times is not None
    ]
    return format_table(("", "median", "p90", "predicted", "vs one device", "vs all cores"), cells)


def _format_devices(result: Benchmark) -> str:
    """Return a table of busy times and memory, with the whole process."""
    process = result.process
    rows = [
        (
            device.id,
            *_format(format_milliseconds, device.busy_seconds, device.predicted_busy_seconds),
            *_format(format_bytes, device.peak_bytes, device.predicted_peak_bytes),
        )
        for device in result.devices
    ]
    phases = [("opening", process.opening_bytes, "-"), ("running", process.running_bytes, "-")]
    if predicted := process.predicted_all_plans_bytes:
        phases.append(("all plans", process.all_plans_bytes, format_bytes(predicted)))
    rows += [(f"process, {phase}", "-", "-", *_format(format_bytes, size), text) for phase, size, text in phases]
    return format_table(("", "busy", "predicted", "process peak", "predicted"), rows)


def _format_openings(openings: Openings) -> str:
    """Return a table of what opening takes."""
    rows = [
        (label, format_milliseconds(item.seconds), format_bytes(item.peak_bytes), format_bytes(item.resident_bytes))
        for label, item in (("bundle", openings.bundle), ("one session, all cores", openings.model))
    ]
    return format_table(("", "to open", "memory, peak", "once open"), rows)


def _format_links(links: Sequence[LinkUse]) -> str:
    """Return a table of transfers between devices in one step."""
    rows = [
        (
            f"{link.source} -> {link.destination}",
            str(link.values),
            *_format(format_bytes, link.bytes, link.predicted_bytes),
            *_format(format_milliseconds, link.seconds, link.predicted_seconds),
        )
        for link in links
    ]
    return format_table(("", "values", "size", "predicted", "time", "predicted"), rows)


def _format_streams(streams: Sequence[StreamUse]) -> str:
    """Return a table of the weights that stream in one step."""
    rows = [
        (
            f"weights -> {stream.device}",
            format_bytes(stream.bytes),
            *_format(_format_rate, stream.bytes_per_second, stream.predicted_bytes_per_second),
            *_format(format_milliseconds, stream.wait_seconds, stream.predicted_wait_seconds),
        )
        for stream in streams
    ]
    return format_table(("", "size", "rate", "predicted", "waited for", "predicted"), rows)


def _format_comparison(comparison: TimelineComparison, in_flight: int) -> str:
    """Return the busy shares of devices, and the largest differences between measured and predicted timelines."""
    shares = ", ".join(
        f"{item.device} {item.share:.0%} (predicted {item.predicted_share:.0%})" for item in comparison.devices
    )
    lines = [f"busy with {in_flight} in flight, over {comparison.requests} requests: {shares}"]
    for kind, preposition, item in (("segment", "on", comparison.segment), ("value", "to", comparison.transfer)):
        if item is not None:
            predicted, measured = format_milliseconds(item.predicted_seconds), format_milliseconds(item.seconds)
            where = f"{preposition} {item.device}: predicted {predicted}, measured {measured}"
            lines.append(f"largest difference: {kind} {format_name(item.name)} {where}")
    return "\n".join(lines)


def _format_rate(bytes_per_second: float) -> str:
    return f"{format_bytes(int(bytes_per_second))}/s"


def _format(format_figure: Callable[[Any], str], *figures: float | None) -> list[str]:
    """Return figures as texts; a dash for one that is unknown."""
    return ["-" if figure is None else format_figure(figure) for figure in figures]
