"""Simulate a bundle: its segments are the nodes of a graph, for one request or for many in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxplace.bundle.bundle_routes import list_route_devices, list_routes
from onnxplace.bundle.manifest import Manifest, RouteRecord, SegmentRecord
from onnxplace.graph.op_graph import Csr, Floats, Ints, Longs, OpGraph
from onnxplace.simulation.simulator import Simulation, simulate, simulate_stream
from onnxplace.simulation.steady_state import Loads, add_routes, predict_python_seconds, steady_state_loads
from onnxplace.simulation.weight_streams import WeightStream, find_distances, measure_block
from onnxplace.utils.groups import group_pairs

# ---------------------------------------------------------------------------------------------------------- one request


def build_segment_graph(manifest: Manifest) -> OpGraph:
    """Return the graph whose nodes are the bundle's segments."""
    segment_index = {segment.id: index for index, segment in enumerate(manifest.segments)}
    value_index = {name: index for index, name in enumerate(manifest.values)}
    returned = {item.value for item in manifest.outputs}
    values = manifest.values.values()
    return OpGraph(
        names=tuple(segment.id for segment in manifest.segments),
        ops=("segment",) * len(manifest.segments),
        value_names=tuple(value_index),
        value_bytes=np.array([value.bytes for value in values], dtype=np.int64),
        producer=np.array([segment_index[v.producer] if v.producer else -1 for v in values], dtype=np.int32),
        is_output=np.array([name in returned for name in value_index], dtype=bool),
        alias=np.full(len(value_index), -1, dtype=np.int32),
        inputs=Csr.of([[value_index[name] for name in segment.inputs] for segment in manifest.segments]),
        weight_names=tuple(segment.id for segment in manifest.segments),
        weight_bytes=np.array([segment.weights_bytes for segment in manifest.segments], dtype=np.int64),
        weights=Csr.of([[index] for index in range(len(manifest.segments))]),
        workspace_bytes=np.array([segment.workspace_bytes for segment in manifest.segments], dtype=np.int64),
    )


def order_segments(manifest: Manifest) -> list[SegmentRecord]:
    """Return the segments, each after those whose values it reads.

    Among those that are ready, the first of the manifest comes first.
    """
    return [manifest.segments[index] for index in build_segment_graph(manifest).order]


def simulate_manifest(manifest: Manifest) -> Simulation:
    """Run a bundle's segments in simulated time.

    The segments' seconds include the slowdown by other busy devices, but no waiting for weights, which is simulated:
    the step follows many others. The simulation leaves out the time of a request before the first segment and after the
    last.
    """
    target, device = manifest.target.target(), _index_devices(manifest)
    order = np.arange(len(device), dtype=np.int32)
    segment_seconds = np.array([segment.seconds for segment in manifest.segments], dtype=np.float64)
    seconds = np.broadcast_to(segment_seconds, (len(target.devices), len(segment_seconds)))
    graph, stream = build_segment_graph(manifest), build_weight_stream(manifest)
    return simulate_stream(graph, seconds, target, device, order, stream)


def build_weight_stream(manifest: Manifest) -> WeightStream:
    """Return the weights that the segments of the first route wait for."""
    if not manifest.streams:
        return WeightStream.none()
    device, load_seconds = _index_devices(manifest), list_load_seconds(manifest, list_routes(manifest)[0])
    order, count = np.arange(len(device), dtype=np.int32), len(manifest.target.devices)
    return WeightStream.of(load_seconds, _find_distances(manifest), device, order, count)


def _index_devices(manifest: Manifest) -> Ints:
    """Return the index of the device of each segment on the first route."""
    position = {device.id: index for index, device in enumerate(manifest.target.devices)}
    return np.array([position[segment.device] for segment in manifest.segments], dtype=np.int32)


def predict_weight_wait_seconds(manifest: Manifest) -> float:
    """Return the part of a step in which it waits for weights that stream."""
    if not manifest.streams:
        return 0.0
    resident = manifest.model_copy(update={"streams": ()})
    return simulate_manifest(manifest).makespan_seconds - simulate_manifest(resident).makespan_seconds


def list_weight_waits(manifest: Manifest) -> dict[str, float]:
    """Return, per device, the time of a step in which it is idle before runs whose weights come last."""
    simulation, free, waits = simulate_manifest(manifest), dict[str, float](), dict[str, float]()
    times = zip(simulation.start_seconds, simulation.finish_seconds, simulation.arrival_seconds)
    for segment, (start, finish, arrival) in zip(manifest.segments, times):
        if start == arrival:
            waits[segment.device] = waits.get(segment.device, 0.0) + float(start) - free.get(segment.device, 0.0)
        free[segment.device] = float(finish)
    return waits


def list_load_seconds(manifest: Manifest, route: RouteRecord) -> Floats:
    """Return, per segment, the time in which its weights that stream come to its device of a route, without waits."""
    streams = {stream.device: stream for stream in manifest.streams}
    seconds = np.zeros(len(manifest.segments))
    for index, segment in enumerate(manifest.segments):
        if segment.streamed and manifest.streams:
            stream = streams.get(route.devices[segment.device]) or streams[segment.device]
            weights = [manifest.streamed[name] for name in segment.streamed]
            seconds[index] = sum(measure_block([item.bytes]) / stream.bytes_per_second[item.home] for item in weights)
    return seconds


def _find_distances(manifest: Manifest) -> Longs:
    """Return what `find_distances` does, for the bundle's segments."""
    sizes = [measure_block(manifest.streamed[name].bytes for name in item.streamed) for item in manifest.segments]
    pool_bytes = {stream.device: stream.pool_bytes for stream in manifest.streams}
    pools = {i: pool_bytes[item.id] for i, item in enumerate(manifest.target.devices) if item.id in pool_bytes}
    order = np.arange(len(sizes), dtype=np.int32)
    return find_distances(np.array(sizes, dtype=np.int64), pools, _index_devices(manifest), order)


def predict_interval_seconds(manifest: Manifest) -> float:
    """Return the time between two results with requests in flight on all routes, by the segments' times.

    Requests divide over routes by their shares. The segments' times include the slowdown by devices that are busy with
    the same request, not by those that are busy with others. Python does its part of one request after the other, so
    the time is at least `predict_serial_seconds`. A device's weights come for one request after the other.
    """
    target, graph, routes = manifest.target.target(), build_segment_graph(manifest), list_routes(manifest)
    loads, streamed, order = list[Loads](), np.zeros(len(target.devices)), np.arange(len(graph), dtype=np.int32)
    for route in routes:
        home = [target.position(route.devices[segment.device]) for segment in manifest.segments]
        seconds = np.array([route.seconds[segment.id] for segment in manifest.segments])
        device = np.array(home, dtype=np.int32)
        table = np.broadcast_to(seconds, (len(target.devices), len(seconds)))
        streamed += route.share * np.bincount(device, list_load_seconds(manifest, route), len(target.devices))
        loads.append(steady_state_loads(graph, table, target, device, order=order))
    totals = add_routes(loads, [route.share for route in routes])
    bounds = [*totals.values(), float(streamed.max()), predict_serial_seconds(manifest)]
    if manifest.streams and len(list_route_devices(manifest)) == 1:  # nothing overlaps with its waits for weights
        bounds.append(simulate_manifest(manifest).makespan_seconds)
    return max(bounds)


def predict_serial_seconds(manifest: Manifest) -> float:
    """Return a lower bound of Python's part of a request, which no other request overlaps.

    On one CPU device, it is at least the time of a request before and after its segments. Elsewhere that time contains
    waking threads and waiting for GPUs, which overlap with other requests.
    """
    target, used = manifest.target.target(), list_route_devices(manifest)
    is_on_one_cpu = len(used) == 1 and target.devices[target.position(used[0])].kind == "cpu"
    homes = [[route.devices[item.device] for item in manifest.segments] for route in list_routes(manifest)]
    return max(predict_python_seconds(target, homes), manifest.predicted.request_seconds * is_on_one_cpu)


# -------------------------------------------------------------------------------------------------------- many requests


# Rounds that look for the order of requests with states; the last one counts even if the order still changes.
MAX_ORDER_ROUNDS = 8


@dataclass(frozen=True)
class SubmittedRequest:
    """A request to simulate."""

    submitted_seconds: float
    route: int = 0
    """Index of its route."""
    conversation: int = 0
    """Requests with states that have the same number follow one another."""


@dataclass(frozen=True)
class SimulatedTransfer:
    """A value on its way to another device."""

    value: str
    destination: str
    start_seconds: float
    finish_seconds: float


@dataclass(frozen=True)
class SimulatedLoad:
    """The weights of a segment that stream, on their way to its device."""

    segment: str
    start_seconds: float
    finish_seconds: float


@dataclass(frozen=True)
class SimulatedRequest:
    """The simulated time of one request, on the same clock as its submission."""

    start_seconds: Floats
    """Per segment of the manifest."""
    finish_seconds: Floats
    transfers: tuple[SimulatedTransfer, ...]
    loads: tuple[SimulatedLoad, ...]
    """Without those that were over when the first request was submitted; others may begin before this one is."""
    end_seconds: float
    """When its last segment or transfer ends."""


def simulate_requests(manifest: Manifest, requests: Sequence[SubmittedRequest]) -> tuple[SimulatedRequest, ...]:
    """Simulate requests that are in flight together, each from its submission on.

    Devices and channels work as in `simulate`. Each device does its part of one request after the other, in the order
    of submission. With states, the requests of a conversation follow one another, and devices take requests in the
    order in which their predecessors end. Segments take the times of the manifest. These leave out the slowdown by
    devices that are busy with other requests, unless they were measured under load.

    Args:
        manifest: The bundle's.
        requests: In any order; results are in the same one.
    """
    if not requests:
        return ()
    submitted = [request.submitted_seconds for request in requests]
    previous = _find_previous(requests) if manifest.states else {}
    order = sorted(range(len(requests)), key=lambda index: (submitted[index], index))
    for _ in range(MAX_ORDER_ROUNDS):
        simulated = _simulate_in_order(manifest, requests, order, previous)
        ready = [
            max(submitted[index], simulated[previous[index]].end_seconds) if index in previous else submitted[index]
            for index in range(len(requests))
        ]
        last, order = order, sorted(order, key=lambda index: (ready[index], submitted[index], index))
        if order == last:
            break
    return simulated


def _find_previous(requests: Sequence[SubmittedRequest]) -> dict[int, int]:
    """Return, for each request that is not the first of its conversation, the index of the one before it."""
    previous: dict[int, int] = {}
    latest: dict[int, int] = {}
    for index in sorted(range(len(requests)), key=lambda index: (requests[index].submitted_seconds, index)):
        if (conversation := requests[index].conversation) in latest:
            previous[index] = latest[conversation]
        latest[conversation] = index
    return previous


def _simulate_in_order(
    manifest: Manifest, requests: Sequence[SubmittedRequest], order: Sequence[int], previous: Mapping[int, int]
) -> tuple[SimulatedRequest, ...]:
    """Simulate requests whose devices take them in one order."""
    target, routes, count = manifest.target.target(), list_routes(manifest), len(manifest.segments)
    taken = [routes[request.route] for request in requests]
    homes = [target.position(route.devices[item.device]) for route in taken for item in manifest.segments]
    device = np.array(homes, dtype=np.int32)
    own_seconds = np.array([route.seconds[item.id] for route in taken for item in manifest.segments], dtype=np.float64)
    sequence = np.array([index * count + node for index in order for node in range(count)], dtype=np.int32)
    load_seconds = np.concatenate([list_load_seconds(manifest, route) for route in taken])
    distances = np.tile(_find_distances(manifest), len(requests))
    simulation = simulate(
        _repeat_graph(manifest, len(requests), previous),
        np.broadcast_to(own_seconds, (len(target.devices), len(own_seconds))),
        target,
        device,
        sequence,
        np.repeat([request.submitted_seconds for request in requests], count),
        WeightStream.of(load_seconds, distances, device, sequence, len(target.devices)),
    )
    return _cut_simulation(manifest, requests, simulation, load_seconds)


def _repeat_graph(manifest: Manifest, count: int, previous: Mapping[int, int]) -> OpGraph:
    """Return the graph of segments `count` times; `previous` requests end before others start.

    An empty value from the last segment of each device to the first one of each device says so. Its transfer takes the
    latency of a link, about the time in which a device learns that another one has ended.
    """
    graph = build_segment_graph(manifest)
    nodes, values = len(graph), len(graph.value_names)
    by_device = group_pairs((segment.device, index) for index, segment in enumerate(manifest.segments))
    producer = [int(node) + copy * nodes if node >= 0 else -1 for copy in range(count) for node in graph.producer]
    inputs = [(graph.inputs[node] + copy * values).tolist() for copy in range(count) for node in range(nodes)]
    for follower, leader in previous.items():
        for program in by_device.values():
            for other in by_device.values():
                inputs[follower * nodes + other[0]].append(len(producer))
            producer.append(leader * nodes + program[-1])
    extra = len(producer) - count * values
    return OpGraph(
        names=graph.names * count,
        ops=graph.ops * count,
        value_names=graph.value_names * count + ("",) * extra,
        value_bytes=np.concatenate([np.tile(graph.value_bytes, count), np.zeros(extra, dtype=np.int64)]),
        producer=np.array(producer, dtype=np.int32),
        is_output=np.zeros(len(producer), dtype=bool),
        alias=np.full(len(producer), -1, dtype=np.int32),
        inputs=Csr.of(inputs),
        weight_names=(),
        weight_bytes=np.zeros(0, dtype=np.int64),
        weights=Csr.of([[]] * (nodes * count)),
        workspace_bytes=np.zeros(nodes * count, dtype=np.int64),
    )


def _cut_simulation(
    manifest: Manifest, requests: Sequence[SubmittedRequest], simulation: Simulation, load_seconds: Floats
) -> tuple[SimulatedRequest, ...]:
    """Return the part of each request; `load_seconds` are those of all their blocks."""
    count, names = len(manifest.segments), list(manifest.values)
    transfers: list[list[SimulatedTransfer]] = [[] for _ in requests]
    sent = simulation.transfers
    for index, value in enumerate(sent.value.tolist()):
        request, position = divmod(value, max(len(names), 1))
        if request < len(requests):  # the others are the empty values between requests
            destination = manifest.target.devices[int(sent.destination[index])].id
            start, finish = float(sent.start_seconds[index]), float(sent.finish_seconds[index])
            transfers[request].append(SimulatedTransfer(names[position], destination, start, finish))
    results = []
    for index, request in enumerate(requests):
        own = slice(index * count, (index + 1) * count)
        finish_seconds = simulation.finish_seconds[own]
        arrivals = [transfer.finish_seconds for transfer in transfers[index]]
        end = max([float(finish_seconds.max(initial=request.submitted_seconds)), *arrivals])
        loads = tuple(
            SimulatedLoad(segment.id, float(arrival - seconds), float(arrival))
            for segment, arrival, seconds in zip(manifest.segments, simulation.arrival_seconds[own], load_seconds[own])
            if np.isfinite(arrival)
        )
        results.append(
            SimulatedRequest(simulation.start_seconds[own], finish_seconds, tuple(transfers[index]), loads, end)
        )
    return tuple(results)
