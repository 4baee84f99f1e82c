"""Simulate a bundle: the compiler's own simulator over its segments."""

from __future__ import annotations

import numpy as np

from onnxplace.bundle.manifest import Manifest
from onnxplace.bundle.routes import list_route_devices, list_routes
from onnxplace.graph import Csr, OpGraph
from onnxplace.simulation import Simulation, predict_python_seconds, simulate, steady_state_loads


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


def simulate_manifest(manifest: Manifest) -> Simulation:
    """Run a bundle's segments in simulated time.

    The segments' seconds include the slowdown by other busy devices. The simulation leaves out the time of a request
    before the first segment and after the last.
    """
    target = manifest.target.target()
    device = np.array([target.position(segment.device) for segment in manifest.segments], dtype=np.int32)
    segment_seconds = np.array([segment.seconds for segment in manifest.segments], dtype=np.float64)
    seconds = np.broadcast_to(segment_seconds, (len(target.devices), len(segment_seconds)))
    return simulate(build_segment_graph(manifest), seconds, target, device, np.arange(len(device), dtype=np.int32))


def predict_interval_seconds(manifest: Manifest) -> float:
    """Return the time between two results with requests in flight on all routes, by the segments' times.

    Requests divide over routes by their shares. The segments' times include the slowdown by devices that are busy with
    the same request, not by those that are busy with others. Python does its part of one request after the other, so
    the time is at least `predict_serial_seconds`.
    """
    target, graph, routes = manifest.target.target(), build_segment_graph(manifest), list_routes(manifest)
    loads = []
    for route in routes:
        home = [target.position(route.devices[segment.device]) for segment in manifest.segments]
        seconds = np.array([route.seconds[segment.id] for segment in manifest.segments])
        device = np.array(home, dtype=np.int32)
        table = np.broadcast_to(seconds, (len(target.devices), len(seconds)))
        loads.append(steady_state_loads(graph, table, target, device).by_resource)
    totals = [sum(route.share * load[kind] for route, load in zip(routes, loads)) for kind in loads[0]]
    return max(float(max(np.max(total) for total in totals)), predict_serial_seconds(manifest))


def predict_serial_seconds(manifest: Manifest) -> float:
    """Return a lower bound of Python's part of a request, which no other request overlaps.

    On one CPU device, it is at least the time of a request before and after its segments. Elsewhere that time contains
    waking threads and waiting for GPUs, which overlap with other requests.
    """
    target, used = manifest.target.target(), list_route_devices(manifest)
    is_on_one_cpu = len(used) == 1 and target.devices[target.position(used[0])].kind == "cpu"
    homes = [[route.devices[item.device] for item in manifest.segments] for route in list_routes(manifest)]
    return max(predict_python_seconds(target, homes), manifest.predicted.request_seconds * is_on_one_cpu)
