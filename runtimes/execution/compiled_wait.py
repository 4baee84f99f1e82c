"""The compiled wait for a wakeup flag, a counter that other threads and processes change.

It does not hold the interpreter's lock. llvmlite builds it in a few milliseconds out of instructions. numba would take
a third of a second to be imported, most of the time in which a small bundle is opened; opening needs it for nothing
else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding, ir

# Flags are this many counters apart: a cache line each, so that notifying one does not slow the wait for another.
STRIDE = 8
_NUMBER = ir.IntType(64)
# The instruction by which a thread tells its core that it only waits: names and arguments of LLVM's intrinsics.
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}


class NotifyAndWait:
    """Notifies flags, then waits for one; for calls of one thread.

    Args:
        address: Address of the counters. Other threads change them, so that loads and additions are atomic.
    """

    def __init__(self, address: int) -> None:
        # A call with five arguments would take three times as long as one with the address of five numbers.
        numbers = np.array([address, 0, 0, 0, 0])
        self._numbers, self._place, self._kernel = numbers.data, numbers.ctypes.data, compile_function(_build_wait)

    def __call__(self, notified: int, flag: int, seen: int, pauses: int) -> int:
        """Return the count of a flag, once that is not what was `seen`, or after this many pauses.

        Args:
            notified: bit i is set if flag i is to be notified first.
            flag: the one to wait for.
            seen: its count before the condition was checked that it announces.
            pauses: how long to wait.
        """
        numbers = self._numbers
        numbers[1], numbers[2], numbers[3], numbers[4] = notified, flag, seen, pauses
        return self._kernel(self._place)


@cache
def compile_function(build: Callable[[ir.Function], None], *, keeps_lock: bool = False) -> Callable[[int], int]:
    """Return a function of an address, compiled for this processor.

    Args:
        build: Adds its instructions.
        keeps_lock: Whether its calls keep the interpreter's lock, because they take less time than giving it up.
    """
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = ir.Module(build.__name__)
    module.triple = binding.get_process_triple()
    build(ir.Function(module, ir.FunctionType(_NUMBER, [_NUMBER.as_pointer()]), "compiled"))
    machine = binding.Target.from_triple(module.triple).create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), machine)
    engine.finalize_object()
    make_type = ctypes.PYFUNCTYPE if keeps_lock else ctypes.CFUNCTYPE
    function: Any = make_type(ctypes.c_int64, ctypes.c_void_p)(engine.get_function_address("compiled"))
    function.engine = engine  # whose end frees the code
    return function  # type: ignore[no-any-return]


def _build_wait(function: ir.Function) -> None:
    number, module = _NUMBER, function.module
    entry, more, notify, look, late, pause, noticed = map(
        function.append_basic_block, ["entry", "more", "notify", "look", "late", "pause", "noticed"]
    )
    build, zero, one = ir.IRBuilder(entry), number(0), number(1)
    places = [build.gep(function.args[0], [number(index)]) for index in range(5)]
    address, notified, flag, seen, pauses = (build.load(place) for place in places)

    def point_to(index: ir.Value) -> ir.Value:
        offset = build.mul(index, number(8 * STRIDE))
        return build.inttoptr(build.add(address, offset), number.as_pointer())

    counter = point_to(flag)
    build.branch(more)
    build.position_at_end(more)  # for each bit of `notified`, from the lowest
    left = build.phi(number)
    build.cbranch(build.icmp_unsigned("==", left, zero), look, notify)
    build.position_at_end(notify)
    build.atomic_rmw("add", point_to(build.cttz(left, ir.IntType(1)(1))), one, "seq_cst")
    left.add_incoming(notified, entry)
    left.add_incoming(build.and_(left, build.sub(left, one)), notify)
    build.branch(more)
    build.position_at_end(look)  # then again and again
    attempt = build.phi(number)
    count = build.load_atomic(counter, "seq_cst", 8)
    build.cbranch(build.icmp_unsigned("!=", count, seen), noticed, late)
    build.position_at_end(late)
    build.cbranch(build.icmp_signed("<", attempt, pauses), pause, noticed)
    build.position_at_end(pause)
    name, arguments = _PAUSES.get(module.triple.partition("-")[0].replace("arm64", "aarch64"), ("", ()))
    if name:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(arguments))
        build.call(ir.Function(module, kind, name), [ir.IntType(32)(item) for item in arguments])
    attempt.add_incoming(zero, more)
    attempt.add_incoming(build.add(attempt, one), pause)
    build.branch(look)
    build.position_at_end(noticed)
    build.ret(count)
