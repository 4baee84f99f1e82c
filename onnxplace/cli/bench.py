"""The command `onnxplace bench`: predicted figures next to measured ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import click

from onnxplace.cli.completion import BUNDLE_PATH
from onnxplace.cli.shared_options import (
    against_option,
    as_json,
    inputs_option,
    make_no_outputs_error,
    note_core_shortage,
    note_left_out_copies,
    parse_shape,
    print_json,
    print_notes,
    print_text,
    seed_option,
    shape_option,
    show_progress,
    with_operator_libraries,
    with_runtime,
)
from onnxplace.errors import UsageError, format_name
from onnxplace.report import format_bytes, format_milliseconds, format_table

if TYPE_CHECKING:
    from onnxplace.api import InferenceSession
    from onnxplace.bundle import Bundle
    from onnxplace.errors import Diagnostic
    from onnxplace.evaluation import DeviceUsage, StepInputs, Timings
    from onnxplace.runtime import CopyStatus, Runtime
    from onnxplace.traces import Difference, RequestTimeline, TimelineComparison


# Rounds that fill caches and are not counted.
WARM_UPS = 2
# Turns with requests in flight, of a quarter of a second or more.
MAX_STREAMED_TURNS = 8
# Rounds with traces; more of them hardly change the medians of parts of a step.
MAX_TRACED = 20


@click.command(short_help="Compare predictions with measurements: steps, memory.")
@click.argument("bundle", type=BUNDLE_PATH)
@against_option
@inputs_option
@shape_option
@click.option(
    "--repeat", default=20, show_default=True, type=click.IntRange(1), help="Rounds, after two for warming up."
)
@click.option(
    "--in-flight", default=1, show_default=True, type=int, metavar="N",
    help="Also time a result with N requests in flight.",
)  # fmt: skip
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="F.json",
    help="Write a timeline of requests and the predicted one, for Perfetto.",
)  # fmt: skip
@with_runtime
@click.option("--no-memory", is_flag=True, help="Do not measure memory, which needs a process for each device.")
@click.option("--record", is_flag=True, help="Write the times of segments into BUNDLE: predictions then follow them.")
@click.option("--max-ratio", type=float, metavar="R", help="Exit 1 if the bundle takes more than R times the model.")
@seed_option
@with_operator_libraries
@as_json
def bench(
    bundle: Path,
    *,
    against: Path | None,
    inputs: Path | None,
    shape: str,
    repeat: int,
    in_flight: int,
    trace: Path | None,
    no_memory: bool,
    record: bool,
    max_ratio: float | None,
    seed: int,
    json_: bool,
    session_options: Mapping[str, Any],
) -> None:
    """Compare predictions for BUNDLE with measurements: steps, devices, links, memory.

    The bundle, one session with all cores, and one session with the cores of a single device take turns. All carry
    states on, plain sessions as arrays. Then a few traced steps show busy times and transfers. Separate processes show
    the peak memory of each device, with the runtime onnxruntime only.
    """
    from onnxplace.api import load
    from onnxplace.evaluation import choose_step_inputs, measure_usage
    from onnxplace.serving import check_in_flight
    from onnxplace.traces import compare_timelines, predict_stream, predict_timelines
    from onnxplace.utils import require_writable

    check_in_flight(in_flight, "--in-flight")
    if trace:
        require_writable(trace, bundle, *(path for path in (inputs, against) if path))
    opened = load(bundle)
    runtime = _create_runtime(**session_options)
    note_core_shortage(opened, session_options["runtime"])
    if in_flight > 1 and opened.manifest.states:
        raise UsageError(
            "U042",
            "requests with states follow one another, so only one is in flight",
            where="--in-flight",
            hint="omit it",
        )
    steps = choose_step_inputs(opened, inputs, parse_shape(shape), seed)
    notes = _report_other_sizes(opened, steps.first)
    if record:
        _require_recordable(bundle, notes)
    with show_progress(json_, "timing steps", similar=True) as observer:
        if record:
            opened, notes = _record_trial(opened, steps.first, runtime)
        times, copies = _time_steps(opened, against, steps, repeat, in_flight, session_options)
        with_memory = not no_memory and session_options["runtime"] == "onnxruntime"
        rounds = min(repeat, MAX_TRACED)
        usage = measure_usage(opened, steps.first, rounds, with_memory, observer, in_flight, runtime)
    predicted = predict_stream(opened.manifest, usage.timelines, in_flight)
    comparison = compare_timelines(opened.manifest, usage.timelines, predicted)
    if trace:
        _write_trace(trace, opened, usage.timelines, predict_timelines(opened.manifest, usage.timelines))
    ratio = times["bundle"].median_seconds / times["model"].median_seconds
    note_left_out_copies(copies)
    reported = _predict_copies(opened, len(copies)) if copies else opened
    print_notes([*notes, *usage.notes])
    with suppress(BrokenPipeError):  # the exit code still tells the result
        if json_:
            entries = {"copies": [asdict(copy) for copy in copies]} if copies else {}
            print_json({**build_json(reported, times, usage), "timeline": asdict(comparison), **entries})
        else:
            print_text(format_summary(reported, times, usage))
            print_text("\n" + format_comparison(comparison, in_flight))
    _require_ratio(ratio, max_ratio)


def _require_recordable(path: Path, other_sizes: Sequence[Diagnostic]) -> None:
    """Raise UsageError before any work if times are of other sizes than the predictions, or cannot be written."""
    from onnxplace.bundle import MANIFEST_FILE
    from onnxplace.utils import require_writable

    for note in other_sizes:
        raise UsageError("U042", note.message, where="--record", hint=note.hint)
    require_writable(path / MANIFEST_FILE)


def _record_trial(bundle: Bundle, feeds: Mapping[str, Any], runtime: Runtime) -> tuple[Bundle, list[Diagnostic]]:
    """Record a trial; return the bundle with its times, and a note if other work disturbed it."""
    from onnxplace.evaluation import find_trial_doubt, record_trial

    recorded = record_trial(bundle, feeds, runtime)
    trial = recorded.manifest.trial
    doubt = find_trial_doubt(trial, recorded.manifest.model) if trial else None
    return recorded, [doubt] if doubt else []


def _predict_copies(bundle: Bundle, count: int) -> Bundle:
    """Return a bundle whose predicted rate is that of several copies, which do not delay each other."""
    predicted = bundle.manifest.predicted
    updates = {"interval_seconds": predicted.interval_seconds / count}
    manifest = bundle.manifest.model_copy(update={"predicted": predicted.model_copy(update=updates)})
    return replace(bundle, manifest=manifest)


def _require_ratio(ratio: float, max_ratio: float | None) -> None:
    """End the command with exit code 1 if the bundle takes too long."""
    if max_ratio is not None and ratio > max_ratio:
        with suppress(OSError):
            print_text(
                f"the bundle takes {ratio:.3f} times as long as the model, expected at most {max_ratio}", err=True
            )
        raise SystemExit(1)


def _create_runtime(runtime: str, **options: Any) -> Runtime:
    """Return the runtime that is timed; raises UsageError if it computes nothing, or has no such options."""
    from onnxplace.pipeline import find_plugin
    from onnxplace.runtime import create_runtime

    if runtime == "simulated":
        raise make_no_outputs_error(runtime, "bench")
    return create_runtime(cast("type[Runtime]", find_plugin("runtimes", runtime)), runtime, **options)


def _write_trace(
    path: Path, bundle: Bundle, measured: Sequence[RequestTimeline], predicted: Sequence[RequestTimeline]
) -> None:
    from onnxplace.traces import chrome_trace, read_segment_nodes
    from onnxplace.utils import write_file

    content = json.dumps(chrome_trace(measured, predicted, bundle.manifest, read_segment_nodes(bundle)))
    write_file(path, lambda stream: stream.write(content.encode()))


def _time_steps(
    bundle: Bundle, against: Path | None, steps: StepInputs, repeat: int, in_flight: int, options: Mapping[str, Any]
) -> tuple[dict[str, Timings], tuple[CopyStatus, ...]]:
    """Time the bundle, opened with these options, and the plain sessions in turn; return its copies, too."""
    from onnxplace.api import InferenceSession
    from onnxplace.evaluation import StateCarrier, open_reference, time_in_turns
    from onnxplace.machine import available_cores
    from onnxplace.runtime import DEFAULT_MAX_IN_FLIGHT

    largest = max(
        (device.cores for device in bundle.target.devices if device.kind == "cpu"), default=len(available_cores())
    )
    whole, one = (
        StateCarrier(open_reference(bundle, against, used), bundle)
        for used in (available_cores(), available_cores()[:largest])
    )
    if bundle.manifest.states:
        whole(steps.first)
        steps.learn(whole.states)
    feeds = [steps.feeds(number) for number in range(repeat + WARM_UPS)]
    with InferenceSession(bundle, max_in_flight=max(in_flight, DEFAULT_MAX_IN_FLIGHT), **options) as session:
        calls: dict[str, Callable[[Any], object]] = {
            "bundle": lambda arrays: session.run(None, arrays),
            "model": whole,
            "one_device": one,
        }
        with steps.explained(1):
            times = time_in_turns({name: _iterate_feeds(call, feeds) for name, call in calls.items()}, repeat, WARM_UPS)
            if in_flight > 1:
                times["in_flight"] = _time_results(session, feeds, in_flight, repeat)
        copies = session.list_copies()
    return times, copies


def _time_results(session: InferenceSession, feeds: Sequence[Any], in_flight: int, repeat: int) -> Timings:
    """Time the results of requests that are kept in flight, after a turn for warming up."""
    from onnxplace.evaluation import RequestStream, Timings

    repeated = itertools.cycle(feeds)
    stream = RequestStream(lambda: session.submit(next(repeated)), in_flight)
    turns = [stream.take_turn() for _ in range(1 + min(max(repeat // in_flight, 3), MAX_STREAMED_TURNS))][1:]
    intervals = sorted(turn.interval_seconds for turn in turns)
    p90 = intervals[round(0.9 * (len(intervals) - 1))]
    return Timings(median(intervals), p90, sum(turn.results for turn in turns))


def _iterate_feeds(call: Callable[[Any], object], feeds: Sequence[Any]) -> Callable[[], object]:
    """Return a function that passes the next of `feeds` to `call`."""
    remaining = iter(feeds)
    return lambda: call(next(remaining))


def _report_other_sizes(bundle: Bundle, feeds: Mapping[str, Any]) -> list[Diagnostic]:
    """Return a note if inputs have other sizes than the compiled ones."""
    from onnxplace.errors import Diagnostic
    from onnxplace.feeds import dimension_keys

    compiled = bundle.manifest.dimensions
    changed = {
        key: size
        for item in bundle.inputs
        if item.shape is not None and item.name in feeds and item.dtype.startswith("tensor(")
        for (key, fixed), size in zip(dimension_keys(item), feeds[item.name].shape)
        if fixed is None and compiled.get(key, size) != size
    }
    if not changed:
        return []
    actual, predicted = (", ".join(f"{key}={sizes[key]}" for key in changed) for sizes in (changed, compiled))
    message = f"predictions are for {predicted}, and the inputs have {actual}"
    hint = "compile again with --shape to compare them"
    return [Diagnostic("F008", message, where=bundle.manifest.model, hint=hint)]


# -------------------------------------------------------------------------------------------------------------- results


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
    for phase, measured in (("opening", process.opening_bytes), ("running", process.running_bytes)):
        rows.append((f"process, {phase}", "-", "-", _format_size(measured), "-"))
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
