"""Choose the plans of a bundle that is compiled for several sizes, and put them together.

Each size is compiled as if it were the only one. Then every plan runs at every size, in turns, and a set of few plans
is chosen: the one with the least step over all sizes, of which each size takes the fastest. All plans of a set share
the memory of the devices. At sizes between those that take different plans, the plans of the set run too, so that a
session knows where one becomes faster than the other.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise
from typing import Any, TypeVar

import numpy as np

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.manifest import InputRecord, OutputRecord, SizeRecord
from onnxplace.bundle.split_states import COPIED_BYTES_PER_SECOND, SplitStates
from onnxplace.driver.candidates import Candidate, PredictedStep, predict_elsewhere
from onnxplace.driver.join_plans import join_plans
from onnxplace.driver.plan_memory import PlanMemory, fits_together, hold_together
from onnxplace.driver.sources import SizedModel
from onnxplace.driver.trials import Compiled
from onnxplace.errors import Diagnostic, InfeasibleError, NoteWarning, OnnxplaceError
from onnxplace.facts import Placement, Profile
from onnxplace.feeds.dimensions import drop_derived_sizes
from onnxplace.graph.op_graph import Floats
from onnxplace.machine.transfer_rates import find_host_rate
from onnxplace.measure.cached_trials import build_trial_key
from onnxplace.measure.rate_trial import choose_in_flight, run_rate_trials
from onnxplace.measure.trial import find_trial_obstacle, replace_manifest, run_trials
from onnxplace.model.lowering import bind
from onnxplace.model.model import Model
from onnxplace.model.tensors import read_shape_entries
from onnxplace.target.target import Device, Target
from onnxplace.utils.quantities import format_milliseconds

# A further plan has to make the step of some size shorter by more than this, or it is not worth opening.
MIN_PLAN_GAIN = 0.04
# So many sets of one size are compared; larger ones are found by leaving out one plan after the other.
MAX_SETS = 10_000
# Sizes that are tried between two that take different plans: each halves the range in which the other one takes over.
MAX_HALVINGS = 3

_Homes = Mapping[str, tuple[Device, int]]

AnyDeclared = TypeVar("AnyDeclared", InputRecord, OutputRecord)


@dataclass(frozen=True)
class PlanSet:
    """Plans, and the step of the fastest one at each size."""

    plans: tuple[int, ...]
    seconds: Floats
    loss: float
    fastest: tuple[int, ...]
    """The plan of each size."""
    move_seconds: float = 0.0
    """The longest move of states between two plans."""

    @staticmethod
    def of(plans: Sequence[int], steps: Floats, weights: Floats, *, is_worst_ratio: bool) -> PlanSet:
        """Return a set of plans with its weighted step, or its worst ratio to the best step of each size."""
        seconds, fastest = steps[list(plans)].min(axis=0), np.array(plans)[steps[list(plans)].argmin(axis=0)]
        ratios = seconds / steps.min(axis=0)
        loss = float(ratios.max() if is_worst_ratio else seconds @ weights)
        return PlanSet(tuple(plans), seconds, loss, tuple(fastest.tolist()))

    def hold(self, memory: Sequence[PlanMemory], steps: Sequence[Sequence[PredictedStep]]) -> list[PlanMemory]:
        """Return what devices hold for each plan, of all by index, at the sizes that take it."""
        served = {plan: [size for size, other in enumerate(self.fastest) if other == plan] for plan in self.plans}
        return [memory[plan].grow([steps[plan][size].peak_bytes for size in sizes]) for plan, sizes in served.items()]


def rank_sets(
    steps: Floats,
    weights: Floats,
    most: int,
    fits: Callable[[PlanSet], bool],
    *,
    move_seconds: Floats | float = 0.0,
    is_worst_ratio: bool = False,
) -> list[PlanSet]:
    """Return the sets of plans that a bundle could have: the one that it gets, then all others, the best first.

    It gets few plans that are together nearly as fast as any `most` of them.

    Args:
        steps: Seconds of each plan at each size (plans, sizes), infinite where it does not run.
        weights: How often each size is.
        most: The largest number of plans.
        fits: Whether the memory of the devices holds the plans of a set together, at the sizes that take them.
        move_seconds: What it takes to move states from one plan to another [plan, plan], or between any two.
        is_worst_ratio: Whether the largest ratio to the best step of a size counts, instead of the weighted step.

    Raises InfeasibleError if no set of plans takes all sizes.

    >>> rank_sets(np.array([[1.0, 96.0], [2.0, 69.0]]), np.ones(2), 3, lambda item: True)[0].plans
    (0, 1)
    """
    moves, sets = np.broadcast_to(move_seconds, (len(steps),) * 2), list[PlanSet]()
    rate = partial(PlanSet.of, steps=steps, weights=weights, is_worst_ratio=is_worst_ratio)
    for item in map(rate, _list_sets(len(steps), most, lambda plans: rate(plans).loss)):
        move = max((float(moves[pair]) for pair in combinations(item.plans, 2)), default=0.0)
        # Requests of the rarer kinds switch there and back, at least; the time of a move is part of their steps.
        shares = np.bincount(item.fastest, weights)
        lost = 0.0 if is_worst_ratio else move * float(2 * (shares.sum() - shares.max()))
        if np.isfinite(item.seconds).all() and fits(item):
            sets.append(replace(item, loss=item.loss + lost, move_seconds=move))
    if not sets:
        message = "no plans take all sizes together within the memory of the devices"
        hint = "raise --plans or --max-memory, or give fewer sizes"
        raise InfeasibleError("P001", message, where="--shape", hint=hint)
    sets.sort(key=lambda item: (item.loss, len(item.plans)))
    best, limit = sets[0], 1 + MIN_PLAN_GAIN
    enough = [item for item in sets if item.loss <= limit * best.loss and (item.seconds <= limit * best.seconds).all()]
    # Digits that only tell errors of rounding do not decide; then the plan of the first size does.
    chosen = min(enough, key=lambda item: (len(item.plans), float(f"{item.loss:.6g}"), item.plans))
    return [chosen, *(item for item in sets if item is not chosen)]


def _list_sets(count: int, most: int, loss: Callable[[Sequence[int]], float]) -> Iterator[tuple[int, ...]]:
    """Return sets of up to `most` plans: all small ones; of larger ones, if they are many, those without the worst."""
    kept, small = tuple(range(count)), 0
    while small < most and 0 < math.comb(count, small + 1) <= MAX_SETS:
        small += 1
        yield from combinations(kept, small)
    while small < most and small < len(kept):
        yield from [kept] if len(kept) <= most else ()
        # The plan without which the others lose the least.
        kept = min(combinations(kept, len(kept) - 1), key=loss)


def join_sizes(
    compiled: Sequence[Compiled],
    sized: Sequence[SizedModel],
    most: int,
    *,
    measures: bool,
    is_worst_ratio: bool = False,
    is_rate: bool = False,
) -> Compiled:
    """Return the bundle for several sizes, of what was compiled for each of them.

    Args:
        compiled: Bundles, each compiled for one size; all but the first one may be moved.
        sized: The model with each size.
        most: The largest number of plans.
        measures: Whether the plans may run here.
        is_worst_ratio: As for `rank_sets`.
        is_rate: Whether the time between results counts where plans run, with requests in flight, instead of the step.
    """
    keys = [build_trial_key(item.bundle, {}) for item in compiled]  # of all that runs: equal ones are one plan
    plans = [item for index, item in enumerate(compiled) if keys[index] not in keys[:index]]
    bundles = [item.bundle for item in plans]
    weights = np.array([item.weight for item in sized])
    measures = measures and (len(plans) == 1 or find_trial_obstacle(*bundles) is None)
    seed = compiled[0].candidate.profiled.seed
    own = np.array([[key == other for other in keys] for key in dict.fromkeys(keys)])
    predicted = [[predict_elsewhere(item.candidate, size.candidate.profiled) for size in compiled] for item in plans]
    # Plans that are the same are kept once; at each of their sizes, the step is that of the one compiled for it.
    known = np.array([item.bundle.manifest.step_seconds for item in compiled])
    steps = np.where(own, known, np.array([[step.seconds for step in row] for row in predicted]))
    if measures:
        measured = [_measure(bundles, size.model.feeds(seed), is_rate) for size in sized]
        steps = np.where(np.isfinite(steps), np.stack(measured, axis=1), math.inf)
    # A device that needs static shapes leaves other sizes to the host, of which a prediction knows nothing.
    static = np.array([any(segment.static for segment in bundle.manifest.segments) for bundle in bundles])
    is_left_to_host = static[:, None] & ~own
    if not measures:
        steps[is_left_to_host] = math.inf
    memory = [PlanMemory.of(bundle) for bundle in bundles]
    chosen = rank_sets(
        steps,
        weights,
        most,
        lambda item: fits_together(item.hold(memory, predicted)),
        move_seconds=predict_moves([item.candidate for item in plans], compiled[0].candidate.state.target),
        is_worst_ratio=is_worst_ratio,
    )[0]
    # Where a size has its plan, the host takes no other plan's part in it.
    steps[is_left_to_host & own[list(chosen.plans)].any(axis=0)] = math.inf
    # Whoever knows nothing of plans runs the first one: it takes all sizes, with whole operators, if one does.
    first = sorted(
        chosen.plans,
        key=lambda index: (not np.isfinite(steps[index]).all(), bool(bundles[index].manifest.sharding), index),
    )
    used = [bundles[index] for index in first]
    records = [_record(item.model.dimensions, steps[first, index], item.weight) for index, item in enumerate(sized)]
    if measures and len(used) > 1:
        records += _measure_between(used, records, sized[0], is_rate, seed)
    note = _describe_choice(records[: len(sized)], len(first))
    kept = plans[first[0]]
    diagnostics = (*_list_notes([item for index in first for item in plans[index].diagnostics], used), note)
    updates: dict[str, Any] = {"diagnostics": (*_list_notes(kept.bundle.manifest.diagnostics, used), note)}
    together = chosen.hold(memory, predicted)
    updates |= {"held": hold_together(together), "plans_overlap": fits_together(together, sum)}
    if len(used) == 1:
        manifest = used[0].manifest.model_copy(update={**updates, "sizes": tuple(records)})
        return replace(kept, bundle=replace_manifest(used[0], manifest), diagnostics=diagnostics)
    updates["inputs"] = _merge_declared([item.manifest.inputs for item in used], sized[0].model)
    updates["outputs"] = _merge_declared([item.manifest.outputs for item in used], sized[0].model)
    timings = tuple(timing for item in compiled for timing in item.timings)
    return replace(kept, bundle=join_plans(used, updates, records), timings=timings, diagnostics=diagnostics)


def _list_notes(notes: Sequence[Diagnostic], bundles: Sequence[Bundle]) -> list[Diagnostic]:
    """Return notes on plans, each once, without those on devices that are idle in one plan and used in another."""
    working = [(item, {record.id for record in item.manifest.devices if record.nodes}) for item in bundles]
    devices = [device for item, names in working for device in item.target.devices if device.id in names]
    used = {name for device in devices for name in (device.id, *device.processors)}
    return [note for note in dict.fromkeys(notes) if note.code != "P010" or note.where not in used]


def _measure(bundles: Sequence[Bundle], feeds: Mapping[str, Any], is_rate: bool) -> Floats:
    """Return the step of each bundle with some inputs, in turns; infinite for one that does not take them."""
    taking = [item for item in bundles if item.takes_sizes(SplitStates(item.manifest).cut_feeds(feeds))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoteWarning)  # that the host computes a size that is not the plan's own
        if is_rate and taking:
            in_flight = max(choose_in_flight(bundle.manifest) for bundle in taking)
            times = [trial.interval_seconds for trial in run_rate_trials(taking, feeds, in_flight)]
        else:
            times = [trial.step_seconds for trial in (run_trials(taking, feeds, compares=False) if taking else ())]
    steps = {bundle.path: seconds for bundle, seconds in zip(taking, times)}
    return np.array([steps.get(bundle.path, math.inf) for bundle in bundles])


def predict_moves(plans: Sequence[Candidate], target: Target) -> Floats:
    """Return the seconds in which the states of one plan become those of another [plan, plan].

    States that another device has in the other plan leave their device, and enter the other one, through the host's
    memory. They have the bytes that they have after a call.
    """
    homes = [_find_state_homes(plan) for plan in plans]
    used = dict.fromkeys(device for states in homes for device, _ in states.values())
    rates = {item: COPIED_BYTES_PER_SECOND if item.is_host else find_host_rate(target, item) for item in used}

    def leave(own: _Homes, other: _Homes) -> float:
        return sum(size / rates[home] for name, (home, size) in own.items() if other.get(name, (None,))[0] != home)

    left: Floats = np.array([[leave(own, other) for other in homes] for own in homes])
    return left + left.T


def _find_state_homes(plan: Candidate) -> _Homes:
    """Return by name of each state the device that keeps it between calls, and its bytes."""
    model, graph = plan.state[Model], plan.state[Profile].graph
    index = {name: value for value, name in enumerate(graph.value_names)}
    values = ((name, index[model.sources.get(output, output)]) for name, output in model.states.items())
    home = [plan.state.target.devices[device] for device in plan.state[Placement].device]
    return {name: (home[graph.producer[value]], int(graph.value_bytes[value])) for name, value in values}


def _record(sizes: Mapping[str, int], seconds: Floats, weight: float = 0.0) -> SizeRecord:
    steps = tuple(float(step) if math.isfinite(step) else None for step in seconds)
    return SizeRecord(dimensions=dict(sizes), seconds=steps, weight=weight)


def _measure_between(
    bundles: Sequence[Bundle], records: Sequence[SizeRecord], sized: SizedModel, is_rate: bool, seed: int
) -> list[SizeRecord]:
    """Return sizes between those that take different plans, near the one at which the other plan takes over."""
    found = list[SizeRecord]()
    ordered = sorted(records, key=lambda item: min(filter(None, item.seconds), default=0.0))
    for low, high in pairwise(ordered):
        for _ in range(MAX_HALVINGS if None not in (*low.seconds, *high.seconds) else 0):
            middle = find_middle(low.dimensions, high.dimensions)
            if low.fastest == high.fastest or middle in (low.dimensions, high.dimensions):
                break
            try:
                model = bind(sized.model, middle, {})
                record = _record(model.dimensions, _measure(bundles, model.feeds(seed), is_rate))
            except OnnxplaceError:  # not every size is one of the model
                break
            found.append(record)
            low, high = (record, high) if record.fastest == low.fastest else (low, record)
    return found


def find_middle(low: Mapping[str, int], high: Mapping[str, int]) -> dict[str, int]:
    """Return sizes half way between others, on a logarithmic scale; what follows from them is left out.

    >>> find_middle({"batch": 1, "seq": 8}, {"batch": 4, "seq": 128})
    {'batch': 2, 'seq': 33}
    """
    middle = {name: round(math.sqrt((low[name] + 1) * (high[name] + 1)) - 1) for name in low}
    return drop_derived_sizes(middle)


def _merge_declared(records: Sequence[Sequence[AnyDeclared]], model: Model) -> tuple[AnyDeclared, ...]:
    """Return the inputs of all plans, or their outputs; where shapes differ, they are as the model declares them."""
    declared = {value.name: read_shape_entries(value.type) for value in (*model.inputs, *model.outputs)}
    shapes = [{item.name: item.shape for item in items} for items in records]
    return tuple(
        item
        if all(other.get(item.name, item.shape) == item.shape for other in shapes)
        else item.model_copy(update={"shape": declared.get(item.name)})
        for item in records[0]
    )


def _describe_choice(records: Sequence[SizeRecord], count: int) -> Diagnostic:
    """Return the note on the plans that were chosen, and their steps at each size."""
    texts = []
    for record in records:
        steps = ["-" if step is None else format_milliseconds(step) for step in record.seconds]
        best = steps.pop(record.fastest)
        by = f" by plan {record.fastest}" if count > 1 else ""
        texts.append(f"{record.text}: {best}{by}" + (f" ({', '.join(steps)})" if steps else ""))
    what = "one plan" if count == 1 else f"{count} plans"
    return Diagnostic("P047", f"{what} for {len(records)} sizes: {'; '.join(texts)}", where="--shape")
