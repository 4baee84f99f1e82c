"""Run delay: the time that ready threads had no core.

Linux counts it for each thread (`schedstat`, second number). On other systems, it is unknown and counts as zero.
"""

from __future__ import annotations

from pathlib import Path


def read_run_delays(pool: bool) -> dict[str, int]:
    """Return the run delay of threads, in nanoseconds, by thread id.

    Args:
        pool: Whether to read all threads of the process; else only the calling one, under the id "".
    """
    if not pool:
        delay = _read_waited_nanoseconds("/proc/thread-self/schedstat")
        return {} if delay is None else {"": delay}
    delays = {path.parent.name: _read_waited_nanoseconds(path) for path in Path("/proc/self/task").glob("*/schedstat")}
    return {thread: delay for thread, delay in delays.items() if delay is not None}


def longest_wait(before: dict[str, int], after: dict[str, int]) -> float:
    """Return the seconds that the most delayed thread waited.

    The other threads wait for it.

    >>> longest_wait({"1": 0, "2": 0}, {"1": 500_000_000, "2": 250_000_000})
    0.5
    """
    return max((after[thread] - before.get(thread, 0) for thread in after), default=0) * 1e-9


def _read_waited_nanoseconds(path: str | Path) -> int | None:
    """Return the second number of a schedstat file.

    Returns None without such a file.
    """
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read().split()[1])
    except (OSError, ValueError, IndexError):  # another system, a thread that ended, a kernel without it
        return None
