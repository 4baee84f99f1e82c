"""Futures that neither an interrupt of who waits nor a callback that fails can turn against the worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from onnxplace.runtime import Result
from onnxplace.runtimes.execution.sleepers import Sleepers
from onnxplace.utils import call_guarded


class ResultFuture(Future[Result]):
    """A future under way, which cannot be cancelled.

    Python's own is left with a locked lock if Ctrl-C comes at a bad moment of `result()`, and the worker that
    completes it then hangs. Here, who waits touches that lock only once the worker is through with it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._finished = False
        self._sleepers = Sleepers()
        self._calls: deque[Callable[[Future[Result]], object]] = deque()

    def finish(self, result: Result | None, failure: BaseException | None) -> None:
        """Set the result, or the failure, wake who waits, and then call back."""
        if failure is not None:
            self.set_exception(failure)
        else:
            assert result is not None
            self.set_result(result)
        self._finished = True
        self._sleepers.wake()
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
        asleep = self._sleepers.enter()
        if not self._finished:  # which may have been set before we were in line
            asleep.acquire(timeout=-1 if timeout is None else max(timeout, 0))
        if not self._finished:
            raise TimeoutError
