"""Threads that signals cannot leave hanging, and that Ctrl-C can stop."""

from __future__ import annotations

import _thread
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

Result = TypeVar("Result")


def start_thread(thread: threading.Thread) -> None:
    """Start a thread safely, even if a signal interrupts the main thread.

    `Thread.start` waits on a `threading.Condition`. An interrupt at a bad moment leaves its lock locked forever, and
    the new thread hangs before it begins. Only the main thread handles signals, so another thread does the waiting.
    """
    if threading.current_thread() is not threading.main_thread():
        thread.start()
        return
    problems: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    _thread.start_new_thread(_start_and_report, (thread, problems))
    if (problem := problems.get()) is not None:
        raise problem


def run_in_threads(jobs: Sequence[Callable[[], Result]], stop: Callable[[], object]) -> list[Result]:
    """Run jobs at the same time, which do not hold the interpreter's lock; return their results.

    Python handles signals in the main thread, between two of its own instructions: where a compiled loop or a solver
    takes seconds, Ctrl-C has to find the main thread waiting.

    Args:
        jobs: What to run, each in a thread of its own.
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
        for thread in threads:
            start_thread(thread)
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


def _start_and_report(thread: threading.Thread, problems: queue.SimpleQueue[BaseException | None]) -> None:
    """Start a thread; put the exception, or None, into `problems`."""
    try:
        thread.start()
        problems.put(None)
    except BaseException as problem:  # noqa: BLE001 - raised again in the main thread
        problems.put(problem)
