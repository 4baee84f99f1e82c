"""The thread that joins waiting requests, runs them as one, and gives each its part of the result.

Callers put messages into its inbox, and so do runtimes when a request ends. Only this thread alters the queue and the
batches in flight, so that neither needs a lock.

Requests can be joined if they agree in all but the size of their batch; they wait in one queue per group of such
requests. A batch starts when it is full, when its first request has waited `max_delay_ms`, or at once while nothing
else runs, so that an idle session adds no delay. If a batch fails, its requests run one by one, so that only those fail
that have to.
"""

from __future__ import annotations

import atexit
import copy
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from onnxplace.bundle.manifest import BatchingRecord
from onnxplace.errors import ExecutionError
from onnxplace.feeds.feeds import Array
from onnxplace.runtime.interface import Result, RuntimeSession
from onnxplace.runtimes.execution.futures import ResultFuture, WaitList
from onnxplace.utils.threads import start_thread

# Join the feeds of requests along the axes of their batch, and cut the outputs.

# Inputs that have to be equal are compared by their bytes, up to this size.
MAX_COMPARED_BYTES = 1 << 16


class Joiner:
    """The axes along which requests of a bundle are joined."""

    def __init__(self, record: BatchingRecord) -> None:
        self._inputs = record.inputs
        self._outputs = record.outputs

    def describe_feeds(self, feeds: Mapping[str, Any]) -> tuple[int, Hashable | None]:
        """Return the size of a request's batch, and what other requests must have in common with it.

        None stands for a request that runs alone: without a batch, with broadcast inputs of it, with an input of too
        low a rank, which the session reports, or with other inputs that are too large to be compared.
        """
        sizes, entries = set(), []
        for name in sorted(feeds):
            value = feeds[name]
            axis = self._inputs.get(name)
            if not isinstance(value, np.ndarray) or (axis is not None and axis >= value.ndim):
                return 0, None
            if axis is None:
                if value.dtype.hasobject or value.nbytes > MAX_COMPARED_BYTES:
                    return 0, None
                # An input without the batch is shared by all requests of a batch, so it has to be equal.
                entries.append((name, value.dtype, value.shape, value.tobytes()))
            else:
                sizes.add(value.shape[axis])
                # Apart from the axis of the batch, shapes and types have to agree, as for a concatenation.
                entries.append((name, value.dtype, value.shape[:axis], value.shape[axis + 1 :]))
        if len(sizes) != 1 or 0 in sizes or not self._inputs.keys() <= feeds.keys():
            return 0, None
        return sizes.pop(), tuple(entries)

    def join_feeds(self, feeds: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
        """Return the feeds of all requests as one, in their order."""
        return {
            name: np.concatenate([item[name] for item in feeds], axis=self._inputs[name])
            if name in self._inputs
            else value
            for name, value in feeds[0].items()
        }

    def cut_outputs(self, outputs: Mapping[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
        """Return the outputs of each request; they share no memory.

        Raises ValueError if an output does not have the same number of entries for each request of the batch.
        """
        total = sum(sizes)
        parts: list[dict[str, Any]] = [{} for _ in sizes]
        for name, value in outputs.items():
            axis = self._outputs.get(name)
            if axis is None:
                for part in parts:
                    part[name] = copy.deepcopy(value)
                continue
            if axis >= value.ndim or value.shape[axis] % total or not value.shape[axis]:
                raise ValueError(f"output {name!r} of shape {list(value.shape)} holds no batch of {total}")
            # An axis may hold several entries per request, always the same number.
            ends = np.cumsum(sizes) * (value.shape[axis] // total)
            for part, piece in zip(parts, np.split(value, ends[:-1], axis=axis), strict=True):
                part[name] = piece.copy()
        return parts


# Requests that wait to be joined: which of them make a batch, and when.


@dataclass(frozen=True, eq=False)
class WaitingRequest:
    """A request that may be joined with others."""

    feeds: Mapping[str, Any]
    size: int
    """Size of its own batch."""
    group: Hashable | None
    """Requests of one group can be joined; None for a request that runs alone."""
    arrival: float
    """Time on the clock of the batcher, in seconds."""
    future: ResultFuture = field(default_factory=ResultFuture)
    start_time: float = field(default_factory=time.perf_counter)


class BatchQueue:
    """The waiting requests by group, each group in the order of arrival. It knows no threads and no clock."""

    def __init__(self, max_batch: int, max_delay_seconds: float) -> None:
        self.max_batch = max_batch
        self._max_delay_seconds = max_delay_seconds
        self._groups: dict[Hashable, deque[WaitingRequest]] = {}

    def add(self, request: WaitingRequest) -> None:
        """Let a request wait."""
        group = request if request.group is None else request.group
        self._groups.setdefault(group, deque()).append(request)

    def remove(self, request: WaitingRequest) -> bool:
        """Forget a request; return whether it was still waiting."""
        group = request if request.group is None else request.group
        waiting = self._groups.get(group, deque())
        if request not in waiting:
            return False
        waiting.remove(request)
        if not waiting:
            del self._groups[group]
        return True

    def take(self, now: float, *, at_once: bool) -> list[WaitingRequest]:
        """Remove and return the next batch; empty if none is due.

        A batch is due if it is full, or its first request has waited long enough, or `at_once` is set because nothing
        else is in flight. Of several, that with the oldest request comes first.
        """
        due = [
            group
            for group, waiting in self._groups.items()
            if at_once or now >= waiting[0].arrival + self._max_delay_seconds or self._is_full(waiting)
        ]
        if not due:
            return []
        group = min(due, key=lambda item: self._groups[item][0].arrival)
        waiting = self._groups[group]
        batch = [waiting.popleft() for _ in range(self._count_joined(waiting))]
        if not waiting:
            del self._groups[group]
        return batch

    def find_deadline(self) -> float | None:
        """Return when the next batch is due if no other request arrives; None without requests."""
        if not self._groups:
            return None
        return min(waiting[0].arrival for waiting in self._groups.values()) + self._max_delay_seconds

    def clear(self) -> list[WaitingRequest]:
        """Remove and return all requests."""
        requests = [request for waiting in self._groups.values() for request in waiting]
        self._groups.clear()
        return requests

    def _count_joined(self, waiting: deque[WaitingRequest]) -> int:
        """Return how many requests of a group fit into one batch, without skipping one; at least one."""
        total = 0
        for count, request in enumerate(waiting):
            # Order of arrival: a small request does not overtake a large one, which could wait forever.
            total += request.size
            if total > self.max_batch:
                return max(count, 1)
        return len(waiting)

    def _is_full(self, waiting: deque[WaitingRequest]) -> bool:
        """Return whether no later request can join the first batch of a group."""
        count = self._count_joined(waiting)
        size = sum(waiting[index].size for index in range(count))
        return count < len(waiting) or size >= self.max_batch or waiting[0].group is None


# The thread checks this often whether its session still exists.
OWNER_CHECK_SECONDS = 3.0
# Time at the end of the interpreter for waiting requests.
EXIT_SECONDS = 10.0


class Batcher:
    """Joins requests of a session. Its thread keeps it alive until it is closed or abandoned."""

    def __init__(
        self,
        session: RuntimeSession,
        joiner: Joiner,
        waiting: BatchQueue,
        max_in_flight: int,
        where: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session, self._joiner, self._where, self._clock = session, joiner, where, clock
        self._max_in_flight = max_in_flight
        # While as many batches run as may, the requests of one more can wait.
        self._max_requests = (max_in_flight + 1) * waiting.max_batch
        self._queue = waiting
        self._alone: deque[WaitingRequest] = deque()
        """Requests of failed batches, which run one by one."""
        self._running: dict[Future[Result], list[WaitingRequest]] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._changes = WaitList()
        """Woken when a request ends."""
        self._open: dict[WaitingRequest, None] = {}
        """Requests without a result."""
        self._direct: dict[object, None] = {}
        """Tokens of callers that run a request themselves."""
        self._closed = False
        self._broken: ExecutionError | None = None
        self.process = os.getpid()
        self.owner: weakref.ref[object] | None = None
        self.thread = threading.Thread(target=self._work, name="onnxplace batching", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        _open_batchers.add(self)
        _register_exit_hook()
        start_thread(self.thread)

    # -- callers ------------------------------------------------------------------------------------

    def submit(self, feeds: Mapping[str, Any], deadline: float | None = None) -> WaitingRequest:
        """Let a request wait to be joined; blocks while too many are in flight.

        Raises ExecutionError if the session accepts none, TimeoutError if there is no place before the deadline.
        """
        size, group = self._joiner.describe_feeds(feeds)
        request = WaitingRequest(feeds, size, group, self._clock())
        while (wakeup := self._try_accept(request)) is not None:
            if not wakeup.acquire(timeout=-1 if deadline is None else max(deadline - time.monotonic(), 0)):
                raise TimeoutError
        return request

    def _try_accept(self, request: WaitingRequest) -> threading.Lock | None:
        with self._lock:
            self._require_open()
            # A callback on the batcher's own thread does not wait for itself.
            if len(self._open) >= self._max_requests and threading.current_thread() is not self.thread:
                return self._changes.enter()
            self._open[request] = None
            self._inbox.put(partial(self._queue.add, request))
            return None

    def _require_open(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._closed:
            raise ExecutionError("X002", "the session is closed", where=self._where)

    def enter_directly(self, token: object) -> bool:
        """Return whether the caller may run its request itself, since there is no other; then it has to leave."""
        with self._lock:
            self._require_open()
            # Nothing to join with: the caller's own thread saves waking this one, and being woken by it.
            if self._open or self._direct:
                return False
            self._direct[token] = None
            return True

    def leave_directly(self, token: object) -> None:
        """Note that a caller has run its request; may be repeated."""
        if self._direct.pop(token, token) is None:
            self._inbox.put(None)

    def find_request(self, future: Future[Result]) -> WaitingRequest | None:
        """Return the request without a result that has a future."""
        return next((request for request in list(self._open) if request.future is future), None)

    def drop(self, request: WaitingRequest) -> None:
        """Note that the result of a request is no longer wanted."""
        self._inbox.put(partial(self._drop, request))

    def describe_progress(self, request: WaitingRequest) -> str:
        """Return whether a request waits or runs."""
        for requests in list(self._running.values()):
            if request in requests:
                return f"it runs in a batch of {sum(item.size for item in requests) or 1}"
        return f"it waits for {len(self._running) + len(self._direct)} requests in flight"

    def close(self, timeout: float | None = None) -> None:
        """Refuse new requests, wait at most `timeout` seconds for the others, then end them and the thread."""
        limit = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._closed = True
            self._changes.wake()
        self._inbox.put(None)
        if threading.current_thread() is self.thread:
            return  # a callback: the thread closes the session after the last request
        try:
            is_done = self._wait_for_requests(limit)
        except BaseException:  # an interrupt: do not wait any longer
            self._inbox.put(self._refuse_waiting)
            self._session.close(0)
            raise
        if not is_done:
            self._inbox.put(self._refuse_waiting)
        self._session.close(None if limit is None else max(limit - time.monotonic(), 0))
        with suppress(RuntimeError):  # the thread was never started
            self.thread.join(OWNER_CHECK_SECONDS)

    def _wait_for_requests(self, limit: float | None) -> bool:
        """Wait until no request is without a result; return whether that came before the limit."""
        while True:
            with self._lock:
                if not self._open:
                    return True
                wakeup = self._changes.enter()
            if not wakeup.acquire(timeout=-1 if limit is None else max(limit - time.monotonic(), 0)):
                return False

    def abandon(self) -> None:
        """Let the thread end after all requests, without waiting: for finalizers, which may hold any lock."""
        self._closed = True
        self._inbox.put(None)

    # -- the thread ---------------------------------------------------------------------------------

    def _work(self) -> None:
        """Follow messages, and start batches that are due, until the session is closed."""
        try:
            while not self._is_finished():
                message = self._await_message()
                if message is not None:
                    message()
                    del message  # and the request that it refers to
                self._start_due_batches()
            self._session.abandon()
        except BaseException as cause:  # noqa: BLE001 - whatever ends a thread, such as an exception set from outside
            self._mark_broken(cause)

    def _is_finished(self) -> bool:
        with self._lock:
            return self._closed and not self._open and not self._running

    def _await_message(self) -> Callable[[], None] | None:
        """Return the next message; None if there is none before a batch is due."""
        # Without room for a batch, no deadline counts: the end of a running one is a message.
        deadline = self._queue.find_deadline() if self._has_room() else None
        seconds = OWNER_CHECK_SECONDS
        if deadline is not None:
            seconds = min(max(deadline - self._clock(), 0), seconds)
        try:
            return self._inbox.get(timeout=seconds)
        except queue.Empty:
            if self.owner is not None and self.owner() is None:
                self._closed = True
            return None

    def _has_room(self) -> bool:
        return len(self._running) + len(self._direct) < self._max_in_flight

    def _start_due_batches(self) -> None:
        """Start batches while more may be in flight; waiting messages come first, they may complete a batch."""
        while self._has_room() and self._inbox.empty():
            if self._alone:
                batch = [self._alone.popleft()]
            else:
                # An idle session does not wait: what arrives meanwhile makes the next batch.
                at_once = self._closed or not (self._running or self._direct)
                batch = self._queue.take(self._clock(), at_once=at_once)
            if not batch:
                return
            self._start_batch(batch)

    def _start_batch(self, batch: list[WaitingRequest]) -> None:
        try:
            feeds = [request.feeds for request in batch]
            future = self._session.submit(self._joiner.join_feeds(feeds) if len(batch) > 1 else feeds[0])
        except Exception as failure:  # noqa: BLE001 - their callers get it
            self._fail_batch(batch, failure)
            return
        self._running[future] = batch
        future.add_done_callback(lambda ended: self._inbox.put(partial(self._end_batch, ended)))

    def _end_batch(self, future: Future[Result]) -> None:
        """Give each request of a batch its part of the result."""
        batch = self._running.pop(future)
        if (failure := future.exception(0)) is not None:
            self._fail_batch(batch, failure)
            return
        result = future.result(0)
        try:
            sizes = [request.size for request in batch]
            parts = self._joiner.cut_outputs(result.outputs, sizes) if len(batch) > 1 else [result.outputs]
        except (ValueError, MemoryError) as problem:
            self._fail_batch(batch, problem)
            return
        for request, part in zip(batch, parts, strict=True):
            seconds = time.perf_counter() - request.start_time
            self._finish(request, Result(part, result.events, seconds, result.plan), None)

    def _fail_batch(self, batch: Sequence[WaitingRequest], failure: BaseException) -> None:
        """Let the requests of a failed batch run one by one, so that only those fail that have to."""
        if len(batch) > 1:
            self._alone.extend(request for request in batch if request in self._open)
        else:
            self._finish(batch[0], None, failure)

    def _finish(self, request: WaitingRequest, result: Result | None, failure: BaseException | None) -> None:
        """Deliver a result or a failure, once."""
        with self._lock:
            if request not in self._open:
                return
            del self._open[request]
            self._changes.wake()
        request.future.finish(result, failure)

    def _drop(self, request: WaitingRequest) -> None:
        """Forget a request; a batch is ended if nobody waits for any of its requests."""
        self._queue.remove(request)
        with suppress(ValueError):
            self._alone.remove(request)
        self._finish(request, None, ExecutionError("X011", "its caller no longer waits for it", where=self._where))
        for future, batch in list(self._running.items()):
            if request in batch and not any(item in self._open for item in batch):
                self._session.cancel(future)

    def _refuse_waiting(self) -> None:
        """Fail all requests that have not started."""
        waiting = [*self._queue.clear(), *self._alone]
        self._alone.clear()
        for request in waiting:
            self._finish(request, None, ExecutionError("X002", "the session was closed", where=self._where))

    def _mark_broken(self, cause: BaseException) -> None:
        """Fail all requests after the thread died, so that no caller waits for it."""
        message = f"its thread died: {type(cause).__name__}: {cause}".rstrip(": ")
        self._broken = ExecutionError("X005", message, where="batching", hint="open a new session")
        self._closed = True
        with self._lock:  # a request that is accepted meanwhile is in this list, or its caller sees the failure
            requests = list(self._open)
            self._changes.wake()
        for request in requests:
            self._finish(request, None, self._broken)
        self._session.abandon()


_open_batchers: weakref.WeakSet[Batcher] = weakref.WeakSet()


@cache
def _register_exit_hook() -> None:
    """Close batchers before the engines below them: hooks run in reverse order, and those of engines exist already."""
    atexit.register(_close_all)


def _close_all() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for batcher in list(_open_batchers):
        if batcher.process == os.getpid():
            batcher.close(max(deadline - time.monotonic(), 0))
