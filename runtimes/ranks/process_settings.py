"""What a rank asks of the system for its process: exact sleeps, memory that is kept, an end with its parent."""

from __future__ import annotations

import ctypes
import signal
from contextlib import suppress


def sleep_exactly() -> None:
    """Let naps of this thread, and of threads that it starts, take no longer than asked, and keep freed memory.

    Linux lengthens naps by 50 us. glibc maps large arrays anew each time, and touching them costs more than copying.
    """
    set_timer_slack, trim_threshold, map_threshold = 29, -1, -3
    with suppress(OSError, AttributeError):  # another system or C library
        library = ctypes.CDLL(None)
        library.prctl(set_timer_slack, 1, 0, 0, 0)
        library.mallopt(trim_threshold, 1 << 30)
        library.mallopt(map_threshold, 32 << 20)


def end_with_parent() -> None:
    """Let this process be killed when its parent ends, where the system can: a launcher may end its children only."""
    set_parent_death_signal = 1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
