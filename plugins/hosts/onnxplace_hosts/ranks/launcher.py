"""MPI's launcher and its ranks, as processes: start, watch, and end them, and let them connect."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from onnxplace_hosts.connection import Connection

# What each rank runs.
RANK_MODULE = "onnxplace_hosts.ranks.rank_process"
# Time for the launcher to end after a rank, and to say which; it takes a tenth of that where processors are free.
REPORTING_SECONDS = 2.0
# Time to end: after ranks were asked to, after the launcher was asked to, and after it was killed.
CLOSING_SECONDS, TERMINATING_SECONDS, KILLING_SECONDS = 1.0, 0.4, 1.0
_LOOK_SECONDS = 0.005
MAX_LOG_BYTES = 1 << 16

# Files of shared memory of MPICH and Open MPI, in the memory maps of a process.
_MEMORY_FILE = re.compile(r"(/dev/shm/(?:mpich_shm|sm_segment)\S+)$", re.MULTILINE)


def make_command(connection: Connection, counts: Mapping[str, int], path: str, connected: int) -> list[str]:
    """Return the command that starts ranks.

    Args:
        connection: How to reach other hosts.
        counts: The number of ranks of each host, in the order of the ranks.
        path: The socket of the driver, or of its bridge.
        connected: The number of ranks that connect to it, which come first.
    """
    arguments = (path, str(connected), json.dumps(dict(counts)), connection.interface)
    return connection.make_ranks_command(counts, RANK_MODULE, *arguments)


class Launcher:
    """A running `mpiexec` in a session of its own, so that signals of the terminal do not reach it.

    Args:
        command: mpiexec and its arguments.
        marker: A text in the command line of all ranks, and in no other: ranks of this machine are found by it.
        connection: Its input and output, if these are not discarded and kept for `read_log`.
    """

    def __init__(self, command: Sequence[str], marker: str, connection: socket.socket | None = None) -> None:
        self._marker = marker.encode()
        # A file, as orphans would hold a pipe open. It has no name, and ends with its last user.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if connection is None else connection.fileno(),
            stdout=(self._log if connection is None else connection).fileno(),
            stderr=self._log,
            start_new_session=True,
        )
        self._owner = os.getpid()
        self._memory_files: set[str] = set()

    @property
    def is_running(self) -> bool:
        """Return whether the launcher has not ended."""
        return self._process.poll() is None

    @property
    def is_closed(self) -> bool:
        """Return whether `end` was called, after which there is no log."""
        return self._log.closed

    def wait(self, seconds: float) -> bool:
        """Return whether the launcher ends within this time."""
        end = time.monotonic() + seconds
        while self.is_running:
            if time.monotonic() > end:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def read_log(self) -> str:
        """Return the last lines that the launcher and the ranks wrote."""
        size = os.fstat(self._log.fileno()).st_size
        data = os.pread(self._log.fileno(), MAX_LOG_BYTES, max(size - MAX_LOG_BYTES, 0))
        return data.decode(errors="replace")

    def note_memory_files(self) -> None:
        """Note the files of shared memory that ranks here use: MPI leaves them behind if a rank is killed."""
        for pid in self.list_local_ranks():
            with suppress(OSError):
                self._memory_files.update(_MEMORY_FILE.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace")))

    def end(self, closing_seconds: float = CLOSING_SECONDS) -> None:
        """End the launcher and all ranks: wait for their own end, then terminate, then kill them."""
        if os.getpid() != self._owner:
            return
        if not self.wait(closing_seconds):
            self._signal(signal.SIGTERM)
            if not self.wait(TERMINATING_SECONDS):
                self._signal(signal.SIGKILL)
                self.wait(KILLING_SECONDS)
        for pid in self.list_local_ranks():  # a process that was stopped does not end by SIGTERM
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for path in self._memory_files:
            with suppress(OSError):
                os.unlink(path)
        self._log.close()

    def _signal(self, number: int) -> None:
        with suppress(OSError):
            os.killpg(self._process.pid, number)

    def list_local_ranks(self) -> list[int]:
        """Return the ranks that run on this machine, where it has /proc."""
        pids = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if self._marker in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                    pids.append(int(path.parent.name))
        return pids


# The socket to which ranks connect: in a folder that only this user can enter, so that no port is opened.

# A path of a Unix socket has at most 107 bytes.
_MAX_SOCKET_PATH = 100
_ACCEPT_SECONDS = 0.02
# What a rank sends first, and the time that it may take for that: it may have been stopped meanwhile.
_RANK = struct.Struct("<i")
_RANK_SECONDS = 5.0


class RankSocket:
    """A Unix socket for connections of ranks; the end of its `with` block removes it from the disk."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="onnxplace-"))
        if len(os.fsencode(self._folder)) > _MAX_SOCKET_PATH:
            self._folder.rmdir()
            self._folder = Path(tempfile.mkdtemp(prefix="onnxplace-", dir="/tmp"))
        self.path = str(self._folder / "socket")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def __enter__(self) -> RankSocket:
        self._listener.bind(self.path)
        self._listener.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def accept(self, check: Callable[[], None]) -> tuple[int, socket.socket]:
        """Return the next rank, and its connection; `check` is called again and again meanwhile, and may raise."""
        while True:
            if select.select([self._listener], [], [], _ACCEPT_SECONDS)[0]:
                connection, _ = self._listener.accept()
                if (rank := _read_rank(connection)) is not None:
                    return rank, connection
                connection.close()
            check()


def connect_rank(path: str, rank: int) -> socket.socket:
    """Return the connection of a rank with the driver."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    connection.sendall(_RANK.pack(rank))
    return connection


def _read_rank(connection: socket.socket) -> int | None:
    """Return which rank has connected; None for a process of another user, or one that does not say it."""
    if not _is_same_user(connection):
        return None
    number = read_exactly(connection, _RANK.size, _RANK_SECONDS)
    return None if number is None else int(_RANK.unpack(number)[0])


def read_exactly(connection: socket.socket, size: int, seconds: float) -> bytes | None:
    """Return so many bytes, or None if they do not come within so many seconds; the connection blocks afterwards."""
    connection.settimeout(seconds)
    try:
        data = connection.recv(size, socket.MSG_WAITALL)
    except OSError:
        return None
    connection.settimeout(None)
    return data if len(data) == size else None


def _is_same_user(connection: socket.socket) -> bool:
    """Return whether the other end of a Unix socket belongs to this user, where the system says so."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())
