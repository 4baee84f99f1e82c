"""A thread for users' callbacks, which may take their time, use the session that calls them, or fail."""

from __future__ import annotations

import _thread
import atexit
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable

# At the end of the interpreter, so long for callbacks that are still to come.
EXIT_SECONDS = 10.0


def call_guarded(callback: Callable[..., object], *arguments: object) -> None:
    """Call a user's callback; what it raises goes to `threading.excepthook`, which prints it, and no further."""
    try:
        callback(*arguments)
    except BaseException as problem:  # noqa: BLE001 - also sys.exit(): the thread has others to call
        try:
            threading.excepthook(
                threading.ExceptHookArgs((type(problem), problem, problem.__traceback__, threading.current_thread()))
            )
        except BaseException:  # noqa: BLE001 - a hook may fail as well
            traceback.print_exc()


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, whole or not at all, whatever interrupts the main thread meanwhile.

    `Thread.start` waits on a `threading.Condition`. An interrupt at a bad moment leaves its lock locked for good,
    and the thread then hangs before it begins. Signals come to the main thread only, so another one does that waiting.
    """
    if threading.current_thread() is not threading.main_thread():
        thread.start()
        return
    problems: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    _thread.start_new_thread(_start_and_tell, (thread, problems))
    if (problem := problems.get()) is not None:
        raise problem


def _start_and_tell(thread: threading.Thread, problems: queue.SimpleQueue[BaseException | None]) -> None:
    try:
        thread.start()
        problems.put(None)
    except BaseException as problem:  # noqa: BLE001 - raised where it was asked for
        problems.put(problem)


Calls = queue.SimpleQueue[Callable[[], object] | None]


class Callbacks:
    """Calls back, one call after the other, from a thread that is started for the first one.

    What a callback raises goes to `threading.excepthook`, which prints it; the next one is called all the same. The
    thread ends when this object is closed, or when nobody is left who could call: it does not refer to it.
    """

    def __init__(self) -> None:
        self._calls: Calls = queue.SimpleQueue()
        self._closed = False
        self._started = False
        self._lock = threading.Lock()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def call(self, function: Callable[[], object]) -> None:
        """Let the thread call a function."""
        if self._closed:  # after the end, each call gets a thread of its own
            calls: Calls = queue.SimpleQueue()
            _start(calls)
            calls.put(function)
            calls.put(None)
            return
        with self._lock:
            if not self._started:
                _start(self._calls)
                self._started = True
        self._calls.put(function)

    def close(self) -> None:
        """Let the thread end after the calls so far; waits for nothing."""
        self._closed = True
        self._calls.put(None)


def _start(calls: Calls) -> None:
    thread = threading.Thread(target=_work, args=(calls,), name="onnxplace callbacks", daemon=True)
    start_thread(thread)
    _threads[thread] = calls


def _work(calls: Calls) -> None:
    while (function := calls.get()) is not None:
        call_guarded(function)
        del function  # with all that it holds


_threads: weakref.WeakKeyDictionary[threading.Thread, Calls] = weakref.WeakKeyDictionary()


@atexit.register
def _join_all() -> None:
    """Wait for callbacks of what the end of the interpreter let finish."""
    ends = time.monotonic() + EXIT_SECONDS
    for thread, calls in list(_threads.items()):
        calls.put(None)
        thread.join(max(ends - time.monotonic(), 0))
