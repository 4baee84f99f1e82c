"""Compile kernels with numba, on first use, and keep the machine code on disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.event import Event, Listener, register
from numba.core.options import DefaultOptions


def compiled_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` on first use and keep the machine code on disk, where there is a place for it."""
    return _kept(function, _PLAIN)


def in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel that makes no arrays, nor lists, but writes to those it is given: that takes less time."""
    return _kept(function, _PLAIN | _UNCOUNTED)


def _kept(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    compiled = _njit(**options)(function)
    with suppress(RuntimeError):  # neither the package's folder nor the user's cache can be written
        compiled._cache = _Cache(function)
    return compiled  # type: ignore[no-any-return]


_njit: Any = numba.njit
# No kernel is called from C.
_PLAIN: dict[str, Any] = {"nogil": True, "no_cfunc_wrapper": True}
# Without counting who refers to an array. numba counts at each use, which is a sixth of what it has to compile.
_UNCOUNTED: dict[str, Any] = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}
# For kernels that only kernels call, with which they are kept: without wrappers for Python, and without files of
# their own, they compile in half the time. They make no arrays either.
compiled_part = _njit(**_PLAIN, **_UNCOUNTED, no_cpython_wrapper=True)


class _Cache(FunctionCache):
    """numba's cache, that also sees changes to kernels of other files, and starts anew where it cannot be read."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._cache_file._source_stamp = tuple(sorted(_stamps(function, {}).items()))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return what is on disk for a signature, or None."""
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 - unpickling what an earlier version left can raise anything
            with suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled; on a disk that is full, do without."""
        with suppress(OSError):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


def _stamps(function: Any, found: dict[str, tuple[float, int]]) -> Mapping[str, tuple[float, int]]:
    """Return the time and size of the source of `function` and of all kernels that its module imports."""
    path = function.__code__.co_filename
    if path not in found:
        about = os.stat(path)
        found[path] = (about.st_mtime, about.st_size)
        for other in list(function.__globals__.values()):
            if isinstance(other, numba.core.registry.CPUDispatcher):
                _stamps(other.py_func, found)
    return found


class _Compiling(Listener):
    """Hears of every compilation, one at a time, in whichever thread: adds up their time, and tells of the next one."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.loops = 0
        self.then: Callable[[], None] | None = None
        self._depth = 0
        self._since = 0.0

    def on_start(self, event: Event) -> None:
        """Begin to count, unless a kernel is compiled for another."""
        if self._depth == 0:
            self._since = time.perf_counter()
        self._depth += 1
        self.loops += event.data["dispatcher"].py_func.__module__.startswith("onnxplace.")
        then, self.then = self.then, None
        if then is not None:
            then()

    def on_end(self, event: Event) -> None:
        """Count what the outermost took."""
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._since


_compiling = _Compiling()
register("numba:compile", _compiling)  # type: ignore[no-untyped-call]


def budget_clock() -> float:
    """Return the seconds of a clock that stands still while kernels are compiled, for budgets and times of passes."""
    return time.perf_counter() - _compiling.seconds


def compiled_loops() -> int:
    """Return how many loops of ours this process had to compile, or is compiling; others were read from disk."""
    return _compiling.loops


def on_compiling(then: Callable[[], None]) -> None:
    """Call `then` as soon as a kernel has to be compiled, not for those that are read from disk; once."""
    _compiling.then = then
