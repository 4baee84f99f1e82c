"""Run nothing: return the timeline that the compiler predicts. Needs no device and no ONNX Runtime."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import ClassVar

from onnxplace.bundle import Bundle, Manifest, RouteRecord, list_routes, move_to_route, simulate_manifest
from onnxplace.errors import ExecutionError
from onnxplace.feeds import Array
from onnxplace.runtime import Event, Result, Runtime, RuntimeSession
from onnxplace.simulation import Simulation


class Simulated(Runtime):
    """The event simulator over a bundle's segments; outputs are empty."""

    name: ClassVar[str] = "simulated"
    summary: ClassVar[str] = "run nothing; return the predicted timeline"
    keeps_state: ClassVar[bool] = True

    def open(self, bundle: Bundle, *, trace: bool = False) -> RuntimeSession:
        """Return a session whose requests take the predicted time, without running anything."""
        return SimulatedSession(bundle, trace)


class SimulatedSession(RuntimeSession):
    """A session that returns predicted timelines."""

    def __init__(self, bundle: Bundle, trace: bool, parent: SimulatedSession | None = None) -> None:
        self._bundle = bundle
        self._trace = trace
        self._parent = parent
        """The session of a conversation."""
        self._closed = False
        routes = list_routes(bundle.manifest)
        self._routes = routes[:1] if bundle.manifest.states else routes
        self._counts = [0] * len(self._routes)

    def submit(self, feeds: Mapping[str, Array], states: Collection[str] = ()) -> Future[Result]:
        """Return the predicted timeline at once; submitted requests take the routes in turn, by their shares."""
        ranks = [(count + 1) / max(route.share, 1e-9) for count, route in zip(self._counts, self._routes)]
        index = ranks.index(min(ranks))
        self._counts[index] += 1
        future: Future[Result] = Future()
        future.set_result(self._predict(self._routes[index]))
        return future

    def run(self, feeds: Mapping[str, Array], states: Collection[str] = (), timeout: float | None = None) -> Result:
        """Return the predicted timeline of a request alone, which takes the first route."""
        return self._predict(self._routes[0])

    def _predict(self, route: RouteRecord) -> Result:
        self._require_open()
        manifest = move_to_route(self._bundle.manifest, route)
        simulation = simulate_manifest(manifest)
        events = _list_events(manifest, simulation) if self._trace else ()
        return Result({}, events, simulation.makespan_seconds + manifest.predicted.request_seconds)

    def open_conversation(self) -> RuntimeSession:
        """Return a session that ends with this one; nothing is stored."""
        self._require_open()
        return SimulatedSession(self._bundle, self._trace, self)

    def _require_open(self) -> None:
        if self._parent is not None:
            self._parent._require_open()
        if self._closed:
            what = "session" if self._parent is None else "conversation"
            raise ExecutionError("X002", f"the {what} is closed", where=str(self._bundle.path))

    def close(self, timeout: float | None = None) -> None:
        """Refuse further requests."""
        self._closed = True


def _list_events(manifest: Manifest, simulation: Simulation) -> tuple[Event, ...]:
    """Return runs and copies of a simulation, ordered by start."""
    transfers = simulation.transfers
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
            device=manifest.target.devices[int(transfers.destination[i])].id,
            kind="copy",
            name=names[int(transfers.value[i])],
            start_seconds=float(transfers.start_seconds[i]),
            finish_seconds=float(transfers.finish_seconds[i]),
        )
        for i in range(len(transfers.value))
    ]
    return tuple(sorted(events, key=lambda event: (event.start_seconds, event.device)))
