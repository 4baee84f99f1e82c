"""Compile loops with numba on first use, and cache the machine code on disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from typing import Any

# A thread of its own imports numba, so that numba starts on an empty stack. Python keeps frames in chunks of 16 KiB.
# Where the end of a chunk falls into a loop of `numba.core.typeconv.rules`, each call maps and unmaps a chunk. That
# happens by chance, below deep imports such as those of commands, and takes up to 0.2 s. An error recurs below.
with ThreadPoolExecutor(max_workers=1) as _executor:
    _executor.submit(import_module, "numba")

import numba
from numba.core.caching import FunctionCache
from numba.core.event import Event, Listener, register
from numba.core.options import DefaultOptions


def compiled_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` on first use, and cache the machine code on disk where a folder can be written."""
    return _compile_cached(function, _OPTIONS)


def in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a loop that allocates no arrays or lists, but writes to its arguments; this compiles faster."""
    return _compile_cached(function, _OPTIONS | _WITHOUT_REFERENCE_COUNTS)


def _compile_cached(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    compiled = _njit(**options)(function)
    with suppress(RuntimeError):  # neither the package's folder nor the user's cache can be written
        compiled._cache = _Cache(function)
    return compiled  # type: ignore[no-any-return]


_njit: Any = numba.njit
# Loops run without the interpreter's lock, and none is called from C.
_OPTIONS: dict[str, Any] = {"nogil": True, "no_cfunc_wrapper": True}
# Without reference counts of arrays: numba counts at each use, which is a sixth of the code that it has to compile.
_WITHOUT_REFERENCE_COUNTS: dict[str, Any] = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}
# For loops that only other loops call, with which they are cached: without wrappers for Python, and without files of
# their own, they compile in half the time. They allocate no arrays either.
compiled_part = _njit(**_OPTIONS, **_WITHOUT_REFERENCE_COUNTS, no_cpython_wrapper=True)


class _Cache(FunctionCache):
    """numba's cache, which also sees changes to called loops in other files, and starts anew if it is damaged."""

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
        status = os.stat(path)
        stamps[path] = (status.st_mtime, status.st_size)
        for callee in list(function.__globals__.values()):
            if isinstance(callee, numba.core.registry.CPUDispatcher):
                _source_stamps(callee.py_func, stamps)
    return stamps


class _CompilationListener(Listener):
    """Adds up the time of all compilations in any thread, and calls back at the next one."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.loops = 0
        self.callback: Callable[[], None] | None = None
        self._depth = 0
        self._since = 0.0

    def on_start(self, event: Event) -> None:
        """Start the clock, unless this loop is compiled for another one."""
        if self._depth == 0:
            self._since = time.perf_counter()
        self._depth += 1
        self.loops += event.data["dispatcher"].py_func.__module__.startswith("onnxplace.")
        callback, self.callback = self.callback, None
        if callback is not None:
            callback()

    def on_end(self, event: Event) -> None:
        """Stop the clock at the end of the outermost compilation."""
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._since


_compiling = _CompilationListener()
register("numba:compile", _compiling)  # type: ignore[no-untyped-call]


def budget_clock() -> float:
    """Return seconds of a clock that stops while loops are compiled, for budgets and times of passes."""
    return time.perf_counter() - _compiling.seconds


def compiled_loops() -> int:
    """Return the number of loops of this package that this process has compiled or is compiling."""
    return _compiling.loops


def on_compiling(callback: Callable[[], None]) -> None:
    """Call `callback` once, at the next compilation; loops that are read from disk do not count."""
    _compiling.callback = callback
