"""A thread for users' callbacks, which may take their time, use the session that calls them, or fail."""

from __future__ import annotations

import atexit
import queue
import threading
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
    """Start a thread; an interrupt meanwhile is raised as one.

    `Thread.start` waits on a `threading.Condition`, which an interrupt at a bad moment leaves with a RuntimeError.
    """
    try:
        thread.start()
    except RuntimeError as problem:
        if isinstance(problem.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise


class Callbacks:
    """Calls back, one call after the other, from a thread that is started when the first one is announced.

    What a callback raises goes to `threading.excepthook`, which prints it; the next one is called all the same.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._announced = 0
        self._called = 0
        self._closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def announce(self) -> None:
        """Expect one more `call`: the thread waits for it, even when it is closed."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="onnxplace callbacks", daemon=True)
                start_thread(self._thread)
                _all.add(self)
            self._announced += 1

    def withdraw(self) -> None:
        """Expect one `call` less: what was to call failed to begin."""
        self.call(lambda: None)

    def call(self, function: Callable[[], object]) -> None:
        """Let the thread call a function that was announced."""
        self._calls.put(function)

    def close(self) -> None:
        """Let the thread end after the last call that was announced; waits for nothing."""
        self._closed = True
        self._calls.put(None)

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended, at most so many seconds."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _work(self) -> None:
        while not self._closed or self._called < self._announced:
            function = self._calls.get()
            if function is None:
                continue
            self._called += 1
            call_guarded(function)
            del function  # with all that it holds


_all: weakref.WeakSet[Callbacks] = weakref.WeakSet()


@atexit.register
def _join_all() -> None:
    """Wait for callbacks of what the end of the interpreter let finish."""
    for callbacks in list(_all):
        callbacks.close()
        callbacks.join(EXIT_SECONDS)
