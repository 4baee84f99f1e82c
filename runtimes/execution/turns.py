"""The processors that several devices compute on: each runs one segment at a time, first come, first served."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(eq=False)
class Turn:
    """A place in the queues of some processors."""

    processors: frozenset[str]
    wake: Callable[[], None]
    """Wakes the thread that waits for it; may be called in vain."""
    has_begun: bool = False
    """Whether the processors are its own, until it ends."""


class TurnQueue:
    """The turns of the devices of one engine, or several, in the order in which their threads asked for them.

    A turn takes its place in the queues of all its processors at once, and begins when it is the first in each of
    them. So it waits for earlier turns only: there is no deadlock, and none is passed over.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[Hashable, Turn] = {}

    def join(self, key: Hashable, processors: frozenset[str], wake: Callable[[], None]) -> Turn:
        """Ask for a turn; wait until `has_begun`. It is over with `leave`, which has to follow whatever happens."""
        turn = Turn(processors, wake)
        with self._lock:
            turn.has_begun = all(processors.isdisjoint(other.processors) for other in self._turns.values())
            self._turns[key] = turn
        return turn

    def leave(self, key: Hashable) -> None:
        """End a turn, begun or not, if there is one; an interrupted call may be repeated."""
        with self._lock:
            self._turns.pop(key, None)
            taken = frozenset[str]()
            for turn in self._turns.values():  # they are as few as devices
                if taken.isdisjoint(turn.processors):
                    turn.has_begun = True
                    turn.wake()
                taken |= turn.processors


shared_turns: ContextVar[TurnQueue | None] = ContextVar("turns of several engines", default=None)
"""The queue of engines that are opened to share processors, such as those of a bundle's plans."""
