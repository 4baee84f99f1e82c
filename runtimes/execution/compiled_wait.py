"""Compiled accesses to counters that other threads and processes change, and the wait for a bell.

They do not hold the interpreter's lock. llvmlite builds them in a few milliseconds out of instructions. numba would
take a third of a second to be imported, most of the time in which a small bundle is opened; opening needs it for
nothing else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from llvmlite import binding, ir

# Bells are this many counters apart: a cache line each, so that ringing one does not slow the wait for another.
STRIDE = 8
_NUMBER = ir.IntType(64)
# The instruction by which a thread tells its core that it only waits: names and arguments of LLVM's intrinsics.
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}


class RingAndWait:
    """Rings bells, then waits for one; for calls of one thread.

    Args:
        address: Address of the counters. Other threads change them, so that loads and additions are atomic.
    """

    def __init__(self, address: int) -> None:
        # A call with five arguments would take three times as long as one with the address of five numbers.
        numbers = np.array([address, 0, 0, 0, 0])
        self._numbers, self._place, self._kernel = numbers.data, numbers.ctypes.data, _load_kernels()[0]

    def __call__(self, rung: int, bell: int, seen: int, pauses: int) -> int:
        """Return how often a bell has rung, once that is not what was `seen`, or after so many pauses.

        Args:
            rung: bit i is set if bell i is to ring first.
            bell: the one to wait for.
            seen: its count before the condition was checked that it announces.
            pauses: how long to wait.
        """
        numbers = self._numbers
        numbers[1], numbers[2], numbers[3], numbers[4] = rung, bell, seen, pauses
        return self._kernel(self._place)


class AddAndRing:
    """Adds to a counter, then rings a bell; for calls of one thread at a time.

    Args:
        counter: Its address. Who sees the sum sees what was written before.
        bell: The address of the bell's counter.
    """

    def __init__(self, counter: int, bell: int) -> None:
        numbers = np.array([counter, 0, bell])
        self._numbers, self._place, self._kernel = numbers.data, numbers.ctypes.data, _load_kernels()[1]

    def __call__(self, amount: int) -> int:
        """Return the counter behind the bell."""
        self._numbers[1] = amount
        return self._kernel(self._place)


def bind_load(address: int) -> Callable[[], int]:
    """Return what loads the counter at an address; what its writer wrote before is seen afterwards."""
    return partial(_load_kernels()[2], address)


@cache
def _load_kernels() -> list[Callable[[int], int]]:
    """Return the functions, compiled for this processor; each takes the address of its arguments."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = ir.Module("bells")
    module.triple = binding.get_process_triple()
    builders = (_build_wait, _build_addition, _build_load)
    for number, build in enumerate(builders):
        build(ir.Function(module, ir.FunctionType(_NUMBER, [_NUMBER.as_pointer()]), f"kernel{number}"))
    machine = binding.Target.from_triple(module.triple).create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), machine)
    engine.finalize_object()
    # Only the wait gives the interpreter's lock up: the others take less time than that.
    kinds = (ctypes.CFUNCTYPE, ctypes.PYFUNCTYPE, ctypes.PYFUNCTYPE)
    kernels: list[Any] = [
        kind(ctypes.c_int64, ctypes.c_void_p)(engine.get_function_address(f"kernel{number}"))
        for number, kind in enumerate(kinds)
    ]
    for kernel in kernels:
        kernel.engine = engine  # whose end frees the code
    return kernels


def _build_load(function: ir.Function) -> None:
    build = ir.IRBuilder(function.append_basic_block())
    build.ret(build.load_atomic(function.args[0], "seq_cst", 8))


def _build_addition(function: ir.Function) -> None:
    build = ir.IRBuilder(function.append_basic_block())
    counter, amount, bell = (build.load(build.gep(function.args[0], [_NUMBER(index)])) for index in range(3))
    pointer = _NUMBER.as_pointer()
    build.atomic_rmw("add", build.inttoptr(counter, pointer), amount, "seq_cst")
    build.atomic_rmw("add", build.inttoptr(bell, pointer), _NUMBER(1), "seq_cst")
    build.ret(build.load_atomic(build.inttoptr(build.add(bell, _NUMBER(8)), pointer), "seq_cst", 8))


def _build_wait(function: ir.Function) -> None:
    number, module = _NUMBER, function.module
    entry, more, ring, look, late, pause, heard = map(
        function.append_basic_block, ["entry", "more", "ring", "look", "late", "pause", "heard"]
    )
    build, zero, one = ir.IRBuilder(entry), number(0), number(1)
    places = [build.gep(function.args[0], [number(index)]) for index in range(5)]
    address, rung, bell, seen, pauses = (build.load(place) for place in places)

    def point_to(index: ir.Value) -> ir.Value:
        offset = build.mul(index, number(8 * STRIDE))
        return build.inttoptr(build.add(address, offset), number.as_pointer())

    counter = point_to(bell)
    build.branch(more)
    build.position_at_end(more)  # for each bit of `rung`, from the lowest
    left = build.phi(number)
    build.cbranch(build.icmp_unsigned("==", left, zero), look, ring)
    build.position_at_end(ring)
    build.atomic_rmw("add", point_to(build.cttz(left, ir.IntType(1)(1))), one, "seq_cst")
    left.add_incoming(rung, entry)
    left.add_incoming(build.and_(left, build.sub(left, one)), ring)
    build.branch(more)
    build.position_at_end(look)  # then turn after turn
    turn = build.phi(number)
    count = build.load_atomic(counter, "seq_cst", 8)
    build.cbranch(build.icmp_unsigned("!=", count, seen), heard, late)
    build.position_at_end(late)
    build.cbranch(build.icmp_signed("<", turn, pauses), pause, heard)
    build.position_at_end(pause)
    name, arguments = _PAUSES.get(module.triple.partition("-")[0].replace("arm64", "aarch64"), ("", ()))
    if name:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(arguments))
        build.call(ir.Function(module, kind, name), [ir.IntType(32)(item) for item in arguments])
    turn.add_incoming(zero, more)
    turn.add_incoming(build.add(turn, one), pause)
    build.branch(look)
    build.position_at_end(heard)
    build.ret(count)
