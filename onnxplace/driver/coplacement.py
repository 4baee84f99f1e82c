"""Choose which nodes of a training step stay together: compare groups by their predicted step and traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from onnxplace.driver.slices import replace_pass, run_slice
from onnxplace.errors import Diagnostic, Figure, InfeasibleError
from onnxplace.facts import Placement
from onnxplace.model import Model
from onnxplace.pipeline import (
    BAECHI,
    OBJECTIVES,
    Observer,
    PassSpec,
    Pipeline,
    Timing,
    make_spec,
)
from onnxplace.problem import list_transfer_bytes, predict_single_device_seconds, predict_step_seconds
from onnxplace.report import format_bytes, format_milliseconds
from onnxplace.state import State

COPLACE = "coplace"
"""The pass that groups nodes."""
# Of steps that differ by less, the one that sends less is kept: transfers are what predictions know least about.
MAX_STEP_RATIO = 1.05
# Baechi's placers take the first device that is free, whatever has to be sent. Groups are kept for them that cut the
# traffic to this share, where the step stays clearly shorter than on one device, and is not much longer than others.
MAX_TRAFFIC_SHARE, MAX_ONE_DEVICE_RATIO, MAX_CUTTING_RATIO = 1 / 3, 0.99, 1.25
# Placers that search: alternatives to the usual groups get this share of its time.
SEARCHING, SEARCH_SHARE = ("auto", "multilevel"), 0.5

Options = Mapping[str, str]


@dataclass(frozen=True)
class Grouping:
    """Options of `coplace` that decide which nodes of a training step stay together."""

    name: str
    options: Options


TOGETHER = Grouping("nodes of a parameter together", MappingProxyType({}))
FREE = Grouping("free nodes", MappingProxyType({"parameters": "free"}))
FOLLOW = Grouping("backward with forward nodes", MappingProxyType({"backward": "follow"}))
# What is compared, by kind of placer; the usual groups come first.
FOR_SEARCH = (TOGETHER, FREE, FOLLOW)
FOR_BAECHI = (
    FREE,
    TOGETHER,
    Grouping("nodes of a parameter and of chains together", MappingProxyType({"join": "always"})),
    FOLLOW,
    Grouping("backward with forward nodes, no chains", MappingProxyType({"backward": "follow", "join": "never"})),
    Grouping(
        "backward with forward nodes, chains together", MappingProxyType({"backward": "follow", "join": "always"})
    ),
)


@dataclass(frozen=True)
class GroupedStep:
    """A training step that was placed with some grouping."""

    name: str
    steps: Pipeline
    state: State
    timings: tuple[Timing, ...]

    @property
    def step_seconds(self) -> float:
        """Return the predicted step, from the call to the last output."""
        return predict_step_seconds(self.state)

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that devices send each other in a step."""
        return sum(list_transfer_bytes(self.state))

    def __str__(self) -> str:
        return f"{self.name} {format_milliseconds(self.step_seconds)} ({format_bytes(self.sent_bytes)} sent)"


def place_training_step(
    steps: Pipeline, state: State, first: int, observer: Observer | None
) -> tuple[Pipeline, State, tuple[Timing, ...]]:
    """Run the passes of a default pipeline from position `first` on, except the last one, for a training step.

    Several groupings are placed, and one is kept, by predictions: the shortest step, or one that is hardly longer and
    sends less. For Baechi's placers that is the shortest step of those that send at most a third of what free nodes do,
    are shorter than one device and at most a quarter longer than the shortest, if there are any.

    Raises:
        InfeasibleError: no grouping fits.
    """
    position = next((index for index, step in enumerate(steps.passes) if step.name == COPLACE), -1)
    placer = next(step.name for step in steps.passes if Placement in step.provides)
    rewrites = any(Model in step.provides for step in steps.passes[first : max(position, first)])
    if position < first or rewrites or len(state.target.devices) < 2:
        return _run(steps, state, first, observer)
    groupings = FOR_BAECHI if placer in BAECHI else FOR_SEARCH if placer in SEARCHING else (TOGETHER, FREE)
    placed, problem = list[GroupedStep](), None
    for number, grouping in enumerate(groupings):
        if placed and placer not in (*BAECHI, *SEARCHING):
            break  # free nodes are only needed if the usual groups do not fit
        changed = _replace_options(steps, position, grouping.options)
        quick = _shorten_search(changed) if number else changed
        try:
            _, after, timings = _run(quick, state, first, observer)
        except InfeasibleError as error:
            problem = problem or error
            continue
        placed.append(GroupedStep(grouping.name, changed, after, timings))
    if not placed:
        assert problem is not None
        raise problem
    one_device = float(predict_single_device_seconds(state, must_fit=True).min())
    best = _choose_cutting(placed, one_device) if placer in BAECHI else _choose_shortest(placed, one_device)
    notes = [_describe(placed, best, one_device)] if len(placed) > 1 else []
    if placer == OBJECTIVES["latency"] and best.step_seconds > one_device:
        best = _place_alone(best, state, first, observer)
    return best.steps, best.state.with_notes(*notes), best.timings


def _run(
    steps: Pipeline, state: State, first: int, observer: Observer | None
) -> tuple[Pipeline, State, tuple[Timing, ...]]:
    return steps, *run_slice(steps, state, first, len(steps.passes) - 1, observer)


def _replace_options(steps: Pipeline, position: int, options: Options) -> Pipeline:
    """Return a pipeline with more options of one pass; its bundle records that."""
    spec = make_spec(steps.passes[position])
    return replace_pass(steps, position, PassSpec(spec.name, {**spec.options, **options}))


def _shorten_search(steps: Pipeline) -> Pipeline:
    """Return a pipeline whose placer searches for a shorter time."""
    passes: list[Any] = [*steps.passes]
    for index, step in enumerate(passes):
        if step.name in SEARCHING:
            passes[index] = replace(step, seconds=step.seconds * SEARCH_SHARE)
    return Pipeline(tuple(passes))


def _choose_shortest(placed: Sequence[GroupedStep], one_device: float) -> GroupedStep:
    """Return the shortest step, or one that is hardly longer and sends less, if one device is not faster than that."""
    shortest = min(item.step_seconds for item in placed)
    limit = max(shortest, min(MAX_STEP_RATIO * shortest, one_device))
    return min((item for item in placed if item.step_seconds <= limit), key=lambda item: item.sent_bytes)


def _choose_cutting(placed: Sequence[GroupedStep], one_device: float) -> GroupedStep:
    """Return the shortest of the steps that cut the traffic of the first one, else as `_choose_shortest`."""
    shortest = min(item.step_seconds for item in placed)
    limit_bytes = MAX_TRAFFIC_SHARE * placed[0].sent_bytes
    limit_seconds = min(MAX_ONE_DEVICE_RATIO * one_device, MAX_CUTTING_RATIO * shortest)
    cutting = [item for item in placed if item.sent_bytes <= limit_bytes and item.step_seconds <= limit_seconds]
    return min(cutting, key=lambda item: item.step_seconds) if cutting else _choose_shortest(placed, one_device)


def _place_alone(best: GroupedStep, state: State, first: int, observer: Observer | None) -> GroupedStep:
    """Return the step on one device, where that is predicted to be faster."""
    position = next(index for index, step in enumerate(best.steps.passes) if Placement in step.provides)
    steps = replace_pass(best.steps, position, PassSpec("single"))
    try:
        _, after, timings = _run(steps, state, first, observer)
    except InfeasibleError:  # nodes are pinned to several devices
        return best
    return GroupedStep("one device", steps, after, timings)


def _describe(placed: Sequence[GroupedStep], best: GroupedStep, one_device: float) -> Diagnostic:
    """Return the note that lists what was compared."""
    alone = "one device does not fit" if one_device == np.inf else f"one device {format_milliseconds(one_device)}"
    message = f"training step: {alone}; placed with {'; '.join(map(str, placed))}: kept {best.name}"
    others = [Figure(item.name, item.step_seconds) for item in placed if item.name != best.name]
    alone_figure = [Figure("one device", one_device)] if one_device < np.inf and best.name != "one device" else []
    hint = "--pipeline with coplace{parameters=..., backward=...} chooses another"
    figures = (Figure(best.name, best.step_seconds), *others, *alone_figure)
    return Diagnostic("P046", message, hint=hint, figures=figures)
