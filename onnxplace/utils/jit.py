"""Compile loops with numba on first use, and cache the machine code on disk.

To compile takes numba about 10 ms for a line of a loop. So loops whose work is linear in their arguments run in plain
Python at first: on a graph of some hundred nodes, all of them together take less time than to read machine code from
disk. They are compiled once they have gone through enough elements to be worth it. Numba itself, which takes 0.2 s to
import, is imported with the first loop that is compiled or read (`numba_loops.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, partial, update_wrapper
from importlib import import_module
from types import FunctionType
from typing import Any

import numpy as np

# Elements of arrays that a loop goes through in plain Python, in one process, before it is compiled. They take 0.1 to
# 2 s, no longer than compiling does.
MAX_INTERPRETED_ELEMENTS = 1_000_000
# The same before machine code is read that is on disk, which takes about 10 ms.
MAX_ELEMENTS_BEFORE_READING = 4_000
# How many times as many that are while numba is not imported, which takes 0.2 s.
IMPORT_FACTOR = 20


class CompiledLoop:
    """A loop that numba compiles when it is first called, from Python or by another compiled loop."""

    def __init__(self, function: Callable[..., Any], allocates: bool, is_part: bool = False) -> None:
        update_wrapper(self, function)
        self.py_func: Any = function
        self._allocates, self._is_part = allocates, is_part

    @cached_property
    def _compiled(self) -> Any:
        return _load_numba().make_dispatcher(self.py_func, self._allocates, self._is_part)

    @property
    def _numba_type_(self) -> Any:
        """The type that numba gives this loop where another one calls it."""
        return self._compiled._numba_type_

    def __call__(self, *arguments: Any) -> Any:
        return self._compiled(*arguments)


class _LinearLoop(CompiledLoop):
    """A loop that runs in plain Python until it is compiled, with equal results; compiled loops may call it, too."""

    _elements, _is_compiled = 0, False

    def __call__(self, *arguments: Any) -> Any:
        if not self._is_compiled:
            self._elements += sum(map(_count_elements, arguments))
            factor = 1 if _load_numba.cache_info().currsize else IMPORT_FACTOR
            self._is_compiled = self._elements > MAX_INTERPRETED_ELEMENTS or (
                self._elements > factor * MAX_ELEMENTS_BEFORE_READING and _load_numba().is_on_disk(self._compiled)
            )
        if self._is_compiled:
            return self._compiled(*arguments)
        return self._interpret(arguments)

    @cached_property
    def _in_plain_python(self) -> Callable[..., Any]:
        # On first use, because the loops that it calls may be defined behind it.
        return _copy_with_plain_callees(self.py_func)

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
        # Rows of a grid can be taken of arrays alone.
        return value if self._allocates or value.ndim > 1 else value.data


# Decorator: compile a loop on first use, and cache the machine code on disk where a folder can be written.
compiled_loop = partial(CompiledLoop, allocates=True)
# The same for a loop that allocates no arrays or lists, but writes to its arguments; this compiles faster.
in_place = partial(CompiledLoop, allocates=False)
# Like `in_place`, in half of the time, for a loop that only other loops call, with which it is cached.
compiled_part = partial(CompiledLoop, allocates=False, is_part=True)
# Run a loop, of time linear in its arguments, in plain Python until it is worth compiling.
linear_loop = partial(_LinearLoop, allocates=True)
# Like `linear_loop`, for a loop that allocates no arrays or lists.
linear_in_place = partial(_LinearLoop, allocates=False)


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


class _CompilationClock:
    """Adds up the time of all compilations in any thread, and calls back at the next one; a listener of numba."""

    seconds, _depth, _since = 0.0, 0, 0.0
    callback: Callable[[], None] | None = None

    def notify(self, event: Any) -> None:
        """Start the clock when a loop is compiled, unless that is for another one, and stop it at the end of that."""
        self._depth += 1 if event.is_start else -1
        if event.is_start and self._depth == 1:
            self._since = time.perf_counter()
            callback, self.callback = self.callback, None
            if callback is not None:
                callback()
        elif self._depth == 0:
            self.seconds += time.perf_counter() - self._since


compilation_clock = _CompilationClock()


@cache
def _load_numba() -> Any:
    """Import what compiles loops.

    A separate thread imports numba, so that numba starts on an empty stack. Python keeps frames in chunks of 16 KiB.
    Where the end of a chunk falls into a loop of `numba.core.typeconv.rules`, each call maps and unmaps a chunk. That
    happens by chance, below deep imports such as those of commands, and takes up to 0.2 s.
    """
    began = time.perf_counter()
    with ThreadPoolExecutor(max_workers=1) as executor:
        numba_loops = executor.submit(import_module, "onnxplace.utils.numba_loops").result()
    compilation_clock.seconds += time.perf_counter() - began
    return numba_loops


def budget_clock() -> float:
    """Return seconds of a clock that stops while loops are compiled, for budgets and times of passes."""
    return time.perf_counter() - compilation_clock.seconds


def on_compiling(callback: Callable[[], None]) -> None:
    """Call `callback` once, at the next compilation; loops that are read from disk do not count."""
    compilation_clock.callback = callback
