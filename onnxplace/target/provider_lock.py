"""A lock around all calls of an execution provider that is not safe for threads, and around the end of its objects."""

from __future__ import annotations

import os
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

T = TypeVar("T")


class ProviderLock:
    """A lock of the process, and the sessions and values that are freed while it is held.

    Anything may drop the last reference to an object: garbage collection in any thread, an exception whose traceback
    has a frame that used it, or a caller who kept a future. So objects of such a provider are never handed out. Others
    have a *handle*, and this lock keeps the object until it is freed, after the handle is gone. A finalizer does not
    wait for runs of other threads.
    """

    def __init__(self) -> None:
        # It may be taken twice: a handle may be dropped by the thread that holds it.
        self._lock = threading.RLock()
        self._owned: dict[weakref.ref[Any], tuple[int, list[Any]]] = {}
        """The process that made each handle, and its objects."""
        self._orphans: deque[weakref.ref[Any]] = deque()
        """Handles that are gone and whose objects are not yet freed."""
        self._in_call = False
        """Whether a thread will free the orphans before it releases the lock."""

    def hold(self) -> AbstractContextManager[object]:
        """Return the lock itself."""
        return self._lock

    def call(self, function: Callable[[], T]) -> T:
        """Call a function while this thread holds the lock.

        If it raises, the frames that its exception refers to are emptied. They would keep objects of the provider until
        someone drops the exception.
        """
        outer = sys.exception()
        with self._lock:
            try:
                self._in_call = True
                self._free_orphans()  # before the call needs their memory
                return function()
            except BaseException as problem:
                _empty_frames(problem, outer)
                raise
            finally:
                # In this order: an orphan that comes later finds that nobody will free it.
                self._in_call = False
                self._free_orphans()

    def own(self, handle: object, *objects: object) -> list[Any]:
        """Free objects, the last one first, while the lock is held, soon after their handle is gone.

        Returns a list of them, which is all that the handle may keep: it is emptied when they are freed.
        """
        items = list(objects)
        self._owned[weakref.ref(handle, self._bury)] = (os.getpid(), items)
        return items

    def _bury(self, reference: weakref.ref[Any]) -> None:
        """Free the objects of a handle that is gone, or leave them to the thread that is in a call.

        If an interrupt prevents this, they stay in memory.
        """
        if self._owned[reference][0] != os.getpid():
            return  # a fork: the provider would hang, and so would the lock if a missing thread holds it
        self._orphans.append(reference)
        if not self._in_call:
            with self._lock:
                self._free_orphans()

    def _free_orphans(self) -> None:
        while self._orphans:
            _, items = self._owned.pop(self._orphans.popleft())
            while items:
                items.pop()


def _empty_frames(problem: BaseException | None, outer: BaseException | None) -> None:
    """Empty the frames of an exception and of those that led to it, up to the one that was being handled before.

    Frames that still run stay as they are.
    """
    while problem is not None and problem is not outer:
        traceback.clear_frames(problem.__traceback__)
        problem = problem.__context__
