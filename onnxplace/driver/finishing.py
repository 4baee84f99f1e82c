"""Finish a bundle: run a trial, and compare with one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxplace.bundle import Bundle, DiagnosticRecord, Staging
from onnxplace.driver.sharding import SHARD, PlacedModel
from onnxplace.driver.step_trial import keep_fastest_step
from onnxplace.driver.throughput import Candidate, report_plain_session
from onnxplace.driver.throughput_trial import try_strategies
from onnxplace.errors import Diagnostic, Figure, OnnxplaceError
from onnxplace.evaluation import (
    RateTrial,
    Trial,
    apply_rate_trial,
    apply_trial,
    find_trial_doubt,
    find_trial_obstacle,
    is_doubtful,
    replace_manifest,
    run_trials,
)
from onnxplace.facts import Emitted, Placement, Profile, Shards, Source
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
from onnxplace.problem import predict_single_device_seconds
from onnxplace.report import format_milliseconds
from onnxplace.state import State
from onnxplace.utils import progress_part

# One step is faster than another only below this ratio; timings of equal work differ by a few percent.
CLEAR_STEP_RATIO = 0.97


@dataclass(frozen=True)
class FinishedBundle:
    """A bundle that is ready to be moved into place."""

    bundle: Bundle
    steps: Pipeline
    """The passes that wrote it."""
    state: State
    timings: tuple[Timing, ...]


def finish_bundle(
    placed: PlacedModel,
    staging: Staging,
    *,
    trial: bool,
    cache: bool,
    compare_one_device: bool,
    candidates: Sequence[Candidate] = (),
    compare_steps: bool = False,
    on_trial: Callable[[], None],
) -> FinishedBundle:
    """Run a bundle in a trial if its costs were measured here.

    Record the results.
    `compare_one_device`: if one device alone may be faster, that is tried too, and the faster bundle is the result.
    `candidates`: strategies, the given one first; the best in a trial with requests in flight is the result. With
    `compare_steps`, it is the one with the shortest step. `on_trial` is called before the trial. Nothing is moved into
    its final place yet.
    """
    steps, state = placed.steps, placed.state
    measured, rate, timings = None, None, []
    obstacles = _find_unmeasured_costs(state) if trial else []
    if obstacles is None:
        on_trial()
        start, feeds = time.perf_counter(), state[Model].feeds(_find_seed(steps))
        if candidates and compare_steps:
            with progress_part(0, 2):
                placed = _keep_fastest_step(placed, candidates, staging, feeds, cache)
            steps, state = placed.steps, placed.state
        elif candidates and not state[Model].states:
            with progress_part(0, 2):
                placed, rate = _keep_fastest(placed, candidates, staging, (placed.whole or state)[Model], cache)
            steps, state = placed.steps, placed.state
            feeds = state[Model].feeds(_find_seed(steps))
        # After the candidates, or before the comparison with one device.
        with progress_part(int(bool(candidates)), 1 + (bool(candidates) or compare_one_device)):
            measured, state = _try_bundle(state, feeds, cache)
        faster_device = _find_faster_device(placed, measured.step_seconds) if measured and compare_one_device else None
        if measured and faster_device:
            with progress_part(1, 2):
                steps, state, measured = _compare_with_one_device(placed, state, measured, cache, staging)
        timings.append(Timing("trial", time.perf_counter() - start))
    else:
        state = state.saying(*obstacles)
    bundle = Bundle.open(state[Emitted].path)
    manifest = bundle.manifest if measured is None else apply_trial(bundle.manifest, measured)
    plain = report_plain_session(rate, manifest.predicted.interval_seconds)
    manifest = manifest if rate is None else apply_rate_trial(manifest, rate)
    after = replace(placed, state=state, whole=placed.whole if Shards in state else None)
    faster = plain if candidates else _report_faster_device(after, manifest.predicted.step_seconds)
    state = state.saying(*faster)
    state = replace(state, diagnostics=tuple(dict.fromkeys(state.diagnostics)))  # emitting twice repeats notes
    state = replace(state, diagnostics=tuple(_name_result(note, staging) for note in state.diagnostics))
    records = tuple(DiagnosticRecord(**asdict(note)) for note in state.diagnostics)
    bundle = replace_manifest(bundle, manifest.model_copy(update={"diagnostics": records}))
    return FinishedBundle(bundle, steps, state, tuple(timings))


def _keep_fastest(
    placed: PlacedModel, candidates: Sequence[Candidate], staging: Staging, model: Model, cache: bool
) -> tuple[PlacedModel, RateTrial | None]:
    """Return the strategy that is fastest with requests in flight, and its trial; the given one if none can be run."""
    first = replace(candidates[0], placed=placed)
    try:
        tried = try_strategies([first, *candidates[1:]], staging, model.feeds(_find_seed(placed.steps)), cache)
    except (OnnxplaceError, OSError):  # for example a full disk; the trial of the given one reports its own failure
        return placed, None
    if tried is None:
        return placed, None
    notes = [tried.note, *(report_idle_devices(tried.placed.state) if tried.placed is not placed else ())]
    return replace(tried.placed, state=tried.placed.state.saying(*notes)), tried.trial


def _keep_fastest_step(
    placed: PlacedModel, candidates: Sequence[Candidate], staging: Staging, feeds: Mapping[str, Any], cache: bool
) -> PlacedModel:
    """Return the strategy with the shortest training step; the given one if a bundle fails in its trial."""
    first = replace(candidates[0], placed=placed)
    try:
        kept, notes = keep_fastest_step([first, *candidates[1:]], staging, feeds, cache)
    except (OnnxplaceError, OSError):  # the trial of the given one reports its own failure
        return placed
    if kept is not placed:
        notes += report_idle_devices(kept.state)
    return replace(kept, state=kept.state.saying(*notes))


def _name_result(note: Diagnostic, staging: Staging) -> Diagnostic:
    """Return a note with the path of the finished bundle."""
    message, where, hint = map(staging.with_final_name, (note.message, note.where, note.hint))
    return replace(note, message=message, where=where, hint=hint)


def _find_unmeasured_costs(state: State) -> list[Diagnostic] | None:
    """Return None if all costs were measured on such devices, else notes.

    A trial would replace costs that the user gave, so there is none, and a note reports that.
    """
    used = {state.target.devices[index].cost_class for index in set(state[Placement].device.tolist())}
    sources = state[Profile].sources
    if all(kind in sources and np.isin(sources[kind], (Source.MEASURED, Source.KNOWN)).all() for kind in used):
        return None
    if not any((sources[kind] == Source.GIVEN).any() for kind in used if kind in sources):
        return []
    message = "the bundle was not tried out: predictions are for the costs that were given"
    return [Diagnostic("C020", message, where=state[Model].name)]


def _find_seed(steps: Pipeline) -> int:
    """Return the seed of the inputs that costs were measured with."""
    return next((getattr(step, "seed", 0) for step in steps.passes if Profile in step.provides), 0)


def _try_bundle(state: State, feeds: Mapping[str, Any], cache: bool) -> tuple[Trial | None, State]:
    """Run a bundle and return its trial.

    If that fails, there is a note instead of a trial. Raises ExecutionError if the bundle computes something else than
    the unsplit model.
    """
    bundle = Bundle.open(state[Emitted].path)
    try:
        if problem := find_trial_obstacle(bundle):
            return None, state.saying(problem)
        (measured,) = run_trials([bundle], feeds, cached=cache)
    except OnnxplaceError as problem:
        if problem.code == "C022":
            raise
        message = f"the bundle fails in its trial: {problem.message}"
        hint = "onnxplace verify shows whether the unsplit model fails too"
        return None, state.saying(Diagnostic("C021", message, where=problem.where, hint=hint))
    doubt = find_trial_doubt(measured, state[Model].name)
    return measured, state.saying(doubt) if doubt else state


def _compare_with_one_device(
    placed: PlacedModel, state: State, measured: Trial, cache: bool, staging: Staging
) -> tuple[Pipeline, State, Trial]:
    """Return the bundle on one device if faster, else the given one.

    Both run in turns, since the speed of a machine changes from second to second.
    """
    steps, feeds = placed.steps, (placed.whole or state)[Model].feeds(_find_seed(placed.steps))
    other_path = staging.sibling_path("alone")
    one_device, begin = _replace_placer(placed, other_path)
    try:
        alone, _ = Pipeline(one_device.passes[begin:]).run(placed.whole or state)
        bundles = [Bundle.open(state[Emitted].path), Bundle.open(other_path)]
        if find_trial_obstacle(*bundles):
            return steps, state, measured
        several, one = run_trials(bundles, feeds, cached=cache)
        if is_doubtful(several) or is_doubtful(one) or one.step_seconds > CLEAR_STEP_RATIO * several.step_seconds:
            return steps, state, several
    except (OnnxplaceError, OSError):  # for example, nodes are pinned to two devices
        return steps, state, measured
    home = state.target.devices[int(alone[Placement].device[0])].id
    times = (
        f"a step took {format_milliseconds(several.step_seconds)}, "
        f"and on {home} alone {format_milliseconds(one.step_seconds)}"
    )
    figures = (Figure(home, one.step_seconds), Figure("several devices", several.step_seconds))
    message = f"in a trial, {times}: kept {home}"
    note = Diagnostic("P042", message, where=state[Placement].placer, figures=figures)
    return one_device, alone.saying(note, *report_idle_devices(alone)), one


def _replace_placer(placed: PlacedModel, path: Path) -> tuple[Pipeline, int]:
    """Return the pipeline with `single` as its placer, without sharding, writing to `path`.

    Also the position of the first pass to run: the placer, or for a sharded model the pass that came after `shard`.
    """
    steps = placed.steps
    emit: Any = steps.passes[-1]
    specs, passes = [*parse_pipeline(emit.pipeline)], [*steps.passes[:-1]]
    begin = placer = next(index for index, step in enumerate(passes) if Placement in step.provides)
    passes[placer], specs[placer] = make_pass("single"), PassSpec("single")
    if placed.whole is not None:
        begin = next(index for index, step in enumerate(passes) if step.name == SHARD)
        del passes[begin], specs[begin]
    emit = replace(emit, path=str(path), pipeline=format_pipeline(specs))
    return Pipeline((*passes, emit)), begin


def _find_faster_device(placed: PlacedModel, step_seconds: float) -> tuple[int, float] | None:
    """Return the fastest single device and its step, if below `step_seconds`."""
    if len(set(placed.state[Placement].device.tolist())) < 2:
        return None
    state = placed.whole or placed.state
    seconds = predict_single_device_seconds(state, must_fit=True)
    best = int(seconds.argmin())
    return (best, float(seconds[best])) if seconds[best] < step_seconds else None


def _report_faster_device(placed: PlacedModel, step_seconds: float) -> list[Diagnostic]:
    """Return a note if one device should be faster than the bundle."""
    state = placed.state
    aims = (OBJECTIVES["throughput"], OBJECTIVES["fit"])  # which do not aim at the time of one step
    if (
        state[Placement].placer in aims
        or (faster := _find_faster_device(placed, CLEAR_STEP_RATIO * step_seconds)) is None
    ):
        return []
    expected = f"{format_milliseconds(faster[1])} a step, the bundle {format_milliseconds(step_seconds)}"
    message = f"one device is expected to be faster: {expected}"
    return [Diagnostic("P011", message, where=state.target.devices[faster[0]].id, hint="try --placer single")]
