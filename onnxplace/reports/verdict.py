"""The verdict of a report: one sentence with one number, and what would help.

What would help is computed, not guessed: the step is simulated again with one thing changed, or taken from what the
compiler compared. Nothing is said where the data do not support it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxplace.graph.op_graph import Floats
from onnxplace.reports.page_records import Advice, AttemptGroup, Bound, Verdict
from onnxplace.reports.step_analysis import PlacedStep
from onnxplace.simulation.simulator import simulate_stream
from onnxplace.simulation.weight_streams import WeightStream
from onnxplace.target.target import Target
from onnxplace.utils.groups import group_pairs
from onnxplace.utils.quantities import format_time

# Smaller shares of a step are no advice, and smaller differences of two no reason.
MIN_SHARE = 0.02
MAX_ADVICE = 4
RATE_LABEL = "A result every, with requests in flight"
"""Of the figure that decides under load."""


@dataclass(frozen=True)
class ReportContext:
    """A plan besides its step and its bound."""

    basis: str
    """`from trial` or `from node costs`."""
    single_device_fits: bool = True
    step_seconds: float | None = None
    """Measured in a trial, if there was one."""
    times_as_fast: float | None = None
    """As one device, in that trial."""
    interval_seconds: float = 0.0
    """Between two results with requests in flight; 0 if unknown."""
    sizes: str = ""
    """Symbolic dimensions with their sizes; empty without any."""
    attempts: tuple[AttemptGroup, ...] = ()
    streams: tuple[tuple[str, WeightStream], ...] = ()
    """Changes of how weights stream, in words, with what the step would wait for then."""


def judge_step(step: PlacedStep, bound: Bound, context: ReportContext) -> Verdict:
    """Return the verdict about a simulated step."""
    limit, seconds = _find_limit(bound)
    verdict = Verdict(
        sentence="",
        basis=context.basis,
        step_seconds=bound.step_seconds if context.step_seconds is None else context.step_seconds,
        times_as_fast=bound.times_as_fast if context.step_seconds is None else context.times_as_fast,
        above_bound=bound.above_bound,
        limit=limit,
        advice=tuple(_list_advice(step, bound, context))[:MAX_ADVICE],
    )
    share = seconds / bound.step_seconds if bound.step_seconds > 0 else 0.0
    used = {step.device_names[device] for device in step.device.tolist()}
    return replace(verdict, sentence=_phrase(verdict, used, share, context))


def _find_limit(bound: Bound) -> tuple[str, float]:
    """Return what takes most of the chain that determines the step, with its seconds."""
    names = {"transfer": "transfers", "weights": "waiting for weights", "wait": "waiting", "request": "the request"}
    parts = group_pairs((names.get(part.kind, part.where), part.seconds) for part in bound.chain)
    return max(((name, sum(own)) for name, own in parts.items()), key=lambda item: item[1], default=("", 0.0))


def _phrase(verdict: Verdict, used: set[str], share: float, context: ReportContext) -> str:
    """Return the sentence of a verdict."""
    parts = []
    if len(used) == 1:
        parts.append(f"All of it runs on one device, {next(iter(used))}")
    elif verdict.times_as_fast is not None:
        single = "one device" if context.single_device_fits else "one device would be, which it does not fit on"
        parts.append(f"{verdict.times_as_fast:.2f} times as fast as {single}")
    if (above := verdict.above_bound) is not None:
        distance = f"{_percent(above)} above the lower bound" if above < 1 else f"{above + 1:.1f} times the lower bound"
        parts.append("at the lower bound" if above < MIN_SHARE / 4 else distance)
    if verdict.limit:
        limit = f"what {verdict.limit} computes" if verdict.limit in used else verdict.limit
        parts.append(f"limited by {limit} ({_percent(share)} of the step)")
    return f"{'; '.join(parts) or 'There is nothing to compute'}."


def _percent(share: float) -> str:
    return f"{100 * share:.{1 if share < 0.1 else 0}f} %"


# ------------------------------------------------------------------------------------------------------ what would help


def _list_advice(step: PlacedStep, bound: Bound, context: ReportContext) -> Iterator[Advice]:
    """Yield what would make a step shorter, what gains most first."""
    now, lowest, single = bound.step_seconds, bound.lower_bound_seconds, bound.single_device_seconds
    if 0 < single <= now * (1 + MIN_SHARE) and len(set(step.device.tolist())) > 1 and context.single_device_fits:
        is_faster = single < now * (1 - MIN_SHARE)
        yield Advice(f"One device is {'faster' if is_faster else 'as fast'}: it takes {format_time(single)}.", single)
    changes = sorted(_try_changes(step, bound, context), key=lambda item: item.step_seconds or 0.0)
    yield from (item for item in changes if (item.step_seconds or 0.0) < now * (1 - MIN_SHARE))
    yield from _advise_batch(step, bound, context)
    if 0 < context.interval_seconds < now * (1 - MIN_SHARE):
        every = format_time(context.interval_seconds)
        yield Advice(f"Several requests in flight: a result every {every}; each one takes as long as before.", None)
    if 0 < lowest < now <= lowest * (1 + MIN_SHARE):
        yield Advice(f"Another placement of the same operators gains at most {format_time(now - lowest)}.", None)


def _try_changes(step: PlacedStep, bound: Bound, context: ReportContext) -> Iterator[Advice]:
    """Yield changes of devices, links and operators with the step that each leads to."""
    base, seconds = step.simulation.makespan_seconds, np.nan_to_num(step.seconds)

    def try_step(what: str, target: Target, times: Floats, stream: WeightStream = step.stream) -> Advice:
        after = simulate_stream(step.graph, times, target, step.device, step.order, stream).makespan_seconds
        now = max(bound.step_seconds - base + after, 0.0)
        saved = 1 - now / bound.step_seconds if bound.step_seconds > 0 else 0.0
        return Advice(f"{what}: the step would take {format_time(now)}, {_percent(saved)} less.", now)

    for what, stream in context.streams:
        yield try_step(what, step.target, seconds, stream)
    if len(step.simulation.transfers):
        links = step.target.with_all_links()
        faster = [
            replace(link, latency_seconds=link.latency_seconds / 2, bytes_per_second=link.bytes_per_second * 2)
            for link in links.links
        ]
        yield try_step("Links twice as fast", replace(links, links=tuple(faster)), seconds)
    if bound.busiest_device:
        busiest = step.device_names.index(bound.busiest_device)
        times = seconds.copy()
        times[busiest] /= 2
        yield try_step(f"A device twice as fast in place of {bound.busiest_device}", step.target, times)
    yield from _advise_splitting(context.attempts, bound.step_seconds)


def _advise_splitting(attempts: Sequence[AttemptGroup], now: float) -> Iterator[Advice]:
    """Yield that splitting operators was predicted to be shorter, if the compiler compared it and kept them whole."""
    for group in attempts:
        kept, best = next(item for item in group.attempts if item.is_kept), group.attempts[0]
        if group.code == "P062" and best is not kept:
            text = f"Splitting operators: {best.name} was predicted at {format_time(best.seconds)}"
            text += f", {kept.name}, which was kept, at {format_time(kept.seconds)}. The option --shard asks for it."
            yield Advice(text, now * best.seconds / kept.seconds)


def _advise_batch(step: PlacedStep, bound: Bound, context: ReportContext) -> Iterator[Advice]:
    """Yield that a larger batch would help, if much of the step does not grow with it."""
    devices = dict(zip(step.device_names, step.target.devices))
    fixed = sum(
        part.seconds if part.kind == "request" else part.events * devices[part.where].segment_seconds
        for part in bound.chain
        if part.kind in ("request", "compute")
    )
    if context.sizes and fixed >= MIN_SHARE * bound.step_seconds:
        share = _percent(min(fixed / bound.step_seconds, 1.0))
        text = f"A larger batch (now {context.sizes}): calls of segments and the request take {format_time(fixed)}"
        yield Advice(f"{text} of the step ({share}) whatever its size.", None)
