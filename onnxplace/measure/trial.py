"""Run a compiled bundle, to predict its time from measured times of its segments.

The costs of nodes are those of one session over the whole model. Split into segments, the same nodes take longer: each
session has its own copies of weights, caches are cold after a wait, and other devices use the same memory. How much
longer depends on model and machine, so it is measured.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onnxplace.bundle.bundle import MANIFEST_FILE, Bundle
from onnxplace.bundle.bundle_routes import list_route_devices, list_routes, move_to_route, sum_device_seconds
from onnxplace.bundle.bundle_simulation import (
    list_load_seconds,
    predict_interval_seconds,
    predict_weight_wait_seconds,
    simulate_manifest,
)
from onnxplace.bundle.manifest import HOST, Manifest, RouteRecord, StreamRecord, TrialRecord
from onnxplace.bundle.split_states import SplitStates
from onnxplace.errors import Diagnostic
from onnxplace.feeds.feeds import Array
from onnxplace.machine.hardware import RUNTIME_BYTES, available_cores, available_memory_bytes, find_device_problem
from onnxplace.machine.ort_sessions import open_in_threads
from onnxplace.machine.repeated_runs import (
    DOUBTFUL_WAITING_SHARE,
    MAX_CREDIBLE_WAITING_SHARE,
    MAX_SLOWDOWN,
    MIN_RUNS,
    RepeatPolicy,
    Runs,
    Stopwatch,
    find_least_reference_seconds,
    longest_wait,
    read_run_delays,
)
from onnxplace.measure.cached_trials import RequestCount, Seconds, Share, measure_once
from onnxplace.measure.compare import find_bundle_lineages, open_reference, settle
from onnxplace.measure.host_nodes import find_core_shortage
from onnxplace.measure.size_comparison import await_early, compare_at_another_size
from onnxplace.measure.step_inputs import RepeatedStep
from onnxplace.pipeline.registry import create_runtime
from onnxplace.runtime.interface import Event, Result, Runtime, RuntimeSession
from onnxplace.runtime.timelines import find_medians
from onnxplace.utils.control_groups import find_core_limit
from onnxplace.utils.differences import relative_error
from onnxplace.utils.files import write_file
from onnxplace.utils.progress import report_progress

# Clocks, caches and sessions settle within this time, or within one step.
WARM_UP_SECONDS = 0.05
# Repeat until the median is sure, or more steps do not make it surer; stop after `max_runs` steps, or these seconds of
# all sessions together. Where bundles are compared, there are at least `SURE_RUNS` steps, and more if the user wants to
# be sure.
REPEAT_POLICY, SURE_RUNS = RepeatPolicy(max_runs=2000, seconds=1.8, tolerance=0.02), 5
THOROUGH_SECONDS, THOROUGH_RUNS = 6.0, 9
# Bundles take turns of this time. Reading how long threads waited takes longer than a small step, so it is done once
# per turn.
BURST_SECONDS = 0.01
# The session with all cores runs in one of this many rounds, since its threads need time to settle.
ALL_CORES_ROUNDS = 6
# How the note begins that a trial of the bundle was disturbed.
DOUBT = "the trial is less sure than usual: steps"
# Codes of notes that there was no trial, or that it failed: they are wrong once a later one is recorded.
NO_TRIAL_CODES = ("C020", "C021")


Cores = tuple[int, ...]


@dataclass(frozen=True)
class PlainTimes:
    """Steps of the unsplit model in plain sessions, which took turns with a bundle; without the waits for cores."""

    one_device_seconds: Seconds
    """In one session with the cores of the largest device."""
    all_cores_seconds: Seconds
    speedup_low: Seconds
    speedup_high: Seconds
    """Eight of ten turns had a speed-up over one device between the two."""


@dataclass(frozen=True)
class Trial:
    """Measured times of a bundle."""

    step_seconds: Seconds
    """Median time of a request, minus the longest time that a worker waited for a core."""
    request_seconds: Seconds
    """Part of it before the first device began and after the last one ended."""
    segment_seconds: Mapping[str, Seconds]
    """Time of each segment on its device, without waits and copies."""
    requests: RequestCount
    """Number of requests that counted."""
    waiting: Share
    """Share of the time of these requests in which a thread waited for a core, also one of another process."""
    uncertainty: Share = 0.0
    """Share by which the median may be wrong: more where the speed of the machine drifted."""
    load_seconds: Mapping[str, Seconds] = field(default_factory=dict)
    """Time in which the weights of a segment came that stream, without those that were on their way before."""
    plain: PlainTimes | None = None
    """Of plain sessions in the same turns, if they took part."""
    size_notes: tuple[str, ...] = ()
    """Remarks on the comparison with the unsplit model at other sizes."""

    @property
    def is_doubtful(self) -> bool:
        """Return whether other work on the machine may have slowed the trial."""
        return is_doubtful(self)


def find_trial_obstacle(*bundles: Bundle) -> Diagnostic | None:
    """Return why these bundles cannot be run here at the same time, or None."""
    for manifest in (bundle.manifest for bundle in bundles):
        # A trial below a quota counts processor time, which devices share.
        has_quota = find_core_limit() < math.inf
        if problem := _find_missing_gpu(manifest) or (None if has_quota else find_core_shortage(manifest)):
            return replace(problem, code="C020", message=f"no trial was run: {problem.message}")
    # All bundles are open at the same time, since they run in turns.
    needs, free = sum(count_process_bytes(bundle.manifest) for bundle in bundles), available_memory_bytes()
    if needs <= free:
        return None
    subject = "it needs" if len(bundles) == 1 else f"{len(bundles)} bundles need"
    message = f"no trial was run: {subject} {needs} bytes of memory, {free} are free"
    return Diagnostic("C020", message, where=bundles[0].manifest.model)


def count_process_bytes(manifest: Manifest) -> int:
    """Return the memory of a process that runs a bundle, with all plans: its own, and what CPU devices hold."""
    if host := manifest.held.get(HOST):
        return RUNTIME_BYTES + host.peak_bytes
    on_host = {device.id for device in manifest.target.devices if device.has_cores}
    return RUNTIME_BYTES + sum(device.peak_bytes for device in manifest.devices if device.id in on_host)


def _find_missing_gpu(manifest: Manifest) -> Diagnostic | None:
    used = list_route_devices(manifest)
    for device in manifest.target.devices:
        if device.id in used and (problem := find_device_problem(device)):
            return Diagnostic("T011", problem, where=device.id)
    return None


class TrialSessions(ExitStack):
    """Bundles of one model and plain sessions of it: they stay open from one trial to the next, until this ends."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: dict[Path | Cores, _TrialSession] = {}
        """By the path of a bundle, or the cores of a plain session."""

    def open(self, key: Path | Cores, bundle: Bundle, feeds: Mapping[str, Array], create: Any) -> _TrialSession:
        """Return the session of a key; unless it is open, `create` opens it, for steps with inputs of the bundle."""
        if key not in self.opened:
            # One bundle may hold a state whole that another one holds in parts.
            feeds = SplitStates(bundle.manifest).align_copies(feeds)
            step = RepeatedStep(bundle, feeds, carries=isinstance(key, Path))
            self.opened[key] = _TrialSession(self.enter_context(create()), step)
        return self.opened[key]

    def close_all(self) -> None:
        """Close what is open, such as bundles that are not kept, or of which one failed."""
        self.close()
        self.opened.clear()


def run_trials(
    bundles: Sequence[Bundle],
    feeds: Mapping[str, Array],
    *,
    cached: bool = True,
    runtime: Runtime | None = None,
    thorough: bool = False,
    plain: bool = False,
    compares: bool = True,
    sessions: TrialSessions | None = None,
) -> tuple[Trial, ...]:
    """Run bundles in turns until their medians are sure: three steps at least, five of several, nine if `thorough`.

    If `plain`, and the memory suffices, the unsplit model of the first bundle takes turns with them: in one session
    with the cores of one device, and in one with all cores. If it `compares`, each bundle is compared with the unsplit
    model at another size. What is open among `sessions` is not opened again.

    Earlier measurements of equal segments and feeds are reused if `cached`. With a `runtime`, such as that for several
    hosts, its sessions run, and nothing is reused. Raises ExecutionError if a segment fails or a bundle differs from
    the unsplit model at another size, and TargetError if a device is missing.
    """
    is_local = runtime is None
    policy = replace(REPEAT_POLICY, min_runs=SURE_RUNS) if len(bundles) > 1 else REPEAT_POLICY
    policy = replace(policy, seconds=THOROUGH_SECONDS, min_runs=THOROUGH_RUNS) if thorough else policy
    references = _list_reference_cores(bundles, sessions.opened if sessions else ()) if plain and is_local else ()
    policy = replace(policy, seconds=policy.seconds / (len(bundles) + len(references)))

    def measure() -> tuple[Trial, ...]:
        opener = runtime or create_runtime("onnxruntime")
        with nullcontext(sessions) if sessions else TrialSessions() as used:
            tried = [used.open(item.path, item, feeds, partial(opener.open, item, trace=True)) for item in bundles]
            plain = {cores: partial(_PlainSession, bundles[0], cores) for cores in references}
            jobs = [partial(used.open, cores, bundles[0], feeds, create) for cores, create in plain.items()]
            plain_sessions = dict(zip(plain, open_in_threads(jobs)))
            plain_ones = [plain_sessions[cores] for cores in references]
            await_early()
            _take_turns(tried, plain_ones, policy)
        times = [_compare_plain(session, *plain_ones) if plain_ones else None for session in tried]
        notes = [compare_at_another_size(bundle) if is_local and compares else () for bundle in bundles]
        return tuple(
            replace(session.summarise(), plain=times[index], size_notes=notes[index])
            for index, session in enumerate(tried)
        )

    parts = [f"{'compared ' * compares}trial {policy.min_runs}", *(f"plain {cores}" for cores in references)]
    return measure_once(Trial, parts, bundles, feeds, cached and is_local, is_local, measure)


def _take_turns(tried: Sequence[_TrialSession], plain: Sequence[_TrialSession], policy: RepeatPolicy) -> None:
    """Run bundles and plain sessions, of which the last one has all cores, until the times of bundles are sure."""
    sessions = dict.fromkeys([*tried, *plain])
    all_cores = plain[-1] if len({*plain}) > 1 else None
    for session in sessions:
        session.warm_up()
    # In turns, so that changes of the machine's speed affect all. The last bundle to settle ends the loop.
    for number in itertools.count():
        if all(policy.has_enough(session.runs) for session in tried):
            break
        for session in sessions:
            if session is not all_cores:
                session.run_burst()
        if all_cores and number % ALL_CORES_ROUNDS == 0:
            all_cores.run_burst()
            settle()
        report_progress(min(policy.estimate_share(session.runs) for session in tried))
    for session in sessions:
        session.end()


def _list_reference_cores(bundles: Sequence[Bundle], opened: Collection[object] = ()) -> tuple[Cores, ...]:
    """Return the cores of one device, and all cores, if plain sessions can run the unsplit model here."""
    first = bundles[0].manifest
    if first.streams or not first.segments or any(device.kind != "cpu" for device in first.target.devices):
        return ()
    # A device that spans several processors is no single one, unless it is all there is.
    usual = [item.cores for item in first.target.devices if len(item.processors) < 2]
    cores, largest = available_cores(), max(usual or [item.cores for item in first.target.devices])
    # Backwards where they differ, so that they are opened on different cores.
    references = cores[:largest], cores[::-1] if largest < len(cores) else cores
    needs = [count_process_bytes(item.manifest) for item in bundles if item.path not in opened]
    weights = sum(item.bytes for item in (*first.files.values(), *first.linked.values()))
    needs += [weights for item in references if item not in opened]
    return references if sum(needs) <= available_memory_bytes() else ()


def _compare_plain(bundle: _TrialSession, one_device: _TrialSession, all_cores: _TrialSession) -> PlainTimes:
    """Return the times of plain sessions; the speed-up is that of their undisturbed turns with the bundle."""
    turns = np.array([one_device.bursts, bundle.bursts])
    is_undisturbed = turns[:, :, 1].max(axis=0) <= DOUBTFUL_WAITING_SHARE
    seconds = turns[:, is_undisturbed if is_undisturbed.sum() >= MIN_RUNS else slice(None), 0]
    low, ratio, high = np.quantile(seconds[0] / np.maximum(seconds[1], 1e-9), (0.1, 0.5, 0.9)).tolist()
    # By turns, as medians of their own would be of other moments if the speed of the machine drifts.
    return PlainTimes(bundle.runs.seconds * ratio, all_cores.runs.seconds, low, high)


def measure_error(bundle: Bundle, feeds: Mapping[str, Array]) -> float:
    """Return the largest error of an output, relative to its largest magnitude; the CPU runs the unsplit model.

    Each route of the bundle runs once. States are left out, and outputs that depend on random numbers.

    Raises:
        ExecutionError: a segment fails.
        TargetError: a device is missing.
    """
    lineages, feeds = find_bundle_lineages(bundle), SplitStates(bundle.manifest).align_copies(feeds)
    names = [item.name for item in bundle.returned_outputs if not lineages[item.name].random_nodes]
    expected = open_reference(bundle, None, available_cores())(feeds)
    runtime, errors = create_runtime("onnxruntime"), [0.0]
    for route in list_routes(bundle.manifest):
        with runtime.open(Bundle(bundle.path, move_to_route(bundle.manifest, route))) as session:
            outputs = session.run(feeds).outputs
        errors += [relative_error(outputs[name], expected[name]) for name in names]
    return max(errors)


def is_doubtful(trial: Trial | TrialRecord) -> bool:
    """Return whether other work on the machine may have slowed a trial."""
    return max(trial.waiting, trial.uncertainty) > DOUBTFUL_WAITING_SHARE


def report_doubt(what: str, waiting: float, where: str, uncertainty: float = 0.0) -> Diagnostic:
    """Return the note for a trial that other work on the machine disturbed; `what` waited a share of its time."""
    reasons = [f"waited {waiting:.0%} of their time for a core"] if waiting >= 0.005 or not uncertainty else []
    if uncertainty > DOUBTFUL_WAITING_SHARE:
        reasons.append(f"have a median that is known to {uncertainty:.0%}, as the speed of the machine drifted")
    message = f"{what} {' and '.join(reasons)}"
    hint = "repeat the command when the machine is idle; these times are not cached"
    return Diagnostic("C004", message, where=where, hint=hint)


def find_trial_doubt(trial: Trial | TrialRecord, where: str) -> Diagnostic | None:
    """Return a note if other work on the machine may have slowed the trial of a bundle, or None."""
    return report_doubt(DOUBT, trial.waiting, where, trial.uncertainty) if is_doubtful(trial) else None


def apply_trial(manifest: Manifest, trial: Trial) -> Manifest:
    """Return a manifest whose predictions use the segments' times of a trial.

    An earlier trial is replaced: planned times stay those from the costs of nodes. So does the lower bound, which is
    proven for these costs, and is compared with the planned step only. The time of a single device is that of the
    trial, if one took part.
    """
    earlier = manifest.trial
    segments = tuple(
        segment.model_copy(
            update={
                "seconds": trial.segment_seconds[segment.id],
                "planned_seconds": segment.seconds if earlier is None else segment.planned_seconds,
            }
        )
        for segment in manifest.segments
    )
    measured = manifest.predicted.model_copy(update={"request_seconds": trial.request_seconds})
    routes = _scale_routes(manifest, trial)
    # Simulate the bundle again, with measured times in place of planned ones.
    streams = _scale_streams(manifest, trial)
    updates = {"segments": segments, "routes": routes, "predicted": measured, "streams": streams}
    changed = manifest.model_copy(update=updates)
    simulation, busy = simulate_manifest(changed), sum_device_seconds(changed)
    step_seconds = simulation.makespan_seconds + trial.request_seconds
    single_seconds = trial.plain.one_device_seconds if trial.plain else manifest.predicted.single_device_seconds
    if len({segment.device for segment in segments}) == 1:  # it is one device itself
        single_seconds = min(single_seconds, step_seconds)
    predicted = measured.model_copy(
        update={
            "step_seconds": step_seconds,
            "single_device_seconds": single_seconds,
            "interval_seconds": predict_interval_seconds(changed),
            "weight_wait_seconds": predict_weight_wait_seconds(changed),
        }
    )
    record = TrialRecord(
        step_seconds=trial.step_seconds,
        planned_seconds=manifest.predicted.step_seconds if earlier is None else earlier.planned_seconds,
        requests=trial.requests,
        waiting=min(trial.waiting, 1.0),
        uncertainty=trial.uncertainty,
        **(asdict(trial.plain) if trial.plain else {}),
    )
    devices = tuple(item.model_copy(update={"compute_seconds": busy[item.id]}) for item in manifest.devices)
    return changed.model_copy(update={"predicted": predicted, "trial": record, "devices": devices})


def _scale_routes(manifest: Manifest, trial: Trial) -> tuple[RouteRecord, ...]:
    """Return the further routes, whose segments take longer by as much as on the first route, which the trial took."""
    ratios = {item.id: trial.segment_seconds[item.id] / max(item.seconds, 1e-12) for item in manifest.segments}
    return tuple(
        route.model_copy(update={"seconds": {name: value * ratios[name] for name, value in route.seconds.items()}})
        for route in manifest.routes
    )


def _scale_streams(manifest: Manifest, trial: Trial) -> tuple[StreamRecord, ...]:
    """Return the streams with the rates at which weights came in the trial."""
    predicted = list_load_seconds(manifest, list_routes(manifest)[0])
    streams = []
    for stream in manifest.streams:
        pairs = [
            (seconds, trial.load_seconds[segment.id])
            for segment, seconds in zip(manifest.segments, predicted.tolist())
            if segment.device == stream.device and segment.id in trial.load_seconds
        ]
        ratio = sum(pair[0] for pair in pairs) / max(sum(pair[1] for pair in pairs), 1e-12) if pairs else 1.0
        rates = {home: rate * ratio for home, rate in stream.bytes_per_second.items()}
        streams.append(stream.model_copy(update={"bytes_per_second": rates}))
    return tuple(streams)


class _PlainSession(RuntimeSession):
    """One session over the unsplit model of a bundle."""

    def __init__(self, bundle: Bundle, cores: Sequence[int]) -> None:
        self._run_model = open_reference(bundle, None, cores)

    def submit(self, feeds: Mapping[str, Array], states: Collection[str] = ()) -> Future[Result]:
        future, began = Future[Result](), time.perf_counter()
        outputs = self._run_model(feeds)
        future.set_result(Result(outputs, (), time.perf_counter() - began))
        return future

    def close(self, timeout: float | None = None) -> None:
        """Do nothing: the session ends with its last reference."""


class _TrialSession:
    """An open bundle and the times of its steps."""

    def __init__(self, session: RuntimeSession, step: RepeatedStep) -> None:
        self._session, self._step = session, step
        self._steps: list[tuple[tuple[Event, ...], float]] = []
        """Events and seconds of each step."""
        self._waiting_shares: list[float] = []
        """Share of the burst of each step in which a thread waited for a core."""
        self._reference_seconds: list[float] = []
        """Of the reference loop after the burst of each step."""
        self.bursts: list[tuple[float, float]] = []
        """Mean step of each burst without the waits, and the share of its time that other programs took."""
        self._began, self._remote_delays = 0.0, dict[str, int]()
        """When the warm-up ended, and how long threads of other processes had waited until then."""
        self._remote_waiting_share = 0.0

    def warm_up(self) -> None:
        """Run uncounted steps until clocks, caches and sessions have settled; forget the steps of an earlier trial."""
        began, elapsed = time.perf_counter(), WARM_UP_SECONDS if self._steps else 0.0
        while elapsed < WARM_UP_SECONDS:
            self._run_step()
            elapsed = time.perf_counter() - began
        for item in (self._steps, self._waiting_shares, self._reference_seconds, self.bursts):
            item.clear()
        self._began, self._remote_delays = time.perf_counter(), dict(self._session.read_remote_delays())

    def end(self) -> None:
        """Note the share of the time since the warm-up in which a thread of another process waited for a core."""
        waiting = longest_wait(self._remote_delays, dict(self._session.read_remote_delays()))
        share = waiting / (time.perf_counter() - self._began)
        self._remote_waiting_share = min(share, MAX_CREDIBLE_WAITING_SHARE)

    def run_burst(self) -> None:
        """Run steps for `BURST_SECONDS`, at least one."""
        stopwatch, began, first = Stopwatch(lambda: read_run_delays(pool=True)), time.perf_counter(), len(self._steps)
        while len(self._steps) == first or time.perf_counter() - began < BURST_SECONDS:
            self._run_step()
        stopwatch.stop()
        share, count = stopwatch.waiting_share, len(self._steps) - first
        self._waiting_shares += [share] * count
        self._reference_seconds += [stopwatch.reference_seconds] * count
        slowdown = max(stopwatch.reference_seconds / find_least_reference_seconds() - MAX_SLOWDOWN, 0.0)
        seconds = sum(seconds for _, seconds in self._steps[first:]) / count * (1 - share)
        self.bursts.append((seconds, share + slowdown))

    @property
    def runs(self) -> Runs:
        """Return the times of the steps so far."""
        seconds = np.array([seconds for _, seconds in self._steps])
        return Runs(seconds, seconds * np.array(self._waiting_shares), np.array(self._reference_seconds))

    def _run_step(self) -> None:
        result = self._session.run(self._step.prepare(self._session))
        self._steps.append((result.events, result.seconds))

    def summarise(self) -> Trial:
        """Return medians over the steps that waited least for a core."""
        runs = self.runs
        # It is unknown which event a wait fell into, so it is subtracted from all in proportion.
        steps = [(*self._steps[index], 1 - self._waiting_shares[index]) for index in runs.undisturbed]
        request_times = []
        for events, seconds, working_share in steps:
            begin = min((event.start_seconds for event in events), default=0.0)  # no events if all devices are idle
            end = max((event.finish_seconds for event in events), default=0.0)
            request_times.append((begin + seconds - end) * working_share)
        return Trial(
            step_seconds=runs.seconds,
            request_seconds=max(float(np.median(request_times)), 0.0),
            segment_seconds=find_medians(
                {name: seconds * working_share for name, seconds in measure_segment_seconds(events).items()}
                for events, _, working_share in steps
            ),
            # The thread that reads waits for the disk, and seldom for a core.
            load_seconds=find_medians(measure_load_seconds(events) for events, _, _ in steps),
            requests=len(runs.undisturbed),
            # Not subtracted from times: other processes may have looked for messages only.
            waiting=max(runs.waiting, self._remote_waiting_share),
            uncertainty=min(runs.uncertainty, 1.0),
        )


def measure_segment_seconds(events: Sequence[Event]) -> dict[str, float]:
    """Return, by segment, its run and the time before it in which its device neither waited nor copied."""
    finish: dict[str, float] = {}
    gaps: dict[str, float] = {}
    seconds = {}
    for event in sorted(events, key=lambda event: event.start_seconds):
        if event.kind == "load":  # weights come while the device does something else
            continue
        # Time between two events on a device is overhead of the segment that follows.
        gap = event.start_seconds - finish.get(event.device, event.start_seconds)
        gaps[event.device] = gaps.get(event.device, 0.0) + gap
        finish[event.device] = event.finish_seconds
        if event.kind == "run":
            seconds[event.name] = event.finish_seconds - event.start_seconds + gaps.pop(event.device)
    return seconds


def measure_load_seconds(events: Sequence[Event]) -> dict[str, float]:
    """Return, by segment, the time in which its weights came that stream, if it is known when that began."""
    return {
        event.name: event.finish_seconds - event.start_seconds
        for event in events
        if event.kind == "load" and event.start_seconds > 0  # others began before the request
    }


def replace_manifest(bundle: Bundle, manifest: Manifest) -> Bundle:
    """Replace the manifest of a bundle atomically."""
    text = manifest.model_dump_json(indent=1)
    write_file(bundle.path / MANIFEST_FILE, lambda stream: stream.write(text.encode()))
    return Bundle(bundle.path, manifest)


def record_trial(bundle: Bundle, feeds: Mapping[str, Array], runtime: Runtime) -> Bundle:
    """Run a bundle in a trial where it is used, such as on several hosts, and write the times into its manifest.

    Predictions then follow these times. An earlier trial is replaced, and so are the notes about it, or its absence.

    Args:
        bundle: It is replaced on the disk, by name and at once.
        feeds: Inputs of the sizes that the bundle was compiled for, states included.
        runtime: What runs it.

    Raises ExecutionError if a segment fails, TargetError if a device is missing, UsageError if the manifest cannot be
    written.
    """
    (trial,) = run_trials([bundle], feeds, runtime=runtime)
    manifest = apply_trial(bundle.manifest, trial)
    notes = [
        item for item in manifest.diagnostics if item.code not in NO_TRIAL_CODES and not item.message.startswith(DOUBT)
    ]
    if doubt := find_trial_doubt(trial, manifest.model):
        notes.append(doubt)
    return replace_manifest(bundle, manifest.model_copy(update={"diagnostics": tuple(notes)}))
