"""What the control groups of this process allow, such as those of its container: cores and memory.

Linux has two versions of them, which may be in use side by side. Each group is a folder, within those of the groups
around it, and each of these may have its own limit: the least counts.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath

# Where `proc` and the mounted groups are: tests have others.
ROOT = Path("/")
# A mounted hierarchy: the group at its root, its folder, its version, and in version 1 its controllers.
_MOUNT = re.compile(r"^\S+ \S+ \S+ (\S+) (\S+) .*?- (cgroup2?) \S* (\S+)$", re.MULTILINE)
# Limit, use, and the name in memory.stat of pages that can be dropped: of version 2, and of version 1.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def list_cores() -> list[int]:
    """Return the processor cores that this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(os.getpid()))
    return list(range(os.cpu_count() or 1))


@cache
def find_core_limit() -> float:
    """Return how many cores' time this process may use, such as 0.6; infinity if that is all that it can run on."""
    limits = [math.inf]
    for group in _list_groups():
        quota = _read(group / "cpu.max") or _read(group / "cpu.cfs_quota_us") + _read(group / "cpu.cfs_period_us")
        with suppress(ValueError, ZeroDivisionError):  # "max", or no such files
            used, period = map(int, quota)
            limits.append(used / period if used > 0 else math.inf)
    return min(limits) if min(limits) < len(list_cores()) else math.inf


def count_cores() -> int:
    """Return how many whole cores this process may use the time of, at least one."""
    cores = len(list_cores())
    return max(int(min(find_core_limit(), cores) + 0.01), 1)


def count_free_bytes() -> int:
    """Return the free memory of the host, or as much as the groups still allow: pages of files that were read count."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for group in _list_groups():
        statistics = _read(group / "memory.stat")
        for limit, use, droppable in _MEMORY_FILES:
            with suppress(ValueError, IndexError):  # "max", or no such files
                dropped = int(statistics[statistics.index(droppable) + 1]) if droppable in statistics else 0
                free = min(free, int(_read(group / limit)[0]) - int(_read(group / use)[0]) + dropped)
    return max(free, 0)


def _list_groups() -> Iterator[Path]:
    """List the folders of the groups of this process that it can see, and of the groups around them."""
    groups = re.findall(r"^\d+:(.*?):(/.*)$", _read_text(ROOT / "proc/self/cgroup"), re.MULTILINE)
    for mount in _MOUNT.finditer(_read_text(ROOT / "proc/self/mountinfo")):
        root, folder = (re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), mount[name]) for name in (1, 2))
        mounted = set(mount[4].split(",")) if mount[3] == "cgroup" else {""}  # version 2 names no controllers
        for controllers, path in groups:
            ends = PurePosixPath(root).parts[1:], PurePosixPath(path).parts[1:]
            below = _find_path_below(*ends) if mounted >= set(controllers.split(",")) else None
            if below is not None:
                yield from (ROOT.joinpath(folder.lstrip("/"), *below[:length]) for length in range(len(below) + 1))


def _find_path_below(root: tuple[str, ...], path: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the path from a mounted group to that of this process; None if that is not below it.

    Both are told from the root of the namespace, and lead out of it by "..". From there no name is known of the way
    back, so that it ends at the mounted group.
    """
    if path[: len(root)] == root:
        return None if ".." in path[len(root) :] else path[len(root) :]
    return () if set(root) == {".."} and path.count("..") < len(root) else None


def _read(path: Path) -> list[str]:
    return _read_text(path).split()


def _read_text(path: Path) -> str:
    """Return the text of a file; nothing if it cannot be read."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
