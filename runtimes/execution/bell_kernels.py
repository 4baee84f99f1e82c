"""Compiled waits for bells, without the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onnxplace.utils import in_place

# Other threads change the counters while a loop reads them. The compiler could move plain loads out of the loop, so
# loads and additions are atomic instructions of LLVM, which numba does not offer by itself.
_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic
_find_function: Any = cgutils.get_or_insert_function
ir: Any = cgutils.ir  # type: ignore[attr-defined]  # llvmlite's, of which each numba takes one version

# Bells are this many counters apart: a cache line each, so that ringing one does not slow the wait for another.
STRIDE = 8


@_intrinsic
def _add_atomically(typing_context: Any, counter: Any) -> Any:
    """Add one to the int64 at an address."""
    del typing_context

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "seq_cst")
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64), generate


@_intrinsic
def _load_atomically(typing_context: Any, counter: Any) -> Any:
    """Return the int64 at an address, which other threads change."""
    del typing_context

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), generate


@_intrinsic
def _pause(typing_context: Any) -> Any:
    """Tell the core that this thread only waits, where x86 or Arm has an instruction for that."""
    del typing_context

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature, arguments
        triple = builder.module.triple
        # LLVM's intrinsics: numba has no assembler.
        if triple.startswith(("x86_64", "i686")):
            function = ir.FunctionType(ir.VoidType(), [])
            builder.call(_find_function(builder.module, function, "llvm.x86.sse2.pause"), [])
        elif triple.startswith(("aarch64", "arm64")):
            function = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            hint = _find_function(builder.module, function, "llvm.aarch64.hint")
            builder.call(hint, [ir.Constant(ir.IntType(32), 1)])
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(), generate


@in_place
def ring_and_wait(address: int, rung: int, bell: int, seen: int, pauses: int) -> bool:
    """Ring bells, then wait until one has rung since it was `seen`; return False if that takes more than `pauses`.

    Args:
        address: Address of the counters.
        rung: bit i is set if bell i is to ring.
        bell: the one to wait for.
        seen: its count before the condition was checked that it announces.
        pauses: how long to wait.
    """
    index = 0
    while rung:
        if rung & 1:
            _add_atomically(address + index * STRIDE * 8)
        rung >>= 1
        index += 1
    # Spin: each turn reads the counter and pauses, without the interpreter's lock.
    for _ in range(pauses):
        if _load_atomically(address + bell * STRIDE * 8) != seen:
            return True
        _pause()
    return False
