"""Threads that signals cannot leave hanging, and a thread for users' callbacks."""

from __future__ import annotations

import _thread
import atexit
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

Result = TypeVar("Result")


def start_thread(*threads: threading.Thread) -> None:
    """Start one thread or several safely, even if a signal interrupts the main thread.

    `Thread.start` waits on a `threading.Condition`. An interrupt at a bad moment leaves its lock locked forever, and
    the new thread hangs before it begins. Only the main thread handles signals, so another thread does the waiting.
    """
    problems: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    if threading.current_thread() is threading.main_thread():
        _thread.start_new_thread(_start_and_report, (threads, problems))
    else:
        _start_and_report(threads, problems)
    if (problem := problems.get()) is not None:
        raise problem


def run_in_threads(jobs: Sequence[Callable[[], Result]], stop: Callable[[], object]) -> list[Result]:
    """Run jobs at the same time, which do not hold the interpreter's lock; return their results.

    Python handles signals in the main thread, between two of its own instructions: where a compiled loop or a solver
    takes seconds, Ctrl-C has to find the main thread waiting.

    Args:
        jobs: What to run, each in its own thread.
        stop: Makes the jobs end soon; called on Ctrl-C, and as soon as a job fails.

    >>> run_in_threads([lambda: 1, lambda: 2], stop=lambda: None)
    [1, 2]
    """
    # A queue, as futures have conditions, whose locks an interrupt may leave locked.
    ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    results: dict[int, Result] = {}

    def run(index: int) -> None:
        try:
            results[index] = jobs[index]()
            ends.put(None)
        except BaseException as problem:  # noqa: BLE001 - raised again in the thread that waits
            ends.put(problem)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(jobs))]
    try:
        start_thread(*threads)
        for _ in jobs:
            if (problem := ends.get()) is not None:
                raise problem
    except BaseException:
        stop()
        raise
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    return [results[index] for index in range(len(jobs))]


def _start_and_report(threads: Sequence[threading.Thread], problems: queue.SimpleQueue[BaseException | None]) -> None:
    """Start threads; put the exception, or None, into `problems`."""
    try:
        for thread in threads:
            thread.start()
        problems.put(None)
    except BaseException as problem:  # noqa: BLE001 - raised again in the thread that waits
        problems.put(problem)


# ------------------------------------------------------------------------------------------------------------ callbacks


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
        if self._closed:  # each late call gets its own thread
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
