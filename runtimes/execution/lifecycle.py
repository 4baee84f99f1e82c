"""The ends of all engines of a process: at the end of the interpreter, and in a forked child."""

from __future__ import annotations

import ctypes
import time
import weakref
from typing import Protocol

from onnxplace.machine import end_openings

# Time at the end of the interpreter for requests in flight; then they are ended.
EXIT_SECONDS = 10.0
# Time to end them if that is interrupted.
INTERRUPTED_EXIT_SECONDS = 0.3


class Closable(Protocol):
    """An engine, as far as its end is concerned."""

    def close(self, timeout: float | None = None) -> None:
        """Wait for requests in flight, then end the workers."""

    def end_requests(self) -> None:
        """Let all requests in flight fail."""


OPEN_ENGINES: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_all_engines() -> None:
    """End all workers before the interpreter ends: Python freezes, or even kills, threads that outlive it."""
    deadline = time.monotonic() + EXIT_SECONDS
    try:
        end_openings(EXIT_SECONDS)
        for engine in list(OPEN_ENGINES):
            engine.close(max(deadline - time.monotonic(), 0))
    except KeyboardInterrupt:
        for engine in list(OPEN_ENGINES):
            engine.end_requests()
        time.sleep(INTERRUPTED_EXIT_SECONDS)


def keep_sessions_in_child() -> None:
    """Never free the sessions that a forked child inherits: their destructors wait for missing threads."""
    for engine in list(OPEN_ENGINES):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
