"""Strategies for training steps: what stays together, split operators, replicas and micro-batches.

For the least latency, whole operators are placed with several groupings of nodes, and predictions choose one. With
`--objective step`, strategies that compute the batch in parts are compared too, and the best ones are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onnxplace.driver.candidates import (
    Candidate,
    InfeasibleStrategy,
    Profiled,
    Result,
    Strategy,
    create_pass,
    place_on_one_device,
)
from onnxplace.driver.choose import Objective, list_ways
from onnxplace.errors import Diagnostic, Figure, UsageError
from onnxplace.facts import Profile
from onnxplace.model.model import Model
from onnxplace.pipeline.select_placer import BAECHI, OBJECTIVES, ObjectiveName
from onnxplace.problem import predict_single_device_seconds
from onnxplace.state import Pass, State
from onnxplace.utils.quantities import format_bytes, format_milliseconds, list_first

# ------------------------------------------------------------------------------------------------- groupings

# Of steps that differ by less, the one that sends less is kept: transfers are what predictions know least about.
MAX_STEP_RATIO = 1.05
# Baechi's placers take the first device that is free, whatever has to be sent. Groups are kept for them that cut the
# traffic to this share, where the step stays clearly shorter than on one device, and is not much longer than others.
MAX_TRAFFIC_SHARE, MAX_ONE_DEVICE_RATIO, MAX_CUTTING_RATIO = 1 / 3, 0.99, 1.25
# Placers that search: alternatives to the usual groups get this share of its time.
SEARCHING, SEARCH_SHARE = ("auto", "multilevel"), 0.5


# Options of `coplace` that decide which nodes of a training step stay together, by name; the usual ones come first.
FOR_SEARCH: Mapping[str, Mapping[str, str]] = {
    "nodes of a parameter together": {},
    "free nodes": {"parameters": "free"},
    "backward with forward nodes": {"backward": "follow"},
}
FOR_BAECHI: Mapping[str, Mapping[str, str]] = {
    "free nodes": {"parameters": "free"},
    "nodes of a parameter together": {},
    "nodes of a parameter and of chains together": {"join": "always"},
    "backward with forward nodes": {"backward": "follow"},
    "backward with forward nodes, no chains": {"backward": "follow", "join": "never"},
    "backward with forward nodes, chains together": {"backward": "follow", "join": "always"},
}


def list_groupings(profiled: Profiled, results: Sequence[Result]) -> Iterator[list[Strategy]]:
    """Yield a training step placed with several groupings; one device too, where that is predicted to be faster.

    For placers that do not search, groups are only an alternative to those that do not fit.
    """
    placer = profiled.placer.name
    is_compared = placer in (*BAECHI, *SEARCHING)
    groupings = [*(FOR_BAECHI if placer in BAECHI else FOR_SEARCH).items()][: None if is_compared else 2]
    for number, (name, options) in enumerate(groupings):
        if is_compared or not any(isinstance(item, Candidate) for item in results):
            passes = [_set_options(step, options, is_alternative=number > 0) for step in profiled.rest]
            yield [Strategy(name, "placed", tuple(passes))]
    fitting = [item for item in results if isinstance(item, Candidate)]
    is_searched = placer == OBJECTIVES["latency"] and fitting
    if is_searched and choose_grouping(fitting).step_seconds > predict_one_device(profiled.state):
        yield [place_on_one_device(profiled)]


def _set_options(step: Any, grouping: Mapping[str, str], *, is_alternative: bool = False) -> Any:
    """Return a pass with the options of a grouping; a search for an alternative is shorter."""
    if step.name == "coplace":
        return replace(step, **grouping)
    if is_alternative and step.name in SEARCHING:
        return replace(step, seconds=step.seconds * SEARCH_SHARE)
    return step


def predict_one_device(state: State) -> float:
    """Return the step on the fastest device that has room for all of it; infinity if none has."""
    return float(predict_single_device_seconds(state, must_fit=True).min())


def choose_grouping(placed: Sequence[Candidate]) -> Candidate:
    """Return the best of several groupings, which are in the order in which they were listed.

    That is the shortest step, or one that is hardly longer and sends less. For Baechi's placers, it is the shortest one
    of those that send at most a third of what free nodes do, are shorter than one device and at most a quarter longer
    than the shortest, if there are any.
    """
    one_device = predict_one_device(placed[0].profiled.state)
    choose = choose_cutting if placed[0].profiled.placer.name in BAECHI else choose_shortest
    return choose(placed, one_device)


def choose_shortest(placed: Sequence[Candidate], one_device: float) -> Candidate:
    """Return the shortest step, or one that is hardly longer and sends less, if one device is not faster than that."""
    shortest = min(item.step_seconds for item in placed)
    limit = max(shortest, min(MAX_STEP_RATIO * shortest, one_device))
    return min((item for item in placed if item.step_seconds <= limit), key=lambda item: item.sent_bytes)


def choose_cutting(placed: Sequence[Candidate], one_device: float) -> Candidate:
    """Return the shortest of the steps that cut the traffic of the first one, else as `choose_shortest`."""
    shortest = min(item.step_seconds for item in placed)
    limit_bytes = MAX_TRAFFIC_SHARE * placed[0].sent_bytes
    limit_seconds = min(MAX_ONE_DEVICE_RATIO * one_device, MAX_CUTTING_RATIO * shortest)
    cutting = [item for item in placed if item.sent_bytes <= limit_bytes and item.step_seconds <= limit_seconds]
    return min(cutting, key=lambda item: item.step_seconds) if cutting else choose_shortest(placed, one_device)


def _choose_placed(fitting: Sequence[Candidate]) -> list[Candidate]:
    """Return one device, which is only listed where it is shorter, or else the best grouping."""
    alone = [item for item in fitting if item.strategy.kind == "one device"]
    return alone or [choose_grouping(fitting) if len(fitting) > 1 else fitting[0]]


def _describe_groupings(
    fitting: Sequence[Candidate], infeasible: Sequence[InfeasibleStrategy], kept: Candidate
) -> list[Diagnostic]:
    """Return the note that lists which groupings were compared, if there were several."""
    placed = [item for item in fitting if item.strategy.kind == "placed"]
    if len(placed) < 2:
        return []
    one_device = predict_one_device(kept.profiled.state)
    alone = "one device does not fit" if one_device == np.inf else f"one device {format_milliseconds(one_device)}"
    texts = [
        f"{item.name} {format_milliseconds(item.step_seconds)} ({format_bytes(item.sent_bytes)} sent)"
        for item in placed
    ]
    message = f"training step: {alone}; placed with {'; '.join(texts)}: kept {kept.name}"
    others = [item for item in placed if item.name != kept.name]
    figures = [Figure(item.name, item.step_seconds) for item in (kept, *others)]
    if one_device < np.inf and kept.name != "one device":
        figures.append(Figure("one device", one_device))
    hint = "--pipeline with coplace{parameters=..., backward=...} chooses another"
    return [Diagnostic("P046", message, hint=hint, figures=tuple(figures))]


# ------------------------------------------------------------------------------------------------- --objective step

# Numbers of micro-batches that are considered.
COUNTS = (2, 4, 8)
# A trial costs some seconds each.
MAX_TRIED = 3
# Strategies that the prediction puts this far behind are not tried.
TRIED_RATIO = 1.25
# Predictions in the note.
MAX_LISTED = 6
# Splitting operators and batches of larger models takes minutes.
MAX_NODES = 50_000


def list_step_strategies(profiled: Profiled, results: Sequence[Result]) -> Iterator[list[Strategy]]:
    """Yield the strategies for a training step, the simple ones first.

    Micro-batches come with the schedule 1F1B, then the best of them with other schedules.
    """
    count = len(profiled.state.target.devices)
    alone = place_on_one_device(profiled)
    if count == 1:
        yield [alone]
        return
    placed = Strategy("whole operators placed", "placed", profiled.replace_placer(create_pass("auto")))
    if len(profiled.state[Profile].graph) > MAX_NODES:
        yield [alone, placed]
        return
    quick = profiled.replace_placer(create_pass("auto", seconds=0.5))
    sharded = [
        Strategy(f"sharded {ways} ways", "sharded", (create_pass("shard", ways=ways, exact=True, fixed=True), *quick))
        for ways in list_ways(count)
    ]
    replicas = [_replicas(profiled, number, count // number) for number in range(2, count + 1) if not count % number]
    yield [alone, placed, *sharded, *replicas, *(_micro_batches(profiled, parts, count, "1f1b") for parts in COUNTS)]
    fitting = [item for item in results if isinstance(item, Candidate) and item.strategy.kind == "micro-batches"]
    if fitting:
        microbatch: Any = min(fitting, key=lambda item: item.step_seconds).strategy.passes[0]
        interleaved = (
            [_micro_batches(profiled, microbatch.count, 2 * count, "1f1b")] if microbatch.count > count else []
        )
        yield [_micro_batches(profiled, microbatch.count, count, "gpipe"), *interleaved]


def _replicas(profiled: Profiled, replicas: int, stages: int) -> Strategy:
    """Return the strategy of replicas that compute parts of the batch, each in stages if it has several devices.

    Gradients stay with the part that they come from.
    """
    parts = replicas * (1 if stages == 1 else 2 * stages)
    name = f"{replicas} replicas" + (f" of {stages} stages x {parts // replicas} micro-batches" if stages > 1 else "")
    passes = _pipeline_parts(profiled, stages, "1f1b", parameters="free", join="never")
    return Strategy(name, "replicas", (create_pass("microbatch", count=parts, replicas=replicas), *passes))


def _micro_batches(profiled: Profiled, parts: int, stages: int, schedule: str) -> Strategy:
    """Return the strategy of stages that take turns with parts of the batch."""
    name = f"{stages} stages x {parts} micro-batches ({schedule})"
    passes = _pipeline_parts(profiled, stages, schedule)
    return Strategy(name, "micro-batches", (create_pass("microbatch", count=parts), *passes))


def _pipeline_parts(profiled: Profiled, stages: int, schedule: str, **grouping: str) -> tuple[Pass, ...]:
    """Return the passes that place parts of a batch on stages; clusters would join parts of different times."""
    passes = profiled.replace_placer(create_pass("pipelined", stages=stages, schedule=schedule))
    return tuple(_set_options(step, grouping) for step in passes if step.name != "fuse")


def _rank(fitting: Sequence[Candidate]) -> list[Candidate]:
    return sorted(fitting, key=lambda item: item.step_seconds)


def _choose_tried(fitting: Sequence[Candidate]) -> list[Candidate]:
    """Return the best by prediction, close ones of other kinds, and one device."""
    best, *others = _rank(fitting)
    chosen = {best.strategy.kind: best}
    for item in others:
        kind = item.strategy.kind
        is_close = item.step_seconds <= TRIED_RATIO * best.step_seconds
        if (is_close or kind == "one device") and len(chosen) < MAX_TRIED + (kind == "one device"):
            chosen.setdefault(kind, item)
    return [*chosen.values()]


def _describe(
    fitting: Sequence[Candidate], infeasible: Sequence[InfeasibleStrategy], kept: Candidate
) -> list[Diagnostic]:
    """Return the note that lists what was considered."""
    texts = list_first(
        [f"{item.name}: {format_milliseconds(item.step_seconds)}" for item in _rank(fitting)], MAX_LISTED
    )
    if infeasible:
        texts.append(f"impossible: {infeasible[0].strategy.name} ({infeasible[0].problem.message})")
        texts += [f"{len(infeasible) - 1} more impossible"] if len(infeasible) > 1 else []
    return [Diagnostic("L068", f"a training step by prediction: {'; '.join(texts)}", where="step")]


# ------------------------------------------------------------------------------------------------- the entry point

GROUPINGS = Objective(list_groupings, _choose_placed, _describe_groupings)
TRAINING_STEP = Objective(list_step_strategies, _choose_tried, _describe, comparison="steps")


def find_objective(name: ObjectiveName, profiled: Profiled) -> Objective | None:
    """Return the strategies for a training step, None for other models.

    Raises UsageError if `step` is the objective for a model that is none. Before it is profiled, one with states may
    be one.
    """
    model, is_profiled = profiled.state[Model], Profile in profiled.state
    roles = profiled.state[Profile].training if is_profiled else None
    if name == "step":
        if roles is None and (is_profiled or not (model.training or model.states)):
            message = "--objective step is for training steps: this model carries no parameters"
            hint = "export it with onnxplace_training.export_training_step, or name its parameters: --state 'new_*=*'"
            raise UsageError("L040", f"{message} from one call to the next", where=model.name, hint=hint)
        return TRAINING_STEP
    # Passes of the user that split operators or batches leave nothing to group.
    is_rewritten = any(Model in step.provides for step in profiled.rest)
    is_open = roles is not None and len(profiled.state.target.devices) > 1 and not is_rewritten
    return GROUPINGS if is_open else None
