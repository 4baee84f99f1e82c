"""Compile the loops of the default placer in several processes, on a machine that has not compiled them yet.

numba compiles in one thread at a time. So this process starts helpers, which leave compiled loops on disk. It does that
before anything is measured or timed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module

import numpy as np

from onnxplace.graph import Csr
from onnxplace.machine import available_cores
from onnxplace.utils import compiled_loops

# The warm-ups that compile the loops of a pass; loops of other passes are compiled when they are called.
WARM_UPS_OF_PASS: Mapping[str, frozenset[str]] = {
    "profile": frozenset({"layers"}),
    "coplace": frozenset({"groups"}),
    "fuse": frozenset({"levels"}),
    "m-etf": frozenset({"lists", "simulation", "bounds", "readers"}),
    "m-sct": frozenset({"lists", "simulation", "bounds", "readers"}),
    "multilevel": frozenset({"lists", "simulation", "bounds", "levels", "paths", "search"}),
    "auto": frozenset({"lists", "simulation", "bounds", "levels", "paths", "search"}),
}
# Helpers are worth their start only if this warm-up is needed.
LONGEST_WARM_UP = "lists"
# The module of the warm-ups; the core knows passes by name only.
WARM_UP_MODULE = "onnxplace.passes.placement.search.first_use"
# Warm-ups of this process, then of each helper, by the number of helpers. Shares take about the same time; this process
# has started already, and compiles small loops before and after.
PROCESS_SHARES: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("groups", "simulation", "paths", "lists"), ("search", "levels", "bounds", "layers", "readers")),
    (("groups", "simulation", "lists"), ("search", "layers"), ("levels", "bounds", "paths", "readers")),
    (("layers", "groups", "simulation"), ("lists",), ("search",), ("levels", "bounds", "paths", "readers")),
)
# A helper is killed after this time; loops that it has not compiled are compiled when they are called.
HELPER_TIMEOUT_SECONDS = 120

_warmed_up = False


def compile_loops(passes: Iterable[str]) -> None:
    """Compile the loops of these passes, if that takes long and they are not on disk yet.

    It works once per process. Call it before any work that is timed.
    """
    global _warmed_up
    warm_ups = frozenset[str]().union(*(WARM_UPS_OF_PASS.get(name, ()) for name in passes))
    if (
        _warmed_up
        or LONGEST_WARM_UP not in warm_ups
        or len(available_cores()) < 2
        or not sys.executable
        or not _has_compiled_first_loop()
    ):
        return
    _warmed_up = True
    shares = PROCESS_SHARES[min(len(available_cores()) - 2, len(PROCESS_SHARES) - 1)]
    own, *others = ([name for name in share if name in warm_ups] for share in shares)
    with _start_helpers(filter(None, others)) as helpers:
        import_module(WARM_UP_MODULE).run_warm_ups(own)
        for helper in helpers:
            helper.wait(HELPER_TIMEOUT_SECONDS)


def _has_compiled_first_loop() -> bool:
    """Return whether the first loop of any run had to be compiled, and could be written to disk."""
    from onnxplace.graph import group_items

    item = np.zeros(1, dtype=np.int32)
    Csr.grouped(item, item, 1)
    return compiled_loops() > 0 and group_items.stats.cache_path is not None  # type: ignore[attr-defined]


@contextmanager
def _start_helpers(shares: Iterable[Sequence[str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run warm-ups in helper processes, which end with the block; a helper that cannot start is left out."""
    helpers: list[subprocess.Popen[bytes]] = []
    paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    try:
        for share in shares:
            # -P: files in the current folder must not shadow modules of this package.
            command = [sys.executable, "-P", "-c", f"from {__name__} import run_helper; run_helper()", *share]
            with suppress(OSError):
                helpers.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, "PYTHONPATH": paths},
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                )
        with suppress(subprocess.TimeoutExpired):
            yield helpers
    finally:
        for helper in helpers:
            helper.kill()  # without effect on a helper that has ended
            helper.wait()


def run_helper() -> None:
    """Run the warm-ups that the command line of a helper names."""
    import_module(WARM_UP_MODULE).run_warm_ups(sys.argv[1:])
