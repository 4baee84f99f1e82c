"""Compile loops with numba on first use, and cache the machine code on disk.

To compile takes numba about 10 ms for a line of a loop. So loops whose work is linear in their arguments run in plain
Python at first: on a graph of some hundred nodes, all of them together take less time than to read machine code from
disk. They are compiled once they have gone through enough elements to be worth it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, cached_property, update_wrapper
from importlib import import_module
from types import FunctionType
from typing import Any

import numpy as np

# A separate thread imports numba, so that numba starts on an empty stack. Python keeps frames in chunks of 16 KiB.
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


def linear_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run `function`, of time linear in its arguments, in plain Python until it is worth compiling."""
    return _LinearLoop(_compile_cached(function, _OPTIONS), arrays_as_views=False)


def linear_in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like `linear_loop`, for a loop that allocates no arrays or lists."""
    return _LinearLoop(_compile_cached(function, _OPTIONS | _WITHOUT_REFERENCE_COUNTS), arrays_as_views=True)


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

# Elements of arrays that a loop goes through in plain Python, in one process, before it is compiled. They take 0.03 to
# 0.6 s, no longer than compiling does.
MAX_INTERPRETED_ELEMENTS = 300_000
# The same before machine code is read that is on disk, which takes about 10 ms.
MAX_ELEMENTS_BEFORE_READING = 4_000


class _LinearLoop:
    """A loop that runs in plain Python until it is compiled, with equal results; compiled loops may call it, too."""

    def __init__(self, compiled: Any, arrays_as_views: bool) -> None:
        update_wrapper(self, compiled.py_func)
        self.py_func, self._compiled = compiled.py_func, compiled
        self._arrays_as_views, self._elements, self._is_compiled = arrays_as_views, 0, False

    @property
    def _numba_type_(self) -> Any:
        return self._compiled._numba_type_

    def __call__(self, *arguments: Any) -> Any:
        if not self._is_compiled:
            self._elements += sum(map(_count_elements, arguments))
            self._is_compiled = self._elements > MAX_INTERPRETED_ELEMENTS or (
                self._elements > MAX_ELEMENTS_BEFORE_READING and self._is_on_disk
            )
        if self._is_compiled:
            return self._compiled(*arguments)
        return self._interpret(arguments)

    @cached_property
    def _in_plain_python(self) -> Callable[..., Any]:
        # On first use, because the loops that it calls may be defined behind it.
        return _copy_with_plain_callees(self.py_func)

    @cached_property
    def _is_on_disk(self) -> bool:
        kept = self._compiled._cache
        return isinstance(kept, _Cache) and kept.is_filled()

    def _interpret(self, arguments: tuple[Any, ...]) -> Any:
        """Run the loop in plain Python, on objects whose items are read faster than those of arrays."""
        records: list[tuple[Any, list[Any]]] = []
        result = self._in_plain_python(*(self._convert(argument, records) for argument in arguments))
        for array, rows in records:
            for name in array.dtype.names:
                array[name] = [getattr(row, name) for row in rows]
        return result

    def _convert(self, value: Any, records: list[tuple[Any, list[Any]]]) -> Any:
        """Return an array as a view with Python's numbers, or, added to `records`, as a list of objects."""
        if isinstance(value, tuple):
            return type(value)._make(self._convert(item, records) for item in value)  # type: ignore[attr-defined]
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype.names:
            records.append((value, list(map(_record_type(value.dtype.names), value.tolist()))))
            return records[-1][1]
        return value.data if self._arrays_as_views else value


@cache
def _record_type(names: tuple[str, ...]) -> Callable[[tuple[Any, ...]], Any]:
    """Return a class of objects with these attributes, made from a tuple; they can be changed."""

    def fill(record: Any, values: tuple[Any, ...]) -> None:
        for name, value in zip(names, values):
            setattr(record, name, value)

    return type("Record", (), {"__slots__": names, "__init__": fill})


def _count_elements(value: Any) -> int:
    """Return the number of elements of an array, or of all arrays in a tuple."""
    if isinstance(value, tuple):
        return sum(map(_count_elements, value))
    return value.size if isinstance(value, np.ndarray) else 0


def _copy_with_plain_callees(function: FunctionType) -> FunctionType:
    """Return a copy of a loop that calls other loops in plain Python, too."""
    names = dict(function.__globals__)
    for name in function.__code__.co_names:
        if callee := getattr(names.get(name), "py_func", None):
            names[name] = _copy_with_plain_callees(callee)
    return FunctionType(function.__code__, names, function.__name__)


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

    def is_filled(self) -> bool:
        """Return whether a compiled loop is on disk, for the source as it is now."""
        with suppress(Exception):
            return bool(self._cache_file._load_index())  # type: ignore[no-untyped-call]
        return False

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
            if isinstance(callee, (numba.core.registry.CPUDispatcher, _LinearLoop)):
                _source_stamps(callee.py_func, stamps)
    return stamps


class _CompilationListener(Listener):
    """Adds up the time of all compilations in any thread, and calls back at the next one."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.callback: Callable[[], None] | None = None
        self._depth = 0
        self._since = 0.0

    def on_start(self, event: Event) -> None:
        """Start the clock, unless this loop is compiled for another one."""
        if self._depth == 0:
            self._since = time.perf_counter()
        self._depth += 1
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


def on_compiling(callback: Callable[[], None]) -> None:
    """Call `callback` once, at the next compilation; loops that are read from disk do not count."""
    _compiling.callback = callback
