"""Ctrl-C at any moment of the code under test."""

from __future__ import annotations

import gc
import signal
from types import FrameType


class Interrupts:
    """Raises KeyboardInterrupt in the main thread after some seconds, as Ctrl-C does, if that is inside then.

    Nothing is collected meanwhile: what finalizers of other tests and callbacks of hypothesis raise is ignored.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._is_inside = False

    def __enter__(self) -> None:
        gc.disable()
        self._is_inside = True
        signal.signal(signal.SIGALRM, self._interrupt)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *problem: object) -> None:
        self._is_inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.enable()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_inside:
            self._is_inside = False
            raise KeyboardInterrupt
