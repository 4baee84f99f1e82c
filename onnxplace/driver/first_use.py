"""Compile the loops of the default placer with all cores, on a machine that has not compiled them yet.

numba compiles in one thread at a time, so the work is shared between this process and others, which leave what they
compile on disk. It is done before anything is measured or timed.
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

# The errands that compile what a pass needs; loops of other passes are compiled when they are called.
NEEDS: Mapping[str, frozenset[str]] = {
    "profile": frozenset({"layers"}),
    "coplace": frozenset({"groups"}),
    "fuse": frozenset({"levels"}),
    "m-etf": frozenset({"lists", "simulation", "bounds", "readers"}),
    "m-sct": frozenset({"lists", "simulation", "bounds", "readers"}),
    "multilevel": frozenset({"lists", "simulation", "bounds", "levels", "paths", "search"}),
    "auto": frozenset({"lists", "simulation", "bounds", "levels", "paths", "search"}),
}
# One that takes long enough to share it.
LONG = "lists"
# Where the errands are that compile them; the core knows passes by name only.
ERRANDS = "onnxplace.passes.placement.search.first_use"
# Which errands this process runs, and which each of the others, by how many there are: about as long each, and this
# process, which has begun already, compiles small loops before and after.
SHARES: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("groups", "simulation", "paths", "lists"), ("search", "levels", "bounds", "layers", "readers")),
    (("groups", "simulation", "lists"), ("search", "layers"), ("levels", "bounds", "paths", "readers")),
    (("layers", "groups", "simulation"), ("lists",), ("search",), ("levels", "bounds", "paths", "readers")),
)
# After which a process is given up; what it did not compile is compiled when it is called.
PATIENCE_SECONDS = 120

_shared = False


def compile_loops(passes: Iterable[str]) -> None:
    """Compile what these passes need, if that takes long and this process had to compile anything yet.

    Once per process. Call it before work whose time counts.
    """
    global _shared
    errands = frozenset[str]().union(*(NEEDS.get(name, ()) for name in passes))
    if _shared or LONG not in errands or len(available_cores()) < 2 or not sys.executable or not _is_first():
        return
    _shared = True
    shares = SHARES[min(len(available_cores()) - 2, len(SHARES) - 1)]
    own, *others = ([name for name in share if name in errands] for share in shares)
    with _helpers(filter(None, others)) as helpers:
        import_module(ERRANDS).run_errands(own)
        for helper in helpers:
            helper.wait(PATIENCE_SECONDS)


def _is_first() -> bool:
    """Return whether the loop that everything begins with had to be compiled, and could be kept."""
    from onnxplace.graph import group_items

    one = np.zeros(1, dtype=np.int32)
    Csr.grouped(one, one, 1)
    return compiled_loops() > 0 and group_items.stats.cache_path is not None  # type: ignore[attr-defined]


@contextmanager
def _helpers(shares: Iterable[Sequence[str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run errands in processes of their own, which end with the block; what cannot be started is left out."""
    helpers: list[subprocess.Popen[bytes]] = []
    paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    try:
        for share in shares:
            # -P: files in the current folder are no modules of ours.
            command = [sys.executable, "-P", "-c", f"from {__name__} import help_out; help_out()", *share]
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
            helper.kill()  # nothing happens to one that has ended
            helper.wait()


def help_out() -> None:
    """Run, in a helper, the errands that the command line names."""
    import_module(ERRANDS).run_errands(sys.argv[1:])
