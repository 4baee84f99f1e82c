"""Try strategies for throughput with requests in flight, and balance stages by what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxplace.bundle import Bundle, Staging
from onnxplace.driver.sharding import PlacedModel
from onnxplace.driver.throughput import Candidate, describe_kept, format_rate
from onnxplace.errors import Diagnostic
from onnxplace.evaluation import RateTrial, choose_in_flight, find_trial_obstacle, report_doubt, run_rate_trials
from onnxplace.facts import Clusters, Emitted, Groups, Placement, Profile, Routes, Schedule, Segments
from onnxplace.feeds import Array
from onnxplace.graph import Floats
from onnxplace.pipeline import Pipeline, make_pass
from onnxplace.problem import commit_placement, placement_problem
from onnxplace.state import State
from onnxplace.utils import progress_part

# Stages are balanced again where they are at most this many times slower than the best.
BALANCED_RATIO = 1.3
# One bundle is faster than another only below this ratio of intervals.
CLEAR_RATIO = 0.99
# Of a measured to a predicted time of a segment; others are measured wrong.
MIN_SCALE, MAX_SCALE = 0.1, 10.0


@dataclass(frozen=True)
class TriedStrategy:
    """The strategy that a trial kept, with its bundle in its state."""

    placed: PlacedModel
    trial: RateTrial | None
    """None where none could be run."""
    note: Diagnostic


@dataclass(frozen=True)
class _Tried:
    name: str
    candidate: Candidate
    trial: RateTrial


def try_strategies(
    candidates: Sequence[Candidate], staging: Staging, feeds: Mapping[str, Array], cache: bool
) -> TriedStrategy | None:
    """Run bundles in turns with requests in flight, and return the one with the most results per second.

    The first candidate is written already; the others are written next to it. Stages are placed once more, with the
    costs of nodes scaled by what their segments took under load, and kept if that is faster. A strategy for which this
    machine has no memory is left out where another fits: its devices share the memory, whatever their limits are.
    Where all of them do not fit at one time, and where other work on the machine disturbs them, the prediction decides.
    Returns None if none can be run here.

    Raises:
        OnnxplaceError: a bundle fails.
    """
    written = [candidates[0], *(write_candidate(item, staging, index) for index, item in enumerate(candidates[1:], 1))]
    written = [item for item in written if not find_trial_obstacle(open_candidate(item))]
    if not written:
        return None
    bundles = [open_candidate(item) for item in written]
    if problem := find_trial_obstacle(*bundles):
        note = replace(problem, message=f"{problem.message}; kept {written[0].name} by prediction", where="throughput")
        return TriedStrategy(written[0].placed, None, note)
    in_flight = max(map(choose_in_flight, (bundle.manifest for bundle in bundles)))
    with progress_part(0, 2):
        trials = run_rate_trials(bundles, feeds, in_flight, cached=cache)
    if any(trial.is_doubtful for trial in trials):
        note = _report_doubt(written[0].name, trials[0], max(trial.waiting for trial in trials))
        return TriedStrategy(written[0].placed, trials[0], note)
    tried = [_Tried(item.name, item, trial) for item, trial in zip(written, trials)]
    best = min(tried, key=lambda item: item.trial.interval_seconds)
    stages = min(
        (item for item in tried if _can_balance(item.candidate)),
        key=lambda item: item.trial.interval_seconds,
        default=None,
    )
    figures = {item.name: item.trial.interval_seconds for item in tried}
    if stages is not None and stages.trial.interval_seconds <= BALANCED_RATIO * best.trial.interval_seconds:
        balanced = write_candidate(_balance(stages), staging, len(candidates))
        if balanced.placed.state[Placement].device.tolist() != stages.candidate.placed.state[Placement].device.tolist():
            with progress_part(1, 2):
                trials = run_rate_trials(
                    [open_candidate(best.candidate), open_candidate(balanced)], feeds, in_flight, cached=cache
                )
            best = replace(best, trial=trials[0])
            figures |= {best.name: trials[0].interval_seconds, balanced.name: trials[1].interval_seconds}
            is_doubtful = any(trial.is_doubtful for trial in trials)
            if not is_doubtful and trials[1].interval_seconds < CLEAR_RATIO * trials[0].interval_seconds:
                best = _Tried(balanced.name, balanced, trials[1])
    note = describe_kept(sorted(figures.items(), key=lambda item: item[1]), in_flight, best.name)
    return TriedStrategy(best.candidate.placed, best.trial, note)


def _report_doubt(kept: str, trial: RateTrial, waiting: float) -> Diagnostic:
    rate = format_rate(trial.interval_seconds)
    what = f"kept {kept} by prediction: a trial with requests in flight had {rate} requests/s, but workers"
    return report_doubt(what, waiting, "throughput")


def open_candidate(candidate: Candidate) -> Bundle:
    """Return the bundle that a candidate was written to."""
    return Bundle.open(candidate.placed.state[Emitted].path)


def write_candidate(candidate: Candidate, staging: Staging, index: int) -> Candidate:
    """Write a bundle next to the first one."""
    placed = candidate.placed
    emit: Any = placed.steps.passes[-1]
    steps = Pipeline((*placed.steps.passes[:-1], replace(emit, path=str(staging.sibling_path(f"tried{index}")))))
    state, _ = Pipeline(steps.passes[-1:]).run(placed.state)
    return replace(candidate, placed=replace(placed, steps=steps, state=state))


def _can_balance(candidate: Candidate) -> bool:
    state = candidate.placed.state
    return candidate.kind == "stages" and len(set(state[Placement].device.tolist())) > 1


def _balance(stages: _Tried) -> Candidate:
    """Return the stages placed by costs that are scaled to what each segment took with requests in flight."""
    placed = stages.candidate.placed
    base = placed.state.without(Groups, Clusters, Placement, Schedule, Segments, Routes, Emitted)
    profile = base[Profile]
    scale = _measured_ratios(placed.state, stages.trial)
    scaled = replace(profile, seconds={kind: seconds * scale for kind, seconds in profile.seconds.items()})
    placing = [step for step in placed.steps.passes if {Groups, Clusters, Placement} & set(step.provides)]
    after, _ = Pipeline(tuple(placing)).run(base.having(scaled))
    device, start = after[Placement].device, after[Schedule].simulation.start_seconds
    grouped = base.having(after[Groups]) if Groups in after else base
    state = commit_placement(grouped, placement_problem(grouped), device, start, after[Placement].placer)
    state, _ = Pipeline((make_pass("split"),)).run(state)
    name = f"{stages.name}, balanced by the trial"
    return replace(stages.candidate, name=name, placed=replace(placed, state=state))


def _measured_ratios(state: State, trial: RateTrial) -> Floats:
    """Return, per node, the ratio of what its segment took under load to the costs of its nodes."""
    profile, bundle = state[Profile], Bundle.open(state[Emitted].path)
    ratios = np.ones(len(profile.graph))
    for record, segment in zip(bundle.manifest.segments, state[Segments].segments):
        device = state.target.devices[segment.device]
        planned = float(profile.seconds[device.cost_class][segment.nodes].sum()) + device.segment_seconds
        if planned > 0:
            ratios[segment.nodes] = np.clip(trial.segment_seconds[record.id] / planned, MIN_SCALE, MAX_SCALE)
    return ratios
