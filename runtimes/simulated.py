"""Run nothing: return the timeline that the compiler predicts. Needs no device and no ONNX Runtime."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import ClassVar

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.bundle_routes import list_routes
from onnxplace.errors import ExecutionError
from onnxplace.feeds.feeds import Array
from onnxplace.runtime.interface import DEFAULT_MAX_IN_FLIGHT, Result, Runtime, RuntimeSession, SessionStates
from onnxplace.runtime.timelines import RequestTimeline, predict_timelines


class Simulated(Runtime):
    """The event simulator over a bundle's segments; outputs are empty."""

    name: ClassVar[str] = "simulated"
    summary: ClassVar[str] = "run nothing; return the predicted timeline"
    keeps_state: ClassVar[bool] = True

    def open(
        self, bundle: Bundle, *, trace: bool = False, max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    ) -> RuntimeSession:
        """Return a session whose requests take the predicted time, without running anything.

        They end at once, so that none are in flight. Their timelines follow one another on a clock of the session.
        """
        return SimulatedSession(bundle, trace)


class SimulatedStates(SessionStates):
    """No states, which take no time to move to another plan."""

    def read(self) -> Mapping[str, Array]:
        """Return nothing."""
        return {}


class SimulatedSession(RuntimeSession):
    """A session that returns predicted timelines."""

    def __init__(self, bundle: Bundle, trace: bool, parent: SimulatedSession | None = None) -> None:
        self._bundle = bundle
        self._trace = trace
        self._parent = parent
        """The session of a conversation."""
        self._closed = False
        self._number = 0 if parent is None else next(parent._conversation_numbers)
        self._conversation_numbers: Iterator[int] = itertools.count(1)
        self._lock = threading.Lock()
        self._ended_count, self._ended_seconds = 0, 0.0
        """Requests of this session and its conversations follow one another without a pause."""
        routes = list_routes(bundle.manifest)
        self._shares = [route.share for route in (routes[:1] if bundle.manifest.states else routes)]
        self._counts = [0] * len(self._shares)

    def submit(self, feeds: Mapping[str, Array], states: Collection[str] = ()) -> Future[Result]:
        """Return the predicted timeline at once; submitted requests take the routes in turn, by their shares."""
        ranks = [(count + 1) / max(share, 1e-9) for count, share in zip(self._counts, self._shares)]
        index = ranks.index(min(ranks))
        self._counts[index] += 1
        future: Future[Result] = Future()
        future.set_result(self._predict(index))
        return future

    def run(self, feeds: Mapping[str, Array], states: Collection[str] = (), timeout: float | None = None) -> Result:
        """Return the predicted timeline of a request alone, which takes the first route."""
        return self._predict(0)

    def _predict(self, route: int) -> Result:
        self._require_open()
        request = RequestTimeline(
            number=0, submitted_seconds=0.0, finish_seconds=0.0, events=(), route=route, conversation=self._number
        )
        (timeline,) = predict_timelines(self._bundle.manifest, [request])
        root = self._parent or self
        with root._lock:
            number, submitted = root._ended_count, root._ended_seconds
            root._ended_count, root._ended_seconds = number + 1, submitted + timeline.finish_seconds
        events = tuple(
            replace(event, request=number, submitted_seconds=submitted) for event in timeline.events if self._trace
        )
        return Result({}, events, timeline.finish_seconds)

    @property
    def states(self) -> SessionStates:
        """Return no states."""
        return SimulatedStates(type(self).__name__)

    def open_conversation(self) -> RuntimeSession:
        """Return a session that ends with this one; nothing is stored."""
        self._require_open()
        return SimulatedSession(self._bundle, self._trace, self._parent or self)

    def _require_open(self) -> None:
        if self._parent is not None:
            self._parent._require_open()
        if self._closed:
            what = "session" if self._parent is None else "conversation"
            raise ExecutionError("X002", f"the {what} is closed", where=str(self._bundle.path))

    def close(self, timeout: float | None = None) -> None:
        """Refuse further requests."""
        self._closed = True
