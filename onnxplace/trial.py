"""Run a bundle once it is compiled, to predict its steps from what its segments take where they are.

The costs of nodes are those of one session over the whole model. Cut into segments, the same nodes take longer: each
session has its own copies of weights, caches are cold after a wait, and other devices use the same memory. How much
depends on model and machine, so it is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import cast

import numpy as np

from onnxplace import cost_cache
from onnxplace.bundle import COSTS, MANIFEST, WHOLE, Bundle, Manifest, TrialRecord
from onnxplace.feeds import Array
from onnxplace.files import write_file
from onnxplace.loads import simulated_loads
from onnxplace.machine import available_memory_bytes, cores, cuda_problem, onnxruntime
from onnxplace.patience import LEAST_RUNS, Patience
from onnxplace.registry import find
from onnxplace.replay import simulate_manifest
from onnxplace.runtime import Event, Result, Runtime, RuntimeSession
from onnxplace.sessions import operator_libraries
from onnxplace.state import Diagnostic

# Clocks and caches settle in this time, and sessions in these steps.
WARM_UP_SECONDS, WARM_UPS = 0.03, 2
# Steps that waited for a core for more of their time than this are no good measure.
DOUBT = 0.05
# Until the standard error of the median step is below this share, or these many steps or seconds.
ENOUGH = Patience(repeat=2000, seconds=1.0, tolerance=0.02)


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


def untried(bundle: Bundle) -> Diagnostic | None:
    """Say why a bundle cannot be run here as it is meant to be, or None."""
    manifest = bundle.manifest
    for device in manifest.target.devices:
        if device.kind == "cuda" and manifest.programs.get(device.id) and (problem := cuda_problem(device.index)):
            return Diagnostic("C020", f"the bundle was not tried out: {problem}", where=device.id)
    asked, there = sum(d.cores for d in manifest.target.devices if d.kind == "cpu"), len(cores())
    if asked > there:
        message = f"the bundle was not tried out: its CPU devices have {asked} cores, this machine {there}"
        return Diagnostic("C020", message, where=manifest.model)
    needs, free = max(manifest.predicted.running_bytes, manifest.predicted.opening_bytes), available_memory_bytes()
    if needs > free:
        message = f"the bundle was not tried out: it would take {needs} bytes of memory, and {free} are free"
        return Diagnostic("C020", message, where=manifest.model)
    return None


def try_out(bundle: Bundle, feeds: Mapping[str, Array], *, cached: bool = True) -> Trial:
    """Run a bundle about a second long; what was measured before, for equal segments and feeds, is used again.

    Raises ExecutionError if a part fails, TargetError if a device is not here.
    """
    name = _key(bundle, feeds)
    if cached and (kept := _recalled(name, bundle.manifest)):
        return kept
    runtime = cast("type[Runtime]", find("runtimes", "onnxruntime"))()
    with runtime.open(bundle, trace=True) as session:
        found = _measured(session, feeds)
    if cached and not doubtful(found):
        with suppress(ValueError):  # a full disk, say: then it is measured again
            cost_cache.write(name, asdict(found))
    return found


def doubtful(trial: Trial) -> bool:
    """Return whether other work on the machine may have made the steps of a trial longer."""
    return trial.waiting > DOUBT and trial.requests > LEAST_RUNS  # few were asked for, or long ones leave no time


def tried(manifest: Manifest, trial: Trial) -> Manifest:
    """Return a manifest that predicts from the segments' times of a trial."""
    segments = tuple(
        segment.model_copy(update={"seconds": trial.segment_seconds[segment.id]}) for segment in manifest.segments
    )
    changed = manifest.model_copy(update={"segments": segments})
    simulation = simulate_manifest(changed)
    busy = dict(zip((device.id for device in manifest.target.devices), simulation.compute_seconds.tolist()))
    predicted = manifest.predicted.model_copy(
        update={
            "step_seconds": simulation.makespan_seconds + trial.request_seconds,
            "interval_seconds": simulated_loads(simulation, manifest.target.target()).interval_seconds,
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


def rewritten(bundle: Bundle, manifest: Manifest) -> Bundle:
    """Put another manifest into a bundle, in place of its own at one stroke."""
    text = manifest.model_dump_json(indent=1)
    write_file(bundle.path / MANIFEST, lambda stream: stream.write(text.encode()))
    return Bundle(bundle.path, manifest)


def _measured(session: RuntimeSession, feeds: Mapping[str, Array]) -> Trial:
    """Run until the step is known well enough."""
    results: list[tuple[tuple[Event, ...], float]] = []

    def once() -> None:
        session.reset_state()  # states that are not fed would go on growing
        result: Result = session.run(feeds)
        results.append((result.events, result.seconds))

    warm = time.perf_counter() + WARM_UP_SECONDS
    while len(results) < WARM_UPS or time.perf_counter() < warm:
        once()
    results.clear()
    runs, _ = ENOUGH.run(once, pool=True)
    calm = [results[index] for index in runs.calm]
    spent: dict[str, list[float]] = {}
    besides = []
    for events, seconds in calm:
        begin = min((event.start_seconds for event in events), default=0.0)  # no device has anything to do: no events
        end = max((event.finish_seconds for event in events), default=0.0)
        besides.append(begin + seconds - end)
        for segment, taken in seconds_by_segment(events).items():
            spent.setdefault(segment, []).append(taken)
    segments = {name: float(np.median(times)) for name, times in spent.items()}
    return Trial(runs.seconds, max(float(np.median(besides)), 0.0), segments, len(calm), runs.waiting)


def seconds_by_segment(events: Sequence[Event]) -> dict[str, float]:
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


def _key(bundle: Bundle, feeds: Mapping[str, Array]) -> str:
    """Return the key of a trial: what runs where, on which machine, on which inputs."""
    manifest = bundle.manifest
    apart = {name: record for name, record in manifest.files.items() if name not in (COSTS, WHOLE)}
    return cost_cache.key(
        [
            *("trial", cost_cache.processor(), onnxruntime().__version__, *operator_libraries()),
            *(f"{device.id} {device.cores} {device.model}" for device in manifest.target.devices),
            manifest.model_dump_json(include={"programs", "states"}),
            *(f"{name} {record.sha256}" for name, record in sorted({**apart, **manifest.linked}.items())),
            *(f"{name} {cost_cache.described(value)}" for name, value in sorted(feeds.items())),
        ]
    )


def _recalled(name: str, manifest: Manifest) -> Trial | None:
    """Return what was kept under a key; None if nothing is, or nothing that makes sense."""
    try:
        data = cost_cache.read(name) or {}
        found = Trial(**{item.name: data[item.name] for item in fields(Trial)})
        times = [found.step_seconds, found.request_seconds, found.waiting, *found.segment_seconds.values()]
        good = all(0 <= seconds < math.inf for seconds in times)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return found if good and {segment.id for segment in manifest.segments} == found.segment_seconds.keys() else None
