"""Ranks of a session of the runtime `mpi`, as processes of this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import onnxplace

MODULE = b"onnxplace.runtimes.ranks.rank_process"
# Ranks end in a tenth of that on an idle machine.
GONE_SECONDS = 20.0


def read_rank_ids(session: onnxplace.InferenceSession) -> list[int]:
    """Return the process ids of a session's ranks, by rank."""
    processes = session._session.engine._cluster._processes
    return [processes[rank] for rank in sorted(processes)]


def is_alive(process_id: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def find_ranks() -> list[int]:
    """Return the process ids of all ranks on this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if MODULE in command.split(b"\0") and is_alive(int(path.parent.name)):
            found.append(int(path.parent.name))
    return found


def await_gone(process_ids: Any) -> list[int]:
    """Return those processes that do not end."""
    end = time.monotonic() + GONE_SECONDS
    while (alive := [item for item in process_ids if is_alive(item)]) and time.monotonic() < end:
        time.sleep(0.02)
    return alive


def read_ranks_of_copies(session: onnxplace.InferenceSession) -> list[list[int]]:
    """Return the process ids of the ranks of each copy of a session's bundle, by rank."""
    engines = [copy.session.engine for copy in session._session.copies.copies]
    return [
        [processes[rank] for rank in sorted(processes)] for processes in (item._cluster._processes for item in engines)
    ]
