"""Weights that stream: where that is worth a prediction, what it gives, and what more memory would give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxplace.driver.decision import Candidate, Profiled, Result, predict
from onnxplace.errors import Diagnostic, Figure, InfeasibleError
from onnxplace.facts import Placement, Profile, Streaming
from onnxplace.passes.profiling import MIN_STREAMED_BYTES
from onnxplace.pipeline import OBJECTIVES
from onnxplace.problem import fits_single_device, placement_problem, predict_waiting_seconds
from onnxplace.utils import format_bytes, format_time

STREAMED = "streamed weights"
"""The name of the strategy."""
# Limits of a curve: so many parts of the memory of the whole model.
CURVE_PARTS = 8


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
        return not any(isinstance(item, Candidate) for item in results)
    return not fits_single_device(state).any()


def stream_curve(built: Candidate, limits: Iterable[int] = ()) -> list[StreamPoint]:
    """Predict the step of a strategy with weights that stream, for several limits of the device they stream to most.

    By default, limits are parts of the memory that the whole model needs there. Those that are too small are left out.
    Where a limit leaves room for it, the pool keeps its size.
    """
    target, device = built.state.target, find_streaming_device(built)
    whole = int(whole_bytes(built) * 1.01)
    stream, points = built.state[Streaming].streams.get(device), list[StreamPoint]()
    for limit in limits or [whole * (part + 1) // CURVE_PARTS for part in range(CURVE_PARTS)]:
        limited = replace(built.profiled.state, target=target.limiting({target.devices[device].id: limit}))
        passes = built.strategy.passes
        if stream and stream.pool_bytes <= limit // 4:
            pool: Any = {"pool": str(stream.pool_bytes)}
            passes = tuple(replace(step, **pool) if Streaming in step.provides else step for step in passes)
        try:
            item = predict(replace(built.strategy, passes=passes), replace(built.profiled, state=limited))
        except InfeasibleError:
            continue
        points.append(StreamPoint(limit, item.step_seconds, predict_waiting_seconds(item.state)))
    return points


def whole_bytes(built: Candidate) -> int:
    """Return the memory that the whole model needs on the device to which most weights stream."""
    return int(placement_problem(built.profiled.state).alone_bytes()[find_streaming_device(built)])


def find_streaming_device(built: Candidate) -> int:
    """Return the index of the device to which most bytes stream in a step, or of that with most nodes."""
    state = built.state
    graph, device, sizes = state[Profile].graph, state[Placement].device, state[Streaming].weight_bytes
    size = np.array([sizes.get(name, 0) for name in graph.weight_names], dtype=np.int64)
    count = len(state.target.devices)
    streamed = np.bincount(device[graph.weights.rows], size[graph.weights.items], count)
    return int(streamed.argmax()) if streamed.any() else int(np.bincount(device, minlength=count).argmax())


def describe_streaming(kept: Candidate, others: Sequence[Candidate]) -> Diagnostic:
    """Return the note about the step of weights that stream, its waits, and what more memory would give."""
    step, waiting, device = kept.step_seconds, predict_waiting_seconds(kept.state), find_streaming_device(kept)
    texts = [f"planned step {format_time(step)}, of which {format_time(waiting)} waits for weights"]
    limit = kept.state.target.devices[device].memory_bytes
    more = max(whole_bytes(kept) - limit, 0) // 2
    for point in stream_curve(kept, [limit + more]) if more else ():
        texts.append(f"with {format_bytes(more)} more: {format_time(point.step_seconds)}")
    figures = [Figure(STREAMED, step)]
    for other in others:
        texts.append(f"{other.name}, all weights held: {format_time(other.step_seconds)}")
        figures.append(Figure(other.name, other.step_seconds))
    where = kept.state.target.devices[device].id
    hint = "--stream off prevents it; docs/streaming.md"
    return Diagnostic("P068", "; ".join(texts), where=where, hint=hint, figures=tuple(figures))
