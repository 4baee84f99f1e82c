"""A session over several copies of a bundle, and its conversations.

A request without states goes to the copy with the fewest in flight. If that dies before it has answered, another copy
gets the request, once. States are on one copy: the first request of a conversation chooses it, and so does the next one
after that copy died. What was there is lost then: a later request has to feed all states, or follow `reset`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from onnxplace.bundle.bundle import Bundle
from onnxplace.errors import ExecutionError, FeedError
from onnxplace.feeds.feeds import Array
from onnxplace.runtime.interface import CopyStatus, Result, RuntimeSession, SessionStates, run_timeout_error
from onnxplace.runtimes.execution.futures import ResultFuture
from onnxplace_hosts.replicas.copies import Copy, CopyOpener, CopySet

_LOST_HINT = "feed saved values, or start from the initial ones: session.reset_state()"


# -- requests with states ---------------------------------------------------------------------------


@dataclass
class _Binding:
    """The copy of a conversation, its session, and the conversation there, which may be the session itself."""

    copy: Copy
    session: RuntimeSession
    own: RuntimeSession
    changes: int = 0
    """Number of requests that have succeeded there, which a copy that has died cannot tell."""


class BoundStates(SessionStates):
    """The states of a conversation over several copies: which copy has them, and whether they are lost.

    Args:
        copies: All copies.
        names: All state inputs.
        opens_conversation: Whether it has states of its own on its copy; or else those of the copy's session.
    """

    def __init__(self, copies: CopySet, names: Sequence[str], *, opens_conversation: bool) -> None:
        self._copies, self._names, self._opens_conversation = copies, names, opens_conversation
        self._lock = threading.RLock()
        self.binding: _Binding | None = None
        self._is_lost = self._protects = self._is_closed = False
        self._earlier_changes = 0
        """Number of requests that had succeeded on copies that died."""

    def bind(self, feeds: Mapping[str, Array]) -> _Binding:
        """Return the copy that has the states, or choose one for the next request, which has these feeds.

        Raises FeedError if states were lost and are not fed.
        """
        with self._lock:
            if self._is_closed:
                hint = "open another one: session.conversation()"
                raise ExecutionError("X002", "the conversation is closed", where=self._copies.where, hint=hint)
            if (binding := self._find_binding()) is not None:
                return binding
            missing = [name for name in self._names if name not in feeds]
            if self._is_lost and missing:
                message = f"no value for state input {missing[0]!r}: the copy of the bundle that had it has died"
                raise FeedError("S007", message, hint=_LOST_HINT)
            copy, session = self._copies.bind(self)
            own = session.open_conversation() if self._opens_conversation else session
            if self._protects:
                own.states.protect()
            self.binding, self._is_lost = _Binding(copy, session, own), False
            return self.binding

    def _find_binding(self) -> _Binding | None:
        """Return the copy that has the states, if it lives; otherwise, they are lost."""
        binding = self.binding
        if binding is None or (binding.session.failure is None and binding.copy.session is binding.session):
            return binding
        if self._copies.closed:
            return binding  # which says so
        self.binding, self._is_lost = None, True
        self._earlier_changes += binding.changes
        binding.copy.users.discard(self)
        return None

    def end_request(self, binding: _Binding, token: object, *, has_succeeded: bool) -> None:
        """Note the end of a request on a copy."""
        self._copies.release(token)
        with self._lock:
            binding.changes += has_succeeded
        self._copies.report(binding.copy, binding.session)

    def close(self) -> RuntimeSession | None:
        """Refuse further requests; return the conversation on the copy, if there is one."""
        self._is_closed = True
        return self.binding.own if self.binding is not None and self._opens_conversation else None

    def reset(self) -> None:
        """Forget the states, also those that were lost, before the next request."""
        with self._lock:
            binding, self._is_lost = self._find_binding(), False
        if binding is not None:
            binding.own.states.reset()

    def _find_states(self) -> SessionStates | None:
        """Return the states on their copy, None if there are none; raises FeedError if they are lost."""
        with self._lock:
            binding = self._find_binding()
            if self._is_lost:
                message = "the states are lost: the copy of the bundle that had them has died"
                raise FeedError("S007", message, hint=_LOST_HINT)
        return None if binding is None else binding.own.states

    def read(self) -> Mapping[str, Array]:
        """Return copies of the stored states, by state input, after the requests in flight."""
        states = self._find_states()
        return {} if states is None else states.read()

    def protect(self) -> None:
        """Keep the states before each run, for a failure of it; not for the death of their copy."""
        with self._lock:
            self._protects = True
            if (binding := self._find_binding()) is not None:
                binding.own.states.protect()

    def restore(self) -> None:
        """Bring back the protected states before the last run that succeeded."""
        if (states := self._find_states()) is not None:
            states.restore()

    def count_changes(self) -> int:
        """Return how many runs have changed the states, after the requests in flight."""
        with self._lock:
            binding = self._find_binding()
        return self._earlier_changes + (0 if binding is None else binding.own.states.count_changes())


class BoundSession(RuntimeSession):
    """A conversation over several copies.

    Args:
        copies: All copies.
        state_names: All state inputs.
        owner: The session of the copies, kept alive; None for the requests outside of conversations.
    """

    def __init__(self, copies: CopySet, state_names: Sequence[str], owner: object = None) -> None:
        self._copies, self._state_names, self._owner = copies, state_names, owner
        self._states = BoundStates(copies, state_names, opens_conversation=owner is not None)

    @property
    def states(self) -> BoundStates:
        """Return the states of this conversation."""
        return self._states

    def submit(self, feeds: Mapping[str, Array], states: Collection[str] = ()) -> Future[Result]:
        """Start a request on the copy that has the states; blocks while that has as many in flight as allowed."""
        self._copies.require_own_process()
        token, own_states = object(), self._states
        binding = own_states.bind(feeds)
        try:
            self._copies.count(token, binding.copy)
            future = binding.own.submit(feeds, states)
        except BaseException:
            self._copies.release(token)
            raise

        def finish(ended: Future[Result]) -> None:  # a reference to the session would keep it alive
            own_states.end_request(binding, token, has_succeeded=ended.exception() is None)

        future.add_done_callback(finish)
        return future

    def run(self, feeds: Mapping[str, Array], states: Collection[str] = (), timeout: float | None = None) -> Result:
        """Return the result of a request on the copy that has the states."""
        self._copies.require_own_process()
        token, has_succeeded = object(), False
        binding = self._states.bind(feeds)
        try:
            self._copies.count(token, binding.copy)
            result = binding.own.run(feeds, states, timeout)
            has_succeeded = True
            return result
        finally:
            self._states.end_request(binding, token, has_succeeded=has_succeeded)

    def cancel(self, future: Future[Result]) -> None:
        """End a request in flight."""
        if (binding := self._states.binding) is not None:
            binding.own.cancel(future)

    def open_conversation(self) -> RuntimeSession:
        """Return another conversation of the same copies."""
        return BoundSession(self._copies, self._state_names, self._owner)

    def close(self, timeout: float | None = None) -> None:
        """Wait for the requests of this conversation, then free its states; the copies stay open."""
        if (own := self._states.close()) is not None:
            own.close(timeout)

    def abandon(self) -> None:
        """Let its requests end, whose states are then freed, without waiting for them."""
        if (own := self._states.close()) is not None:
            own.abandon()


# -- requests without states ------------------------------------------------------------------------


class ReplicatedRequest:
    """A request without states, which is repeated once if its copy dies before it has answered.

    Args:
        copies: All copies.
        open_requests: The requests of a session by future, of which this is one until it ends.
        feeds: Its inputs.
    """

    def __init__(
        self,
        copies: CopySet,
        open_requests: dict[Future[Result], ReplicatedRequest],
        feeds: Mapping[str, Array],
    ) -> None:
        self._copies, self._open_requests, self._feeds = copies, open_requests, feeds
        self.future = ResultFuture()
        self._start_time = time.perf_counter()
        self._current: tuple[RuntimeSession, Future[Result]] | None = None
        """The session of the copy that has it, and its future there."""
        self._may_repeat = True

    def start(self) -> None:
        """Hand the request to a copy, or to another one if that has just died."""
        while True:
            copy, session = self._copies.acquire(self)
            try:
                inner = session.submit(self._feeds)
            except ExecutionError:
                self._copies.release(self)
                self._copies.report(copy, session)
                if session.failure is None or not self._take_repeat():
                    raise
                continue
            self._current = session, inner
            self._open_requests[self.future] = self
            inner.add_done_callback(partial(self._end, copy, session))
            return

    def _take_repeat(self) -> bool:
        """Return whether the request may be repeated, which it may be once."""
        may_repeat, self._may_repeat = self._may_repeat, False
        return may_repeat

    def _end(self, copy: Copy, session: RuntimeSession, inner: Future[Result]) -> None:
        """Deliver the result, or repeat the request if its copy has died; a callback of its future there."""
        self._copies.release(self)
        failure = inner.exception()
        if failure is not None and is_end(failure, session):
            self._copies.report(copy, session)
            if self._take_repeat():
                with suppress(ExecutionError):
                    self.start()
                    return
                self._copies.release(self)
        self._open_requests.pop(self.future, None)
        if failure is not None:
            self.future.finish(None, failure)
            return
        self.future.finish(replace(inner.result(), seconds=time.perf_counter() - self._start_time), None)

    def cancel(self) -> None:
        """End the request, which is not repeated then."""
        self._may_repeat = False
        if self._current is not None:
            session, inner = self._current
            session.cancel(inner)


class ReplicatedSession(RuntimeSession):
    """Copies of a bundle behind one session, which opens and closes them.

    Args:
        bundle: The bundle.
        openers: One opener for each copy.
        max_in_flight: Number of requests in flight that each copy accepts.
    """

    def __init__(self, bundle: Bundle, openers: Sequence[CopyOpener], max_in_flight: int) -> None:
        self.copies = CopySet(openers, str(bundle.path), max_in_flight)
        self._state_names = tuple(item.name for item in bundle.state_inputs)
        self._open_requests: dict[Future[Result], ReplicatedRequest] = {}
        self._own = BoundSession(self.copies, self._state_names)
        """Runs the requests of a bundle with states outside of conversations."""
        self.copies.open()
        self._finalizer = weakref.finalize(self, self.copies.abandon_all)
        self._finalizer.atexit = False  # the hook of the engines waits for them

    @property
    def states(self) -> SessionStates:
        """Return the states of requests outside of conversations."""
        return self._own.states

    def submit(self, feeds: Mapping[str, Array], states: Collection[str] = ()) -> Future[Result]:
        """Start a request; blocks while all copies have as many in flight as allowed."""
        self.copies.require_own_process()
        if self._state_names:
            return self._own.submit(feeds, states)
        request = ReplicatedRequest(self.copies, self._open_requests, feeds)
        try:
            request.start()
        except BaseException:
            self.copies.release(request)
            raise
        return request.future

    def run(self, feeds: Mapping[str, Array], states: Collection[str] = (), timeout: float | None = None) -> Result:
        """Return the result of a request."""
        self.copies.require_own_process()
        if self._state_names:
            return self._own.run(feeds, states, timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        token, was_repeated = object(), False
        try:
            while True:
                copy, session = self._acquire(token, deadline, timeout)
                left = None if deadline is None else max(deadline - time.monotonic(), 0)
                try:
                    return session.run(feeds, timeout=left)
                except ExecutionError as problem:
                    self.copies.release(token)
                    self.copies.report(copy, session)
                    if was_repeated or not is_end(problem, session):
                        raise
                    was_repeated = True
        finally:
            self.copies.release(token)

    def _acquire(self, token: object, deadline: float | None, timeout: float | None) -> tuple[Copy, RuntimeSession]:
        """Return a copy for a request; raises RunTimeoutError if all are full until the deadline."""
        try:
            return self.copies.acquire(token, deadline)
        except TimeoutError:
            progress = "all copies have as many requests in flight as allowed"
            raise run_timeout_error(timeout, progress, self.copies.where) from None

    def cancel(self, future: Future[Result]) -> None:
        """End a request in flight, which is not repeated then."""
        if (request := self._open_requests.get(future)) is not None:
            request.cancel()
        else:
            self._own.cancel(future)

    def open_conversation(self) -> RuntimeSession:
        """Return a session with states of its own, which are on one copy."""
        self.copies.require_own_process()
        return BoundSession(self.copies, self._state_names, self)

    def read_remote_delays(self) -> Mapping[str, int]:
        """Return how long threads of the processes of open copies waited for a core."""
        return {
            f"{index} {thread}": delay
            for index, copy in enumerate(self.copies.copies)
            if (session := copy.find_session()) is not None
            for thread, delay in session.read_remote_delays().items()
        }

    def list_copies(self) -> tuple[CopyStatus, ...]:
        """Return all copies."""
        return self.copies.describe()

    def close(self, timeout: float | None = None) -> None:
        """Close all copies after their requests."""
        self.copies.close(timeout)

    def abandon(self) -> None:
        """Let all copies end without waiting for them."""
        self.copies.abandon_all()


def is_end(failure: BaseException, session: RuntimeSession) -> bool:
    """Return whether a request failed because its session has ended, or was closed after that."""
    end = session.failure
    codes = {"X002", end.code} if isinstance(end, ExecutionError) else set()
    return end is not None and (failure is end or (isinstance(failure, ExecutionError) and failure.code in codes))
