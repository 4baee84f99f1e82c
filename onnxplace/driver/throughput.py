"""Strategies for many requests in flight: copies, stages, copies of stages, split operators, and all of these together.

Copies of the model on all devices need no transfer and no balance: where they fit, nothing else is considered. With
carried states, whose requests stay on the first route, there are no copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from onnxplace.driver.decision import (
    Candidate,
    InfeasibleStrategy,
    Objective,
    Profiled,
    Result,
    Strategy,
    create_pass,
    rank_texts,
)
from onnxplace.errors import Diagnostic, Figure
from onnxplace.evaluation import RateTrial
from onnxplace.model import Model

# A trial costs some seconds each.
MAX_TRIED = 4
# Strategies that the prediction puts this far behind are not tried, unless they are the best of their kind.
TRIED_RATIO = 1.1
# Kinds of which the best one is always tried: the costs of nodes do not know how busy devices slow each other down.
TRIED_KINDS = ("copies", "stages")
# Predictions in the note.
MAX_LISTED_STRATEGIES = 5
# A plain session is clearly faster below this ratio of intervals; it was not timed in the same turns.
CLEAR_PLAIN_RATIO = 0.9
# Up to this number of devices, all ways to share them among stages are listed; beyond, only even ones.
MAX_PARTITIONED_DEVICES = 8
# Time for the stages of each way to share devices.
PARTITION_SECONDS = 0.5
# Numbers of devices that share operators. Each is a search for layouts over the whole graph.
WAYS = (2, 4, 8, 16, 32, 64)


def make_throughput_objective(*, may_shard: bool) -> Objective:
    """Return the objective of the most requests per second; `may_shard`: whether operators may be split."""

    def propose(profiled: Profiled, results: Sequence[Result]) -> Iterator[Sequence[Strategy]]:
        yield list_simple(profiled)
        if any(map(_covers_all_devices, results)):
            return
        yield from list_copied_stages(profiled, results)
        if may_shard:
            yield list_sharded(profiled)

    return Objective(propose, _choose_tried, _describe, comparison="requests in flight", usual_kind="stages")


def _covers_all_devices(result: Result) -> bool:
    """Return whether a result is a copy of the whole model on every device."""
    if not isinstance(result, Candidate) or not result.strategy.everywhere:
        return False
    return result.devices == len(result.state.target.devices)


def list_simple(profiled: Profiled) -> list[Strategy]:
    """Return one device, copies of it, and stages."""
    count = len(profiled.state.target.devices)
    alone = profiled.replace_placer(create_pass("single"))
    strategies = [Strategy("one device", "one device", alone)]
    if count == 1:
        return strategies
    if not profiled.state[Model].states:
        strategies.append(Strategy(f"{count} copies of the model", "copies", alone, everywhere=True))
    strategies.append(Strategy("stages", "stages", profiled.rest))
    strategies.append(Strategy("stages, not contiguous", "stages", _set_stages(profiled, contiguous=False)))
    return strategies


def _set_stages(profiled: Profiled, **options: object) -> tuple[Any, ...]:
    """Return the passes with other options of the placer of stages."""
    placer: Any = profiled.placer
    return tuple(replace(placer, **options) if step is placer else step for step in profiled.rest)


def list_copied_stages(profiled: Profiled, results: Sequence[Result] = ()) -> Iterator[list[Strategy]]:
    """Yield copies of stages, for each number of stages.

    There is at most one stage more than in the first ones that fit: each costs transfers and balance.
    """
    if profiled.state[Model].states:
        return
    for count, partitions in groupby(_list_partitions(len(profiled.state.target.devices)), key=len):
        fitting = [item.strategy for item in results if isinstance(item, Candidate)]
        if any(item.kind == "copied stages" and len(item.groups) < count - 1 for item in fitting):
            return
        yield [_copy_stages(profiled, parts) for parts in partitions]


def _copy_stages(profiled: Profiled, parts: Sequence[int]) -> Strategy:
    """Return stages on these numbers of devices."""
    is_even = len(set(parts)) == 1
    name = (
        f"{parts[0]} copies of {len(parts)} stages" if is_even else f"stages on {' + '.join(map(str, parts))} devices"
    )
    ends = [sum(parts[: index + 1]) for index in range(len(parts))]
    groups = tuple(tuple(range(end - size, end)) for end, size in zip(ends, parts))
    return Strategy(
        name, "copied stages", _set_stages(profiled, seconds=PARTITION_SECONDS, replicas=tuple(parts)), groups
    )


def list_sharded(profiled: Profiled) -> list[Strategy]:
    """Return split operators over groups of devices: copies of a group, or stages of such groups."""
    strategies, count = [], len(profiled.state.target.devices)
    # Parts have their devices: only their order is searched.
    quick = profiled.replace_placer(create_pass("auto", seconds=0.5))
    for ways in list_ways(count) if count > 1 else ():
        copies = count // ways
        split = create_pass("shard", ways=ways, exact=True)
        if copies == 1:
            strategies.append(Strategy(f"sharded {ways} ways", "sharded", (split, *quick)))
            continue
        groups = tuple(tuple(range(first, copies * ways, ways)) for first in range(ways))
        if not profiled.state[Model].states:
            name = f"{copies} copies, each sharded {ways} ways"
            strategies.append(Strategy(name, "sharded", (split, *quick), groups))
        if count % ways == 0:
            stages = create_pass("shard", ways=ways, exact=True, stages=copies)
            strategies.append(Strategy(f"{copies} stages, each sharded {ways} ways", "sharded", (stages, *quick)))
    return strategies


def list_ways(count: int) -> list[int]:
    """Return the numbers of devices that may share operators.

    >>> list_ways(6)
    [2, 4, 6]
    """
    return sorted({size for size in WAYS if size < count} | {count})


def _list_partitions(count: int) -> list[tuple[int, ...]]:
    """Return ways to share devices among stages, without one device each and without copies of the whole model.

    Fewer stages come first. The stages choose among the groups, so their order does not matter.

    >>> _list_partitions(4)
    [(1, 3), (2, 2), (1, 1, 2)]
    """
    if count > MAX_PARTITIONED_DEVICES:
        sizes = [size for size in range(2, count) if count % size == 0]
        return [(count // size,) * size for size in sizes]
    parts = [part for part in _iterate_partitions(count, 1) if 1 < len(part) < count]
    return sorted(parts, key=lambda part: (len(part), part))


def _iterate_partitions(count: int, least: int) -> Iterator[tuple[int, ...]]:
    """Yield the partitions of a number into ascending parts of at least `least`."""
    yield (count,)
    for first in range(least, count // 2 + 1):
        for others in _iterate_partitions(count - first, first):
            yield (first, *others)


def _rank(fitting: Sequence[Candidate]) -> list[Candidate]:
    return sorted(fitting, key=lambda item: item.interval_seconds)


def _choose_tried(fitting: Sequence[Candidate]) -> list[Candidate]:
    """Return the best by prediction, the best of some kinds, and close ones."""
    ranked = _rank(fitting)
    best_of_kinds = [next((item for item in ranked if item.strategy.kind == kind), None) for kind in TRIED_KINDS]
    close = [item for item in ranked if item.interval_seconds <= ranked[0].interval_seconds * TRIED_RATIO]
    tried = {item.name: item for item in (ranked[0], *best_of_kinds, *close) if item is not None}
    return [*tried.values()][:MAX_TRIED]


def _describe(
    fitting: Sequence[Candidate], infeasible: Sequence[InfeasibleStrategy], kept: Candidate
) -> list[Diagnostic]:
    """Return the notes about what was considered, and about carried states."""
    ranked = _rank(fitting)
    texts = rank_texts([f"{item.name}: {format_rate(item.interval_seconds)}" for item in ranked], MAX_LISTED_STRATEGIES)
    message = f"requests per second by prediction: {'; '.join(texts)}"
    figures = tuple(Figure(item.name, item.interval_seconds) for item in ranked)
    notes = [Diagnostic("P043", message, where="throughput", figures=figures)]
    model = kept.profiled.state[Model]
    if model.states:  # requests of one conversation follow one another
        message = (
            "requests that pass states on follow one another: the predicted rate needs several conversations at a time"
        )
        hint = "session.conversation() begins one; have as many in progress as there are devices"
        notes.append(Diagnostic("P045", message, where=model.name, hint=hint))
    return notes


def format_rate(interval_seconds: float) -> str:
    """Format a time between results as a number of requests per second.

    >>> format_rate(0.01), format_rate(1e-5)
    ('100', '100000')
    """
    form = ".4g" if interval_seconds > 1e-3 else ".0f"
    return f"{1 / interval_seconds:{form}}" if interval_seconds > 0 else "no bound"


def report_plain_session(trial: RateTrial, predicted_seconds: float) -> list[Diagnostic]:
    """Return a note if a trial measured that one session of ONNX Runtime with all cores is clearly faster.

    Other programs slow several devices more than one session: if they did, it is also faster than `predicted_seconds`.
    """
    if not 0 < trial.plain_seconds < CLEAR_PLAIN_RATIO * trial.interval_seconds:
        return []
    if trial.is_doubtful and trial.plain_seconds > predicted_seconds:
        return []
    rates = f"{format_rate(trial.plain_seconds)} requests/s, this bundle {format_rate(trial.interval_seconds)}"
    message = f"one onnxruntime session with all cores is faster: {rates}"
    hint = "run the model itself with onnxruntime, or join small requests to batches (docs/serving.md)"
    return [Diagnostic("P048", message, where="throughput", hint=hint)]
