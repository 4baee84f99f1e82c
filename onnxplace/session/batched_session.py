"""A session whose concurrent requests are joined into batches: how they are joined, and whether a bundle allows it."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import NoReturn

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.manifest import BatchingRecord
from onnxplace.errors import ExecutionError, UsageError
from onnxplace.feeds.dimensions import MAX_DIMENSION
from onnxplace.feeds.feeds import Array
from onnxplace.runtime.interface import CopyStatus, Result, Runtime, RuntimeSession, open_session, run_timeout_error
from onnxplace.session.batcher import Batcher, BatchQueue, Joiner
from onnxplace.session.planned_session import PlannedSession

# More requests in flight only take memory.
MAX_REQUESTS = 1024
# Longer waits than a minute are mistakes, such as a delay in microseconds.
MAX_DELAY_MS = 60_000.0
# Locks accept no longer timeout.
MAX_TIMEOUT_SECONDS = 1e6


@dataclass(frozen=True)
class Batching:
    """How concurrent requests are joined into one.

    Raises UsageError for impossible values.

    >>> Batching(max_batch=16).max_delay_ms
    2.0
    """

    max_batch: int = 8
    """The largest batch that requests are joined to; a request that is larger itself runs alone."""
    max_delay_ms: float = 2.0
    """Milliseconds that a request waits for others at most, while other requests are in flight."""

    def __post_init__(self) -> None:
        is_whole = isinstance(self.max_batch, Integral) and not isinstance(self.max_batch, bool)
        if not is_whole or not 1 <= self.max_batch <= MAX_DIMENSION:
            message = f"expected max_batch to be an integer from 1 to {MAX_DIMENSION}, got {self.max_batch!r}"
            raise UsageError("U005", message, where="Batching", hint="such as Batching(max_batch=8)")
        is_number = isinstance(self.max_delay_ms, Real) and not isinstance(self.max_delay_ms, bool)
        if not is_number or math.isnan(self.max_delay_ms) or not 0 <= self.max_delay_ms <= MAX_DELAY_MS:
            message = f"expected max_delay_ms to be a number from 0 to {MAX_DELAY_MS:.0f}, got {self.max_delay_ms!r}"
            raise UsageError("U005", message, where="Batching", hint="such as Batching(max_delay_ms=2.0)")


def check_in_flight(count: int, name: str, maximum: int = MAX_REQUESTS) -> int:
    """Return a number of requests, such as those in flight; raises UsageError unless it is from 1 to `maximum`."""
    if not isinstance(count, Integral) or isinstance(count, bool) or not 1 <= count <= maximum:
        message = f"expected {name} to be an integer from 1 to {maximum}, got {count!r}"
        raise UsageError("U005", message, hint=f"such as {name}=8")
    return int(count)


def require_batching(bundle: Bundle) -> BatchingRecord:
    """Return the axes along which a bundle's requests can be joined; raises UsageError if they cannot be."""
    manifest, where = bundle.manifest, str(bundle.path)
    if manifest.states:
        message = (
            f"requests cannot be joined: each takes the states of the one before, such as {manifest.states[0].input!r}"
        )
        raise UsageError("U083", message, where=where, hint="leave batching out, or compile without --state")
    record = manifest.batching
    if record is None:
        message = f"format {manifest.schema_version} of this bundle does not say whether requests can be joined"
        raise UsageError("U083", message, where=where, hint="compile the model again")
    if not record.dimension:
        place = f"{where}, node {record.node!r}" if record.node else where
        hint = "leave batching out; requests still overlap across devices"
        raise UsageError("U083", f"requests cannot be joined: {record.reason}", where=place, hint=hint)
    return record


def check_timeout(timeout: float | None, minimum: float = 1e-9) -> float | None:
    """Return a timeout in seconds; raises UsageError unless it is valid."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or not minimum <= timeout < MAX_TIMEOUT_SECONDS:
        least = "more than 0" if minimum else "0 or more"
        message = f"expected a timeout in seconds, {least} and less than {MAX_TIMEOUT_SECONDS:.0f}, got {timeout!r}"
        raise UsageError("U005", message, hint="omit it to wait without a limit")
    return float(timeout)


class BatchedSession(RuntimeSession):
    """Joins the requests of another session, which it closes at its end."""

    def __init__(
        self, session: RuntimeSession, bundle: Bundle, record: BatchingRecord, batching: Batching, max_in_flight: int
    ) -> None:
        self._session, self._where = session, str(bundle.path)
        waiting = BatchQueue(batching.max_batch, batching.max_delay_ms / 1000)
        self.batcher = Batcher(session, Joiner(record), waiting, max_in_flight, self._where)
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
    bundle: Bundle, runtime: Runtime, trace: bool, max_in_flight: int, batching: Batching | None, warmup: bool = False
) -> RuntimeSession:
    """Open a bundle, all its plans with `warmup`.

    Raises UsageError, before that, if requests are to be joined and cannot be.
    """
    open_any = partial(PlannedSession, warmup=warmup) if bundle.manifest.plans else open_session
    if batching is None:
        return open_any(runtime, bundle, trace=trace, max_in_flight=max_in_flight)
    if not isinstance(batching, Batching):
        hint = "such as batching=onnxplace.Batching(max_batch=8)"
        raise UsageError("U005", f"expected a Batching, got {batching!r}", where="batching", hint=hint)
    record = require_batching(bundle)
    session = open_any(runtime, bundle, trace=trace, max_in_flight=max_in_flight)
    try:
        return BatchedSession(session, bundle, record, batching, max_in_flight)
    except BaseException:
        session.abandon()
        raise
