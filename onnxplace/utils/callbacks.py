"""A thread for users' callbacks, which may take long, use the session that calls them, or fail."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable

from onnxplace.utils.threads import start_thread

# At its end, the interpreter waits this long for pending callbacks.
EXIT_SECONDS = 10.0


def call_guarded(callback: Callable[..., object], *arguments: object) -> None:
    """Call a user's callback; `threading.excepthook` gets, and prints, any exception."""
    try:
        callback(*arguments)
    except BaseException as problem:  # noqa: BLE001 - also SystemExit: the thread has more calls to make
        try:
            threading.excepthook(
                threading.ExceptHookArgs((type(problem), problem, problem.__traceback__, threading.current_thread()))
            )
        except BaseException:  # noqa: BLE001 - a user's hook may fail, too
            traceback.print_exc()


# Functions to call; None ends the thread.
Calls = queue.SimpleQueue[Callable[[], object] | None]


class Callbacks:
    """A queue of callbacks, called one after the other by a thread.

    The first call starts the thread. `threading.excepthook` gets, and prints, the exception of a callback; later calls
    are made nevertheless. The thread ends when this object is closed or garbage-collected: it does not refer to it.
    """

    def __init__(self) -> None:
        self._calls: Calls = queue.SimpleQueue()
        self._closed = False
        self._started = False
        self._lock = threading.Lock()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def call(self, function: Callable[[], object]) -> None:
        """Let the thread call a function; returns at once."""
        if self._closed:  # each late call gets a thread of its own
            calls: Calls = queue.SimpleQueue()
            _start_worker(calls)
            calls.put(function)
            calls.put(None)
            return
        with self._lock:
            if not self._started:
                _start_worker(self._calls)
                self._started = True
        self._calls.put(function)

    def close(self) -> None:
        """Let the thread end after the calls so far, without waiting for it."""
        self._closed = True
        self._calls.put(None)


def _start_worker(calls: Calls) -> None:
    """Start a thread that makes these calls."""
    thread = threading.Thread(target=_make_calls, args=(calls,), name="onnxplace callbacks", daemon=True)
    start_thread(thread)
    _threads[thread] = calls


def _make_calls(calls: Calls) -> None:
    """Call functions until there is a None."""
    while (function := calls.get()) is not None:
        call_guarded(function)
        del function  # and all objects that it refers to


# Threads that may have pending calls.
_threads: weakref.WeakKeyDictionary[threading.Thread, Calls] = weakref.WeakKeyDictionary()


@atexit.register
def _join_all() -> None:
    """Wait for callbacks that are pending at the end of the interpreter."""
    deadline = time.monotonic() + EXIT_SECONDS
    for thread, calls in list(_threads.items()):
        calls.put(None)
        thread.join(max(deadline - time.monotonic(), 0))
