"""Threads that sleep until something changes, in a way that Ctrl-C cannot break.

`threading.Condition` takes its lock back after a wait in Python code; an interrupt of the main thread at that moment
leaves the lock free where it should be held. Here a sleeper holds no lock but its own, which is waited for in C.
"""

from __future__ import annotations

import threading
from contextlib import suppress


class Sleepers:
    """The threads that wait for one kind of change.

    Look at what is waited for, and `enter`, while holding the lock that guards it; let go of that lock; then acquire
    what `enter` returned, and look again. Whoever changes something calls `wake`.
    """

    def __init__(self) -> None:
        self._locks: dict[threading.Lock, None] = {}

    def enter(self) -> threading.Lock:
        """Return a lock that the next `wake` releases."""
        asleep = threading.Lock()
        asleep.acquire()
        self._locks[asleep] = None
        return asleep

    def wake(self) -> None:
        """Let all that entered look again; may be called with or without any lock, by any thread, and once more."""
        for asleep in list(self._locks):
            # Released before it is forgotten: an interrupt may come in between, and must leave nobody asleep.
            with suppress(RuntimeError):  # another thread was faster
                asleep.release()
            self._locks.pop(asleep, None)
