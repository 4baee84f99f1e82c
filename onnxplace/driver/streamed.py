"""Weights that stream: where that is worth a prediction, what it gives, and what more memory would give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxplace.driver.decision import BuiltStrategy, Profiled, Result, predict
from onnxplace.errors import Diagnostic, Figure, InfeasibleError
from onnxplace.facts import Placement, Profile, Streaming
from onnxplace.passes.streaming import MIN_STREAMED_BYTES
from onnxplace.pipeline import OBJECTIVES
from onnxplace.problem import fits_single_device, placement_problem, predict_waiting_seconds
from onnxplace.utils import format_bytes, format_time

# Limits of a curve, as parts of the way from the memory that is given to that of the whole model.
CURVE_PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class StreamPoint:
    """The predicted step with a memory limit of the device to which most weights stream."""

    memory_bytes: int
    step_seconds: float
    waiting_seconds: float
    """The part of the step in which devices wait for weights."""


def needs_streaming(profiled: Profiled, results: Sequence[Result]) -> bool:
    """Return whether weights that stream are worth a prediction.

    That is where no single device holds the model, and for the objective `fit` where nothing else fits. Parameters of
    training steps change, so they stay.
    """
    state = profiled.state
    if state[Profile].training is not None or state[Profile].graph.weight_bytes.max(initial=0) < MIN_STREAMED_BYTES:
        return False
    if profiled.placer.name == OBJECTIVES["fit"]:
        return not any(isinstance(item, BuiltStrategy) for item in results)
    return not fits_single_device(state).any()


def stream_curve(built: BuiltStrategy, limits: Iterable[int] | None = None) -> list[StreamPoint]:
    """Predict the step of a strategy with weights that stream, for several limits of the device they stream to most.

    The pool keeps its size. By default, limits are from the one that is given to the memory of the whole model. Limits
    that are too small are left out. Nothing is measured but what weights as inputs cost.
    """
    target = built.state.target
    device = find_streaming_device(built)
    if limits is None:
        given = target.devices[device].memory_bytes
        whole = max(int(placement_problem(built.profiled.state).alone_bytes()[device] * 1.01), given)
        limits = sorted({given + int(part * (whole - given)) for part in CURVE_PARTS})
    streams = built.state[Streaming].streams
    passes = built.strategy.passes
    if device in streams:
        pool = {"pool": str(streams[device].pool_bytes)}
        passes = tuple(replace(step, **pool) if Streaming in step.provides else step for step in passes)
    points = []
    for limit in limits:
        limited = replace(built.profiled.state, target=target.limiting({target.devices[device].id: limit}))
        try:
            item = predict(replace(built.strategy, passes=passes), replace(built.profiled, state=limited))
        except InfeasibleError:
            continue
        points.append(StreamPoint(limit, item.step_seconds, predict_waiting_seconds(item.state)))
    return points


def find_streaming_device(built: BuiltStrategy) -> int:
    """Return the index of the device to which most bytes stream in a step, or of that with most nodes."""
    state = built.state
    graph, device, sizes = state[Profile].graph, state[Placement].device, state[Streaming].weight_bytes
    size = np.array([sizes.get(name, 0) for name in graph.weight_names], dtype=np.int64)
    count = len(state.target.devices)
    streamed = np.bincount(device[graph.weights.rows], size[graph.weights.items], count)
    return int(streamed.argmax()) if streamed.any() else int(np.bincount(device, minlength=count).argmax())


def describe_streaming(kept: BuiltStrategy, others: Sequence[BuiltStrategy]) -> Diagnostic:
    """Return the note about the step of weights that stream, its waits, and what more memory would give."""
    step, waiting = kept.step_seconds, predict_waiting_seconds(kept.state)
    texts = [f"step {format_time(step)}, of which {format_time(waiting)} waits for weights"]
    now, *more = stream_curve(kept)
    if more:
        half = more[len(more) // 2]
        texts.append(
            f"with {format_bytes(half.memory_bytes - now.memory_bytes)} more: {format_time(half.step_seconds)}"
        )
    figures = [Figure("streamed weights", step)]
    for other in others:
        texts.append(f"{other.name}, all weights held: {format_time(other.step_seconds)}")
        figures.append(Figure(other.name, other.step_seconds))
    where = kept.state.target.devices[find_streaming_device(kept)].id
    hint = "--stream off prevents it; docs/streaming.md"
    return Diagnostic("P068", "; ".join(texts), where=where, hint=hint, figures=tuple(figures))
