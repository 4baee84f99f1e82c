"""Run nothing: return the timeline that the compiler predicts. Needs no device and no ONNX Runtime."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import ClassVar

import numpy as np

from onnxplace.bundle import Bundle, Manifest
from onnxplace.errors import ExecutionError
from onnxplace.feeds import Array
from onnxplace.graph import Csr, OpGraph
from onnxplace.runtime import Event, Result, Runtime, RuntimeSession
from onnxplace.simulate import Simulation, simulate


class Simulated(Runtime):
    """The causal simulator over a bundle's segments; outputs are empty."""

    name: ClassVar[str] = "simulated"
    summary: ClassVar[str] = "run nothing; return the predicted timeline"
    keeps_state: ClassVar[bool] = True

    def open(self, bundle: Bundle, *, trace: bool = False) -> RuntimeSession:
        """Return a session whose every request takes, on paper, what the manifest predicts."""
        return _Session(bundle, trace)


class _Session(RuntimeSession):
    def __init__(self, bundle: Bundle, trace: bool) -> None:
        self._bundle = bundle
        self._trace = trace
        self._closed = False

    def submit(self, feeds: Mapping[str, Array], also: Collection[str] = ()) -> Future[Result]:
        """Return the predicted timeline at once."""
        if self._closed:
            raise ExecutionError("X002", "the session is closed", where=str(self._bundle.path))
        simulation = simulate_bundle(self._bundle)
        events = _events(self._bundle, simulation) if self._trace else ()
        future: Future[Result] = Future()
        future.set_result(Result({}, events, simulation.makespan_seconds))
        return future

    def close(self) -> None:
        """There is nothing to stop."""
        self._closed = True


def segment_graph(manifest: Manifest) -> OpGraph:
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


def simulate_bundle(bundle: Bundle) -> Simulation:
    """Run the bundle's segments in simulated time."""
    manifest, target = bundle.manifest, bundle.target
    device = np.array([target.position(segment.device) for segment in manifest.segments], dtype=np.int32)
    seconds = np.tile(
        np.array([segment.seconds for segment in manifest.segments], dtype=np.float64), (len(target.devices), 1)
    )
    return simulate(segment_graph(manifest), seconds, target, device, np.arange(len(device), dtype=np.int32))


def _events(bundle: Bundle, simulation: Simulation) -> tuple[Event, ...]:
    manifest, sent = bundle.manifest, simulation.transfers
    names = list(manifest.values)
    events = [
        Event(
            segment.device, "run", segment.id, float(simulation.start_seconds[i]), float(simulation.finish_seconds[i])
        )
        for i, segment in enumerate(manifest.segments)
    ]
    events += [
        Event(bundle.target.devices[int(there)].id, "copy", names[int(value)], float(start), float(finish))
        for value, there, start, finish in zip(sent.value, sent.destination, sent.start_seconds, sent.finish_seconds)
    ]
    return tuple(sorted(events, key=lambda event: (event.start_seconds, event.device)))
