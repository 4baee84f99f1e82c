"""Sessions on an engine: handles whose end is the end of its threads, and their conversations."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from concurrent.futures import Future

from onnxplace.feeds import Array
from onnxplace.runtime import Result, RuntimeSession
from onnxplace.runtimes.execution.engine import Engine
from onnxplace.runtimes.execution.futures import Outcome, ResultFuture


class EngineSession(RuntimeSession):
    """A handle on an engine, whose threads end when the handle is closed, deleted, or fails to open."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        engine.owner = weakref.ref(self)
        self.finalizer = weakref.finalize(self, engine.abandon)
        self.finalizer.atexit = False  # the engines' own hook waits for them
        engine.start()

    @property
    def failure(self) -> BaseException | None:
        """Return the error that has ended the engine; None while it works."""
        return self.engine.failure

    def submit(self, feeds: Mapping[str, Array], states: Collection[str] = ()) -> Future[Result]:
        """Start a request; blocks while as many requests are in flight as allowed."""
        future = ResultFuture()
        self.engine.submit(self.engine.request(feeds, states, future))
        return future

    def run(self, feeds: Mapping[str, Array], states: Collection[str] = (), timeout: float | None = None) -> Result:
        """Return the result of a request; with no other in flight, do one device's part in this thread."""
        return self.engine.run(self.engine.request(feeds, states, Outcome()), timeout)

    def cancel(self, future: Future[Result]) -> None:
        """End a request in flight; its devices are free again at the end of the nodes that they execute."""
        self.engine.cancel(future)

    def reset_state(self) -> None:
        """Discard states before the next request, or at once if none is in flight."""
        self.engine.reset_state()

    def read_states(self) -> Mapping[str, Array]:
        """Return copies of the stored states, by state input, after the requests in flight."""
        return self.engine.read_states()

    def protect_states(self) -> None:
        """Keep the states before each run, for a failure, and for `restore_states`."""
        self.engine.protect_states()

    def restore_states(self) -> None:
        """Bring back the protected states before the last run that succeeded."""
        self.engine.restore_states()

    def count_state_changes(self) -> int:
        """Return how many runs have changed the states, after the requests in flight."""
        return self.engine.count_state_changes()

    def read_remote_delays(self) -> Mapping[str, int]:
        """Return how long threads of other processes waited for a core."""
        return self.engine.read_remote_delays()

    def open_conversation(self) -> RuntimeSession:
        """Return a session with states of its own over the same segments and workers."""
        return EngineConversation(self)

    def close(self, timeout: float | None = None) -> None:
        """Let the workers finish requests in flight, and end."""
        self.engine.close(timeout)

    def abandon(self) -> None:
        """Let the workers end without waiting for them."""
        self.engine.abandon()


class EngineConversation(RuntimeSession):
    """A set of states of an open session, which it keeps alive."""

    def __init__(self, session: EngineSession) -> None:
        self._session = session
        self._engine = session.engine
        self._states = session.engine.open_conversation()

    def submit(self, feeds: Mapping[str, Array], states: Collection[str] = ()) -> Future[Result]:
        """Start a request after those of this conversation; blocks while as many are in flight as allowed."""
        future = ResultFuture()
        self._engine.submit(self._engine.request(feeds, states, future, self._states))
        return future

    def run(self, feeds: Mapping[str, Array], states: Collection[str] = (), timeout: float | None = None) -> Result:
        """Return the result of a request; with no other in flight, do one device's part in this thread."""
        return self._engine.run(self._engine.request(feeds, states, Outcome(), self._states), timeout)

    def reset_state(self) -> None:
        """Discard this conversation's states before its next request, or at once if none is in flight."""
        self._engine.reset_state(self._states)

    def read_states(self) -> Mapping[str, Array]:
        """Return copies of the states of this conversation, by state input, after its requests in flight."""
        return self._engine.read_states(self._states)

    def protect_states(self) -> None:
        """Keep the states before each run, for a failure, and for `restore_states`."""
        self._engine.protect_states(self._states)

    def restore_states(self) -> None:
        """Bring back the protected states before the last run that succeeded."""
        self._engine.restore_states(self._states)

    def count_state_changes(self) -> int:
        """Return how many runs have changed the states, after the requests in flight."""
        return self._engine.count_state_changes(self._states)

    def open_conversation(self) -> RuntimeSession:
        """Return another conversation of the same session."""
        return self._session.open_conversation()

    def close(self, timeout: float | None = None) -> None:
        """Wait for this conversation's requests, then free its states; the session stays open."""
        self._engine.close_conversation(self._states, timeout)

    def abandon(self) -> None:
        """Let its requests end, whose states are then freed, without waiting for them."""
        self._states.closed = True
