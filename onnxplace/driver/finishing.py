"""What remains to be done with a bundle before it is put in place: a trial, and one device alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxplace.bundle import Bundle, DiagnosticRecord, Manifest, Staging
from onnxplace.errors import Diagnostic, OnnxplaceError
from onnxplace.evaluation import Trial, apply_trial, find_trial_obstacle, is_doubtful, replace_manifest, run_trials
from onnxplace.facts import Emitted, Placement, Profile, Source
from onnxplace.model import Model
from onnxplace.pipeline import (
    OBJECTIVES,
    PassSpec,
    Pipeline,
    Timing,
    format_pipeline,
    make_pass,
    parse_pipeline,
    report_idle_devices,
)
from onnxplace.problem import fits_single_device, single_device_seconds
from onnxplace.report import format_milliseconds
from onnxplace.state import State
from onnxplace.target import REQUEST_SECONDS

# Steps that differ by less are not told apart.
CLEARLY = 0.97


@dataclass(frozen=True)
class Settled:
    """A bundle that is done."""

    bundle: Bundle
    steps: Pipeline
    """Those that made it."""
    state: State
    timings: tuple[Timing, ...]


def settled(
    steps: Pipeline,
    state: State,
    staging: Staging,
    *,
    trial: bool,
    cache: bool,
    rethink: bool,
    tell: Callable[[], None],
) -> Settled:
    """Try out a bundle if its costs were measured here, and say in its manifest what came out.

    `rethink`: if one device alone may do better, that is tried too, next to it, and its bundle is the result if it
    does. Nothing is put in its final place yet.
    """
    found, timings = None, []
    why_not = _not_measured(state) if trial else []
    if why_not is None:
        tell()
        began, feeds = time.perf_counter(), state[Model].feeds(_seed(steps))
        found, state = _tried(state, feeds, cache)
        if found is not None and rethink and _alone_sooner(state, found.step_seconds) is not None:
            steps, state, found = _the_better(steps, state, found, feeds, cache, staging)
        timings.append(Timing("trial", time.perf_counter() - began))
    else:
        state = state.saying(*why_not)
    bundle = Bundle.open(state[Emitted].path)
    manifest = bundle.manifest if found is None else apply_trial(bundle.manifest, found)
    state = state.saying(*_slower_than_one(state, manifest.predicted.step_seconds), *_beyond_limits(manifest))
    state = replace(state, diagnostics=tuple(dict.fromkeys(state.diagnostics)))  # emitting twice says things twice
    state = replace(state, diagnostics=tuple(_about_result(note, staging) for note in state.diagnostics))
    said = tuple(DiagnosticRecord(**asdict(note)) for note in state.diagnostics)
    bundle = replace_manifest(bundle, manifest.model_copy(update={"diagnostics": said}))
    return Settled(bundle, steps, state, tuple(timings))


def _about_result(note: Diagnostic, staging: Staging) -> Diagnostic:
    """Return a note that names the finished bundle where it named the unfinished one."""
    return Diagnostic(note.code, *map(staging.named, (note.message, note.where, note.hint)))


def _not_measured(state: State) -> list[Diagnostic] | None:
    """Return None if all costs are from measurements on devices like these, so that a trial goes on where they end.

    Costs that the user gave are what he wants to see used, and that is said.
    """
    used = {state.target.devices[index].cost_class for index in set(state[Placement].device.tolist())}
    sources = state[Profile].sources
    if all(kind in sources and np.isin(sources[kind], (Source.MEASURED, Source.KNOWN)).all() for kind in used):
        return None
    if not any((sources[kind] == Source.GIVEN).any() for kind in used if kind in sources):
        return []
    message = "the bundle was not tried out: predictions are for the costs that were given"
    return [Diagnostic("C020", message, where=state[Model].name)]


def _seed(steps: Pipeline) -> int:
    """Return the seed of the inputs that the costs were measured with."""
    return next((getattr(step, "seed", 0) for step in steps.passes if Profile in step.provides), 0)


def _tried(state: State, feeds: Mapping[str, Any], cache: bool) -> tuple[Trial | None, State]:
    """Return how a bundle did; None, and why among the notes, if it could not be run."""
    bundle = Bundle.open(state[Emitted].path)
    try:
        if problem := find_trial_obstacle(bundle):
            return None, state.saying(problem)
        (found,) = run_trials([bundle], feeds, cached=cache)
    except OnnxplaceError as problem:
        message = f"the bundle fails when it is run: {problem.message}"
        hint = "onnxplace verify tells whether the uncut model does, too"
        return None, state.saying(Diagnostic("C021", message, where=problem.where, hint=hint))
    if not is_doubtful(found):
        return found, state
    message = f"the trial is less sure than usual: steps waited {found.waiting:.0%} of their time for a core"
    hint = "compile again when the machine is idle; times like these are not kept"
    return found, state.saying(Diagnostic("C004", message, where=state[Model].name, hint=hint))


def _the_better(
    steps: Pipeline, state: State, found: Trial, feeds: Mapping[str, Any], cache: bool, staging: Staging
) -> tuple[Pipeline, State, Trial]:
    """Return how one device alone does, as another bundle, if that is better; else all unchanged.

    Both run in turns, since a machine may be faster now than a second ago.
    """
    at = next(index for index, step in enumerate(steps.passes) if Placement in step.provides)
    aside = staging.beside("alone")
    try:
        alone, _ = Pipeline(_alone(steps, at, aside).passes[at:]).run(state)
        both = [Bundle.open(state[Emitted].path), Bundle.open(aside)]
        if find_trial_obstacle(*both):
            return steps, state, found
        several, one = run_trials(both, feeds, cached=cache)
        if is_doubtful(several) or is_doubtful(one) or one.step_seconds > CLEARLY * several.step_seconds:
            return steps, state, several
    except (OnnxplaceError, OSError):  # pinned to two devices, say
        return steps, state, found
    home = state.target.devices[int(alone[Placement].device[0])].id
    took = (
        f"a step took {format_milliseconds(several.step_seconds)}, "
        f"and on {home} alone {format_milliseconds(one.step_seconds)}"
    )
    note = Diagnostic("P042", f"in a trial, {took}: kept {home}", where=state[Placement].placer)
    return _alone(steps, at, aside), alone.saying(note, *report_idle_devices(alone)), one


def _alone(steps: Pipeline, at: int, path: Path) -> Pipeline:
    """Return the pipeline with one device in place of its placer, pass `at`, writing to `path`."""
    emit: Any = steps.passes[-1]
    specs = [*parse_pipeline(emit.pipeline)]
    specs[at] = PassSpec("single")
    emit = replace(emit, path=str(path), pipeline=format_pipeline(specs))
    return Pipeline((*steps.passes[:at], make_pass("single"), *steps.passes[at + 1 : -1], emit))


def _alone_sooner(state: State, step_seconds: float) -> tuple[int, float] | None:
    """Return the device on which the model fits and is expected to take the least, and how long, if that is less."""
    if len(set(state[Placement].device.tolist())) < 2:
        return None
    seconds = np.where(
        fits_single_device(state), single_device_seconds(state[Profile], state.target) + REQUEST_SECONDS, np.inf
    )
    best = int(seconds.argmin())
    return (best, float(seconds[best])) if seconds[best] < step_seconds else None


def _slower_than_one(state: State, step_seconds: float) -> list[Diagnostic]:
    """Say so when one device is expected to be faster than what was decided."""
    aims = (OBJECTIVES["throughput"], OBJECTIVES["fit"])  # they do not aim at the time of one step
    if state[Placement].placer in aims or (found := _alone_sooner(state, CLEARLY * step_seconds)) is None:
        return []
    expected = f"{format_milliseconds(found[1])} a step, this {format_milliseconds(step_seconds)}"
    message = f"one device is expected to be faster: {expected}"
    return [Diagnostic("P011", message, where=state.target.devices[found[0]].id, hint="try --placer single")]


def _beyond_limits(manifest: Manifest) -> list[Diagnostic]:
    """Say where sessions, with their copies of weights, take more than the limit, which bounds weights and values."""
    return [
        Diagnostic(
            "P013",
            f"its sessions and values take {device.process_bytes} bytes of the process, more than its limit of "
            f"{device.limit_bytes}: each session has its own copy of the weights that it reads",
            where=device.id,
            hint="the limit bounds weights, each once, and values; lower it if the process has to keep within it",
        )
        for device in manifest.devices
        if device.process_bytes > device.limit_bytes
    ]
