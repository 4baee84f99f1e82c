"""Sessions on an engine: handles whose end is the end of its threads, and their conversations.

A conversation is a set of carried states with requests that follow one another. The session itself is the conversation
of all requests that belong to no other.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from concurrent.futures import Future

from onnxplace.feeds.feeds import Array
from onnxplace.runtime.interface import CopyStatus, Result, RuntimeSession, SessionStates
from onnxplace.runtimes.execution.engine import Engine
from onnxplace.runtimes.execution.futures import ResultFuture
from onnxplace.runtimes.execution.requests import CarriedStates


class EngineStates(SessionStates):
    """The states of one conversation of an engine."""

    def __init__(self, engine: Engine, carried: CarriedStates) -> None:
        self._engine, self._carried = engine, carried

    def reset(self) -> None:
        """Discard the states before the next request, or at once if none is in flight."""
        self._engine.reset_state(self._carried)

    def read(self) -> Mapping[str, Array]:
        """Return copies of the stored states, by state input, after the requests in flight."""
        return self._engine.read_states(self._carried)

    def protect(self) -> None:
        """Keep the states that each run takes, for its failure and for `restore`."""
        self._carried.keeps_previous = True

    def restore(self) -> None:
        """Bring back the states before the last run that succeeded, after the requests in flight."""
        self._engine.when_idle(self._carried, self._carried.restore)

    def count_changes(self) -> int:
        """Return how many runs have stored states, after the requests in flight."""
        return self._engine.when_idle(self._carried, lambda: self._carried.change_count)


class EngineConversation(RuntimeSession):
    """Requests that share one set of states of an engine.

    Args:
        engine: The engine.
        carried: The states.
        session: The session whose end is the end of the engine; kept alive.
    """

    def __init__(self, engine: Engine, carried: CarriedStates, session: EngineSession | None = None) -> None:
        self.engine, self._carried, self._session = engine, carried, session
        self._states = EngineStates(engine, carried)

    @property
    def states(self) -> SessionStates:
        """Return the states of this conversation."""
        return self._states

    def submit(self, feeds: Mapping[str, Array], states: Collection[str] = ()) -> Future[Result]:
        """Start a request after those of this conversation; blocks while as many are in flight as allowed."""
        future = ResultFuture()
        self.engine.submit(self.engine.request(feeds, states, self._carried, future))
        return future

    def run(self, feeds: Mapping[str, Array], states: Collection[str] = (), timeout: float | None = None) -> Result:
        """Return the result of a request; with no other in flight, do one device's part in this thread."""
        return self.engine.run(self.engine.request(feeds, states, self._carried), timeout)

    def cancel(self, future: Future[Result]) -> None:
        """End a request in flight; its devices are free again at the end of the nodes that they execute."""
        self.engine.cancel(future)

    def open_conversation(self) -> RuntimeSession:
        """Return another conversation of the same session, over the same segments and workers."""
        return EngineConversation(self.engine, self.engine.open_conversation(), self._session)

    def close(self, timeout: float | None = None) -> None:
        """Wait for this conversation's requests, then free its states; the session stays open."""
        self.engine.close_conversation(self._carried, timeout)

    def abandon(self) -> None:
        """Let its requests end, whose states are then freed, without waiting for them."""
        self._carried.closed = True


class EngineSession(EngineConversation):
    """A handle on an engine, whose threads end when the handle is closed, deleted, or fails to open."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, engine.own_states)
        engine.owner = weakref.ref(self)
        self.finalizer = weakref.finalize(self, engine.abandon)
        self.finalizer.atexit = False  # the engines' own hook waits for them
        engine.start()

    @property
    def failure(self) -> BaseException | None:
        """Return the error that has ended the engine; None while it works."""
        return self.engine.failure

    def list_copies(self) -> tuple[CopyStatus, ...]:
        """Return the bundle as its one copy, if its own processes run it, which are opened again."""
        return self.engine.list_copies()

    def open_conversation(self) -> RuntimeSession:
        """Return a session with its own states over the same segments and workers."""
        return EngineConversation(self.engine, self.engine.open_conversation(), self)

    def close(self, timeout: float | None = None) -> None:
        """Let the workers finish requests in flight, and end."""
        self.engine.close(timeout)

    def abandon(self) -> None:
        """Let the workers end without waiting for them."""
        self.engine.abandon()
