"""How long threads were ready to run and had no core: Linux counts it for each (`schedstat`, second number).

Elsewhere nothing is known to have waited.
"""

from __future__ import annotations

from pathlib import Path


def read_run_delays(pool: bool) -> dict[str, int]:
    """Return the nanoseconds that this thread, or each one of the process, has been without a core so far."""
    if not pool:
        found = _waited("/proc/thread-self/schedstat")
        return {} if found is None else {"": found}
    tasks = {path.parent.name: _waited(path) for path in Path("/proc/self/task").glob("*/schedstat")}
    return {task: nanoseconds for task, nanoseconds in tasks.items() if nanoseconds is not None}


def longest_wait(before: dict[str, int], after: dict[str, int]) -> float:
    """Return the seconds of the thread that waited longest: the others waited for it."""
    return max((after[task] - before.get(task, 0) for task in after), default=0) * 1e-9


def _waited(path: str | Path) -> int | None:
    """Return the second number of a schedstat file; None where there is none."""
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read().split()[1])
    except (OSError, ValueError, IndexError):  # another system, a thread that ended, a kernel without it
        return None
