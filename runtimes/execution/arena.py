"""One memory arena for all sessions on the CPU.

An arena keeps its peak memory. With an arena per session, a device with many segments would hold the sum of their
peaks, instead of the memory needed at a time.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from contextlib import suppress
from functools import cache

from onnxplace.ort import import_onnxruntime

# Freed memory is returned after sessions with this many bytes of weights: it takes about 8 ms of CPU, and smaller
# sessions free little.
MIN_TRIMMED_BYTES = 1 << 20


@cache
def register_shared_arena() -> None:
    """Create the arena of sessions with the entry `session.use_env_allocators`, limited to the machine's memory.

    It outlives its sessions, for the next ones.

    Without a limit, a request for more doubles the size of the arena's next block until it would hold that request. The
    next small one then reserves as much as the system gives, with a table of 3 % of it that is really used.
    """
    runtime = import_onnxruntime()
    memory = runtime.OrtMemoryInfo("Cpu", runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, runtime.OrtMemType.DEFAULT)
    runtime.create_and_register_allocator(memory, runtime.OrtArenaCfg({"max_mem": _total_memory_bytes()}))


def _total_memory_bytes() -> int:
    """Return the memory and swap space of this machine."""
    import psutil

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a container without statistics of its swap space
        return int(psutil.virtual_memory().total + psutil.swap_memory().total)


def return_freed_memory(weights_bytes: int) -> None:
    """Return memory that opening a session freed to the system; only glibc needs it.

    ONNX Runtime rewrites weights of convolutions when it opens a session. glibc keeps up to one and a half times their
    size for later.
    """
    if weights_bytes >= MIN_TRIMMED_BYTES and sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
