"""What limits a predicted step, and whether fixed sizes would shorten it.

Both follow from the chain of events that determines its length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxplace.driver.candidates import Candidate, Strategy, create_pass, predict
from onnxplace.driver.choose import MIN_GAIN
from onnxplace.errors import Diagnostic, InfeasibleError
from onnxplace.facts import Placement, Profile, Schedule, Segments, Source, Streaming
from onnxplace.model.model import Model
from onnxplace.passes.profiling.roofline import device_peaks
from onnxplace.problem import device_seconds, predict_waiting_seconds
from onnxplace.reports.step_analysis import PlacedStep, divide_chain
from onnxplace.simulation.simulated_contention import memory_share
from onnxplace.utils.quantities import format_milliseconds

# For a hint, that is too long much earlier.
MAX_HINTED_NODES = 5_000
# The share of the peak rate at which a node moves bytes if memory limits it: an estimate assumes the peak, and real
# kernels come close to half of it or more.
ESTIMATED_SHARE, MEASURED_SHARE = 0.99, 0.5


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
    profile, is_fixed = profiled.state[Profile], any(getattr(step, "fixed_sizes", False) for step in profiled.front)
    if is_fixed or not model.dimensions or profile.training or len(profile.graph) > MAX_HINTED_NODES:
        return []
    fixed = sum(part.seconds for part in list_step_parts(kept) if part.kind in ("launches", "calls"))
    if fixed + (now - fixed) / len(kept.state.target.devices) >= (1 - MIN_GAIN) * now:
        return []
    try:
        passes = (create_pass("shard", fixed=True), *profiled.replace_placer(create_pass("m-etf")))
        step_seconds = predict(Strategy("fixed sizes", "sharded", passes), profiled).step_seconds
    except InfeasibleError:  # there is nothing to split, or a state grows from call to call
        return []
    times = " instead of ".join(map(format_milliseconds, (step_seconds, now)))
    message = f"with --fixed-sizes, {' or '.join(model.dimensions)} can be split: {times}"
    note = Diagnostic("P069", message, where=model.name, hint="the bundle then takes these sizes alone")
    return [note] if step_seconds < (1 - MIN_GAIN) * now else []
