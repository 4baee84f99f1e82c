"""The least step: whole operators placed or operators split over devices, and values computed again if nothing fits.

This is also how a pipeline or a placer of the user runs: then there is a single strategy, which is theirs. What limits
a step, and whether fixed sizes would shorten it, follows from the chain of events that determines its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onnxplace.driver.decision import (
    Candidate,
    InfeasibleStrategy,
    Objective,
    Profiled,
    Result,
    Strategy,
    create_pass,
    decide,
    predict,
)
from onnxplace.driver.streamed import STREAMED, describe_streaming, needs_streaming
from onnxplace.driver.training_steps import choose_grouping, describe_groupings, list_groupings
from onnxplace.errors import Diagnostic, Figure, InfeasibleError
from onnxplace.facts import Placement, Profile, Recomputation, Routes, Schedule, Segments, Shards, Source, Streaming
from onnxplace.model import Model
from onnxplace.passes.profiling import device_peaks
from onnxplace.pipeline import OBJECTIVES, Observer
from onnxplace.problem import device_seconds, placement_problem, predict_single_device_seconds, predict_waiting_seconds
from onnxplace.reports import PlacedStep, divide_chain
from onnxplace.simulation import memory_share
from onnxplace.state import Pass
from onnxplace.utils import format_milliseconds

# Split operators, and weights that stream, must make the step clearly shorter: their times are less certain.
MIN_GAIN = 0.05
# Beyond, the choice of layouts takes a minute or more, which a user has to ask for.
MAX_NODES = 50_000
# For a hint, that is too long much earlier.
MAX_HINTED_NODES = 5_000
# The share of the peak rate at which a node moves bytes if memory limits it: an estimate assumes the peak, and real
# kernels come close to half of it or more.
ESTIMATED_SHARE, MEASURED_SHARE = 0.99, 0.5
# Limits of recomputation that are tried in turn, as shares of the memory of all devices. A schedule that just fits one
# device is cut into many segments, so a smaller one comes first. Several devices are never filled evenly.
SHARES_OF_ONE = (0.9, 1.0, 0.8, 0.7)
SHARES_OF_SEVERAL = (0.95, 0.8, 0.65, 0.5, 0.4)
# Beyond, the choice of what to compute again takes minutes, which a user has to ask for.
MAX_RECOMPUTED_NODES = 20_000


def make_latency_objective(
    *, may_shard: bool, shard_metadata: bool, may_group: bool, stream: Pass | None = None, stream_mode: str = "auto"
) -> Objective:
    """Return the objective of the least step.

    Args:
        may_shard: Whether splitting operators is compared with placing whole ones.
        shard_metadata: Whether the pass `shard` writes ONNX's sharding specifications.
        may_group: Whether groupings of a training step are compared.
        stream: The placer that lets weights stream; None if they must not.
        stream_mode: `auto`, or `always`, which compares nothing with it.
    """

    def propose(profiled: Profiled, results: Sequence[Result]) -> Iterator[Sequence[Strategy]]:
        state, rest = profiled.state, profiled.rest
        has_several = len(state.target.devices) > 1
        is_rewritten = any(Model in step.provides for step in rest)
        streamed = (
            [Strategy(STREAMED, "streamed", profiled.replace_placer(stream), min_gain=MIN_GAIN)] if stream else []
        )
        if streamed and stream_mode == "always":
            yield streamed
            return
        if may_group and has_several and state[Profile].training is not None and not is_rewritten:
            yield from list_groupings(profiled, results)
        else:
            yield [_name_passes(rest)]
        if may_shard and has_several and len(state[Profile].graph) <= MAX_NODES:
            # A placement that only has to fit is kept if it does.
            min_gain = 1.0 if profiled.placer.name == OBJECTIVES["fit"] else MIN_GAIN
            yield [
                Strategy(
                    "sharding", "sharded", (create_pass("shard", metadata=shard_metadata), *rest), min_gain=min_gain
                )
            ]
        if streamed and needs_streaming(profiled, results):
            yield streamed

    return Objective(
        propose,
        choose=lambda fitting: [_choose(fitting)],
        describe=_describe,
        usual_kind="streamed" if stream else "placed",
        is_exploring=False,
    )


def _name_passes(passes: tuple[Pass, ...]) -> Strategy:
    """Return the strategy that the passes of a pipeline are."""
    if any(Routes in step.provides for step in passes):
        return Strategy("copies", "copies", passes)
    if any(step.name == OBJECTIVES["throughput"] for step in passes):
        return Strategy("stages", "stages", passes)
    return Strategy("whole operators", "placed", passes)


def _split_by_kind(
    fitting: Sequence[Candidate],
) -> tuple[Candidate | None, Candidate | None, list[Candidate]]:
    """Return the best of whole operators, the sharded candidate, and all groupings."""
    placed = [item for item in fitting if item.strategy.kind not in ("one device", "sharded", "streamed")]
    alone = next((item for item in fitting if item.strategy.kind == "one device"), None)
    sharded = next((item for item in fitting if item.strategy.kind == "sharded"), None)
    several = choose_grouping(placed) if len(placed) > 1 else placed[0] if placed else None
    return alone or several, sharded, placed


def _choose(fitting: Sequence[Candidate]) -> Candidate:
    """Return the shortest step, where each strategy has at least the gain that it needs."""
    whole, sharded, _ = _split_by_kind(fitting)
    streamed = [item for item in fitting if item.strategy.kind == "streamed"]
    candidates = [item for item in (whole, sharded, *streamed) if item is not None]
    return min(candidates, key=lambda item: item.step_seconds / max(1 - item.strategy.min_gain, 1e-12))


def _describe(
    fitting: Sequence[Candidate], infeasible: Sequence[InfeasibleStrategy], kept: Candidate
) -> list[Diagnostic]:
    """Return the notes about groupings, unless operators are split, and about splitting, where that was possible."""
    if kept.strategy.kind == "streamed":
        return [describe_streaming(kept, [item for item in fitting if item is not kept])]
    whole, sharded, placed = _split_by_kind(fitting)
    notes = [describe_groupings(placed, kept)] if len(placed) > 1 and kept is not sharded else []
    if sharded is None:
        return notes
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
    return [*notes, Diagnostic("P062", message, figures=(*figures, Figure("one device", one_device)))]


@dataclass(frozen=True)
class StepPart:
    """A part of a predicted step."""

    kind: str
    """`launches` of nodes; `memory rate`: what they wait for memory; `computes`: what they compute; `copies` between
    devices, and `waits` for them; `streamed weights` that are waited for; `calls` of segments and of the request."""
    seconds: float
    count: int
    """Number of nodes, copies, waits or segments."""


def list_step_parts(built: Candidate) -> tuple[StepPart, ...]:
    """Return the parts of the predicted step, the longest first; together they are the step.

    They are those of the chain of nodes and copies that determines its length. By a roofline, a node waits for memory
    after its launch if the bytes that it moves take that long, else it computes. What segments add are calls.
    """
    state, target, ids = built.state, built.state.target, tuple(item.id for item in built.state.target.devices)
    profile, device, calls = state[Profile], state[Placement].device, max(len(state[Segments].segments), 1)
    graph, order, simulation = profile.graph, state[Schedule].order, state[Schedule].simulation
    seconds, nodes = device_seconds(profile, target), np.arange(len(device))
    step = PlacedStep(
        graph=graph, seconds=seconds, target=target, device_names=ids, device=device, order=order, simulation=simulation
    )
    peaks = [(item.kernel_seconds, item.bytes_per_second) for item in map(device_peaks, target.devices)]
    kernel_seconds, rate = np.array(peaks).T[:, device]
    launches = np.minimum(seconds[device, nodes], kernel_seconds)
    rest = seconds[device, nodes] - launches
    sources = np.stack([profile.sources[item.cost_class] for item in target.devices])[device, nodes]
    least = np.where(sources == Source.ESTIMATED, ESTIMATED_SHARE, MEASURED_SHARE)
    waits = memory_share(graph, rest * rate, 1.0) >= least
    parts = divide_chain(step, {"launches": launches, "memory rate": rest * waits, "computes": rest * ~waits})
    parts["streamed weights"] = [predict_waiting_seconds(state)] if Streaming in state else []
    parts["calls"] = [(built.step_seconds - sum(map(sum, parts.values()))) / calls] * calls
    items = [StepPart(kind, sum(times), sum(time > 0 for time in times)) for kind, times in parts.items()]
    return tuple(sorted((item for item in items if item.seconds > 0), key=lambda item: -item.seconds))


def suggest_fixed_sizes(kept: Candidate) -> list[Diagnostic]:
    """Return a note if the step would be clearly shorter were the sizes of inputs fixed, so that they can be split.

    The layouts are only chosen where that is possible: nodes are launched and segments called as often as before.
    """
    profiled, model, now = kept.profiled, kept.profiled.state[Model], kept.step_seconds
    fixed = sum(part.seconds for part in list_step_parts(kept) if part.kind in ("launches", "calls"))
    least, profile = fixed + (now - fixed) / len(kept.state.target.devices), profiled.state[Profile]
    is_fixed = not model.dimensions or any(getattr(step, "fixed_sizes", False) for step in profiled.front)
    may_gain = least < (1 - MIN_GAIN) * now and len(profile.graph) <= MAX_HINTED_NODES
    if is_fixed or model.other_sizes or profile.training or not may_gain:
        return []
    try:
        passes = (create_pass("shard", fixed=True), *profiled.replace_placer(create_pass("auto", seconds=0.5)))
        step_seconds = predict(Strategy("fixed sizes", "sharded", passes), profiled).step_seconds
    except InfeasibleError:  # there is nothing to split, or a state grows from call to call
        return []
    times = " instead of ".join(map(format_milliseconds, (step_seconds, now)))
    message = f"with --fixed-sizes, {' or '.join(model.dimensions)} can be split: {times}"
    note = Diagnostic("P069", message, where=model.name, hint="the bundle then takes these sizes alone")
    return [note] if step_seconds < (1 - MIN_GAIN) * now else []


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
    total = int(problem.limit_bytes.sum())
    is_alone = len(profiled.state.target.devices) == 1
    for share in SHARES_OF_ONE if is_alone else SHARES_OF_SEVERAL:
        limit = int(share * (total if is_alone else min(total, int(problem.alone_bytes().min()))))
        smaller = profiled.insert(create_pass("recompute", limit=str(limit)), observer)
        result = smaller.state[Recomputation]
        peak = result.peak_after_bytes
        if result.is_changed and peak not in peaks and not (is_alone and peak > total):
            peaks.add(peak)
            yield smaller
