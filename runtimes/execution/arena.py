"""One arena of memory for all sessions on the CPU.

A session of its own keeps the most memory that it ever needed, so that a device with many segments would hold the sum
of what they need, and not what they need at a time.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

from onnxplace.machine import import_onnxruntime

# A trim takes some 8 ms of CPU after such a session; smaller ones leave little behind.
MIN_TRIMMED_BYTES = 1 << 20


def shared_arena_options(kind: str) -> Mapping[str, str]:
    """Return the options with which a session on a device of this kind shares its arena with others of the process.

    The arena stays when sessions are closed, for the next ones. On GPUs each session has its own.
    """
    if kind != "cpu":
        return {}
    _register_shared_arena()
    return {"session.use_env_allocators": "1"}


@cache
def _register_shared_arena() -> None:
    runtime = import_onnxruntime()
    place = runtime.OrtMemoryInfo("Cpu", runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, runtime.OrtMemType.DEFAULT)
    runtime.create_and_register_allocator(place, runtime.OrtArenaCfg({}))


def return_freed_memory(weights_bytes: int) -> None:
    """Return to the system what opening a session of so many bytes of weights has freed; nothing but on glibc.

    ONNX Runtime rewrites weights of convolutions as it opens a session, and glibc keeps up to one and a half times
    their size for later.
    """
    if weights_bytes >= MIN_TRIMMED_BYTES and sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
