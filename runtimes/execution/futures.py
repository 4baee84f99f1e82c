"""Futures that protect workers from interrupted waiters and failing callbacks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from onnxplace.runtime.interface import Result
from onnxplace.utils.threads import call_guarded

# A condition variable that Ctrl-C cannot break.
#
# `threading.Condition` reacquires its lock after a wait in Python code. An interrupt of the main thread at that moment
# leaves the lock free where it should be held. Here a waiting thread holds only its own lock, and waits for it
# in C.


class WaitList:
    """The threads that wait for one kind of change.

    A waiting thread checks its condition and calls `enter` while it holds the lock that guards the condition. Then it
    releases that lock, acquires the one that `enter` returned, and checks again. A thread that changes the condition
    calls `wake`.
    """

    def __init__(self) -> None:
        self._locks: dict[threading.Lock, None] = {}

    def enter(self) -> threading.Lock:
        """Return a lock that the next `wake` releases."""
        wakeup = threading.Lock()
        wakeup.acquire()
        self._locks[wakeup] = None
        return wakeup

    def wake(self) -> None:
        """Wake all threads that entered; may be called by any thread, with or without locks, and repeatedly."""
        for wakeup in list(self._locks):
            # Released before it is removed: an interrupt in between must not leave a thread waiting.
            with suppress(RuntimeError):  # another thread was faster
                wakeup.release()
            self._locks.pop(wakeup, None)


class _Awaited:
    """The end of a request, for which threads wait."""

    def __init__(self) -> None:
        super().__init__()
        self.is_finished = False
        """Whether the result or the failure is set."""
        self._wait_list = WaitList()

    def _wait(self, timeout: float | None) -> None:
        """Wait for the result or the failure; raises TimeoutError."""
        if self.is_finished:
            return
        wakeup = self._wait_list.enter()
        if not self.is_finished:  # it may have been set before this thread entered
            wakeup.acquire(timeout=-1 if timeout is None else max(timeout, 0))
        if not self.is_finished:
            raise TimeoutError


class Outcome(_Awaited):
    """The result of a request whose caller waits for it: less than a future, and 5 us cheaper."""

    _value: tuple[Result | None, BaseException | None] = (None, None)

    def finish(self, result: Result | None, failure: BaseException | None) -> None:
        """Set the result or the failure, and wake the waiting thread; what was set first stays."""
        if not self.is_finished:
            self._value, self.is_finished = (result, failure), True
        self._wait_list.wake()

    def result(self, timeout: float | None = None) -> Result:
        """Return the result; raises the failure, or TimeoutError."""
        self._wait(timeout)
        result, failure = self._value
        if failure is not None:
            raise failure
        assert result is not None
        return result


class ResultFuture(_Awaited, Future[Result]):
    """A running future, which cannot be cancelled.

    Python's own future keeps its lock locked if Ctrl-C interrupts `result()` at a bad moment, and the worker that
    completes it then hangs. Here, a waiting thread uses that lock only after the worker has finished with it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._callbacks: deque[Callable[[Future[Result]], object]] = deque()

    def finish(self, result: Result | None, failure: BaseException | None) -> None:
        """Set the result or the failure, wake waiting threads, then run callbacks.

        It may be repeated after an exception in the middle of it; what was set first stays.
        """
        if self.done():
            pass
        elif failure is not None:
            self.set_exception(failure)
        else:
            assert result is not None
            self.set_result(result)
        self.is_finished = True
        self._wait_list.wake()
        self._run_callbacks()

    def result(self, timeout: float | None = None) -> Result:
        """Return the result; raises the failure, or TimeoutError."""
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the failure or None; raises TimeoutError."""
        self._wait(timeout)
        return super().exception(0)

    def add_done_callback(self, callback: Callable[[Future[Result]], object]) -> None:
        """Call `callback(future)` when it is done, or now if it is; see `call_guarded`."""
        self._callbacks.append(callback)
        if self.is_finished:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # another thread was faster
                return
            call_guarded(callback, self)
