"""Ctrl-C while the main thread computes inside ONNX Runtime.

Python runs its signal handlers in the main thread, between two of its own instructions, so that a model that never
ends could not be interrupted. Inside `interruptible`, a thread that waits on Python's wakeup file descriptor hears of
the signal at once: the first one asks ONNX Runtime to stop at the next node, a second one ends the process, as
happens where a single node never ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from onnxplace.utils import start_thread

# How long a first interrupt may take until it is said that a second one ends the process.
NOTICE_SECONDS = 2.0
# A second one that comes sooner is taken for the first: it may already be on its way.
PATIENCE_SECONDS = 0.3
# Handlers that end what is under way. Any other one is somebody's own affair: it may only set a flag.
_ending: list[object] = [signal.default_int_handler]


def stop_runs_on(handler: Callable[..., object]) -> None:
    """Let signals with this handler, which has to raise, stop what the main thread computes."""
    if handler not in _ending:
        _ending.append(handler)


class _Watcher:
    """A pipe that the system writes signal numbers to, and the thread that reads them; one of each per process."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.reading, self.writing = os.pipe()
        for end in (self.reading, self.writing):
            os.set_blocking(end, False)
        self.section: interruptible | None = None
        """What the main thread is in, or was, if an interrupt kept it from saying that it left."""
        self.before = -1
        """The file descriptor that signals were written to before, and are passed on to."""
        self._stopped: interruptible | None = None
        self._stopped_at = 0.0
        self._lock = threading.Lock()
        start_thread(threading.Thread(target=self._watch, name="onnxplace interrupts", daemon=True))

    def drain(self) -> None:
        """Forget signals of a section that is over, so that they do not stop the next one."""
        with self._lock:
            self._read()
            self.section = None

    def _watch(self) -> None:
        while True:
            select.select([self.reading], [], [])
            with self._lock:
                for number in self._read():
                    self._interrupt(number)
            if self._stopped is not None and not select.select([self.reading], [], [], NOTICE_SECONDS)[0]:
                if self.section is self._stopped and self._stopped.is_inside():
                    _write("interrupted; ONNX Runtime is still at a node. Interrupt again to end the process at once")
                self._stopped = self._stopped if self.section is self._stopped else None

    def _read(self) -> bytes:
        try:
            numbers = os.read(self.reading, 64)
        except BlockingIOError:
            return b""
        if self.before >= 0:
            with suppress(OSError):
                os.write(self.before, numbers)
        return numbers

    def _interrupt(self, number: int) -> None:
        section = self.section
        if section is None or signal.getsignal(number) not in _ending:
            return
        now = time.monotonic()
        if section is not self._stopped:
            self._stopped, self._stopped_at = section, now
            section.was_stopped = True
            section.stop()
        elif now - self._stopped_at >= PATIENCE_SECONDS and section.is_inside():
            _end_process(number)


def _write(text: str) -> None:
    with suppress(OSError, ValueError):
        os.write(2, f"{text}\n".encode())


def _end_process(number: int) -> None:
    """Leave as a process does that a signal ended: the main thread, which would have to raise, does not come back."""
    _write("interrupted again: the process ends, whatever it was at")
    with suppress(Exception):
        sys.stderr.flush()
    os._exit(128 + number)


_watcher: _Watcher | None = None


def prepare_interrupts() -> _Watcher:
    """Start what `interruptible` needs, so that it need not be done when time counts."""
    global _watcher
    if _watcher is None or _watcher.process != os.getpid():
        _watcher = _Watcher()
    return _watcher


class interruptible:  # noqa: N801 - used as a function is
    """Run `stop()` on Ctrl-C while inside; does nothing in other threads than the main one, which hear no signals.

    `stop` must make what runs inside return soon. It is called from another thread, and at most once.
    """

    def __init__(self, stop: Callable[[], object]) -> None:
        self.stop = stop
        self._watcher: _Watcher | None = None
        self._before = -1
        self._frame: FrameType | None = None
        self.was_stopped = False

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        watcher = prepare_interrupts()
        self._frame = sys._getframe(1)
        try:
            if watcher.section is not None:
                watcher.drain()
            self._watcher = watcher
            self._before = signal.set_wakeup_fd(watcher.writing, warn_on_full_buffer=False)
            if self._before == watcher.writing:  # an interrupt kept the last section from taking it back
                watcher.drain()
                self._before = watcher.before
            watcher.before = self._before
            watcher.section = self
        except BaseException:  # an interrupt, just now
            self.__exit__(KeyboardInterrupt, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (watcher := self._watcher) is None:
            return
        signal.set_wakeup_fd(self._before, warn_on_full_buffer=False)
        if kind is not None and not issubclass(kind, Exception):
            watcher.drain()
        self._frame = None
        watcher.section = None  # where an interrupt keeps it from this, the next section drains
        if self.was_stopped and (kind is None or issubclass(kind, Exception)):
            # Python's own has been swallowed, as by something that was being freed just then.
            raise KeyboardInterrupt

    def is_inside(self) -> bool:
        """Return whether the main thread is really there: an interrupt may come before `__exit__` can do anything."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            if frame is self._frame:
                return True
            frame = frame.f_back
        return False


def run_interruptibly(session: Any, names: Any, feeds: Any) -> Any:
    """Return what an ONNX Runtime session computes; Ctrl-C ends it at the next node, and raises as usual."""
    from onnxplace.machine.hardware import import_onnxruntime

    options = import_onnxruntime().RunOptions()
    with interruptible(lambda: setattr(options, "terminate", True)):
        return session.run(names, feeds, options)
