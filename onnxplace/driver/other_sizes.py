"""Predict what was placed for one size of requests at another size, and together with what was placed for others.

Nothing is placed again: the segments are those that a bundle has. Only their times, and the bytes of their values, are
those of the other size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from onnxplace.driver.candidates import Candidate, Profiled
from onnxplace.facts import Placement, Profile, Segments, Streaming, is_refused
from onnxplace.graph.op_graph import Floats, OpGraph, sum_by
from onnxplace.machine.transfer_rates import find_host_rate
from onnxplace.model.model import Model
from onnxplace.problem import describe_shortage, predict_request_seconds
from onnxplace.simulation.simulated_contention import simulate_with_contention
from onnxplace.target.target import Device, Target

# States that move between plans are read and written once in the host's memory, at 2e9 bytes per second together.
HOST_COPY_BYTES_PER_SECOND = 4e9


def predict_elsewhere(candidate: Candidate, profiled: Profiled) -> float:
    """Return the predicted step of a candidate, in seconds, with requests of the sizes of another profile.

    It is infinite where memory is too small, and for a candidate of fixed sizes. What is exact, and what an estimate:

    - Whole operators: each node takes the time that the other profile has for it on its device.
    - Operators or batches in parts, values computed again: the times of nodes grow like those of the whole model on the
      same class of device, and values like all values together. Latencies and calls stay as they are.
    - Weights that stream: a step takes at least as long as at the candidate's own size, since they take as long.
    - Several routes: a request takes the first one.
    """
    own, other = candidate.profiled.state, profiled.state
    is_fixed = any(
        getattr(step, name, False) for step in candidate.pipeline.passes for name in ("fixed_sizes", "fixed")
    )
    if is_fixed and own[Model].input_shapes() != other[Model].input_shapes():
        return math.inf
    state, segments = candidate.state, candidate.state[Segments]
    segment_of = np.zeros(len(state[Profile].graph), dtype=np.int32)
    for index, segment in enumerate(segments.segments):
        segment_of[segment.nodes] = index
    graph, changes = _resize(state[Profile], own[Profile], other[Profile])
    rows = [sum_by(segment_of, changes[device.cost_class], len(segments.segments)) for device in state.target.devices]
    home = np.array([segment.device for segment in segments.segments], dtype=np.int32)
    order = np.arange(len(home), dtype=np.int32)
    coarse, seconds = graph.contract(segment_of), segments.seconds + np.stack(rows)
    simulation = simulate_with_contention(coarse, seconds, state.target, home, order)
    if describe_shortage(state.target, simulation.peak_bytes, simulation.pool_peak_bytes):
        return math.inf
    step_seconds = simulation.makespan_seconds + predict_request_seconds(state)
    return max(step_seconds, candidate.step_seconds) if Streaming in state else step_seconds


def _resize(profile: Profile, own: Profile, other: Profile) -> tuple[OpGraph, Mapping[str, Floats]]:
    """Return the graph of a profile at another size, and by class of device what its nodes take more there.

    Args:
        profile: Of what was placed.
        own: Of the model that it was made of, at the same size.
        other: Of the model at the other size.
    """
    graphs = (profile.graph, own.graph, other.graph)
    is_same = (
        len({(item.names, item.value_names) for item in graphs}) == 1 and own.seconds.keys() <= other.seconds.keys()
    )
    if is_same:
        value_bytes, workspace = other.graph.value_bytes, other.graph.workspace_bytes
        changes = {name: other.seconds[name] - own.seconds[name] for name in own.seconds}
    else:
        growth = float(other.graph.value_bytes.sum() / max(own.graph.value_bytes.sum(), 1))
        value_bytes = (profile.graph.value_bytes * growth).astype(np.int64)
        workspace = (profile.graph.workspace_bytes * growth).astype(np.int64)
        before, after = map(_sum_costs, (own, other))
        ratios = {name: after.get(name, min(after.values())) / max(total, 1e-12) for name, total in before.items()}
        changes = {name: (ratios[name] - 1) * seconds for name, seconds in profile.seconds.items()}
    return replace(profile.graph, value_bytes=value_bytes, workspace_bytes=workspace), changes


def _sum_costs(profile: Profile) -> dict[str, float]:
    """Return by class of device the seconds of all nodes that it takes."""
    return {name: float(seconds[~is_refused(seconds)].sum()) for name, seconds in profile.seconds.items()}


def predict_move_seconds(first: Candidate, second: Candidate, target: Target) -> float:
    """Return what it takes to move the states of one plan to another: out of its devices, then into those of the other.

    They pass through the host's memory. A state that has the same device in both stays there.
    """
    homes = [*map(_list_state_homes, (first, second))]
    ways = [(homes[0], homes[1]), (homes[1], homes[0])]
    moved = [state for own, other in ways for name, state in own.items() if other.get(name, ("",))[0] != state[0]]
    rates = {device: _find_rate(target, device) for device, _ in moved}
    return sum(size / rates[device] for device, size in moved)


def _find_rate(target: Target, device: Device) -> float:
    return HOST_COPY_BYTES_PER_SECOND if device.is_host else find_host_rate(target, device)


def _list_state_homes(candidate: Candidate) -> dict[str, tuple[Device, int]]:
    """Return the device of each state between calls, and its bytes after a call."""
    model, graph = candidate.state[Model], candidate.state[Profile].graph
    index = {name: value for value, name in enumerate(graph.value_names)}
    placed, devices = candidate.state[Placement].device, candidate.state.target.devices
    values = {name: index[model.sources.get(output, output)] for name, output in model.states.items()}
    return {
        name: (devices[placed[graph.producer[value]]], int(graph.value_bytes[value]))
        for name, value in values.items()
        if graph.producer[value] >= 0
    }
