"""Futures that neither an interrupt of who waits nor a callback that fails can turn against the worker."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from onnxplace.callbacks import call_guarded
from onnxplace.runtime import Result


class ResultFuture(Future[Result]):
    """A future under way, which cannot be cancelled.

    Python's own is left with a locked lock if Ctrl-C comes at a bad moment of `result()`, and the worker that
    completes it then hangs. Here, who waits touches that lock only once the worker is through with it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._finished = False
        self._sleepers: deque[Any] = deque()
        """A locked lock of each thread that waits."""
        self._calls: deque[Callable[[Future[Result]], object]] = deque()

    def finish(self, result: Result | None, failure: BaseException | None) -> None:
        """Set the result, or the failure, wake who waits, and then call back."""
        if failure is not None:
            self.set_exception(failure)
        else:
            assert result is not None
            self.set_result(result)
        self._finished = True
        while self._sleepers:
            self._sleepers.popleft().release()
        self._call_back()

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
        self._calls.append(callback)
        if self._finished:
            self._call_back()

    @property
    def is_finished(self) -> bool:
        return self._finished

    def _call_back(self) -> None:
        while self._calls:
            try:
                callback = self._calls.popleft()
            except IndexError:  # another thread was faster
                return
            call_guarded(callback, self)

    def _wait(self, timeout: float | None) -> None:
        if self._finished:
            return
        asleep = threading.Lock()
        asleep.acquire()
        self._sleepers.append(asleep)
        ends = None if timeout is None else time.monotonic() + timeout
        while not self._finished:  # which may have been set before the lock was in line
            left = -1 if ends is None else ends - time.monotonic()
            if ends is not None and left <= 0:
                raise TimeoutError
            asleep.acquire(timeout=left)
