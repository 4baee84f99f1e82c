"""Run nothing: return the timeline that the compiler predicts. Needs no device and no ONNX Runtime."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import ClassVar

from onnxplace.bundle import Bundle, simulate_manifest
from onnxplace.errors import ExecutionError
from onnxplace.feeds import Array
from onnxplace.runtime import Event, Result, Runtime, RuntimeSession
from onnxplace.simulation import Simulation


class Simulated(Runtime):
    """The causal simulator over a bundle's segments; outputs are empty."""

    name: ClassVar[str] = "simulated"
    summary: ClassVar[str] = "run nothing; return the predicted timeline"
    keeps_state: ClassVar[bool] = True

    def open(self, bundle: Bundle, *, trace: bool = False) -> RuntimeSession:
        """Return a session whose every request takes, on paper, what the manifest predicts."""
        return SimulatedSession(bundle, trace)


class SimulatedSession(RuntimeSession):
    def __init__(self, bundle: Bundle, trace: bool) -> None:
        self._bundle = bundle
        self._trace = trace
        self._closed = False

    def submit(self, feeds: Mapping[str, Array], also: Collection[str] = ()) -> Future[Result]:
        """Return the predicted timeline at once."""
        if self._closed:
            raise ExecutionError("X002", "the session is closed", where=str(self._bundle.path))
        simulation = simulate_manifest(self._bundle.manifest)
        events = _list_events(self._bundle, simulation) if self._trace else ()
        future: Future[Result] = Future()
        seconds = simulation.makespan_seconds + self._bundle.manifest.predicted.request_seconds
        future.set_result(Result({}, events, seconds))
        return future

    def close(self, timeout: float | None = None) -> None:
        """There is nothing to stop."""
        self._closed = True


def _list_events(bundle: Bundle, simulation: Simulation) -> tuple[Event, ...]:
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
