"""Interrupt ONNX Runtime with Ctrl-C while the main thread computes.

Python runs signal handlers in the main thread, between two of its own instructions. A model that never ends could
therefore not be interrupted. Inside `interruptible`, another thread waits on Python's wakeup file descriptor and
receives signals at once. The first signal asks ONNX Runtime to stop at the next node. A second one ends the process,
which helps if a single node never ends.
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

from onnxplace.utils.threads import start_thread

# If a first interrupt takes longer than this, a message says that a second one ends the process.
NOTICE_SECONDS = 2.0
# A second interrupt that comes sooner is ignored: it may have been sent before the first one took effect.
MIN_REPEAT_SECONDS = 0.3
# Handlers that raise, and so end the current computation. Other handlers, which may only set a flag, are left alone.
_ending_handlers: list[object] = [signal.default_int_handler]


def register_ending_handler(handler: Callable[..., object]) -> None:
    """Let signals with this handler stop computations of the main thread.

    The handler has to raise.
    """
    if handler not in _ending_handlers:
        _ending_handlers.append(handler)


class _Watcher:
    """A pipe of signal numbers, and the thread that reads it.

    There is one of each per process.
    """

    def __init__(self) -> None:
        self.process_id = os.getpid()
        self.read_fd, self.write_fd = os.pipe()
        for descriptor in (self.read_fd, self.write_fd):
            os.set_blocking(descriptor, False)
        self.section: interruptible | None = None
        """The section of the main thread. It may be over, if an interrupt prevented its end from being recorded."""
        self.previous_fd = -1
        """The previous file descriptor for signals, to which they are passed on; -1 for none."""
        self._stopped: interruptible | None = None
        self._stopped_at = 0.0
        self._lock = threading.Lock()
        start_thread(threading.Thread(target=self._watch, name="onnxplace interrupts", daemon=True))

    def drain(self) -> None:
        """Discard signals of a section that is over.

        They would stop the next one.
        """
        with self._lock:
            self._read()
            self.section = None

    def _watch(self) -> None:
        """Handle signals as long as the process runs."""
        while True:
            select.select([self.read_fd], [], [])
            with self._lock:
                for number in self._read():
                    self._interrupt(number)
            if self._stopped is not None and not select.select([self.read_fd], [], [], NOTICE_SECONDS)[0]:
                if self.section is self._stopped and self._stopped.is_inside():
                    _write_stderr(
                        "interrupted; ONNX Runtime still runs a node. Interrupt again to end the process at once"
                    )
                self._stopped = self._stopped if self.section is self._stopped else None

    def _read(self) -> bytes:
        """Return the signal numbers in the pipe, and pass them on."""
        try:
            numbers = os.read(self.read_fd, 64)
        except BlockingIOError:
            return b""
        if self.previous_fd >= 0:
            with suppress(OSError):
                os.write(self.previous_fd, numbers)
        return numbers

    def _interrupt(self, number: int) -> None:
        """Stop the section of the main thread.

        If it was asked to stop before, end the process.
        """
        section = self.section
        if section is None or signal.getsignal(number) not in _ending_handlers:
            return
        now = time.monotonic()
        if section is not self._stopped:
            self._stopped, self._stopped_at = section, now
            section.was_stopped = True
            section.stop()
        elif now - self._stopped_at >= MIN_REPEAT_SECONDS and section.is_inside():
            _end_process(number)


def _write_stderr(text: str) -> None:
    with suppress(OSError, ValueError):
        os.write(2, f"{text}\n".encode())


def _end_process(number: int) -> None:
    """End the process at once, with the exit code of the signal.

    The main thread, which should raise, is stuck.
    """
    _write_stderr("interrupted again: the process ends at once")
    with suppress(Exception):
        sys.stderr.flush()
    os._exit(128 + number)


_watcher: _Watcher | None = None


def prepare_interrupts() -> _Watcher:
    """Start the thread that `interruptible` needs, ahead of code whose time counts."""
    global _watcher
    if _watcher is None or _watcher.process_id != os.getpid():
        _watcher = _Watcher()
    return _watcher


class interruptible:  # noqa: N801 - used like a function
    """Run `stop()` on Ctrl-C while inside.

    It has no effect outside of the main thread, which alone receives signals.

    Args:
        stop: Makes the code inside return soon. It is called from another thread, at most once.
    """

    _watcher: _Watcher | None = None
    _previous_fd = -1
    _frame: FrameType | None = None
    was_stopped = False

    def __init__(self, stop: Callable[[], object]) -> None:
        self.stop = stop

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        watcher = prepare_interrupts()
        self._frame = sys._getframe(1)
        try:
            if watcher.section is not None:
                watcher.drain()
            self._watcher = watcher
            self._previous_fd = signal.set_wakeup_fd(watcher.write_fd, warn_on_full_buffer=False)
            if self._previous_fd == watcher.write_fd:  # an interrupt prevented the last section from restoring it
                watcher.drain()
                self._previous_fd = watcher.previous_fd
            watcher.previous_fd = self._previous_fd
            watcher.section = self
        except BaseException:  # an interrupt at this moment
            self.__exit__(KeyboardInterrupt, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (watcher := self._watcher) is None:
            return
        signal.set_wakeup_fd(self._previous_fd, warn_on_full_buffer=False)
        if kind is not None and not issubclass(kind, Exception):
            watcher.drain()
        self._frame = None
        watcher.section = None  # if an interrupt prevents this, the next section drains
        if self.was_stopped and (kind is None or issubclass(kind, Exception)):
            # Python's own exception was swallowed, for example by a finalizer that ran at that moment.
            raise KeyboardInterrupt

    def is_inside(self) -> bool:
        """Return whether the main thread is really inside.

        An interrupt may come before `__exit__` can run.
        """
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            if frame is self._frame:
                return True
            frame = frame.f_back
        return False


def run_interruptibly(run: Callable[..., Any], names: Any, feeds: Any) -> Any:
    """Run an ONNX Runtime session by one of its methods.

    Ctrl-C ends it at the next node, and raises as usual.
    """
    from onnxplace.utils.ort import import_onnxruntime

    options = import_onnxruntime().RunOptions()
    with interruptible(lambda: setattr(options, "terminate", True)):
        return run(names, feeds, options)
