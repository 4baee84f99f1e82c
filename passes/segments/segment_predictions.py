"""Predict times, rates and memory of segments, on one route or several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxplace.bundle.manifest import DeviceRecord, Predicted
from onnxplace.facts import (
    Clusters,
    Groups,
    Original,
    Placement,
    Prediction,
    Profile,
    Route,
    Routes,
    Schedule,
    Segments,
    Streaming,
)
from onnxplace.graph.op_graph import Ints
from onnxplace.problem import (
    fits_single_device,
    list_transfer_bytes,
    predict_request_seconds,
    predict_single_device_seconds,
    predict_step_seconds,
    predict_waiting_seconds,
)
from onnxplace.simulation.simulated_contention import simulate_with_contention
from onnxplace.simulation.simulator import device_weights
from onnxplace.simulation.steady_state import predict_python_seconds, predict_request_rates
from onnxplace.state import State


def predict_bundle(state: State) -> Prediction:
    """Return what the manifest says of times and memory of a split model."""
    simulation, graph = state[Segments].simulation, state[Segments].graph
    return Prediction(
        request=_predict_request(state),
        devices=predict_devices(state),
        segment_seconds=simulation.finish_seconds - simulation.start_seconds,
        weights_bytes=device_weights(graph, np.arange(len(graph), dtype=np.int32), len(graph)),
        workspace_bytes=graph.workspace_bytes,
        transfer_bytes=tuple(list_transfer_bytes(state)),
    )


def _predict_request(state: State) -> Predicted:
    """Return the prediction for one inference, request overhead included."""
    single, held = float(predict_single_device_seconds(state).min()), state
    if Streaming in state:  # a single device would hold all weights of the original
        held = state.without(Groups, Clusters).with_facts(Original.of(state).profile)
    routes = state[Routes] if Routes in state else predict_routes(state, ())
    return Predicted(
        step_seconds=predict_step_seconds(state),
        single_device_seconds=single if np.isfinite(single) else 0.0,
        single_device_fits=bool(fits_single_device(held).any()),
        lower_bound_seconds=state[Schedule].lower_bound_seconds,
        interval_seconds=routes.interval_seconds,
        request_seconds=predict_request_seconds(state),
        weight_wait_seconds=predict_waiting_seconds(state) if Streaming in state else 0.0,
    )


def predict_devices(state: State) -> tuple[DeviceRecord, ...]:
    """Return what each device does for one request, on the first route that uses it, and holds for all routes.

    It works on one request at a time: it holds the weights of all programs that it follows, each once, and the values
    of the one that holds most.
    """
    segments, placed, graph = state[Segments], state[Placement].device, state[Profile].graph
    device_maps, simulation = list_device_maps(state), segments.simulation
    value_bytes = simulation.peak_bytes - simulation.weights_bytes
    home = np.array([segment.device for segment in segments.segments], dtype=np.int32)
    records = []
    for index, device in enumerate(state.target.devices):
        # Per route, the devices whose programs this one follows.
        homes = [np.flatnonzero(device_map == index) for device_map in device_maps]
        compute_seconds = float(simulation.compute_seconds[index])
        if first := next((number for number, own in enumerate(homes) if len(own)), 0):
            route = state[Routes].routes[first - 1]
            compute_seconds = float(sum(route.seconds[np.isin(home, homes[first])]))
        programs = np.unique(np.concatenate(homes))
        runs = np.isin(placed, programs)
        weights = np.unique(graph.weights.items[runs[graph.weights.rows]])
        weights_bytes = int(graph.weight_bytes[weights].sum())
        records.append(
            DeviceRecord(
                id=device.id,
                nodes=int(runs.sum()),
                compute_seconds=compute_seconds,
                weights_bytes=weights_bytes,
                peak_bytes=weights_bytes + int(value_bytes[programs].max(initial=0)),
                limit_bytes=device.memory_bytes,
            )
        )
    return tuple(records)


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
    target, graph, seconds = state.target, state[Segments].graph, state[Segments].seconds
    home = np.array([segment.device for segment in state[Segments].segments], dtype=np.int32)
    devices = [device_map[home] for device_map in (list_device_maps(state)[0], *device_maps)]
    rates = predict_request_rates(graph, seconds, target, devices)
    order = np.arange(len(graph), dtype=np.int32)
    routes = []
    for device_map, device, share in zip(device_maps, devices[1:], rates.shares[1:].tolist()):
        simulation = simulate_with_contention(graph, seconds, target, device, order)
        routes.append(Route(device_map, simulation.finish_seconds - simulation.start_seconds, share))
    if Streaming in state and (step := state[Segments].simulation.makespan_seconds) > rates.interval_seconds:
        return Routes(tuple(routes), step, "weights that stream")  # streams serve one request after the other
    python_seconds = predict_python_seconds(target, devices)
    if python_seconds >= rates.interval_seconds:
        return Routes(tuple(routes), python_seconds, "Python")
    return Routes(tuple(routes), rates.interval_seconds, rates.limit)
