"""A condition variable that Ctrl-C cannot break.

`threading.Condition` reacquires its lock after a wait in Python code. An interrupt of the main thread at that moment
leaves the lock free where it should be held. Here a waiting thread holds only a lock of its own, and waits for it in C.
"""

from __future__ import annotations

import threading
from contextlib import suppress


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
