"""A session whose concurrent requests are joined into batches."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import NoReturn

from onnxplace.bundle import BatchingRecord, Bundle
from onnxplace.errors import ExecutionError, UsageError
from onnxplace.feeds import Array
from onnxplace.runtime import CopyStatus, Result, Runtime, RuntimeSession, open_session, run_timeout_error
from onnxplace.serving.batcher import Batcher, Joiner
from onnxplace.serving.batching_options import Batching, require_batching


class BatchedSession(RuntimeSession):
    """Joins the requests of another session, which it closes at its end."""

    def __init__(
        self, session: RuntimeSession, bundle: Bundle, record: BatchingRecord, batching: Batching, max_in_flight: int
    ) -> None:
        self._session, self._where = session, str(bundle.path)
        self.batcher = Batcher(session, Joiner(record), batching, max_in_flight, self._where)
        self.batcher.owner = weakref.ref(self)
        self._finalizer = weakref.finalize(self, self.batcher.abandon)
        self._finalizer.atexit = False  # the batchers' own hook waits for them
        self.batcher.start()

    def submit(self, feeds: Mapping[str, Array], states: Collection[str] = ()) -> Future[Result]:
        """Start a request, alone or joined with others; blocks while as many are in flight as allowed."""
        if self._is_forked:
            return self._session.submit(feeds, states)
        return self.batcher.submit(feeds).future

    def run(self, feeds: Mapping[str, Array], states: Collection[str] = (), timeout: float | None = None) -> Result:
        """Return the result of a request; with no other in flight, this thread runs it without joining."""
        if self._is_forked:
            return self._session.run(feeds, states, timeout)
        if threading.current_thread() is self.batcher.thread:
            hint = "start it from another thread, or use run_async, whose callbacks may run the session"
            message = "run was called by a callback on the thread that joins requests, which would wait for itself"
            raise ExecutionError("X006", message, where=threading.current_thread().name, hint=hint)
        token = object()
        try:
            if self.batcher.enter_directly(token):
                return self._session.run(feeds, states, timeout)
        finally:
            self.batcher.leave_directly(token)
        return self._run_joined(feeds, timeout)

    def _run_joined(self, feeds: Mapping[str, Array], timeout: float | None) -> Result:
        deadline = None if timeout is None else time.monotonic() + timeout
        request = None
        try:
            request = self.batcher.submit(feeds, deadline)
            return request.future.result(None if deadline is None else max(deadline - time.monotonic(), 0))
        except BaseException as failure:
            if request is not None and request.future.is_finished:
                raise
            progress = "too many others wait"
            if request is not None:
                progress = self.batcher.describe_progress(request)
                self.batcher.drop(request)
            if not isinstance(failure, TimeoutError):
                raise
            raise run_timeout_error(timeout, progress, self._where) from None

    def cancel(self, future: Future[Result]) -> None:
        """Forget a request; a batch is ended when all its requests are cancelled."""
        if (request := self.batcher.find_request(future)) is not None:
            self.batcher.drop(request)

    def open_conversation(self) -> NoReturn:
        """Raise UsageError: requests are joined only where no states follow from them."""
        message = "requests that are joined have no states, and no conversations"
        raise UsageError("U045", message, where=self._where, hint="open the session without batching")

    def list_copies(self) -> tuple[CopyStatus, ...]:
        """Return the copies of the bundle, if the requests are joined for several."""
        return self._session.list_copies()

    def close(self, timeout: float | None = None) -> None:
        """Start what waits, wait for all requests at most `timeout` seconds, then end them."""
        if self._is_forked:
            self._session.close(timeout)
        else:
            self.batcher.close(timeout)

    def abandon(self) -> None:
        """Let the thread end after all requests, without waiting."""
        self.batcher.abandon()

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self.batcher.process


def open_serving_session(
    bundle: Bundle, runtime: Runtime, trace: bool, max_in_flight: int, batching: Batching | None
) -> RuntimeSession:
    """Open a bundle; raises UsageError, before that, if requests are to be joined and cannot be."""
    if batching is None:
        return open_session(runtime, bundle, trace=trace, max_in_flight=max_in_flight)
    if not isinstance(batching, Batching):
        hint = "such as batching=onnxplace.Batching(max_batch=8)"
        raise UsageError("U005", f"expected a Batching, got {batching!r}", where="batching", hint=hint)
    record = require_batching(bundle)
    session = open_session(runtime, bundle, trace=trace, max_in_flight=max_in_flight)
    try:
        return BatchedSession(session, bundle, record, batching, max_in_flight)
    except BaseException:
        session.abandon()
        raise
