"""A session of a runtime whose requests end when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from onnxplace.runtime.interface import Result, RuntimeSession

WAIT_SECONDS = 60.0


class FakeSession(RuntimeSession):
    """Doubles `x` into `y`; requests run until they are released, or at once if `is_open`."""

    def __init__(self, is_open: bool = True) -> None:
        self.is_open = is_open
        self.started: list[np.ndarray] = []
        """The `x` of each request, in the order of their start."""
        self.cancelled: list[Future[Result]] = []
        self.is_closed = self.is_abandoned = False
        self.fail: Callable[[np.ndarray], BaseException | None] = lambda x: None
        self.change: Callable[[np.ndarray], np.ndarray] = lambda y: y
        self._running: list[tuple[Future[Result], np.ndarray]] = []
        self._changes = threading.Condition()

    def submit(self, feeds: Mapping[str, Any], states: Collection[str] = ()) -> Future[Result]:
        future: Future[Result] = Future()
        with self._changes:
            self.started.append(feeds["x"])
            self._running.append((future, feeds["x"]))
            self._changes.notify_all()
        if self.is_open:
            self.release()
        return future

    def release(self) -> None:
        """End all requests that run."""
        with self._changes:
            running, self._running = self._running, []
        for future, x in running:
            if (failure := self.fail(x)) is not None:
                future.set_exception(failure)
            else:
                future.set_result(Result({"y": self.change(2 * x)}, (), 0.0))

    def wait_for_starts(self, count: int) -> None:
        """Wait until so many requests have started."""
        with self._changes:
            assert self._changes.wait_for(lambda: len(self.started) >= count, WAIT_SECONDS), len(self.started)

    @property
    def sizes(self) -> list[int]:
        """Return the batch of each request that has started."""
        return [len(x) for x in self.started]

    def cancel(self, future: Future[Result]) -> None:
        self.cancelled.append(future)

    def close(self, timeout: float | None = None) -> None:
        self.is_closed = True
        self.release()

    def abandon(self) -> None:
        self.is_abandoned = True
