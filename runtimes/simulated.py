"""Run nothing: return the timeline that the compiler predicts. Needs no device and no ONNX Runtime."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import ClassVar

from onnxplace.bundle import Bundle, simulate_manifest
from onnxplace.errors import ExecutionError
from onnxplace.feeds import Array
from onnxplace.runtime import DEFAULT_MAX_IN_FLIGHT, Event, Result, Runtime, RuntimeSession
from onnxplace.simulation import Simulation


class Simulated(Runtime):
    """The event simulator over a bundle's segments; outputs are empty."""

    name: ClassVar[str] = "simulated"
    summary: ClassVar[str] = "run nothing; return the predicted timeline"
    keeps_state: ClassVar[bool] = True

    def open(
        self, bundle: Bundle, *, trace: bool = False, max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    ) -> RuntimeSession:
        """Return a session whose requests take the predicted time, without running anything.

        They end at once, so that none are in flight.
        """
        return SimulatedSession(bundle, trace)


class SimulatedSession(RuntimeSession):
    """A session that returns predicted timelines."""

    def __init__(self, bundle: Bundle, trace: bool) -> None:
        self._bundle = bundle
        self._trace = trace
        self._closed = False

    def submit(self, feeds: Mapping[str, Array], states: Collection[str] = ()) -> Future[Result]:
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
        """Refuse further requests."""
        self._closed = True


def _list_events(bundle: Bundle, simulation: Simulation) -> tuple[Event, ...]:
    """Return runs and copies of a simulation, ordered by start."""
    manifest, transfers = bundle.manifest, simulation.transfers
    names = list(manifest.values)
    events = [
        Event(
            device=segment.device,
            kind="run",
            name=segment.id,
            start_seconds=float(simulation.start_seconds[i]),
            finish_seconds=float(simulation.finish_seconds[i]),
        )
        for i, segment in enumerate(manifest.segments)
    ]
    events += [
        Event(
            device=bundle.target.devices[int(transfers.destination[i])].id,
            kind="copy",
            name=names[int(transfers.value[i])],
            start_seconds=float(transfers.start_seconds[i]),
            finish_seconds=float(transfers.finish_seconds[i]),
        )
        for i in range(len(transfers.value))
    ]
    return tuple(sorted(events, key=lambda event: (event.start_seconds, event.device)))
