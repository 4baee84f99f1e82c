"""Finish a bundle: run the candidates, keep the fastest, and predict its times from what was measured.

Candidates run side by side, since the speed of a machine changes from second to second. The prediction decides where
they cannot all run here, and where other work on the machine disturbs them. Nothing is moved into its final place yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.staging import Staging
from onnxplace.driver.candidates import Candidate, create_pass, place_on_one_device, predict
from onnxplace.driver.choose import Comparison, format_rate, report_plain_session
from onnxplace.driver.settings import CompileSettings
from onnxplace.errors import Diagnostic, Figure, InfeasibleError, OnnxplaceError
from onnxplace.facts import Groups, Placement, Profile, Schedule, Segments, Source, is_refused
from onnxplace.feeds.feeds import Array
from onnxplace.graph.op_graph import Floats
from onnxplace.machine import measurement_cache
from onnxplace.measure.host_nodes import report_host_nodes
from onnxplace.measure.rate_trial import RateTrial, apply_rate_trial, choose_in_flight, run_rate_trials
from onnxplace.measure.trial import (
    Trial,
    TrialSessions,
    apply_trial,
    find_trial_doubt,
    find_trial_obstacle,
    replace_manifest,
    report_doubt,
    run_trials,
)
from onnxplace.model.model import Model
from onnxplace.pipeline.pipeline import Pipeline, Timing
from onnxplace.pipeline.select_placer import OBJECTIVES, report_idle_devices
from onnxplace.problem import (
    bound_speedup,
    commit_placement,
    fits_single_device,
    placement_problem,
    predict_single_device_seconds,
)
from onnxplace.state import State
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.target import Device, Target
from onnxplace.utils.progress import progress_part
from onnxplace.utils.quantities import format_milliseconds

# A strategy takes the place of one that the prediction prefers only if its step is clearly shorter.
CLEAR_RATIO = 0.98
# Of a disturbed trial, it counts only if it is shorter by this many times the share of the time that is in doubt.
SURE_DOUBTS = 3
# One device takes the place of several only below this ratio; timings of equal work differ by a few percent.
CLEAR_ONE_DEVICE_RATIO = 0.97
# One session on all cores is written and tried, which takes seconds, only below this ratio.
WORTHWHILE_RATIO = 0.95
# Balanced stages take the place of the best bundle only below this ratio of intervals.
CLEAR_BALANCED_RATIO = 0.99
# Stages are balanced again where they are at most this many times slower than the best.
BALANCED_RATIO = 1.3
# Costs are wrong if a trial is faster by more than this than they allow; overheads, which they leave out, hide that in
# shorter steps.
CREDIBLE_EXCESS, MIN_JUDGED_SECONDS = 1.05, 1e-3
# The same of the sum of costs over the time of one device, whose turns with a bundle leave it colder caches.
CREDIBLE_SUM = 1.1
# Credible ratios of a measured to a predicted time of a segment.
MIN_SCALE, MAX_SCALE = 0.1, 10.0


@dataclass(frozen=True)
class Compiled:
    """A bundle with the pipeline that built it, the times of passes and trial, and notes."""

    bundle: Bundle
    pipeline: str
    timings: tuple[Timing, ...]
    diagnostics: tuple[Diagnostic, ...]
    candidate: Candidate = field(repr=False, compare=False)
    """What was written, by which its step is predicted at other sizes."""


def finish_bundle(
    candidates: Sequence[Candidate], comparison: Comparison, staging: Staging, settings: CompileSettings
) -> Compiled:
    """Run a trial if the costs were measured here, and record the results; the bundle is not yet in its place.

    Args:
        candidates: The best by prediction, which is written, and others that may turn out to be faster.
        comparison: What runs besides the bundle itself.
        staging: Where bundles are written.
        settings: Whether bundles may run, and whether earlier trials may be used.
    """
    kept, step, rate, has_compared = candidates[0], None, None, False
    timings = (*kept.profiled.timings, *kept.timings)
    obstacles = _find_unmeasured_costs(kept.state) if settings.trial else []
    if obstacles is None:
        passes, start = kept.pipeline.passes, time.perf_counter()
        if settings.observer:
            settings.observer("trial", len(passes), len(passes) + 1)
        cache = settings.cache and all(getattr(item, "cache", True) for item in passes)
        trials = _Trials(kept, staging, cache, thorough=settings.effort == "high")
        with trials.sessions:
            kept, step, rate = trials.run(candidates, comparison)
        has_compared = trials.has_compared_one_device
        timings += (Timing("trial", time.perf_counter() - start),)
    # From here on, predictions are those of measured segments, and the measured rate.
    bundle = kept.bundle
    manifest = bundle.manifest if step is None else apply_trial(bundle.manifest, step)
    predicted, faster = manifest.predicted, list[Diagnostic]()
    if rate and step and step.plain and predicted.single_device_fits:
        faster = report_plain_session(rate, step.plain.all_cores_seconds, predicted.interval_seconds)
    elif not has_compared and comparison not in ("steps", "requests in flight"):
        faster = _report_faster_device(kept, manifest.step_seconds, step)
    manifest = manifest if rate is None else apply_rate_trial(manifest, rate)
    kept = kept.with_notes(*(obstacles or ()), *faster, *report_host_nodes(bundle))
    # Emitting twice repeats notes.
    notes = tuple(_name_result(note, staging) for note in dict.fromkeys(kept.state.diagnostics))
    kept = replace(kept, state=replace(kept.state, diagnostics=notes))
    bundle = replace_manifest(bundle, manifest.model_copy(update={"diagnostics": notes}))
    return Compiled(bundle, str(kept.pipeline), timings, notes, kept)


class _Trials:
    """Runs bundles of one model with the same inputs."""

    def __init__(self, first: Candidate, staging: Staging, cache: bool, *, thorough: bool) -> None:
        self._feeds: Mapping[str, Array] = first.unsharded[Model].feeds(first.profiled.seed)
        self._staging, self._cache, self._thorough = staging, cache, thorough
        self.sessions = TrialSessions()
        self.has_compared_one_device = False
        """Whether the faster one of several devices and one was kept, as their turns had it."""

    def run(
        self, candidates: Sequence[Candidate], comparison: Comparison
    ) -> tuple[Candidate, Trial | None, RateTrial | None]:
        """Return the fastest candidate with the trial of its steps, and that with requests in flight."""
        # Requests that pass states on follow one another: there is nothing to gain with several in flight.
        kept, rate = candidates[0], None
        has_states = bool(kept.unsharded[Model].states)
        compares = comparison == "steps" or (comparison == "requests in flight" and not has_states)
        if compares:
            with progress_part(0, 2):
                kept, rate = self._keep_fastest(candidates, comparison)
        # The kept bundle runs alone, too: its segments' times are those of one request at a time.
        with progress_part(int(compares), 1 + (compares or comparison == "one device")):
            kept, step = self._try_steps(kept)
        if step and comparison == "one device":
            with progress_part(1, 2):
                if _find_faster_device(kept, step.step_seconds, step):
                    kept, step = self._compare_with(kept, step, "alone", _place_on_one_device)
                # Overheads hide what is shorter.
                seconds, worthwhile = step.step_seconds, _find_clear_ratio(step, clear=WORTHWHILE_RATIO)
                if step.plain and seconds > MIN_JUDGED_SECONDS and step.plain.all_cores_seconds < worthwhile * seconds:
                    kept, step = self._compare_with(kept, step, "all", _place_on_all_cores)
        return kept, step, rate

    def _try_steps(self, candidate: Candidate) -> tuple[Candidate, Trial | None]:
        """Run a bundle and return its trial.

        If that fails, there is a note instead of a trial; so there is if other programs disturbed a trial that
        contradicts the costs. Raises ExecutionError if the bundle computes something else than the unsplit model.
        """
        bundle = candidate.bundle
        try:
            if problem := self._find_obstacle(bundle):
                return candidate.with_notes(problem), None
            trial = self._run_trial(bundle, self._cache)
            contradiction = _find_contradiction(candidate, trial)
            if contradiction and not trial.is_doubtful:  # measured once more, as either of the two may be wrong
                measurement_cache.forget_used()
                trial = self._run_trial(bundle, cached=False)
                contradiction = _find_contradiction(candidate, trial)
        except OnnxplaceError as problem:
            if problem.code == "C022":
                raise
            message = f"the bundle fails in its trial: {problem.message}"
            hint = "onnxplace verify shows whether the unsplit model fails too"
            return candidate.with_notes(Diagnostic("C021", message, where=problem.where, hint=hint)), None
        name = candidate.state[Model].name
        notes = [Diagnostic("C023", text, where=name) for text in trial.size_notes]
        doubt = find_trial_doubt(trial, name)
        if doubt and contradiction:  # what they took is subtracted, and that may be too much
            message = f"{doubt.message}; it contradicts the costs of nodes, so all figures are predictions"
            return candidate.with_notes(*notes, replace(doubt, message=message)), None
        return candidate.with_notes(*notes, *filter(None, [doubt or contradiction])), trial

    def _run_trial(self, bundle: Bundle, cached: bool) -> Trial:
        is_thorough, used = self._thorough, self.sessions
        return run_trials([bundle], self._feeds, cached=cached, thorough=is_thorough, plain=True, sessions=used)[0]

    def _find_obstacle(self, *bundles: Bundle) -> Diagnostic | None:
        """Return why bundles cannot run next to those that are open, or None."""
        return find_trial_obstacle(*(item for item in bundles if item.path not in self.sessions.opened))

    def _keep_fastest(
        self, candidates: Sequence[Candidate], comparison: Comparison
    ) -> tuple[Candidate, RateTrial | None]:
        """Return the fastest candidate with notes; the first one if none can run, or a bundle fails.

        A strategy for which this machine has no memory is left out where another fits: its devices share the memory,
        whatever their limits are.
        """
        first = candidates[0]
        try:
            paths = [self._staging.sibling_path(f"tried{index}") for index in range(1, len(candidates))]
            written = [first, *(item.write(path) for item, path in zip(candidates[1:], paths))]
            runnable = [item for item in written if not find_trial_obstacle(item.bundle)]
            if not runnable:
                return first, None
            if problem := find_trial_obstacle(*(item.bundle for item in runnable)):
                message = f"{problem.message}; kept {runnable[0].name} by prediction"
                where = "step" if comparison == "steps" else "throughput"
                kept, rate = runnable[0].with_notes(replace(problem, message=message, where=where)), None
            elif comparison == "steps":
                kept, rate = self._compare_steps(runnable), None
                self.sessions.close_all()  # the others take memory
            else:
                kept, rate = self._compare_rates(runnable)
        except (OnnxplaceError, OSError):  # for example a full disk; the trial of the first one reports its own failure
            self.sessions.close_all()
            return first, None
        return kept if kept.strategy is first.strategy else kept.with_notes(*report_idle_devices(kept.state)), rate

    def _compare_steps(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the candidate with the shortest step.

        In doubt, that is the one that the prediction prefers; of devices that share processors, the best one alone.
        """
        if len(candidates) == 1:
            return candidates[0]
        first = min(candidates, key=lambda item: item.devices) if candidates[-1].strategy.devices else candidates[0]
        bundles = [item.bundle for item in candidates]
        trials = run_trials(bundles, self._feeds, cached=self._cache, sessions=self.sessions)
        seconds = {item.name: trial.step_seconds for item, trial in zip(candidates, trials)}
        best = min(candidates, key=lambda item: seconds[item.name] * (CLEAR_RATIO if item is first else 1.0))
        doubt = max(max(trial.waiting, trial.uncertainty) for trial in trials)
        is_clear = seconds[best.name] * (1 + SURE_DOUBTS * doubt) < seconds[first.name]
        if any(trial.is_doubtful for trial in trials) and not is_clear:
            what = f"kept {first.name}, since it is not clear which is faster: in a trial, steps"
            return first.with_notes(report_doubt(what, max(trial.waiting for trial in trials), "step"))
        message = f"a step, measured: {_list_times(seconds, format_milliseconds)}; kept {best.name}"
        return best.with_notes(Diagnostic("P044", message, where="step"))

    def _compare_rates(self, candidates: Sequence[Candidate]) -> tuple[Candidate, RateTrial]:
        """Return the candidate with the most results per second, with requests in flight.

        Stages are placed once more, with the costs of nodes scaled by what their segments took under load, and kept if
        that is faster.
        """
        in_flight = max(choose_in_flight(item.bundle.manifest) for item in candidates)
        with progress_part(0, 2):
            trials = self._run_rates(candidates, in_flight)
        if any(trial.is_doubtful for trial in trials):
            rate = format_rate(trials[0].interval_seconds)
            what = f"kept {candidates[0].name} by prediction: a trial with requests in flight had {rate} requests/s, "
            waiting = max(trial.waiting for trial in trials)
            return candidates[0].with_notes(report_doubt(f"{what}but workers", waiting, "throughput")), trials[0]
        seconds = {item.name: trial.interval_seconds for item, trial in zip(candidates, trials)}
        best, trial = min(zip(candidates, trials), key=lambda pair: pair[1].interval_seconds)
        if balanced := self._balance_stages(candidates, trials):
            with progress_part(1, 2):
                trial, other = self._run_rates([best, balanced], in_flight)
            seconds |= {best.name: trial.interval_seconds, balanced.name: other.interval_seconds}
            is_clear = other.interval_seconds < CLEAR_BALANCED_RATIO * trial.interval_seconds
            if is_clear and not (trial.is_doubtful or other.is_doubtful):
                best, trial = balanced, other
        texts = _list_times(seconds, format_rate)
        message = f"requests per second, measured with {in_flight} in flight: {texts}; kept {best.name}"
        return best.with_notes(Diagnostic("P044", message, where="throughput")), trial

    def _run_rates(self, candidates: Sequence[Candidate], in_flight: int) -> tuple[RateTrial, ...]:
        return run_rate_trials([item.bundle for item in candidates], self._feeds, in_flight, cached=self._cache)

    def _balance_stages(self, candidates: Sequence[Candidate], trials: Sequence[RateTrial]) -> Candidate | None:
        """Return the fastest stages in balance, written; None if there are none, or they are too slow or unchanged."""
        pairs = [
            (trial, item)
            for item, trial in zip(candidates, trials)
            if item.strategy.kind == "stages"
            and not item.is_rewritten
            and len(set(item.state[Placement].device.tolist())) > 1
        ]
        trial, stages = min(pairs, key=lambda pair: pair[0].interval_seconds, default=(None, None))
        fastest = min(trial.interval_seconds for trial in trials)
        if trial is None or stages is None or trial.interval_seconds > BALANCED_RATIO * fastest:
            return None
        balanced = _balance(stages, trial, CLEAR_BALANCED_RATIO * fastest)
        return None if balanced is None else balanced.write(self._staging.sibling_path("balanced"))

    def _compare_with(
        self, several: Candidate, step: Trial, ending: str, place: Callable[[Candidate], Candidate]
    ) -> tuple[Candidate, Trial]:
        """Return the bundle that `place` puts on one device if faster, else the given one."""
        try:
            single = place(several).write(self._staging.sibling_path(ending))
            # A plain session that was faster in nine of ten turns has shown it: the other bundle need not run again.
            plain = step.plain if place is _place_on_one_device else None
            shown = plain if plain and plain.speedup_high < CLEAR_ONE_DEVICE_RATIO else None
            bundles = [single.bundle] if shown else [several.bundle, single.bundle]
            if self._find_obstacle(*bundles):
                return several, step
            *others, one = run_trials(bundles, self._feeds, cached=self._cache, plain=True, sessions=self.sessions)
        except (OnnxplaceError, OSError):  # for example, nodes are pinned to two devices
            return several, step
        if shown and not one.plain:  # nothing tells how the machine's speed changed
            return several, step
        if others:
            step = others[0]
        if place is _place_on_all_cores and one.step_seconds > _find_clear_ratio(step, one) * step.step_seconds:
            return several, step
        self.has_compared_one_device = True
        several_seconds = step.step_seconds
        if shown and one.plain:  # the plain session tells how much faster or slower the machine has become
            several_seconds *= one.plain.one_device_seconds / max(shown.one_device_seconds, 1e-12)
        # They took turns, so that other work slowed both. A plain session that was faster, too, is a second witness.
        is_confirmed = step.plain is not None and step.plain.one_device_seconds < step.step_seconds
        if one.step_seconds > (1.0 if is_confirmed else CLEAR_ONE_DEVICE_RATIO) * several_seconds:
            return several, step
        home = single.state.target.devices[int(single.state[Placement].device[0])].id
        took, alone = format_milliseconds(several_seconds), format_milliseconds(one.step_seconds)
        figures = (Figure(home, one.step_seconds), Figure("several devices", several_seconds))
        message = f"in a trial, a step took {took}, and on {home} alone {alone}: kept {home}"
        placer = several.state[Placement].placer
        note = Diagnostic("P042", message, where=placer, figures=figures)
        return single.with_notes(note, *report_idle_devices(single.state)), one


def _find_clear_ratio(*trials: Trial, clear: float = CLEAR_ONE_DEVICE_RATIO) -> float:
    """Return the ratio of steps below which one session on all cores is clearly faster; 0 while other programs run.

    Those slow several devices more than one session. The speed of a machine that drifts changes for both, in turns.
    """
    doubtful = [trial for trial in trials if trial.is_doubtful]
    if any(trial.waiting > trial.uncertainty for trial in doubtful):
        return 0.0
    return clear / (1 + SURE_DOUBTS * max((trial.uncertainty for trial in doubtful), default=0.0))


def _list_times(seconds: Mapping[str, float], format_seconds: Callable[[float], str]) -> str:
    """Return names with their times, the fastest first."""
    ranked = sorted(seconds.items(), key=lambda item: item[1])
    return "; ".join(f"{name}: {format_seconds(value)}" for name, value in ranked)


def _place_on_one_device(several: Candidate) -> Candidate:
    """Return the strategy with whole operators on the best single device, and the notes about several ones."""
    whole = tuple(step for step in several.strategy.passes if step.name != "shard")
    single = predict(place_on_one_device(replace(several.profiled, rest=whole)), several.profiled)
    if several.is_rewritten:
        return single
    notes = (*several.state.diagnostics, *single.state.diagnostics)
    return replace(single, state=replace(single.state, diagnostics=tuple(dict.fromkeys(notes))))


def _place_on_all_cores(several: Candidate) -> Candidate:
    """Return the model in one session on all cores, as a device that spans the processors of all CPU devices.

    Its costs are measured now. Raises InfeasibleError where the processors are no devices in a row.
    """
    target, front = several.profiled.state.target, several.profiled.front
    numbers = [DeviceAddress.of(device.id).index for device in target.devices if device.is_host]
    is_row = len(numbers) == len(target.devices) and 0 < max(numbers) - min(numbers) == len(numbers) - 1
    # Where no device may hold the model, neither should a session that stands for all of them.
    if target.hosts or not is_row or not fits_single_device(several.unsharded).any():
        raise InfeasibleError("P001", "one session cannot take the place of the devices", where="single")
    names = tuple(f"cpu:{number}" for number in sorted(numbers))
    memory, cores = sum(item.memory_bytes for item in target.devices), sum(item.cores for item in target.devices)
    span = Device(f"cpu:{min(numbers)}-{max(numbers)}", memory, cores=cores, processors=names)
    before = replace(several.profiled.state, target=Target((span,)))
    state, _ = Pipeline(tuple(step for step in front if step.name == "profile")).run(before)
    return predict(place_on_one_device(several.profiled), replace(several.profiled, state=state))


def _balance(stages: Candidate, trial: RateTrial, most_seconds: float) -> Candidate | None:
    """Return the stages placed by costs that are scaled to what each segment took with requests in flight.

    Returns None if that changes nothing, or the interval cannot be less than `most_seconds`: all devices together take
    as long as the nodes do where they are fastest.
    """
    base = stages.profiled.state
    profile, scale = base[Profile], _measure_ratios(stages, trial)
    scaled_seconds = {
        kind: np.where(is_refused(seconds), seconds, seconds * scale) for kind, seconds in profile.seconds.items()
    }
    fastest = np.min([scaled_seconds[device.cost_class] for device in base.target.devices], axis=0)
    if fastest.sum() / len(base.target.devices) >= most_seconds:
        return None
    scaled = replace(profile, seconds=scaled_seconds)
    placing = tuple(step for step in stages.strategy.passes if Segments not in step.provides)
    after, _ = Pipeline(placing).run(base.with_facts(scaled))
    grouped = base.with_facts(after[Groups]) if Groups in after else base
    device, start = after[Placement].device, after[Schedule].simulation.start_seconds
    if np.array_equal(device, stages.state[Placement].device):
        return None
    state = commit_placement(grouped, placement_problem(grouped), device, start, after[Placement].placer)
    state, _ = Pipeline((create_pass("split"),)).run(state)
    state = replace(state, diagnostics=stages.state.diagnostics)
    strategy = replace(stages.strategy, name=f"{stages.name}, balanced by the trial")
    return replace(stages, strategy=strategy, state=state)


def _measure_ratios(candidate: Candidate, trial: RateTrial) -> Floats:
    """Return, per node, the ratio of what its segment took under load to the costs of its nodes."""
    state, bundle = candidate.state, candidate.bundle
    ratios = np.ones(len(state[Profile].graph))
    for record, segment in zip(bundle.manifest.segments, state[Segments].segments):
        device = state.target.devices[segment.device]
        planned = float(state[Profile].seconds[device.cost_class][segment.nodes].sum()) + device.segment_seconds
        if planned > 0:
            ratios[segment.nodes] = np.clip(trial.segment_seconds[record.id] / planned, MIN_SCALE, MAX_SCALE)
    return ratios


def _name_result(note: Diagnostic, staging: Staging) -> Diagnostic:
    """Return a note with the path of the finished bundle."""
    message, where, hint = map(staging.with_final_name, (note.message, note.where, note.hint))
    return replace(note, message=message, where=where, hint=hint)


def are_measured(profile: Profile, cost_classes: Iterable[str]) -> bool:
    """Return whether all costs of these classes of devices were measured, or are known to be nothing."""
    known, sources = (Source.MEASURED, Source.KNOWN), profile.sources
    return all(kind in sources and bool(np.isin(sources[kind], known).all()) for kind in cost_classes)


def _find_unmeasured_costs(state: State) -> list[Diagnostic] | None:
    """Return None if all costs were measured on such devices, else notes.

    A trial would replace costs that the user gave, so there is none, and a note reports that.
    """
    used = {state.target.devices[index].cost_class for index in set(state[Placement].device.tolist())}
    sources = state[Profile].sources
    if are_measured(state[Profile], used):
        return None
    if not any((sources[kind] == Source.GIVEN).any() for kind in used if kind in sources):
        return []
    message = "no trial was run: the predictions use the costs you gave"
    return [Diagnostic("C020", message, where=state[Model].name)]


def _find_faster_device(candidate: Candidate, step_seconds: float, trial: Trial | None) -> tuple[int, float] | None:
    """Return the fastest single device that the model fits on and its step, if below `step_seconds`.

    A trial that ran the model on one device knows better than the costs of nodes.
    """
    if len(set(candidate.state[Placement].device.tolist())) < 2:
        return None
    seconds = predict_single_device_seconds(candidate.unsharded, must_fit=True)
    best = int(seconds.argmin())
    if not np.isfinite(seconds[best]):
        return None
    shortest = trial.plain.one_device_seconds if trial and trial.plain else float(seconds[best])
    return (best, shortest) if shortest < step_seconds else None


def _find_contradiction(candidate: Candidate, trial: Trial) -> Diagnostic | None:
    """Return a note if a trial is faster than its devices can be by the costs of nodes, which are wrong then."""
    if trial.step_seconds < MIN_JUDGED_SECONDS:
        return None
    profile, bound = candidate.unsharded[Profile], candidate.bundle.manifest.predicted.lower_bound_seconds
    most, step, ratio = bound_speedup(profile, candidate.unsharded.target), format_milliseconds(trial.step_seconds), 0.0
    whole, single = min(profile.whole_seconds.values(), default=0.0), math.inf
    if trial.plain:
        single = trial.plain.one_device_seconds
        ratio = single / trial.step_seconds
    excess = 1.0 if trial.is_doubtful else CREDIBLE_EXCESS
    if trial.step_seconds * excess < bound:
        problem = f"the step of {step} is below the lower bound of {format_milliseconds(bound)}"
    elif ratio > excess * most:
        problem = f"the step of {step} is {ratio:.2f} times as fast as one device, and {most:.2f} is the most"
    elif whole > CREDIBLE_SUM * single:
        problem = f"one device takes {format_milliseconds(single)}, and {format_milliseconds(whole)}"
    else:
        return None
    message = f"the figures are less sure than usual: {problem} by the costs of nodes, so these costs are wrong"
    hint = "compile again when the machine is idle: the costs are then measured again"
    return Diagnostic("C004", message, where=candidate.state[Model].name, hint=hint)


def _report_faster_device(candidate: Candidate, step_seconds: float, trial: Trial | None) -> list[Diagnostic]:
    """Return a note if one device is faster than the bundle, which the user asked for, or which could not be tried."""
    aims = (OBJECTIVES["throughput"], OBJECTIVES["fit"])  # which do not aim at the time of one step
    faster = _find_faster_device(candidate, CLEAR_ONE_DEVICE_RATIO * step_seconds, trial)
    if candidate.state[Placement].placer in aims or faster is None:
        return []
    expected = f"{format_milliseconds(faster[1])} a step, the bundle {format_milliseconds(step_seconds)}"
    verb = "is" if trial and trial.plain else "is expected to be"
    message, device = f"one device {verb} faster: {expected}", candidate.state.target.devices[faster[0]]
    return [Diagnostic("P011", message, where=device.id, hint="try --placer single")]
