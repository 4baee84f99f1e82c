"""Decide between placing whole operators and splitting them over devices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from onnxplace.driver.coplacement import place_training_step
from onnxplace.driver.slices import insert_pass, run_slice
from onnxplace.errors import Diagnostic, Figure, InfeasibleError
from onnxplace.facts import Placement, Profile, Shards
from onnxplace.pipeline import OBJECTIVES, Observer, PassSpec, Pipeline, Timing
from onnxplace.problem import predict_single_device_seconds, predict_step_seconds
from onnxplace.report import format_milliseconds
from onnxplace.state import State
from onnxplace.target import Target

SHARD = "shard"
"""The pass that splits operators."""
PLACERS_TRIED = "P040"
"""The code of the note that lists the placers that `auto` tried."""
# Split operators must make the step clearly shorter: they copy weights, and their times are less certain.
MAX_STEP_RATIO = 0.95
# Beyond, the choice of layouts takes a minute or more, which a user has to ask for.
MAX_NODES = 50_000


@dataclass(frozen=True)
class PlacedModel:
    """A placed and split model, with the pipeline that leads to it."""

    steps: Pipeline
    state: State
    unsharded: State | None = None
    """The state before operators were split; None if they were not."""


def place_or_shard(
    steps: Pipeline,
    state: State,
    first: int,
    *,
    compare: bool,
    metadata: bool,
    groups_open: bool,
    observer: Observer | None,
) -> tuple[PlacedModel, tuple[Timing, ...]]:
    """Run the passes of a pipeline from position `first` on, except the last one, which emits.

    `metadata` asks the pass `shard` for ONNX's sharding specifications. With `compare`, they also run after the pass
    `shard`, and the result with the shorter predicted step is kept.
    A placement that does not fit gives way to a sharded one that does. With `groups_open`, groups of a training step
    are compared too.
    """
    place = place_training_step if groups_open and state[Profile].training is not None else _run
    if not compare or len(state.target.devices) < 2 or len(state[Profile].graph) > MAX_NODES:
        steps, placed, timings = place(steps, state, first, observer)
        is_sharded = Shards in placed and placed[Shards].ways > 1
        return PlacedModel(steps, placed, state if is_sharded else None), timings
    sharding = insert_pass(steps, first, PassSpec(SHARD, {"metadata": "true"} if metadata else {}))
    sharded, sharding_times = run_slice(sharding, state, first, first + 1, observer)
    if sharded[Shards].ways == 1:
        steps, placed, timings = place(steps, state, first, observer)
        return PlacedModel(steps, placed), timings
    problem, whole, whole_times = None, None, tuple[Timing, ...]()
    try:
        steps, whole, whole_times = place(steps, state, first, observer)
    except InfeasibleError as error:
        problem = error
    try:
        _, parts, part_times = _run(sharding, sharded, first + 1, observer)
    except InfeasibleError:
        if problem is not None:
            raise problem from None
        assert whole is not None
        return PlacedModel(steps, whole), whole_times
    note = _compare(state, whole, parts)
    if whole is not None and not _is_better(parts, whole):
        return PlacedModel(steps, whole.with_notes(note)), whole_times
    return PlacedModel(sharding, parts.with_notes(note), state), sharding_times + part_times


def _run(
    steps: Pipeline, state: State, first: int, observer: Observer | None
) -> tuple[Pipeline, State, tuple[Timing, ...]]:
    after, timings = run_slice(steps, state, first, len(steps.passes) - 1, observer)
    if Shards in after and after[Shards].ways > 1:
        # Parts have their devices: which placer was kept says nothing of a sharded model.
        notes = tuple(note for note in after.diagnostics if note.code != PLACERS_TRIED)
        after = replace(after, diagnostics=notes)
    return steps, after, timings


def _is_better(parts: State, whole: State) -> bool:
    """Return whether the sharded step is clearly shorter; a placement that only has to fit is kept if it does."""
    if whole[Placement].placer == OBJECTIVES["fit"]:
        return False
    return predict_step_seconds(parts) < MAX_STEP_RATIO * predict_step_seconds(whole)


def _compare(state: State, whole: State | None, parts: State) -> Diagnostic:
    """Return the note that lists what was considered."""
    alone = format_milliseconds(float(predict_single_device_seconds(state).min()))
    placed = "does not fit" if whole is None else format_milliseconds(predict_step_seconds(whole))
    sharded = format_milliseconds(predict_step_seconds(parts))
    ways = parts[Shards].ways
    kept = "whole operators" if whole is not None and not _is_better(parts, whole) else "sharding"
    message = f"one device: {alone}; whole operators placed: {placed}; sharded {ways} ways: {sharded}: kept {kept}"
    figures = [
        Figure("whole operators", predict_step_seconds(whole) if whole is not None else math.inf),
        Figure(f"sharded {ways} ways", predict_step_seconds(parts)),
        Figure("one device", float(predict_single_device_seconds(state).min())),
    ]
    kept_first = figures if kept == "whole operators" else [figures[1], figures[0], figures[2]]
    return Diagnostic("P062", message, figures=tuple(item for item in kept_first if math.isfinite(item.seconds)))


def report_spare_ways(ways: int | None, target: Target) -> list[Diagnostic]:
    """Return a note if the user asked for more ways than there are devices."""
    count = len(target.devices)
    if ways is None or ways <= count:
        return []
    message = f"operators can be split over {count} devices at most, {ways} were asked for"
    return [Diagnostic("P063", message, where="--shard", hint="name more devices with --devices")]
