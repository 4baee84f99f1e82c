"""Copies of a bundle that serve one session: which one takes a request, and what happens when one fails.

A copy that has failed is left out, reported by a RuntimeWarning, and opened again in the background.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Protocol

from onnxplace.errors import ExecutionError, InputError, OnnxplaceError
from onnxplace.runtime.interface import CopyStatus, RuntimeSession, forked_session_error
from onnxplace.runtimes.execution.futures import WaitList
from onnxplace.runtimes.execution.workers import WorkerThread
from onnxplace.utils.threads import call_guarded, start_thread

# Pauses before a failed copy is tried again: the first one, and the longest; each is twice the one before.
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 60.0
# Copies that die without a request in flight are noticed by a look at each of them.
WATCH_SECONDS, SLICE_SECONDS = 0.25, 0.05
# Time for a session that has failed to say so to all its requests.
CLOSING_SECONDS = 1.0
# Time to end threads that open a copy.
ENDING_SECONDS = 3.0


class CopyOpener(Protocol):
    """Opens one copy of a bundle, again after each failure."""

    name: str
    """Its hosts."""

    def open(self) -> RuntimeSession:
        """Open the copy; raises OnnxplaceError."""

    def cancel(self) -> None:
        """Let `open`, in another thread, fail soon."""


class Copy:
    """A copy of a bundle. The lock of its set guards it."""

    def __init__(self, index: int, opener: CopyOpener) -> None:
        self.index, self.opener = index, opener
        self.session: RuntimeSession | None = None
        """None while it is left out."""
        self.in_flight: dict[object, None] = {}
        """Tokens of requests."""
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        """Conversations whose states are here."""
        self.request_count = self.failure_count = 0
        self.last_failure = ""

    def find_session(self) -> RuntimeSession | None:
        """Return its session if that works."""
        session = self.session
        return session if session is not None and session.failure is None else None

    def describe(self) -> CopyStatus:
        """Return its state for users."""
        return CopyStatus(
            name=self.opener.name,
            is_open=self.find_session() is not None,
            requests_in_flight=len(self.in_flight),
            requests=self.request_count,
            failures=self.failure_count,
            last_failure=self.last_failure,
        )


class CopySet:
    """All copies of a session. Its threads keep it alive until it is closed or abandoned.

    Args:
        openers: One opener for each copy.
        where: The bundle, for messages.
        max_in_flight: Requests in flight that each copy accepts.
    """

    def __init__(self, openers: Sequence[CopyOpener], where: str, max_in_flight: int) -> None:
        self.copies = [Copy(index, opener) for index, opener in enumerate(openers)]
        self.where = where
        self._max_in_flight = max_in_flight
        self._lock = threading.Lock()
        self._changes = WaitList()
        """Woken when a request ends, a copy opens or fails, and at the end."""
        self._threads: set[threading.Thread] = set()
        self._looks: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.closed = False
        self.process = os.getpid()

    # -- opening ------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open all copies at once; those that fail are left out, unless none is left.

        Raises the first OnnxplaceError if it is a mistake of the user, or if no copy could be opened. No copy is open
        then.
        """
        outcomes: queue.SimpleQueue[tuple[Copy, BaseException | None]] = queue.SimpleQueue()
        _open_sets.add(self)
        _register_exit_hook()
        try:
            for copy in self.copies:
                self._start_thread(partial(self._open_first, copy, outcomes), copy)
            problems = self._await_outcomes(outcomes)
            mistakes = [item for item in problems.values() if not isinstance(item, ExecutionError)]
            if mistakes or len(problems) == len(self.copies):
                raise (mistakes or list(problems.values()))[0]
        except BaseException:
            self.close(0)
            raise
        self._start_thread(self._watch)
        for copy, problem in problems.items():
            self._leave_out(copy, None, problem)

    def _await_outcomes(
        self, outcomes: queue.SimpleQueue[tuple[Copy, BaseException | None]]
    ) -> dict[Copy, BaseException]:
        """Wait for the attempts to open all copies; return the errors in the order of the copies, mistakes at once."""
        problems: dict[Copy, BaseException] = {}
        for _ in self.copies:
            copy, problem = outcomes.get()
            if problem is not None:
                problems[copy] = problem
            if isinstance(problem, InputError):
                break
        return dict(sorted(problems.items(), key=lambda item: item[0].index))

    def _open_first(self, copy: Copy, outcomes: queue.SimpleQueue[tuple[Copy, BaseException | None]]) -> None:
        outcomes.put((copy, self._try_open(copy)))

    def _try_open(self, copy: Copy) -> BaseException | None:
        """Open a copy; return the error if that fails."""
        try:
            session = copy.opener.open()
        except BaseException as problem:  # noqa: BLE001 - another thread raises or reports it
            return problem
        with self._lock:
            if not self.closed:
                copy.session = session
                self._changes.wake()
                return None
        session.close(0)
        return ExecutionError("X002", "the session is closed", where=self.where)

    def _start_thread(self, work: Callable[[], object], copy: Copy | None = None) -> None:
        name = "onnxplace copies" if copy is None else f"onnxplace copy {copy.index}"
        thread = threading.Thread(target=work, name=name, daemon=True)
        with self._lock:  # several copies may die at once
            self._threads = {item for item in self._threads if item.is_alive()} | {thread}
        start_thread(thread)

    # -- requests -----------------------------------------------------------------------------------

    def acquire(self, token: object, deadline: float | None = None) -> tuple[Copy, RuntimeSession]:
        """Return the open copy with the fewest requests in flight, and count this one; waits while all are full.

        Args:
            token: Stands for the request until `release`.
            deadline: When to raise TimeoutError, by `time.monotonic`.

        Raises ExecutionError if the session is closed, or no copy is left.
        """
        while True:
            with self._lock:
                self._require_open()
                copy, session = min(self._list_usable(), key=lambda item: _rank(item[0]))
                # A callback on a worker does not wait: its own worker may have to free a slot.
                if len(copy.in_flight) < self._max_in_flight or isinstance(threading.current_thread(), WorkerThread):
                    copy.in_flight[token] = None
                    copy.request_count += 1
                    return copy, session
                wakeup = self._changes.enter()
            if not wakeup.acquire(timeout=-1 if deadline is None else max(deadline - time.monotonic(), 0)):
                raise TimeoutError

    def count(self, token: object, copy: Copy) -> None:
        """Count a request whose copy is known, and which its session lets wait."""
        with self._lock:
            copy.in_flight[token] = None
            copy.request_count += 1

    def release(self, token: object) -> None:
        """Note that a request has ended; may be repeated."""
        for copy in self.copies:
            copy.in_flight.pop(token, None)
        self._changes.wake()

    def bind(self, user: object) -> tuple[Copy, RuntimeSession]:
        """Return the open copy with the fewest conversations, for one more; raises ExecutionError like `acquire`."""
        with self._lock:
            self._require_open()
            copy, session = min(self._list_usable(), key=lambda item: (len(item[0].users), *_rank(item[0])))
            copy.users.add(user)
            return copy, session

    def _require_open(self) -> None:
        """Raise ExecutionError if the session is closed."""
        if self.closed:
            raise ExecutionError("X002", "the session is closed", where=self.where)

    def require_own_process(self) -> None:
        """Raise ExecutionError in a forked process."""
        if os.getpid() != self.process:
            raise forked_session_error(self.process, self.where)

    def _list_usable(self) -> list[tuple[Copy, RuntimeSession]]:
        """Return the open copies; raises ExecutionError if there are none."""
        usable = [(copy, session) for copy in self.copies if (session := copy.find_session()) is not None]
        if usable:
            return usable
        reasons = [
            f"copy {copy.index} on {copy.opener.name}: {copy.last_failure or _describe(copy.session)}"
            for copy in self.copies
        ]
        hint = "copies are opened again in the background; session.list_copies() tells which ones are open"
        raise ExecutionError("K014", f"no copy is left: {'; '.join(reasons)}", where=self.where, hint=hint)

    # -- failures -----------------------------------------------------------------------------------

    def report(self, copy: Copy, session: RuntimeSession) -> None:
        """Leave a copy out whose session has failed, and open it again in the background; may be repeated."""
        if (failure := session.failure) is not None:
            self._leave_out(copy, session, failure)

    def _leave_out(self, copy: Copy, session: RuntimeSession | None, failure: BaseException) -> None:
        """Leave a copy out, warn of it, and let a thread open it again."""
        with self._lock:
            if self.closed or copy.session is not session:
                return
            copy.session, copy.last_failure = None, _describe_failure(failure)
            copy.failure_count += 1
            self._changes.wake()
        self._start_thread(partial(self._revive, copy, session), copy)

    def _revive(self, copy: Copy, dead: RuntimeSession | None) -> None:
        """End what is left of a copy, and try to open it until that succeeds or the session is closed."""
        message = f"{self.where}: copy {copy.index} on {copy.opener.name} is left out: {copy.last_failure}"
        call_guarded(warnings.warn, message, RuntimeWarning)
        if dead is not None:
            with suppress(Exception):
                dead.close(CLOSING_SECONDS)
        pause = FIRST_PAUSE_SECONDS
        while self._sleep(pause):
            problem = self._try_open(copy)
            if problem is None:
                return
            copy.last_failure = _describe_failure(problem)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _sleep(self, seconds: float) -> bool:
        """Sleep; return whether the session is still open."""
        end = time.monotonic() + seconds
        while not self.closed and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, SLICE_SECONDS))
        return not self.closed

    def _watch(self) -> None:
        """Look at all copies a few times a second."""
        while not self.closed:
            with suppress(queue.Empty):
                self._looks.get(timeout=WATCH_SECONDS)
            for copy in self.copies:
                if (session := copy.session) is not None:
                    self.report(copy, session)

    def describe(self) -> tuple[CopyStatus, ...]:
        """Return the copies for users."""
        return tuple(copy.describe() for copy in self.copies)

    # -- the end ------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Close all copies after their requests, at most `timeout` seconds for all together; end all threads."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self.abandon()
        if os.getpid() == self.process:
            self._changes.wake()
            for copy in self.copies:
                if copy.session is None:
                    copy.opener.cancel()
        try:
            for copy in self.copies:
                if (session := copy.session) is not None:
                    session.close(None if deadline is None else max(deadline - time.monotonic(), 0))
        except BaseException:  # an interrupt: do not wait for the others any longer
            self.abandon_all()
            raise
        if os.getpid() == self.process and not isinstance(threading.current_thread(), WorkerThread):
            end = time.monotonic() + ENDING_SECONDS
            for thread in self._threads - {threading.current_thread()}:
                with suppress(RuntimeError):  # it was never started
                    thread.join(max(end - time.monotonic(), 0))

    def abandon(self) -> None:
        """Accept no more requests, and let all threads end, without waiting: for finalizers."""
        self.closed = True
        self._looks.put(None)

    def abandon_all(self) -> None:
        """Abandon this set, and the sessions of its copies."""
        self.abandon()
        for copy in self.copies:
            if (session := copy.session) is not None:
                session.abandon()


def _rank(copy: Copy) -> tuple[int, int, int]:
    """Return the key by which a copy is chosen: the least one."""
    return len(copy.in_flight), copy.request_count, copy.index


def _describe(session: RuntimeSession | None) -> str:
    return "it is being opened" if session is None or session.failure is None else _describe_failure(session.failure)


def _describe_failure(failure: BaseException) -> str:
    """Return an error as one line, without its hint."""
    if isinstance(failure, OnnxplaceError):
        place = f"{failure.where}: " if failure.where else ""
        return f"error[{failure.code}] {place}{failure.message}"
    return f"{type(failure).__name__}: {failure}"


_open_sets: weakref.WeakSet[CopySet] = weakref.WeakSet()


@cache
def _register_exit_hook() -> None:
    """Stop opening copies before engines are closed: hooks run in reverse order, and those of engines exist already."""
    atexit.register(_abandon_sets)


def _abandon_sets() -> None:
    for copies in list(_open_sets):
        if copies.process == os.getpid():
            copies.abandon()
            for copy in copies.copies:
                if copy.session is None:
                    copy.opener.cancel()
