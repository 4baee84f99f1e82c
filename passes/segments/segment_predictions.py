"""Predict times, rates and memory of segments on several routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxplace.facts import Profile, Route, Routes, Segments, Streaming
from onnxplace.graph import Ints, Longs
from onnxplace.passes.segments.memory_limits import segment_seconds
from onnxplace.problem import index_segments
from onnxplace.simulation import predict_python_seconds, predict_request_rates, simulate_with_contention
from onnxplace.state import State


@dataclass(frozen=True)
class RouteMemory:
    """Memory of devices, over the segments of all routes."""

    weights_bytes: Longs
    """Per device, each weight once."""
    peak_bytes: Longs
    """Per device: weights, and the values of the program that holds most at one time."""


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
    segment_of = index_segments(segments, len(state[Profile].graph))
    coarse = state[Profile].graph.contract(segment_of)
    seconds = segment_seconds(state, segment_of, coarse)
    home = np.array([segment.device for segment in segments], dtype=np.int32)
    devices = [device_map[home] for device_map in (list_device_maps(state)[0], *device_maps)]
    rates = predict_request_rates(coarse, seconds, target, devices)
    order = np.arange(len(segments), dtype=np.int32)
    routes = []
    for device_map, device, share in zip(device_maps, devices[1:], rates.shares[1:].tolist()):
        simulation = simulate_with_contention(coarse, seconds, target, device, order)
        routes.append(Route(device_map, simulation.finish_seconds - simulation.start_seconds, share))
    if Streaming in state and (step := state[Segments].simulation.makespan_seconds) > rates.interval_seconds:
        return Routes(tuple(routes), step, "weights that stream")  # streams serve one request after the other
    python_seconds = predict_python_seconds(target, devices)
    if python_seconds >= rates.interval_seconds:
        return Routes(tuple(routes), python_seconds, "Python")
    return Routes(tuple(routes), rates.interval_seconds, rates.limit)


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
