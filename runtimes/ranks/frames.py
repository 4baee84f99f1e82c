"""Frames: small fields as JSON, and buffers of bytes, as messages between processes; and a socket of them.

Nothing in a frame is executed when it is read.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Bytes of the header, and number of buffers, in front of each frame.
_PREFIX = struct.Struct("<II")
# A frame with more is refused: the other side is not ours.
MAX_HEADER_BYTES = 256 << 20
# Buffers up to this size are sent in one piece with the header.
MAX_JOINED_BYTES = 16 << 10
# How often a reader that waits looks after other things; a slice counts as at most this long, so that a process that
# was stopped itself does not take the others for dead.
SLICE_SECONDS = 0.1

Tick = Callable[[float], None]


@dataclass
class Frame:
    """A message."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    buffers: Sequence[Any] = ()
    """Flat arrays of bytes."""

    def pack_header(self) -> bytes:
        """Return kind, fields and the sizes of the buffers, with a prefix."""
        header = {"kind": self.kind, "fields": self.fields, "sizes": [len(item) for item in self.buffers]}
        text = json.dumps(header, separators=(",", ":")).encode()
        return _PREFIX.pack(len(text), len(self.buffers)) + text


def unpack_header(data: bytes | memoryview) -> tuple[Frame, list[int], int]:
    """Return a frame without its buffers, their sizes, and the length of the header with its prefix."""
    length, _ = _PREFIX.unpack_from(data)
    end = _PREFIX.size + length
    header = json.loads(bytes(data[_PREFIX.size : end]))
    return Frame(header["kind"], header["fields"]), header["sizes"], end


class FrameSocket:
    """A stream socket of frames: any thread may send, one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._socket = connection
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def send(self, frame: Frame) -> None:
        """Send a frame; blocks while the other side does not read. Raises OSError if it has ended."""
        parts: list[Any] = [frame.pack_header()]
        if sum(len(item) for item in frame.buffers) <= MAX_JOINED_BYTES:
            parts = [b"".join([parts[0], *(bytes(item) for item in frame.buffers)])]
        else:
            parts += frame.buffers
        with self._sending:
            for part in parts:
                if len(part):
                    self._socket.sendall(part)

    def receive(self, tick: Tick) -> Frame:
        """Return the next frame.

        Args:
            tick: Called several times a second while nothing arrives, with the seconds of silence; it may raise.

        Raises EOFError or OSError if the other side has ended.
        """
        length, count = _PREFIX.unpack(self._read(bytearray(_PREFIX.size), tick))
        if length > MAX_HEADER_BYTES:
            raise OSError(f"a header of {length} bytes")
        prefix = _PREFIX.pack(length, count)
        frame, sizes, _ = unpack_header(prefix + bytes(self._read(bytearray(length), tick)))
        frame.buffers = [self._read(np.empty(size, np.uint8), tick) for size in sizes]
        return frame

    def _read(self, buffer: Any, tick: Tick) -> Any:
        """Fill a buffer, and return it."""
        view, silent = memoryview(buffer), 0.0
        while len(view):
            began = time.monotonic()
            if not self._poll.poll(SLICE_SECONDS * 1000):
                silent += min(time.monotonic() - began, 2 * SLICE_SECONDS)
                tick(silent)
                continue
            silent = 0.0
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError("the other side has ended")
            view = view[count:]
        return buffer

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
