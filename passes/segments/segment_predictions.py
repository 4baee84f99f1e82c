"""Predict times, rates and memory of segments: on several routes, and in a process of ONNX Runtime.

The memory of a process is more than the schedule counts. Its rules follow ONNX Runtime 1.31 on Linux, on CPU devices;
the constants are measured by benchmarks/memory.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxplace.facts import Profile, Route, Routes, Segment, Segments
from onnxplace.graph import Floats, Ints, Longs, OpGraph
from onnxplace.machine import RUNTIME_BYTES
from onnxplace.passes.segments.memory_limits import segment_seconds
from onnxplace.simulation import Simulation, predict_python_seconds, predict_request_rates, simulate_with_contention
from onnxplace.state import State
from onnxplace.target import Target

# Code of kernels that the system reads from ONNX Runtime's library at their first use.
KERNELS_BYTES = 2 << 20
# Holes in the arena, which all CPU devices share, and buffers that change the layout of values around convolutions:
# as a share of the bytes of values on the device that has most.
HOLES_SHARE = 0.5
# The same where sessions keep the order of their nodes, as the schedule has it.
ORDERED_HOLES_SHARE = 0.12
# A session without its nodes.
SESSION_BYTES = 128 << 10
# ONNX Runtime's own record of a node: its attributes, names, kernel and buffers.
NODE_BYTES = 5 << 10
# While a session is opened, all weights of convolutions are rewritten at once. The memory that takes, next to the
# result and as a share of it; more where a normalisation is folded into the weights first.
REWRITING_SHARE = 1.0
FOLDING_SHARE = 2.0
_CONVOLUTIONS = {"Conv", "ConvTranspose", "FusedConv"}
# These read rows of a weight directly from the mapped file: pages that the system may drop at any time.
_LOOKUPS = {"Gather", "GatherElements", "GatherND"}


@dataclass(frozen=True)
class RouteMemory:
    """Memory of devices, over the segments of all routes."""

    weights_bytes: Longs
    """Per device, each weight once."""
    peak_bytes: Longs
    """Per device: weights, and the values of the program that holds most at one time."""


def index_segments(segments: Sequence[Segment], count: int) -> Ints:
    """Return the index of the segment of each of `count` nodes."""
    segment_of = np.zeros(count, dtype=np.int32)
    for index, segment in enumerate(segments):
        segment_of[segment.nodes] = index
    return segment_of


def list_device_maps(state: State) -> list[Ints]:
    """Return, per route, the device that takes the place of each device; -1 for devices without a program.

    The first route is that of the programs themselves.
    """
    programs = state[Segments].programs
    own = np.array([index if program else -1 for index, program in enumerate(programs)], dtype=np.int32)
    return [own, *(route.device for route in (state[Routes].routes if Routes in state else ()))]


def predict_routes(state: State, device_maps: Sequence[Ints]) -> Routes:
    """Return routes with their times and shares.

    `device_maps`: per further route, the device that takes the place of each device. Linear in segments and routes.
    """
    segments, target = state[Segments].segments, state.target
    coarse, seconds = _cost_segments(state)
    home = np.array([segment.device for segment in segments], dtype=np.int32)
    devices = [device_map[home] for device_map in (list_device_maps(state)[0], *device_maps)]
    rates = predict_request_rates(coarse, seconds, target, devices)
    order = np.arange(len(segments), dtype=np.int32)
    routes = []
    for device_map, device, share in zip(device_maps, devices[1:], rates.shares[1:].tolist()):
        simulation = simulate_with_contention(coarse, seconds, target, device, order)
        routes.append(Route(device_map, simulation.finish_seconds - simulation.start_seconds, share))
    return Routes(tuple(routes), max(rates.interval_seconds, predict_python_seconds(target, devices)))


def predict_interval_seconds(state: State) -> float:
    """Return the time between two results with requests in flight, on all routes."""
    return state[Routes].interval_seconds if Routes in state else predict_routes(state, ()).interval_seconds


def measure_route_memory(state: State, device_maps: Sequence[Ints]) -> RouteMemory:
    """Return the memory of each device, where a request takes any of several routes.

    A device works on one request at a time. Each program's values are those of the simulated step.
    """
    simulation, count = state[Segments].simulation, len(state.target.devices)
    value_bytes = simulation.peak_bytes - simulation.weights_bytes
    weights, peaks = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for device in range(count):
        programs = sorted({int(home) for routes in device_maps for home in np.flatnonzero(routes == device)})
        if programs:
            weights[device] = _sum_weights(state, programs)
            peaks[device] = weights[device] + value_bytes[programs].max()
    return RouteMemory(weights, peaks)


def _sum_weights(state: State, programs: Sequence[int]) -> int:
    """Return the bytes of the weights that these devices' programs read, each once."""
    graph = state[Profile].graph
    reads = np.zeros(len(graph), dtype=bool)
    for segment in state[Segments].segments:
        if segment.device in programs:
            reads[segment.nodes] = True
    return int(graph.weight_bytes[np.unique(graph.weights.items[reads[graph.weights.rows]])].sum())


def _cost_segments(state: State) -> tuple[OpGraph, Floats]:
    """Return the graph of segments, and their seconds [device, segment] without contention."""
    graph = state[Profile].graph
    segment_of = index_segments(state[Segments].segments, len(graph))
    coarse = graph.contract(segment_of)
    return coarse, segment_seconds(state, segment_of, coarse)


@dataclass(frozen=True)
class Footprint:
    """The memory of a process that has a bundle open.

    GPUs have their own memory and count as zero.
    """

    device_bytes: tuple[int, ...]
    """Per device, if it were alone in the process: sessions with their copies of weights, and values with holes."""
    running_bytes: int
    """Memory of the process during inferences, Python and ONNX Runtime included."""
    opening_bytes: int
    """Peak of the process while it opens sessions, one after the other."""


@dataclass(frozen=True)
class _SessionMemory:
    """The memory of one session."""

    open_bytes: int
    """Once it is open."""
    peak_bytes: int
    """While it is being opened."""


def predict_footprint(
    graph: OpGraph,
    segments: Sequence[Segment],
    simulation: Simulation,
    target: Target,
    device_maps: Sequence[Ints] = (),
    *,
    keeps_order: bool = False,
) -> Footprint:
    """Predict the memory of a process that opens and runs segments.

    It opens them in order. O(N + E). A weight that two segments read counts twice, since each session keeps a copy in
    the layout of its kernels. `device_maps`: per route, the device that takes the place of each device, or -1;
    by default there is one route. `keeps_order`: whether sessions compute nodes in the order of the schedule.
    """
    holes_share = ORDERED_HOLES_SHARE if keeps_order else HOLES_SHARE
    device_maps = device_maps or [np.arange(len(target.devices), dtype=np.int32)]
    on_host = np.array([device.kind == "cpu" for device in target.devices])
    home_values = simulation.peak_bytes - simulation.weights_bytes
    values = np.zeros(len(on_host), dtype=np.int64)
    for device_map in device_maps:
        homes = np.flatnonzero(device_map >= 0)
        np.maximum.at(values, device_map[homes], home_values[homes])
    values = np.where(on_host, values, 0)
    device_bytes = (values + np.rint(holes_share * values).astype(np.int64)).tolist()
    open_bytes = opening_bytes = RUNTIME_BYTES + KERNELS_BYTES
    normalised = _find_normalised(graph)
    for segment in segments:
        session = _predict_session(graph, segment.nodes, normalised)
        for device in dict.fromkeys(int(device_map[segment.device]) for device_map in device_maps):
            if on_host[device]:
                opening_bytes = max(opening_bytes, open_bytes + session.peak_bytes)
                open_bytes += session.open_bytes
                device_bytes[device] += session.open_bytes
    running_bytes = open_bytes + int(values.sum() + holes_share * values.max(initial=0))
    return Footprint(tuple(device_bytes), running_bytes, opening_bytes)


def _find_normalised(graph: OpGraph) -> set[int]:
    """Return the nodes with a BatchNormalization folded into their weights."""
    norms = [node for node, op in enumerate(graph.ops) if op == "BatchNormalization"]
    return {int(graph.producer[value]) for node in norms for value in graph.inputs[node]}


def _predict_session(graph: OpGraph, nodes: Ints, normalised: set[int]) -> _SessionMemory:
    """Predict the memory of a session over `nodes`.

    First all convolutions are rewritten. Then the other weights are packed in the order of their readers: each is in
    memory twice for a moment, in the file's pages and in the copy.
    """
    own_bytes = SESSION_BYTES + NODE_BYTES * len(nodes)
    seen: set[int] = set()
    rewritten, rewriting, packed = 0, 0.0, []
    for node in nodes.tolist():
        if graph.ops[node] in _LOOKUPS:
            continue
        new = [weight for weight in graph.weights[node].tolist() if weight not in seen]
        seen.update(new)
        sizes = graph.weight_bytes[new].tolist()
        if graph.ops[node] in _CONVOLUTIONS:
            rewritten += sum(sizes)
            rewriting += sum(sizes) * (FOLDING_SHARE if node in normalised else REWRITING_SHARE)
        else:
            packed += sizes
    sizes = np.array(packed, dtype=np.int64)
    twice = int((np.cumsum(sizes) + sizes).max(initial=0))
    fixed_bytes = own_bytes + rewritten
    return _SessionMemory(fixed_bytes + int(sizes.sum()), fixed_bytes + int(rewriting) + twice)
