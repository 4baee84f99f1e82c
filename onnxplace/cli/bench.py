"""The command `onnxplace bench`."""

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

from onnxplace.cli.completers import BUNDLE_PATH
from onnxplace.cli.options import (
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
from onnxplace.errors import UsageError

if TYPE_CHECKING:
    from onnxplace.api import InferenceSession
    from onnxplace.bundle import Bundle
    from onnxplace.errors import Diagnostic
    from onnxplace.evaluation import StepInputs, Timings
    from onnxplace.runtime import CopyStatus, Runtime
    from onnxplace.traces import RequestTimeline

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
    from onnxplace.cli.bench_results import build_json, format_comparison, format_summary
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
            "U013",
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
        raise UsageError("U113", note.message, where="--record", hint=note.hint)
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
