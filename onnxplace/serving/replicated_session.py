"""A session over several copies of a bundle: each request goes to the copy with the fewest in flight."""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial

from onnxplace.bundle import Bundle
from onnxplace.errors import ExecutionError
from onnxplace.feeds import Array
from onnxplace.runtime import CopyStatus, Result, RuntimeSession, run_timeout_error
from onnxplace.runtimes.execution import ResultFuture
from onnxplace.serving.bound_session import BoundSession
from onnxplace.serving.copies import Copy, CopyOpener, CopySet


class ReplicatedRequest:
    """A request without states, which is repeated once if its copy dies before it has answered."""

    def __init__(self, feeds: Mapping[str, Array], states: Collection[str]) -> None:
        self.feeds, self.states = feeds, states
        self.future = ResultFuture()
        self.start_time = time.perf_counter()
        self.session: RuntimeSession | None = None
        """Of the copy that has it."""
        self.inner: Future[Result] | None = None
        """Its future there."""
        self.is_cancelled = False
        self.was_repeated = False

    def take_repeat(self) -> bool:
        """Return whether it may be repeated, which it may be once."""
        may_repeat = not (self.was_repeated or self.is_cancelled)
        self.was_repeated = True
        return may_repeat


class ReplicatedSession(RuntimeSession):
    """Copies of a bundle behind one session, which opens and closes them.

    A request without states that its copy has not answered when it dies is repeated once, on another copy. A bundle
    with states has each conversation on one copy, as long as that lives.

    Args:
        bundle: The bundle.
        openers: Of each copy.
        max_in_flight: Requests in flight that each copy accepts.
    """

    def __init__(self, bundle: Bundle, openers: Sequence[CopyOpener], max_in_flight: int) -> None:
        self.copies = CopySet(openers, str(bundle.path), max_in_flight)
        self._state_names = tuple(item.name for item in bundle.state_inputs)
        self._open_requests: dict[Future[Result], ReplicatedRequest] = {}
        self._own = BoundSession(self.copies, self._state_names, opens_conversation=False)
        """For the requests of a bundle with states outside of conversations."""
        self.copies.open()
        self._finalizer = weakref.finalize(self, self.copies.abandon_all)
        self._finalizer.atexit = False  # the hook of the engines waits for them

    # -- requests -----------------------------------------------------------------------------------

    def submit(self, feeds: Mapping[str, Array], states: Collection[str] = ()) -> Future[Result]:
        """Start a request; blocks while all copies have as many in flight as allowed."""
        self.copies.require_own_process()
        if self._state_names:
            return self._own.submit(feeds, states)
        request = ReplicatedRequest(feeds, states)
        try:
            self._start(request)
        except BaseException:
            self.copies.release(request)
            raise
        return request.future

    def _start(self, request: ReplicatedRequest) -> None:
        """Hand a request to a copy, or to another one if that has just died."""
        while True:
            copy, session = self.copies.acquire(request)
            try:
                inner = session.submit(request.feeds, request.states)
            except ExecutionError:
                self.copies.release(request)
                self.copies.report(copy, session)
                if session.failure is None or not request.take_repeat():
                    raise
                continue
            request.session, request.inner = session, inner
            self._open_requests[request.future] = request
            inner.add_done_callback(partial(_end_request, self.copies, self._open_requests, request, copy, session))
            return

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
                    return session.run(feeds, states, left)
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
        request = self._open_requests.get(future)
        if request is None:
            self._own.cancel(future)
            return
        request.is_cancelled = True
        if request.session is not None and request.inner is not None:
            request.session.cancel(request.inner)

    # -- states -------------------------------------------------------------------------------------

    def reset_state(self) -> None:
        """Discard the states of requests outside of conversations."""
        self._own.reset_state()

    def read_states(self) -> Mapping[str, Array]:
        """Return copies of the stored states, by state input, after the requests in flight."""
        return self._own.read_states()

    def protect_states(self) -> None:
        """Keep the states before each run, for a failure of it, and for `restore_states`; not for that of a copy."""
        self._own.protect_states()

    def restore_states(self) -> None:
        """Bring back the protected states before the last run that succeeded."""
        self._own.restore_states()

    def count_state_changes(self) -> int:
        """Return how many runs have changed the states, after the requests in flight."""
        return self._own.count_state_changes()

    def open_conversation(self) -> RuntimeSession:
        """Return a session with states of its own, which are on one copy."""
        self.copies.require_own_process()
        return BoundSession(self.copies, self._state_names, opens_conversation=True, owner=self)

    # -- the end ------------------------------------------------------------------------------------

    def read_remote_delays(self) -> Mapping[str, int]:
        """Return how long threads of the processes of open copies waited for a core."""
        sessions = [copy.find_session() for copy in self.copies.copies]
        return {
            f"{index} {thread}": delay
            for index, session in enumerate(sessions)
            if session is not None
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


def _end_request(
    copies: CopySet,
    open_requests: dict[Future[Result], ReplicatedRequest],
    request: ReplicatedRequest,
    copy: Copy,
    session: RuntimeSession,
    inner: Future[Result],
) -> None:
    """Deliver the result of a request, or repeat it if its copy has died; a callback of its future there."""
    copies.release(request)
    failure = inner.exception()
    if failure is not None and is_end(failure, session):
        copies.report(copy, session)
        if request.take_repeat():
            with suppress(ExecutionError, TimeoutError):
                next_copy, next_session = copies.acquire(request)
                request.session, request.inner = next_session, next_session.submit(request.feeds, request.states)
                request.inner.add_done_callback(
                    partial(_end_request, copies, open_requests, request, next_copy, next_session)
                )
                return
            copies.release(request)
    open_requests.pop(request.future, None)
    if failure is not None:
        request.future.finish(None, failure)
        return
    request.future.finish(replace(inner.result(), seconds=time.perf_counter() - request.start_time), None)


def is_end(failure: BaseException, session: RuntimeSession) -> bool:
    """Return whether a request failed because its session has ended, or was closed after that."""
    end = session.failure
    codes = {"X002", end.code} if isinstance(end, ExecutionError) else set()
    return end is not None and (failure is end or (isinstance(failure, ExecutionError) and failure.code in codes))
