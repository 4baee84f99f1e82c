"""What compiles loops with numba, and the files that keep them; `jit.py` imports this with the first of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.event import Listener, register
from numba.core.options import DefaultOptions

from onnxplace.utils.jit import CompiledLoop, compilation_clock

Listener.register(type(compilation_clock))
register("numba:compile", compilation_clock)  # type: ignore[no-untyped-call]


def make_dispatcher(function: Callable[..., Any], allocates: bool, is_part: bool) -> Any:
    """Return what compiles a loop or reads it from disk; a part has no wrapper for Python, and no files of its own."""
    # Loops run without the interpreter's lock, and none is called from C.
    options: dict[str, Any] = {"nogil": True, "no_cfunc_wrapper": True, "no_cpython_wrapper": is_part}
    # Without reference counts of arrays: numba counts at each use, which is a sixth of the code that it has to compile.
    options |= {} if allocates or not hasattr(DefaultOptions, "_nrt") else {"_nrt": False}
    compiled: Any = numba.njit(**options)(function)
    with suppress(RuntimeError):  # neither the package's folder nor the user's cache can be written
        compiled._cache = compiled._cache if is_part else _Cache(function)
    return compiled


@cache
def is_on_disk(compiled: Any) -> bool:
    """Return whether a loop that was compiled earlier is on disk, for the source as it is now."""
    with suppress(Exception):  # there is no folder for it, or the file is damaged
        return bool(compiled._cache._cache_file._load_index())
    return False


class _Cache(FunctionCache):
    """numba's cache, which also sees changes to called loops in other files, and starts again if it is damaged."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._cache_file._source_stamp = tuple(sorted(_source_stamps(function, {}).items()))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled loop on disk for a signature, or None."""
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 - unpickling a file of an earlier version can raise anything
            with suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write a compiled loop to disk; do without if the disk is full."""
        with suppress(OSError):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


def _source_stamps(function: Any, stamps: dict[str, tuple[float, int]]) -> Mapping[str, tuple[float, int]]:
    """Return time and size of the source files of `function` and of all compiled loops that its module imports."""
    path = function.__code__.co_filename
    if path not in stamps:
        # numba's own stamp covers the file of the loop alone, though code of other files is compiled into it.
        status = os.stat(path)
        stamps[path] = (status.st_mtime, status.st_size)
        for callee in list(function.__globals__.values()):
            if isinstance(callee, CompiledLoop):
                _source_stamps(callee.py_func, stamps)
    return stamps
