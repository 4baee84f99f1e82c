"""Choose how to use the devices: propose strategies, predict each, and keep those that are worth a trial.

An `Objective` says which strategies there are, which of those that fit are worth a trial, and how the choice is
described. `decide` is the loop over them. Plugins may have objectives of their own for some models (`find_objective`).

    objective    proposes                                            keeps                       runs in a trial
    latency      whole operators; split operators;                   the shortest step           one device too
                 weights that stream
    throughput   copies, stages, copies of stages, split operators   up to 4, close ones         all, requests in flight
    step         those of a plugin, for training steps               up to 3 kinds, one device   all, step by step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import numpy as np

from onnxplace.driver.candidates import (
    Candidate,
    InfeasibleStrategy,
    Profiled,
    ProposeStrategies,
    Result,
    Strategy,
    create_pass,
    place_on_one_device,
    predict,
    predict_all,
    set_options,
)
from onnxplace.errors import Diagnostic, Figure, InfeasibleError, format_names
from onnxplace.facts import Placement, Profile, Recomputation, Routes, Shards, Streaming
from onnxplace.measure.rate_trial import RateTrial
from onnxplace.model.model import Model
from onnxplace.passes.profiling.streamed_nodes import MIN_STREAMED_BYTES
from onnxplace.pipeline.pipeline import Observer, Timing
from onnxplace.pipeline.select_placer import OBJECTIVES, ObjectiveName
from onnxplace.plugins import ask_plugins
from onnxplace.problem import (
    device_seconds,
    fits_single_device,
    placement_problem,
    predict_single_device_seconds,
    predict_waiting_seconds,
)
from onnxplace.simulation.lower_bounds import bound_divisible_work
from onnxplace.state import Pass
from onnxplace.target.device_kinds import ISOLATE
from onnxplace.target.target import Target
from onnxplace.utils.groups import group_pairs
from onnxplace.utils.jit import budget_clock
from onnxplace.utils.quantities import format_bytes, format_milliseconds, format_time, list_first

Comparison = Literal["none", "one device", "steps", "requests in flight"]
"""What runs in a trial: only the bundle itself; one device too, where it should be faster; or all candidates, one step
after the other, or with requests in flight."""


@dataclass(frozen=True)
class Objective:
    """What is compared, and which strategies are kept."""

    propose: ProposeStrategies
    choose: Callable[[Sequence[Candidate]], list[Candidate]]
    """Returns those that are worth a trial, the best by prediction first, of those that fit, in their order."""
    describe: Callable[[Sequence[Candidate], Sequence[InfeasibleStrategy], Candidate], Sequence[Diagnostic]]
    """Returns the notes about a choice: what fits, what does not, and the best one."""
    comparison: Comparison = "none"
    """Trial that compares the candidates."""
    usual_kind: str = "placed"
    """If nothing fits, the user hears why this kind does not."""
    is_exploring: bool = True
    """Whether users see one step for each strategy rather than the passes of one strategy after the other."""


def find_objective(name: ObjectiveName, profiled: Profiled) -> Objective | None:
    """Return the objective that a plugin has for such a model; None if the usual strategies are all there are.

    Plugins are asked by the entry point `onnxplace.objectives` for strategies that place whole operators (`latency`),
    and for all strategies of a training step (`step`), before the model is profiled, too.
    """
    objective: Objective | None = ask_plugins("objectives", name, profiled)
    return objective


def decide(objective: Objective, profiled: Profiled, observer: Observer | None = None) -> list[Candidate]:
    """Return the candidates that are worth a trial, the best by prediction first, with notes.

    Raises:
        InfeasibleError: nothing fits.
    """
    began = budget_clock()
    # List and predict. Some strategies are only proposed where earlier ones do not fit, so that is one loop.
    results = predict_all(objective.propose, profiled, observer, is_exploring=objective.is_exploring)
    fitting = [item for item in results if isinstance(item, Candidate)]
    infeasible = [item for item in results if isinstance(item, InfeasibleStrategy)]
    if not fitting:
        usual = (item for item in infeasible if item.strategy.kind == objective.usual_kind)
        raise next(usual, infeasible[0]).problem
    # Keep those between which predictions cannot decide: they are off by more than some strategies differ.
    chosen = objective.choose(fitting)
    notes = objective.describe(fitting, infeasible, chosen[0])
    if objective.is_exploring:
        timings = (Timing("strategies", budget_clock() - began),)
        chosen = [replace(item, timings=timings) for item in chosen]
    return [item.with_notes(*notes) for item in chosen]


# ------------------------------------------------------------------------------------------------- the least step

# Split operators, and weights that stream, must make the step clearly shorter: their times are less certain.
MIN_GAIN = 0.05
# Beyond, the choice of layouts takes a minute or more, which a user has to ask for.
MAX_NODES = 50_000
# Limits of recomputation that are tried in turn, as shares of the memory of all devices. A schedule that just fits one
# device is cut into many segments, so a smaller one comes first. Several devices are never filled evenly.
SHARES_OF_ONE = (0.9, 1.0, 0.8, 0.7)
SHARES_OF_SEVERAL = (0.95, 0.8, 0.65, 0.5, 0.4)
# Beyond, the choice of what to compute again takes minutes, which a user has to ask for.
MAX_RECOMPUTED_NODES = 20_000


def make_latency_objective(
    *,
    whole: Objective,
    may_shard: bool,
    shard_metadata: bool = False,
    stream: Pass | None = None,
    stream_mode: str = "auto",
    compares_sets: bool = False,
) -> Objective:
    """Return the objective of the least step.

    Args:
        whole: How whole operators are placed.
        may_shard: Whether splitting operators is compared with placing whole ones.
        shard_metadata: Whether the pass `shard` writes ONNX's sharding specifications.
        stream: The placer that lets weights stream; None if they must not.
        stream_mode: `auto`, or `always`, which compares nothing with it.
        compares_sets: Whether sets of devices that share processors are compared, also in a trial.
    """

    def propose(profiled: Profiled, results: Sequence[Result]) -> Iterator[Sequence[Strategy]]:
        streamed = list_streamed(profiled, stream)
        if streamed and stream_mode == "always":
            yield streamed
            return
        sets = list_device_sets(profiled.state.target) if compares_sets else [()]
        for ids in sets:
            for strategies in _propose_on(profiled.choose_devices(ids), results, mixes=not ids and len(sets) > 1):
                yield [restrict_strategy(strategy, ids, sets) for strategy in strategies]
        if streamed and needs_streaming(profiled, results):
            yield streamed

    def _propose_on(part: Profiled, results: Sequence[Result], *, mixes: bool) -> Iterator[Sequence[Strategy]]:
        first, state = len(results), part.state
        yield from whole.propose(part, results)
        is_shardable = len(state.target.devices) > 1 and not mixes and len(state[Profile].graph) <= MAX_NODES
        if may_shard and is_shardable:
            # A placement that only has to fit is kept if it does.
            min_gain = 1.0 if part.placer.name == OBJECTIVES["fit"] else MIN_GAIN
            steps = [item.step_seconds for item in results[first:] if isinstance(item, Candidate)]
            limit = (1 - min_gain) * min(steps) if steps else np.inf
            # However operators are split, some device has its share of the work, which may already be too much.
            if bound_divisible_work(device_seconds(state[Profile], state.target), state.target.processors) < limit:
                passes = (create_pass("shard", metadata=shard_metadata), *part.rest)
                yield [Strategy("sharding", "sharded", passes, min_gain=min_gain, max_seconds=limit)]

    def choose(fitting: Sequence[Candidate]) -> list[Candidate]:
        best, fitting = list[Candidate](), [_name_fewer_devices(item) for item in fitting] if compares_sets else fitting
        for ids in dict.fromkeys(item.strategy.devices for item in fitting):
            placed, others = _split_off_whole([item for item in fitting if item.strategy.devices == ids])
            mine = [*(whole.choose(placed) if placed else []), *others]
            best.append(min(mine, key=_weigh_step))
        ranked = sorted(best, key=_weigh_step)
        # One session on all cores is what users compare with, whatever its costs say.
        alone = [item for item in ranked if len(item.strategy.devices) == 1][:2]
        close = [item for item in ranked if _weigh_step(item) <= SET_RATIO * _weigh_step(ranked[0])]
        return list({item.name: item for item in (ranked[0], *alone, *close)}.values())[:MAX_TRIED]

    def describe(
        fitting: Sequence[Candidate], infeasible: Sequence[InfeasibleStrategy], kept: Candidate
    ) -> list[Diagnostic]:
        if kept.strategy.kind == "streamed":
            return [describe_streaming(kept, [item for item in fitting if item is not kept])]
        if len({item.strategy.devices for item in fitting}) > 1:
            return [_compare_sets(fitting, kept)]
        placed, others = _split_off_whole(fitting)
        best = whole.choose(placed)[0] if placed else None
        notes = whole.describe(placed, infeasible, kept) if kept.strategy.kind != "sharded" else []
        sharded = [item for item in others if item.strategy.kind == "sharded"]
        return [*notes, *(_compare_with_sharded(item, best, kept) for item in sharded)]

    usual_kind = "streamed" if stream else "placed"
    return Objective(propose, choose, describe, "steps" if compares_sets else "none", usual_kind, is_exploring=False)


# Devices that share processors. Predictions of sets of them are off by more than those of one set: kernels of other
# providers are fused in other ways.
SET_RATIO = 1.4


def list_device_sets(target: Target) -> list[tuple[str, ...]]:
    """Return sets of devices that are worth strategies of their own; the empty one is all of them.

    If some share processors, these are the devices of each provider, type and options, side by side; each device that
    has several processors, alone; and all, of which some take turns.

    >>> from onnxplace.target.target import Device
    >>> list_device_sets(Target((Device("cpu:0", 1), Device("cpu:1", 1))))
    [()]
    """
    if not target.shares_processors:
        return [()]
    ways, rivals = np.array([max(len(item.processors), 1) for item in target.devices]), target.conflicts
    sharing = np.flatnonzero((ways == 1) & (rivals.sum(axis=1) > 1)).tolist()
    kinds = [(target.devices[index].kind, {**target.devices[index].options, ISOLATE: ""}) for index in sharing]
    groups = group_pairs(((kind, *sorted(options.items())), index) for (kind, options), index in zip(kinds, sharing))
    others = np.flatnonzero((ways == 1) & (rivals.sum(axis=1) == 1)).tolist()
    sides = [group for group in groups.values() if rivals[np.ix_(group, group)].sum() == len(group)]
    spans = [[index] for index in np.flatnonzero(ways > 1).tolist()]
    chosen = [*(sorted([*group, *others]) for group in sides), *spans]
    return [*(tuple(target.devices[index].id for index in group) for group in chosen), ()]


def restrict_strategy(strategy: Strategy, ids: tuple[str, ...], sets: Sequence[tuple[str, ...]]) -> Strategy:
    """Return a strategy for one of several sets of devices, which its name tells from the others."""
    if len(sets) == 1:
        return strategy
    if not ids:  # each change of devices is a call, and cold caches
        return replace(strategy, name=f"{strategy.name} on devices that take turns", min_gain=MIN_GAIN)
    return replace(strategy, name=f"{strategy.name} on {format_names(ids, quoted=False)}", devices=ids)


def _name_fewer_devices(item: Candidate) -> Candidate:
    """Return a candidate over all devices without those that get nothing: they are ways to use the same processors."""
    target = item.state.target
    used = tuple(target.devices[index].id for index in np.unique(item.state[Placement].device).tolist())
    if item.strategy.kind != "placed" or item.strategy.devices or not used:
        return item
    fewer = predict(replace(item.strategy, devices=used), item.profiled)
    return fewer if fewer.step_seconds <= item.step_seconds else item


def _weigh_step(item: Candidate) -> float:
    """Return the predicted step with the gain that its strategy needs."""
    return item.step_seconds / max(1 - item.strategy.min_gain, 1e-12)


def _compare_sets(fitting: Sequence[Candidate], kept: Candidate) -> Diagnostic:
    """Return the note about sets of devices that share processors."""
    ranked = sorted(fitting, key=lambda item: item.step_seconds)
    texts = list_first([f"{item.name}: {format_milliseconds(item.step_seconds)}" for item in ranked], 2 * MAX_TRIED)
    figures = tuple(Figure(item.name, item.step_seconds) for item in ranked)
    message = f"predicted steps: {'; '.join(texts)}: kept {kept.name}"
    return Diagnostic("P062", message, figures=figures)


def _propose_passes(profiled: Profiled, results: Sequence[Result]) -> Iterator[list[Strategy]]:
    """Yield the strategy that the passes of the pipeline are."""
    passes = profiled.rest
    if any(Routes in step.provides for step in passes):
        yield [Strategy("copies", "copies", passes)]
    elif any(step.name == OBJECTIVES["throughput"] for step in passes):
        yield [Strategy("stages", "stages", passes)]
    else:
        yield [Strategy("whole operators", "placed", passes)]


GIVEN_PASSES = Objective(_propose_passes, choose=list, describe=lambda fitting, infeasible, kept: [])
"""The passes as they are, which place whole operators."""


def _split_off_whole(fitting: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Return the candidates with whole operators, all weights held, and the others."""
    kinds = ("sharded", "streamed")
    whole = [item for item in fitting if item.strategy.kind not in kinds]
    return whole, [item for item in fitting if item.strategy.kind in kinds]


def _compare_with_sharded(sharded: Candidate, whole: Candidate | None, kept: Candidate) -> Diagnostic:
    """Return the note about splitting operators."""
    one_device = float(predict_single_device_seconds(kept.profiled.state).min())
    ways = f"sharded {sharded.state[Shards].ways} ways"
    figures = [Figure("whole operators", whole.step_seconds)] if whole else []
    figures.insert(int(kept is whole), Figure(ways, sharded.step_seconds))
    texts = [
        f"one device: {format_milliseconds(one_device)}",
        f"whole operators placed: {format_milliseconds(whole.step_seconds) if whole else 'does not fit'}",
        f"{ways}: {format_milliseconds(sharded.step_seconds)}",
    ]
    message = f"{'; '.join(texts)}: kept {'sharding' if kept is sharded else 'whole operators'}"
    return Diagnostic("P062", message, figures=(*figures, Figure("one device", one_device)))


def decide_or_recompute(
    objective: Objective, profiled: Profiled, mode: str, observer: Observer | None
) -> list[Candidate]:
    """Return what `decide` does; where nothing fits, after computing more and more values again.

    `mode` is `auto`, `off`, `always`, or the limit of the pass `recompute`.
    """
    if mode not in ("auto", "off"):
        recompute = create_pass("recompute", limit="0" if mode == "always" else mode)
        return decide(objective, profiled.insert(recompute, observer), observer)
    try:
        return decide(objective, profiled, observer)
    except InfeasibleError as problem:
        if mode == "off" or len(profiled.state[Profile].graph) > MAX_RECOMPUTED_NODES:
            raise
        for smaller in _recompute_more_and_more(profiled, observer):
            try:
                return decide(objective, smaller, observer)
            except InfeasibleError:
                continue
        raise problem from None


def _recompute_more_and_more(profiled: Profiled, observer: Observer | None) -> Iterator[Profiled]:
    """Yield the model with more and more values computed again, each time with a smaller peak of memory."""
    problem, peaks = placement_problem(profiled.state), set[int]()
    total = problem.target.total_bytes
    has_one_device = len(profiled.state.target.devices) == 1
    for share in SHARES_OF_ONE if has_one_device else SHARES_OF_SEVERAL:
        limit = int(share * (total if has_one_device else min(total, int(problem.alone_bytes().min()))))
        smaller = profiled.insert(create_pass("recompute", limit=str(limit)), observer)
        result = smaller.state[Recomputation]
        peak = result.peak_after_bytes
        if result.is_changed and peak not in peaks and not (has_one_device and peak > total):
            peaks.add(peak)
            yield smaller


# -------------------------------------------------------------------------------------------- weights that stream

STREAMED = "streamed weights"
"""The name of the strategy."""
# Limits of a curve: this number of parts of the memory of the whole model.
CURVE_PARTS = 8


@dataclass(frozen=True)
class StreamPoint:
    """The predicted step with a memory limit of the device to which most weights stream."""

    memory_bytes: int
    step_seconds: float
    waiting_seconds: float
    """The part of the step in which devices wait for weights."""


def list_streamed(profiled: Profiled, stream: Pass | None) -> list[Strategy]:
    """Return the strategy with a placer that lets weights stream, if there is one."""
    return [Strategy(STREAMED, "streamed", profiled.replace_placer(stream), min_gain=MIN_GAIN)] if stream else []


def needs_streaming(profiled: Profiled, results: Sequence[Result]) -> bool:
    """Return whether weights that stream are worth a prediction.

    That is where no single device holds the model, and for the objective `fit` where nothing else fits. Parameters of
    training steps change, so they stay.
    """
    state = profiled.state
    if state[Profile].training is not None or state[Profile].graph.weight_bytes.max(initial=0) < MIN_STREAMED_BYTES:
        return False
    if profiled.placer.name == OBJECTIVES["fit"]:
        return not any(isinstance(item, Candidate) for item in results)
    return not fits_single_device(state).any()


def _find_streaming_device(built: Candidate) -> tuple[int, int]:
    """Return the device to which most bytes stream in a step, or that with most nodes, and what the model needs there.

    The device is its index; the model's bytes are all of its weights and values.
    """
    state = built.state
    graph, device, sizes = state[Profile].graph, state[Placement].device, state[Streaming].weight_bytes
    size = np.array([sizes.get(name, 0) for name in graph.weight_names], dtype=np.int64)
    count = len(state.target.devices)
    streamed = np.bincount(device[graph.weights.rows], size[graph.weights.items], count)
    most = int(streamed.argmax()) if streamed.any() else int(np.bincount(device, minlength=count).argmax())
    return most, int(placement_problem(built.profiled.state).alone_bytes()[most])


def stream_curve(built: Candidate, limits: Iterable[int] = ()) -> list[StreamPoint]:
    """Predict the step of a strategy with weights that stream, for several limits of the device they stream to most.

    By default, limits are parts of the memory that the whole model needs there. Those that are too small are left out.
    Where a limit leaves room for it, the pool keeps its size.
    """
    target, (device, model_bytes) = built.state.target, _find_streaming_device(built)
    whole = int(model_bytes * 1.01)
    stream, points = built.state[Streaming].streams.get(device), list[StreamPoint]()
    for limit in limits or [whole * (part + 1) // CURVE_PARTS for part in range(CURVE_PARTS)]:
        limited = replace(built.profiled.state, target=target.limiting({target.devices[device].id: limit}))
        passes = built.strategy.passes
        if stream and stream.pool_bytes <= limit // 4:
            pool = str(stream.pool_bytes)
            passes = tuple(set_options(step, pool=pool) if Streaming in step.provides else step for step in passes)
        try:
            item = predict(replace(built.strategy, passes=passes), replace(built.profiled, state=limited))
        except InfeasibleError:
            continue
        points.append(StreamPoint(limit, item.step_seconds, predict_waiting_seconds(item.state)))
    return points


def describe_streaming(kept: Candidate, others: Sequence[Candidate]) -> Diagnostic:
    """Return the note about the step of weights that stream, its waits, and what more memory would give."""
    step, waiting = kept.step_seconds, predict_waiting_seconds(kept.state)
    device, model_bytes = _find_streaming_device(kept)
    texts = [f"planned step {format_time(step)}, of which {format_time(waiting)} waits for weights"]
    limit = kept.state.target.devices[device].memory_bytes
    more = max(model_bytes - limit, 0) // 2
    for point in stream_curve(kept, [limit + more]) if more else ():
        texts.append(f"with {format_bytes(more)} more: {format_time(point.step_seconds)}")
    figures = [Figure(STREAMED, step)]
    for other in others:
        texts.append(f"{other.name}, all weights held: {format_time(other.step_seconds)}")
        figures.append(Figure(other.name, other.step_seconds))
    where = kept.state.target.devices[device].id
    hint = "--stream off prevents it; docs/streaming.md"
    return Diagnostic("P068", "; ".join(texts), where=where, hint=hint, figures=tuple(figures))


# -------------------------------------------------------------------------------------------- requests in flight

# A trial costs some seconds each.
MAX_TRIED = 4
# Strategies that the prediction puts this far behind are not tried, unless they are the best of their kind.
TRIED_RATIO = 1.1
# Kinds of which the best one is always tried: the costs of nodes do not know how busy devices slow each other down.
TRIED_KINDS = ("copies", "stages")
# Predictions in the note.
MAX_LISTED_STRATEGIES = 5
# A plain session is clearly faster below this ratio of times; it was not timed in the same turns.
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

    return Objective(propose, _choose_rates, _describe_rates, comparison="requests in flight", usual_kind="stages")


def _covers_all_devices(result: Result) -> bool:
    """Return whether a result is a copy of the whole model on every device."""
    if not isinstance(result, Candidate) or not result.strategy.everywhere:
        return False
    return result.devices == len(result.state.target.devices)


def list_simple(profiled: Profiled) -> list[Strategy]:
    """Return one device, copies of it, and stages."""
    count = len(profiled.state.target.devices)
    one_device = place_on_one_device(profiled)
    if count == 1:
        return [one_device]
    free = profiled.replace_placer(set_options(profiled.placer, contiguous=False))
    stages = [Strategy("stages", "stages", profiled.rest), Strategy("stages, not contiguous", "stages", free)]
    if profiled.state[Model].states:
        return [one_device, *stages]
    copies = Strategy(f"{count} copies of the model", "copies", one_device.passes, everywhere=True)
    return [one_device, copies, *stages]


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
    name = f"stages on {' + '.join(map(str, parts))} devices"
    if len(set(parts)) == 1:
        name = f"{parts[0]} copies of {len(parts)} stages"
    ends = [sum(parts[: index + 1]) for index in range(len(parts))]
    groups = tuple(tuple(range(end - size, end)) for end, size in zip(ends, parts))
    placer = set_options(profiled.placer, seconds=PARTITION_SECONDS, replicas=tuple(parts))
    return Strategy(name, "copied stages", profiled.replace_placer(placer), groups)


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


def _choose_rates(fitting: Sequence[Candidate]) -> list[Candidate]:
    """Return the best by prediction, the best of some kinds, and close ones."""
    ranked = sorted(fitting, key=lambda item: item.interval_seconds)
    best_of_kinds = [next((item for item in ranked if item.strategy.kind == kind), None) for kind in TRIED_KINDS]
    close = [item for item in ranked if item.interval_seconds <= ranked[0].interval_seconds * TRIED_RATIO]
    tried = dict[tuple[object, ...], Candidate]()
    for item in filter(None, (ranked[0], *best_of_kinds, *close)):  # stages that need not be contiguous may be so
        tried.setdefault((item.strategy.kind, item.strategy.groups, item.state[Placement].device.tobytes()), item)
    return [*tried.values()][:MAX_TRIED]


def _describe_rates(
    fitting: Sequence[Candidate], infeasible: Sequence[InfeasibleStrategy], kept: Candidate
) -> list[Diagnostic]:
    """Return the notes about what was considered, and about carried states."""
    ranked = sorted(fitting, key=lambda item: item.interval_seconds)
    texts = list_first([f"{item.name}: {format_rate(item.interval_seconds)}" for item in ranked], MAX_LISTED_STRATEGIES)
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


def report_plain_session(trial: RateTrial, plain_seconds: float, predicted_seconds: float) -> list[Diagnostic]:
    """Return a note if one session of ONNX Runtime with all cores, measured without others, is clearly faster.

    Other programs slow several devices more than one session: if they did, it is also faster than `predicted_seconds`.
    """
    if plain_seconds >= CLEAR_PLAIN_RATIO * trial.interval_seconds:
        return []
    if trial.is_doubtful and plain_seconds > predicted_seconds:
        return []
    rates = f"{format_rate(plain_seconds)} requests/s, this bundle {format_rate(trial.interval_seconds)}"
    message = f"one onnxruntime session with all cores is faster: {rates}"
    hint = "run the model itself with onnxruntime, or join small requests to batches (docs/serving.md)"
    return [Diagnostic("P048", message, where="throughput", hint=hint)]
