"""The socket to which ranks connect: in a folder that only this user can enter, so that no port is opened."""

from __future__ import annotations

import os
import select
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

# A path of a Unix socket has at most 107 bytes.
_MAX_SOCKET_PATH = 100
_LOOK_SECONDS = 0.02
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
            if select.select([self._listener], [], [], _LOOK_SECONDS)[0]:
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
    connection.settimeout(_RANK_SECONDS)
    try:
        number = connection.recv(_RANK.size, socket.MSG_WAITALL)
    except OSError:
        return None
    connection.settimeout(None)
    return int(_RANK.unpack(number)[0]) if len(number) == _RANK.size else None


def _is_same_user(connection: socket.socket) -> bool:
    """Return whether the other end of a Unix socket belongs to this user, where the system says so."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())
