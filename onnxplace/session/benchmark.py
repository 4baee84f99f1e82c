"""Time a bundle next to its predictions, for `onnxplace.bench` and the command of this name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar, cast

from onnxplace.bundle.bundle import MANIFEST_FILE, Bundle
from onnxplace.bundle.manifest import Manifest
from onnxplace.errors import Diagnostic, OnnxplaceError, UsageError, format_count
from onnxplace.feeds.dimensions import dimension_keys, drop_derived_sizes
from onnxplace.feeds.feeds import Array
from onnxplace.machine.hardware import available_cores
from onnxplace.machine.ort_sessions import use_custom_operators
from onnxplace.machine.repeated_runs import DOUBTFUL_WAITING_SHARE, Stopwatch, read_run_delays
from onnxplace.measure.compare import Speedup, Timings, compute_speedup, open_reference, time_in_turns
from onnxplace.measure.device_usage import DeviceUsage, DeviceUse, LinkUse, ProcessUse, StreamUse, measure_usage
from onnxplace.measure.host_nodes import find_core_shortage
from onnxplace.measure.memory_use import Opening, measure_model_opening
from onnxplace.measure.rate_trial import RequestStream
from onnxplace.measure.step_inputs import StateCarrier, StepInputs, choose_step_inputs, keeps_state_shapes
from onnxplace.measure.trial import find_trial_doubt, record_trial, report_doubt
from onnxplace.pipeline.pipeline import Observer
from onnxplace.pipeline.registry import create_runtime
from onnxplace.runtime.chrome_format import chrome_trace, read_segment_nodes
from onnxplace.runtime.interface import DEFAULT_MAX_IN_FLIGHT, CopyStatus, Runtime, make_no_outputs_error
from onnxplace.runtime.timelines import TimelineComparison, compare_timelines, predict_stream, predict_timelines
from onnxplace.session.batched_session import check_in_flight
from onnxplace.session.inference_session import InferenceSession, load
from onnxplace.utils.files import require_writable, write_file
from onnxplace.utils.keywords import checks_arguments
from onnxplace.utils.quantities import format_milliseconds, format_object

# Rounds that fill caches and are not counted.
WARM_UPS = 2
# Turns with requests in flight, of a quarter of a second or more.
MAX_STREAMED_TURNS = 8
# Rounds with traces; more of them hardly change the medians of parts of a step.
MAX_TRACED = 20
# Fewer rounds say little about a difference.
MIN_JUDGED_ROUNDS = 5
# A prediction is reported as wrong beyond this share of it.
MAX_PREDICTION_ERROR = 0.1
# A device that is busy for this share of a step limits it; below, devices wait for one another.
LIMITING_SHARE = 0.6
# The system counts a wait when it ends, wherever it began: less time says nothing about the load.
MIN_JUDGED_SECONDS = 0.25


AnyRecord = TypeVar("AnyRecord")


@dataclass(frozen=True)
class Rates:
    """Requests per second."""

    measured: float
    """With several in flight."""
    predicted: float | None
    """None for other sizes than the compiled ones."""
    all_cores: float
    """Of one session with all cores, one request after the other."""


@dataclass(frozen=True)
class Openings:
    """What opening takes, each in its own process."""

    bundle: Opening
    model: Opening
    """The unsplit model in one session with all cores."""


@dataclass(frozen=True, repr=False)
class Benchmark:
    """Measured times of a bundle next to predicted ones; the fields are those of `onnxplace bench --json`."""

    bundle: Timings
    """A step of the bundle."""
    model: Timings
    """A step of the unsplit model in one session with all cores."""
    one_device: Timings
    """The same with the cores of a single device."""
    in_flight: Timings | None
    """The time between two results with several requests in flight, if that was asked for."""
    speedup: Speedup
    """How many times as fast the bundle is as one session with all cores."""
    speedup_one_device: Speedup
    """The same for one session with the cores of a single device."""
    verdict: str
    """In words: faster or slower than one session with all cores, how sure that is, and what limits."""
    predicted_seconds: float | None
    """None, as the other two, where the inputs have other sizes than the compiled ones.

    Of several sizes that the bundle was compiled for, each has its step.
    """
    predicted_interval_seconds: float | None
    requests_per_second: Rates | None
    predicted_one_device_seconds: float | None
    devices: tuple[DeviceUse, ...]
    links: tuple[LinkUse, ...]
    process: ProcessUse
    timeline: TimelineComparison | None
    """Where a timeline differs most from the predicted one; None for other sizes than the compiled ones."""
    waiting: float | None = None
    """Share of the time in which a thread waited for a core that another one used; None if the steps are too short."""
    streams: tuple[StreamUse, ...] = ()
    """Weights that stream, by device, if some do."""
    copies: tuple[CopyStatus, ...] = ()
    """The copies of the bundle, if the session has several."""
    opening: Openings | None = None
    """Seconds and memory of opening, if memory was measured."""
    diagnostics: tuple[Diagnostic, ...] = ()
    """Notes, such as that the machine was busy meanwhile."""
    plan: int = 0
    """Index of the plan that ran, to which predictions, devices and links belong."""
    dimensions: Mapping[str, int] = field(default_factory=dict)
    """Sizes of symbolic dimensions."""
    sizes: tuple[Benchmark, ...] = ()
    """One for each size that the bundle was compiled for, if there were several and none was given; this is the first.
    """

    def __repr__(self) -> str:
        rates, bundle = self.requests_per_second, format_milliseconds(self.bundle.median_seconds)
        model, one_device = (format_milliseconds(item.median_seconds) for item in (self.model, self.one_device))
        in_flight = [f"in flight: {rates.measured:.4g} requests/s"] if rates else []
        predicted = self.predicted_seconds
        expected = "" if predicted is None else f", predicted {format_milliseconds(predicted)}"
        return format_object(
            f"Benchmark: step {bundle}{expected}",
            f"one session: {model} with all cores, {one_device} with those of one device",
            *in_flight,
            self.verdict,
        )


@checks_arguments
def bench(
    bundle: Bundle | str | Path,
    *,
    against: str | Path | None = None,
    inputs: Mapping[str, Array] | str | Path | None = None,
    shape: Mapping[str, int] | None = None,
    repeat: int = 20,
    in_flight: int = 1,
    trace: str | Path | None = None,
    memory: bool = True,
    update: bool = False,
    seed: int = 0,
    custom_op_libraries: Sequence[str | Path] = (),
    session_options: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> Benchmark:
    """Compare predictions for a bundle with measurements, as `onnxplace bench` does: steps, devices, links, memory.

    Args:
        bundle: A bundle, or its path.
        against: The model's file; by default the unsplit model in the bundle.
        inputs: Arrays by input name, or their file from numpy.savez; by default random ones.
        shape: Sizes of symbolic dimensions, {"batch": 8}.
        repeat: Rounds, after two for warming up.
        in_flight: If more than 1, a result with N requests in flight is timed, too.
        trace: File for a timeline of requests and the predicted one, for Perfetto.
        memory: Whether memory and opening are measured, which needs a process for each device.
        update: Whether the times of segments are written into the bundle, so that predictions follow them.
        seed: Seed of random inputs.
        custom_op_libraries: Shared libraries with operators that ONNX Runtime does not have.
        session_options: Arguments of `InferenceSession`, such as {"runtime": "mpi", "hosts": "localhost:2"}.
        observer: Called before each part with its name, its position from 0 and their number.

    Raises:
        OnnxplaceError: one of the files cannot be used, or the model or the bundle fails with these inputs.

    >>> onnxplace.bench("model.bundle").bundle.median_seconds  # doctest: +SKIP
    0.0912
    """
    check_in_flight(in_flight, "--in-flight")
    if repeat < 1:
        raise UsageError("U005", f"expected 1 round or more, got {repeat}", where="repeat", hint="leave it out")
    opened = bundle if isinstance(bundle, Bundle) else load(bundle)
    if trace:
        read = (Path(path) for path in (inputs, against) if isinstance(path, (str, Path)))
        require_writable(Path(trace), opened.path, *read)
    compiled = [item for item in opened.manifest.sizes if item.weight]
    if compiled and inputs is None and not (shape or update):
        common: dict[str, Any] = {"against": against, "repeat": repeat, "in_flight": in_flight, "seed": seed}
        common |= {"observer": observer, "custom_op_libraries": custom_op_libraries, "session_options": session_options}
        first, *others = (drop_derived_sizes(item.dimensions) for item in compiled)
        result = bench(opened, shape=first, trace=trace, memory=memory, **common)
        further = (bench(opened, shape=item, memory=False, **common) for item in others)
        return replace(result, sizes=(result, *further))
    options = {"runtime": "onnxruntime", **(session_options or {})}
    with use_custom_operators(custom_op_libraries):
        runtime = _create_runtime(**options)
        if in_flight > 1 and opened.manifest.states:
            message = "requests with states follow one another, so only one is in flight"
            raise UsageError("U042", message, where="--in-flight", hint="omit it")
        steps, notes = choose_step_inputs(opened, inputs, shape or {}, seed), list[Diagnostic]()
        if update:
            for note in _report_other_sizes(opened, steps.first):  # the predictions are for the compiled ones
                raise UsageError("U042", note.message, where="--update", hint=note.hint)
            if opened.manifest.plans or opened.is_plan:
                hint = "compile the bundle again, without --no-trial"
                raise UsageError("U042", "a trial runs all plans of a bundle in turns", where="--update", hint=hint)
            require_writable(opened.path / MANIFEST_FILE)
            opened = record_trial(opened, steps.first, runtime)
            trial = opened.manifest.trial
            doubt = find_trial_doubt(trial, opened.manifest.model) if trial else None
            notes = [doubt] if doubt else []
        times, waiting, copies, index = _time_steps(opened, against, steps, repeat, in_flight, options)
        # From here on, the plan that ran is a bundle like any other. It may have no other sizes than its own.
        plan = opened.plans[index]
        manifest, sizes = plan.manifest, steps.sizes
        is_own = inputs is None and sizes.items() <= manifest.dimensions.items()
        steps = choose_step_inputs(plan, inputs, {} if is_own else shape or {}, seed)
        with_memory = memory and options["runtime"] == "onnxruntime"
        rounds = min(repeat, MAX_TRACED)
        usage = measure_usage(plan, steps.first, rounds, with_memory, observer, in_flight, runtime, opened)
        opening, failures = _compare_openings(plan, against, usage.opening)
    predicted = predict_stream(manifest, usage.timelines, in_flight)
    if trace:
        planned = predict_timelines(manifest, usage.timelines)
        content = json.dumps(chrome_trace(usage.timelines, planned, manifest, read_segment_nodes(plan)))
        write_file(Path(trace), lambda stream: stream.write(content.encode()))
    expected = manifest.predicted
    # Copies do not delay each other.
    interval = expected.interval_seconds / max(len(copies), 1)
    other_sizes = _report_other_sizes(plan, steps.first)
    known = [item.seconds[index] for item in opened.manifest.sizes if item.dimensions.items() >= sizes.items()]
    shortage = find_core_shortage(manifest)
    notes = [*([shortage] if shortage else []), *notes, *([] if known else other_sizes)]
    is_comparable = not (update or notes or other_sizes or opened.manifest.plans)
    if waiting is not None and waiting > DOUBTFUL_WAITING_SHARE:
        notes.append(report_doubt("the machine was busy: steps", waiting, manifest.model))
    if is_comparable:
        notes += _report_wrong_prediction(times["bundle"], waiting, manifest)
    speedup, speedup_one_device = (compute_speedup(times[name], times["bundle"]) for name in ("model", "one_device"))
    result = Benchmark(
        bundle=times["bundle"],
        model=times["model"],
        one_device=times["one_device"],
        in_flight=times.get("in_flight"),
        speedup=speedup,
        speedup_one_device=speedup_one_device,
        verdict=_phrase_verdict(speedup, speedup_one_device, times["bundle"], waiting, usage),
        predicted_seconds=manifest.step_seconds,
        predicted_interval_seconds=interval,
        requests_per_second=_compute_rates(times, interval),
        predicted_one_device_seconds=expected.single_device_seconds,
        devices=usage.devices,
        links=usage.links,
        streams=usage.streams,
        process=usage.process,
        timeline=compare_timelines(manifest, usage.timelines, predicted),
        waiting=waiting,
        copies=copies,
        opening=opening,
        diagnostics=(*notes, *usage.notes, *failures),
        plan=index,
        dimensions=sizes,
    )
    step_seconds = known[0] if known else None
    return replace(_without_predictions(result), predicted_seconds=step_seconds) if other_sizes else result


def _without_predictions(result: Benchmark) -> Benchmark:
    """Return the figures of other sizes than the compiled ones, for which nothing was predicted."""
    rates = result.requests_per_second
    return replace(
        _clear_predictions(result),
        requests_per_second=rates and replace(rates, predicted=None),
        timeline=None,
        devices=tuple(map(_clear_predictions, result.devices)),
        links=tuple(map(_clear_predictions, result.links)),
        streams=tuple(map(_clear_predictions, result.streams)),
    )


def _clear_predictions(record: AnyRecord) -> AnyRecord:
    """Return a record without its predicted figures."""
    names = [item.name for item in fields(cast("Any", record)) if item.name.startswith("predicted_")]
    return cast("AnyRecord", replace(cast("Any", record), **dict.fromkeys(names)))


def _phrase_verdict(
    speedup: Speedup, one_device: Speedup, bundle: Timings, waiting: float | None, usage: DeviceUsage
) -> str:
    """Return how the bundle compares with one device, as `compile` does, and with all cores, and what limits it."""
    if waiting is not None and waiting > DOUBTFUL_WAITING_SHARE:
        doubt = f"unsure, as other programs used the cores for {waiting:.0%} of the time: "
    else:
        doubt = f"unsure after {format_count(bundle.runs, 'round')}: " if bundle.runs < MIN_JUDGED_ROUNDS else ""
    has_several = len([device for device in usage.devices if device.busy_seconds > 0]) > 1
    words = one_device.describe("one device") if has_several else "it runs on one device"
    limit = _describe_limit(bundle.median_seconds, usage)
    return f"{doubt}{words}, {speedup.describe('one session with all cores')}; {limit}"


def _describe_limit(step_seconds: float, usage: DeviceUsage) -> str:
    """Return what takes most of a step, from measurements."""
    waits = max((stream.wait_seconds for stream in usage.streams), default=0.0)
    busy, device = max(((item.busy_seconds, item.id) for item in usage.devices), default=(0.0, ""))
    if waits > busy:
        return f"limited by weights that stream: {waits / step_seconds:.0%} of a step waits for them"
    share = min(busy / step_seconds, 1.0)
    if share >= LIMITING_SHARE:
        return f"limited by {device}, which is busy for {share:.0%} of a step, when traced"
    return f"limited by waits: no device is busy for more than {share:.0%} of a step, when traced"


def _compare_openings(
    bundle: Bundle, against: str | Path | None, opening: Opening | None
) -> tuple[Openings | None, list[Diagnostic]]:
    """Return the opening of a bundle next to that of the model, and a note if that one fails."""
    if opening is None:
        return None, []
    try:
        return Openings(opening, measure_model_opening(bundle, against)), []
    except OnnxplaceError as problem:
        message = f"the opening of the whole model was not measured: {problem.message}"
        return None, [Diagnostic(problem.code, message, where=problem.where, hint=problem.hint)]


def _report_wrong_prediction(times: Timings, waiting: float | None, manifest: Manifest) -> list[Diagnostic]:
    """Return a note if steps differ from the prediction by more than a tenth, and by more than from one another."""
    predicted, low = manifest.step_seconds, sorted(times.samples)[times.runs // 10]
    is_sure = times.runs >= MIN_JUDGED_ROUNDS and (waiting is None or waiting <= DOUBTFUL_WAITING_SHARE)
    is_near = abs(times.median_seconds - predicted) <= MAX_PREDICTION_ERROR * predicted
    if not is_sure or is_near or low <= predicted <= times.p90_seconds:
        return []
    step, expected = format_milliseconds(times.median_seconds), format_milliseconds(predicted)
    message = f"a step takes {step}, predicted {expected}: --update writes it into the bundle"
    return [Diagnostic("F008", message, where=manifest.model)]


def _create_runtime(runtime: str, **options: Any) -> Runtime:
    """Return the runtime that is timed; raises UsageError if it computes nothing, or has no such options."""
    if runtime == "simulated":
        raise make_no_outputs_error(runtime, "bench")
    return create_runtime(runtime, **options)


def _time_steps(
    bundle: Bundle,
    against: str | Path | None,
    steps: StepInputs,
    repeat: int,
    in_flight: int,
    options: Mapping[str, Any],
) -> tuple[dict[str, Timings], float | None, tuple[CopyStatus, ...], int]:
    """Time the bundle, opened with these options, and the plain sessions in turn.

    Return also the share of the time in which they waited for a core, the bundle's copies, and its last plan.
    """
    largest = max(
        (device.cores for device in bundle.target.devices if device.kind == "cpu"), default=len(available_cores())
    )
    cores = available_cores(), available_cores()[:largest]
    models = {used: open_reference(bundle, against, used) for used in dict.fromkeys(cores)}  # one if they are the same
    whole, one = (StateCarrier(models[used], bundle) for used in cores)
    if bundle.manifest.states:
        whole(steps.first)
        steps.learn(whole.states)
    # A prompt after a prompt is another size: states that grow begin anew at each of several sizes.
    is_repeated, plans = bool(bundle.manifest.sizes) and not keeps_state_shapes(bundle), list[int]()
    feeds = [steps.first if is_repeated else steps.feeds(number) for number in range(repeat + WARM_UPS)]
    limit = max(in_flight, DEFAULT_MAX_IN_FLIGHT)
    with InferenceSession(bundle, max_in_flight=limit, warmup=True, **options) as session:
        calls: dict[str, Callable[[Any], object]] = {
            "bundle": lambda arrays: plans.append(session.run_timed(arrays).plan),
            "model": whole,
            "one_device": one,
        }
        with steps.explained(1):
            stopwatch = Stopwatch(lambda: read_run_delays(pool=True))
            times = time_in_turns({name: _iterate_feeds(call, feeds) for name, call in calls.items()}, repeat, WARM_UPS)
            stopwatch.stop()
            if in_flight > 1:
                times["in_flight"] = _time_results(session, feeds, in_flight, repeat)
        copies = session.list_copies()
    waiting = max(stopwatch.waiting_share, 0.0) if stopwatch.elapsed_seconds >= MIN_JUDGED_SECONDS else None
    return times, waiting, copies, plans[-1]


def _time_results(session: InferenceSession, feeds: Sequence[Any], in_flight: int, repeat: int) -> Timings:
    """Time the results of requests that are kept in flight, after a turn for warming up."""
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


def _compute_rates(times: Mapping[str, Timings], interval_seconds: float) -> Rates | None:
    """Return requests per second, if they were measured with several in flight."""
    if "in_flight" not in times:
        return None
    seconds = (times["in_flight"].median_seconds, interval_seconds, times["model"].median_seconds)
    return Rates(*(1 / value if value > 0 else 0.0 for value in seconds))
