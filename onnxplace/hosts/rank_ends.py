"""How ranks of MPI end: a shell around each rank says so, whatever the launcher of MPI prints, or does not notice.

MPICH's launcher does not end a job in which a process exits before it has joined: without onnxplace there, all others
would wait for it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

# A shell that runs a command, says how it ended badly, and then dies by a signal, which every launcher notices.
_SCRIPT = (
    '"$@"; code=$?; [ $code = 0 ] && exit; '
    'echo "onnxplace: rank ${PMI_RANK:-${PMIX_RANK:-$OMPI_COMM_WORLD_RANK}} ended with code $code" >&2; kill -KILL $$'
)
_END = re.compile(r"onnxplace: rank (\d+) ended with code (\d+)")
# Shells add this to the number of a signal.
_SIGNAL_BASE = 128
# How ranks of Open MPI end whose peer has ended.
_LOST_PEER = 14
# A line of MPICH's launcher, or of its proxy on the host of this index: `[proxy:1@name] function (file:line): message`.
_LAUNCHER_LINE = re.compile(r"\[(?:mpiexec|proxy:(?P<index>\d+))@[^]]*\] \w+ \([^)]*\): (?P<message>.*)")
# An explanation of Open MPI's launcher, between two lines of hyphens, and the host that some name in it.
_BOX = re.compile(r"^-{40,}\n(.*?)^-{40,}$", re.MULTILINE | re.DOTALL)
_REMOTE_HOST = re.compile(r"Remote host: +(\S+)")


@dataclass(frozen=True)
class RankEnd:
    """A rank that ended badly."""

    rank: int
    reason: str
    """A signal or an exit code, such as `SIGKILL`."""
    cause: str
    """The last line that was written before it exited; empty if it was killed."""


def report_end(command: Sequence[str]) -> list[str]:
    """Return a command that runs another one as a rank, and writes a line if that ends badly."""
    return ["/bin/sh", "-c", _SCRIPT, "sh", *command]


def find_rank_end(printed: str) -> RankEnd | None:
    r"""Return the rank that probably ended badly first: one that was killed, if any was; None if none wrote it.

    >>> find_rank_end("No module named mpi4py\nonnxplace: rank 1 ended with code 1\n")
    RankEnd(rank=1, reason='exit code 1', cause='No module named mpi4py')
    """
    ends = list(_END.finditer(printed))
    if not ends:
        return None
    # Launchers end the others without such a line. But a rank that lost its peer may fail, and write, before that: with
    # Open MPI by a code of its own.
    match = min(ends, key=lambda item: (int(item[2]) == _LOST_PEER, int(item[2]) <= _SIGNAL_BASE))
    rank, code = map(int, match.groups())
    if code > _SIGNAL_BASE:
        with suppress(ValueError):
            return RankEnd(rank, signal.Signals(code - _SIGNAL_BASE).name, "")
    lines = (line.strip() for line in printed[: match.start()].splitlines())
    before = [line for line in lines if line and not _END.fullmatch(line)]
    return RankEnd(rank, f"exit code {code}", before[-1] if before else "")


def find_mpi_cause(printed: str, hosts: Sequence[str]) -> str:
    r"""Return the line that says why MPI failed: that of a rank, the last one of a program, or one of the launcher.

    Args:
        printed: What ranks and the launcher wrote.
        hosts: By the launcher's numbers of hosts.

    >>> find_mpi_cause("[proxy:1@vm] connect (sock.c:140): no route\n[mpiexec@vm] main (m.c:1): error", ["a", "b"])
    'on b: no route'
    """
    if end := find_rank_end(printed):
        return end.cause or f"rank {end.rank} died ({end.reason})"
    box = _BOX.search(printed)
    if box is not None:  # Open MPI explains at length; what was written before it is the cause
        before = [line for line in printed[: box.start()].strip().splitlines() if ": Warning: " not in line]
        if before:
            return before[-1].strip()
        host = _REMOTE_HOST.search(box[1])
        return f"{f'on {host[1]}: ' if host else ''}{' '.join(box[1].split()).partition('. ')[0]}"
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    launcher = [match for line in lines if (match := _LAUNCHER_LINE.fullmatch(line))]
    others = [line for line in lines if not line.startswith(("[mpiexec", "[proxy", "Abort("))]
    if others or not launcher:
        return (others or lines or ["it wrote nothing"])[-1]
    index, message = launcher[0]["index"], launcher[0]["message"]
    return message if index is None else f"on {hosts[int(index)]}: {message}"
