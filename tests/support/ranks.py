"""Ranks of a session of the runtime `mpi`, as processes of this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import onnxplace
from tests.support.fault_checks import HUNG_SECONDS

MODULE = b"onnxplace_hosts.ranks.rank_process"
# Ranks inherit it, so that those of tests that run at the same time are told apart.
MARK = "ONNXPLACE_TEST_PROCESS"
os.environ[MARK] = str(os.getpid())


def read_rank_ids(session: onnxplace.InferenceSession) -> list[int]:
    """Return the process ids of a session's ranks, by rank."""
    processes = session._session.engine.worker._cluster._processes
    return [processes[rank] for rank in sorted(processes)]


def is_alive(process_id: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def find_ranks() -> list[int]:
    """Return the process ids of all ranks that this process of tests has started."""
    ranks = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command, variables = path.read_bytes(), path.with_name("environ").read_bytes()
        except OSError:
            continue
        is_rank = MODULE in command.split(b"\0") and f"{MARK}={os.getpid()}".encode() in variables.split(b"\0")
        if is_rank and is_alive(int(path.parent.name)):
            ranks.append(int(path.parent.name))
    return ranks


def await_gone(process_ids: Any) -> list[int]:
    """Return those processes that do not end."""
    end = time.monotonic() + HUNG_SECONDS
    while (alive := [item for item in process_ids if is_alive(item)]) and time.monotonic() < end:
        time.sleep(0.02)
    return alive


def read_ranks_of_copies(session: onnxplace.InferenceSession) -> list[list[int]]:
    """Return the process ids of the ranks of each copy of a session's bundle, by rank."""
    engines = [copy.session.engine for copy in session._session.copies.copies]
    return [
        [processes[rank] for rank in sorted(processes)]
        for processes in (item.worker._cluster._processes for item in engines)
    ]
