"""Atomic additions to counters in memory that processes share, and loads of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from llvmlite import ir

from onnxplace.runtimes.execution.compiled_wait import compile_function

_NUMBER = ir.IntType(64)


class AddAndNotify:
    """Adds to a counter, then notifies a wakeup flag; for calls of one thread at a time.

    Args:
        counter: Its address. Who sees the sum sees what was written before.
        flag: The address of the flag.
    """

    def __init__(self, counter: int, flag: int) -> None:
        numbers = np.array([counter, 0, flag])
        self._numbers, self._place = numbers.data, numbers.ctypes.data
        self._kernel = compile_function(_build_addition, keeps_lock=True)

    def __call__(self, amount: int) -> int:
        """Return the counter behind the flag."""
        self._numbers[1] = amount
        return self._kernel(self._place)


def bind_load(address: int) -> Callable[[], int]:
    """Return what loads the counter at an address; what its writer wrote before is seen afterwards."""
    return partial(compile_function(_build_load, keeps_lock=True), address)


def _build_addition(function: ir.Function) -> None:
    build = ir.IRBuilder(function.append_basic_block())
    counter, amount, flag = (build.load(build.gep(function.args[0], [_NUMBER(index)])) for index in range(3))
    pointer = _NUMBER.as_pointer()
    build.atomic_rmw("add", build.inttoptr(counter, pointer), amount, "seq_cst")
    build.atomic_rmw("add", build.inttoptr(flag, pointer), _NUMBER(1), "seq_cst")
    build.ret(build.load_atomic(build.inttoptr(build.add(flag, _NUMBER(8)), pointer), "seq_cst", 8))


def _build_load(function: ir.Function) -> None:
    build = ir.IRBuilder(function.append_basic_block())
    build.ret(build.load_atomic(function.args[0], "seq_cst", 8))
