"""Streams with what their work needs: marks on them, and references that are held until a mark is over."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from onnxplace.errors import ExecutionError, format_one_line
from onnxplace.runtimes.execution.failures import is_out_of_memory
from onnxplace.runtimes.execution.stream_driver import Driver, DriverError


class Mark:
    """A point of a work queue: the end of a run or copy."""

    def __init__(
        self, queue: WorkQueue, event: Any, label: str, kept: tuple[Any, ...], waits: tuple[Mark, ...]
    ) -> None:
        self.queue = queue
        self.event = event
        self.label = label
        """The work that ends here, as in `segment cuda0-001`."""
        self.kept = kept
        """What must not be freed or reused before."""
        self.waits = waits
        """Marks of other queues that this work waits for."""

    def synchronize(self) -> None:
        """Wait until it is over; raises ExecutionError that names the work which failed."""
        try:
            self.queue.driver.synchronize(self.event)
        except DriverError as problem:
            raise self.describe(problem) from problem

    def is_over(self) -> bool:
        """Return whether it is over without an error; does not wait."""
        try:
            return self.queue.driver.is_complete(self.event)
        except DriverError:
            return False

    def has_failed(self) -> bool:
        """Return whether its work, or work before it, is known to have failed; does not wait."""
        try:
            self.queue.driver.is_complete(self.event)
        except DriverError:
            return True
        return False

    def find_unfinished(self) -> Mark:
        """Return the work that this one waits for, or itself: the first that is not known to have succeeded."""
        first = self.queue.find_first_unfinished(self)
        for other in first.waits:
            if not other.is_over():
                return other.find_unfinished()
        return first

    def describe(self, problem: BaseException) -> ExecutionError:
        """Return the error of the work before this mark.

        Drivers do not say which work failed, so it is the first that is not known to have succeeded.
        """
        culprit, text = self.find_unfinished(), format_one_line(problem)
        if is_out_of_memory(problem):
            hint = "run fewer requests at a time, lower the limits of its memory, or compile for more devices"
            return ExecutionError(
                "X010", f"{culprit.label} ran out of memory: {text}", where=culprit.queue.name, hint=hint
            )
        hint = "try the same feeds on the whole model: onnxplace verify; a new session may need a new process"
        return ExecutionError("X001", f"{culprit.label} failed: {text}", where=culprit.queue.name, hint=hint)


class WorkQueue:
    """A stream of a device. Any thread may use it; work and its mark are enqueued by `with queue.lock`."""

    def __init__(self, driver: Driver, device: int, name: str) -> None:
        self.driver = driver
        self.stream = driver.create_stream(device)
        self.name = name
        """The id of its device, for error messages."""
        # Reentrant: dropping what a mark keeps may free memory, whose finalizer uses a queue too.
        self.lock = threading.RLock()
        self._marks: deque[Mark] = deque()
        self._waits: list[Mark] = []
        self._held: list[Any] = []
        """What work needs that is about to be enqueued, until the next mark has it."""

    def wait(self, mark: Mark) -> None:
        """Let later work of this queue begin after a mark."""
        if mark.queue is not self:
            with self.lock:
                self.driver.wait(self.stream, mark.event)
                self._waits.append(mark)

    def hold(self, *kept: Any) -> None:
        """Hold objects until the next mark is over; called before the work that needs them is enqueued.

        Ctrl-C may come between the work and its own mark, and what is freed then could be reused while it is in flight.
        """
        with self.lock:
            self._held.extend(kept)

    def mark(self, label: str, *kept: Any) -> Mark:
        """Return a mark after all work so far, and hold objects until it is over."""
        with self.lock:
            event = self.driver.record(self.stream)
            mark = Mark(self, event, label, (*self._held, *kept), tuple(self._waits))
            self._marks.append(mark)
            self._waits.clear()
            self._held.clear()
        return mark

    def last_mark(self) -> Mark | None:
        """Return the mark after the last work; None if everything is over."""
        with self.lock:
            return self._marks[-1] if self._marks else None

    def find_first_unfinished(self, mark: Mark) -> Mark:
        """Return the first mark that is not known to be over, at most `mark`."""
        with self.lock:
            marks = list(self._marks)
        return next((item for item in marks if item is mark or not item.is_over()), mark)

    def find_failed(self) -> Mark | None:
        """Return the first mark whose work is known to have failed; does not wait."""
        with self.lock:
            marks = list(self._marks)
        return next((item for item in marks if item.has_failed()), None)

    def release(self) -> None:
        """Drop what is held for work that is over; raises ExecutionError that names work which failed."""
        over, failure = [], None
        with self.lock:
            try:
                while self._marks and self.driver.is_complete(self._marks[0].event):
                    over.append(self._marks.popleft())
            except DriverError as problem:
                failed, failure = self._marks[0], problem
        for mark in over:
            mark.kept, mark.waits = (), ()
        if failure is not None:  # described without the lock: that takes those of other queues, in any order
            raise failed.describe(failure) from failure

    def finish(self) -> None:
        """Wait for all work; raises ExecutionError that names what failed."""
        if self._held:  # an interrupt came before the mark of what may have been enqueued
            self.mark("interrupted work")
        if (last := self.last_mark()) is not None:
            last.synchronize()
            self.release()

    def discard(self) -> None:
        """Drop all that is held, for a stream that has failed for good or is done."""
        with self.lock:
            marks, self._marks, self._held = list(self._marks), deque(), []
        for mark in marks:
            mark.kept, mark.waits = (), ()
