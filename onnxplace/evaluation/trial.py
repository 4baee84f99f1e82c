"""Run a bundle once it is compiled, to predict its steps from what its segments take where they are.

The costs of nodes are those of one session over the whole model. Cut into segments, the same nodes take longer: each
session has its own copies of weights, caches are cold after a wait, and other devices use the same memory. How much
depends on model and machine, so it is measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from typing import Annotated, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from onnxplace.bundle import (
    COSTS_FILE,
    MANIFEST_FILE,
    WHOLE_MODEL_FILE,
    Bundle,
    Manifest,
    TrialRecord,
    simulate_manifest,
)
from onnxplace.errors import Diagnostic
from onnxplace.feeds import Array
from onnxplace.machine import (
    DOUBTFUL_WAITING_SHARE,
    MAX_CREDIBLE_WAITING_SHARE,
    RepeatPolicy,
    Runs,
    available_cores,
    available_memory_bytes,
    cuda_problem,
    import_onnxruntime,
    longest_wait,
    measurement_cache,
    operator_libraries,
    read_run_delays,
)
from onnxplace.pipeline import find_plugin
from onnxplace.runtime import Event, Runtime, RuntimeSession
from onnxplace.simulation import loads_of_simulation
from onnxplace.target import MAX_SECONDS
from onnxplace.utils import write_file

# Clocks and caches settle in this time, and sessions in these steps.
WARM_UP_SECONDS, WARM_UP_STEPS = 0.03, 2
# Until the standard error of the median step is below this share, though not before so many steps; at most these many
# steps, or seconds.
REPEAT_POLICY = RepeatPolicy(repeat=2000, seconds=1.0, tolerance=0.02, least=9)
BURST_SECONDS = 0.01


@dataclass(frozen=True)
class Trial:
    """How the steps of a bundle went."""

    step_seconds: float
    """Median, without what the worker that waited longest for a core waited."""
    request_seconds: float
    """Of them, before a device began and after the last one ended."""
    segment_seconds: Mapping[str, float]
    """By segment, what it took its device beside waits and copies."""
    requests: int
    waiting: float
    """Share of the time of these requests that a thread waited for a core."""


def find_trial_obstacle(*bundles: Bundle) -> Diagnostic | None:
    """Say why bundles cannot be run here, at the same time, as they are meant to be, or None."""
    for manifest in (bundle.manifest for bundle in bundles):
        if problem := _find_missing_gpu(manifest) or find_core_shortage(manifest):
            return replace(problem, code="C020", message=f"the bundle was not tried out: {problem.message}")
    taken = [bundle.manifest.predicted for bundle in bundles]
    needs, free = sum(max(p.running_bytes, p.opening_bytes) for p in taken), available_memory_bytes()
    if needs <= free:
        return None
    message = f"the bundle was not tried out: it would take {needs} bytes of memory, and {free} are free"
    return Diagnostic("C020", message, where=bundles[0].manifest.model)


def find_core_shortage(manifest: Manifest) -> Diagnostic | None:
    """Say so if a bundle's CPU devices have more cores than this machine, so that they share some; else None."""
    asked, there = sum(d.cores for d in manifest.target.devices if d.kind == "cpu"), len(available_cores())
    if asked <= there:
        return None
    message = f"its CPU devices have {asked} cores, this machine {there}: they get in each other's way"
    return Diagnostic("T014", message, where=manifest.model)


def _find_missing_gpu(manifest: Manifest) -> Diagnostic | None:
    for device in manifest.target.devices:
        if device.kind == "cuda" and manifest.programs.get(device.id) and (problem := cuda_problem(device.index)):
            return Diagnostic("T011", problem, where=device.id)
    return None


def run_trials(bundles: Sequence[Bundle], feeds: Mapping[str, Array], *, cached: bool = True) -> tuple[Trial, ...]:
    """Run bundles for about a second each, though three steps at least, in turns, so that they can be compared.

    What was measured before, for equal segments and feeds, is used again. Raises ExecutionError if a part fails,
    TargetError if a device is not here.
    """
    name = measurement_cache.key(["trial", *(_trial_key(bundle, feeds) for bundle in bundles)])
    if cached and (kept := _read_cached_trials(name, bundles)):
        return kept
    runtime = cast("type[Runtime]", find_plugin("runtimes", "onnxruntime"))()
    with ExitStack() as stack:
        sampled = [_TrialSession(stack.enter_context(runtime.open(bundle, trace=True)), feeds) for bundle in bundles]
        for one in sampled:
            one.warm_up()
        while not all(one.enough for one in sampled):
            for one in sampled:
                one.burst()
    found = tuple(one.trial() for one in sampled)
    if cached and not any(map(is_doubtful, found)):
        with suppress(ValueError):  # a full disk, say: then it is measured again
            measurement_cache.write(name, {"trials": [asdict(trial) for trial in found]})
    return found


def is_doubtful(trial: Trial) -> bool:
    """Return whether other work on the machine may have made the steps of a trial longer."""
    return trial.waiting > DOUBTFUL_WAITING_SHARE


def apply_trial(manifest: Manifest, trial: Trial) -> Manifest:
    """Return a manifest that predicts from the segments' times of a trial.

    What the costs of nodes say of a bound, and of one device, stays where what was seen does not contradict it.
    """
    segments = tuple(
        segment.model_copy(update={"seconds": trial.segment_seconds[segment.id]}) for segment in manifest.segments
    )
    changed = manifest.model_copy(update={"segments": segments})
    simulation = simulate_manifest(changed)
    busy = dict(zip((device.id for device in manifest.target.devices), simulation.compute_seconds.tolist()))
    step_seconds = simulation.makespan_seconds + trial.request_seconds
    single_seconds = manifest.predicted.single_device_seconds
    if len({segment.device for segment in segments}) == 1:
        single_seconds = min(single_seconds, step_seconds)
    predicted = manifest.predicted.model_copy(
        update={
            "step_seconds": step_seconds,
            "lower_bound_seconds": min(manifest.predicted.lower_bound_seconds, step_seconds),
            "single_device_seconds": single_seconds,
            "interval_seconds": loads_of_simulation(simulation, manifest.target.target()).interval_seconds,
            "request_seconds": trial.request_seconds,
        }
    )
    record = TrialRecord(
        step_seconds=trial.step_seconds,
        planned_seconds=manifest.predicted.step_seconds,
        requests=trial.requests,
        waiting=min(trial.waiting, 1.0),
    )
    devices = tuple(item.model_copy(update={"compute_seconds": busy[item.id]}) for item in manifest.devices)
    return changed.model_copy(update={"predicted": predicted, "trial": record, "devices": devices})


def replace_manifest(bundle: Bundle, manifest: Manifest) -> Bundle:
    """Put another manifest into a bundle, in place of its own at one stroke."""
    text = manifest.model_dump_json(indent=1)
    write_file(bundle.path / MANIFEST_FILE, lambda stream: stream.write(text.encode()))
    return Bundle(bundle.path, manifest)


class _TrialSession:
    """An open bundle, and how its steps went."""

    def __init__(self, session: RuntimeSession, feeds: Mapping[str, Array]) -> None:
        self._session, self._feeds = session, feeds
        self._steps: list[tuple[tuple[Event, ...], float]] = []
        """What each device did, and the seconds of the step."""
        self._waited: list[float] = []
        """Per step, the share of its burst in which a thread waited for a core."""

    def warm_up(self) -> None:
        began, passed = time.perf_counter(), 0.0
        while (len(self._steps) < WARM_UP_STEPS or passed < WARM_UP_SECONDS) and passed < REPEAT_POLICY.seconds:
            self._step()
            passed = time.perf_counter() - began
        self._steps.clear()

    def burst(self) -> None:
        """Make steps for a moment. To look what threads waited takes longer than a small step, and its caches."""
        before, began, first = read_run_delays(pool=True), time.perf_counter(), len(self._steps)
        while len(self._steps) == first or time.perf_counter() - began < BURST_SECONDS:
            self._step()
        share = longest_wait(before, read_run_delays(pool=True)) / (time.perf_counter() - began)
        self._waited += [min(share, MAX_CREDIBLE_WAITING_SHARE)] * (len(self._steps) - first)

    @property
    def enough(self) -> bool:
        return REPEAT_POLICY.enough(self._runs) if self._steps else False

    @property
    def _runs(self) -> Runs:
        passed = np.array([seconds for _, seconds in self._steps])
        return Runs(passed, passed * np.array(self._waited))

    def _step(self) -> None:
        self._session.reset_state()  # states that are not fed would go on growing
        result = self._session.run(self._feeds)
        self._steps.append((result.events, result.seconds))

    def trial(self) -> Trial:
        runs = self._runs
        spent: dict[str, list[float]] = {}
        besides = []
        for index in runs.calm:
            events, seconds = self._steps[index]
            own = 1 - self._waited[index]  # nobody knows what it was that waited: it is taken off everything alike
            begin = min((event.start_seconds for event in events), default=0.0)  # no device has anything to do
            end = max((event.finish_seconds for event in events), default=0.0)
            besides.append((begin + seconds - end) * own)
            for segment, taken in measure_segment_seconds(events).items():
                spent.setdefault(segment, []).append(taken * own)
        segments = {name: float(np.median(times)) for name, times in spent.items()}
        return Trial(runs.seconds, max(float(np.median(besides)), 0.0), segments, len(runs.calm), runs.waiting)


def measure_segment_seconds(events: Sequence[Event]) -> dict[str, float]:
    """Return, by segment, its run, and the time before it in which its device neither waited nor copied."""
    finish: dict[str, float] = {}
    between: dict[str, float] = {}
    found = {}
    for event in sorted(events, key=lambda event: event.start_seconds):
        gap = event.start_seconds - finish.get(event.device, event.start_seconds)
        between[event.device] = between.get(event.device, 0.0) + gap
        finish[event.device] = event.finish_seconds
        if event.kind == "run":
            found[event.name] = event.finish_seconds - event.start_seconds + between.pop(event.device)
    return found


def _trial_key(bundle: Bundle, feeds: Mapping[str, Array]) -> str:
    """Return the key of a trial: what runs where, on which machine, on which inputs."""
    manifest = bundle.manifest
    apart = {name: record for name, record in manifest.files.items() if name not in (COSTS_FILE, WHOLE_MODEL_FILE)}
    return measurement_cache.key(
        [
            *(measurement_cache.processor(), import_onnxruntime().__version__),
            *map(measurement_cache.file_described, operator_libraries()),
            *(f"{device.id} {device.cores} {device.model}" for device in manifest.target.devices),
            manifest.model_dump_json(include={"programs", "states"}),
            *(f"{name} {record.sha256}" for name, record in sorted({**apart, **manifest.linked}.items())),
            *(f"{name} {measurement_cache.described(value)}" for name, value in sorted(feeds.items())),
        ]
    )


_CachedFloat = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]


class _CachedTrial(BaseModel):
    """A trial as it is kept, each number within what it can be."""

    model_config = ConfigDict(strict=True, extra="ignore")

    step_seconds: _CachedFloat
    request_seconds: _CachedFloat
    segment_seconds: dict[str, _CachedFloat]
    requests: Annotated[int, Field(ge=1, le=10**9)]
    waiting: Annotated[float, Field(ge=0, le=1)]


def _read_cached_trials(name: str, bundles: Sequence[Bundle]) -> tuple[Trial, ...] | None:
    """Return what was kept under a key; None if nothing is, or nothing that makes sense, which is removed then."""
    try:
        data = measurement_cache.read(name)
    except ValueError:
        return None
    if data is None:
        return None
    try:
        kept = TypeAdapter(list[_CachedTrial]).validate_python(data.get("trials"))
    except ValidationError:
        kept = []
    if len(kept) == len(bundles) and all(map(_covers_segments, kept, bundles)):
        return tuple(Trial(**dict(trial)) for trial in kept)
    measurement_cache.damaged(name, "it does not hold these trials")
    return None


def _covers_segments(trial: _CachedTrial, bundle: Bundle) -> bool:
    """Return whether a trial has a time for each segment of a bundle, and for no other."""
    return {segment.id for segment in bundle.manifest.segments} == trial.segment_seconds.keys()
