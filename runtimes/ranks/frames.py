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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

# Values as plain JSON and flat buffers of bytes: arrays, strings, sequences, maps, absent optionals.

# Element types that ONNX has and numpy lacks are looked up in ml_dtypes.
_STRING_KINDS = "OUS"


def encode_value(value: Any, buffers: list[Any]) -> Any:
    """Return a description of a value as plain JSON; its bytes are appended to `buffers`.

    >>> encode_value([np.zeros((2, 1), np.int8), None], [])
    ['list', [['array', 'int8', [2, 1]], ['none']]]
    """
    if value is None:
        return ["none"]
    if isinstance(value, np.generic):
        return ["scalar", encode_value(np.asarray(value), buffers)]
    if isinstance(value, np.ndarray):
        if value.dtype.kind in _STRING_KINDS:
            buffers.append(_encode_strings(value))
            return ["strings", list(value.shape)]
        buffers.append(flatten(value))
        return ["array", value.dtype.name, list(value.shape)]
    if isinstance(value, Mapping):
        return ["map", list(value), [encode_value(item, buffers) for item in value.values()]]
    if isinstance(value, list):
        return ["list", [encode_value(item, buffers) for item in value]]
    return ["plain", value]


def decode_value(description: Any, buffers: Iterator[Any]) -> Any:
    """Return the value of a description; its arrays share the memory of the buffers."""
    kind, *rest = description
    if kind == "none":
        return None
    if kind == "scalar":
        return decode_value(rest[0], buffers)[()]
    if kind == "strings":
        texts = json.loads(bytes(next(buffers)))
        array = np.empty(len(texts), object)
        array[:] = texts
        return array.reshape(rest[0])
    if kind == "array":
        return unflatten(next(buffers), find_dtype(rest[0]), rest[1])
    if kind == "map":
        return dict(zip(rest[0], [decode_value(item, buffers) for item in rest[1]]))
    return [decode_value(item, buffers) for item in rest[0]] if kind == "list" else rest[0]


def encode_values(values: Mapping[str, Any], buffers: list[Any]) -> dict[str, Any]:
    """Return descriptions of values by name; their bytes are appended to `buffers`."""
    return {name: encode_value(value, buffers) for name, value in values.items()}


def decode_values(descriptions: Mapping[str, Any], buffers: Iterator[Any]) -> dict[str, Any]:
    """Return the values of descriptions by name."""
    return {name: decode_value(item, buffers) for name, item in descriptions.items()}


def flatten(array: Any) -> Any:
    """Return the bytes of an array as a flat array, which shares its memory if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def unflatten(buffer: Any, dtype: np.dtype[Any], shape: Any) -> Any:
    """Return the array that has these bytes; it shares their memory where its numbers are aligned there."""
    array = np.asarray(buffer).view(dtype).reshape(shape)
    return array if array.flags.aligned else array.copy()


def find_dtype(name: str) -> np.dtype[Any]:
    """Return an element type by its name, such as `float32` or `bfloat16`."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype


def _encode_strings(array: Any) -> Any:
    """Return strings as JSON in bytes."""
    texts = [item.decode() if isinstance(item, bytes) else str(item) for item in array.ravel().tolist()]
    return np.frombuffer(json.dumps(texts).encode(), np.uint8)


# The kinds of frames are these:
#
#   driver to rank    open, piece (of a file), request, cancel, read (a state), delays (of its threads), free (states),
#                     clock (an answer), watch (report silent ranks from now on), alive (for the bridge), close
#   rank to driver    started, need (a piece), ready or failed, report (of a request), answer (to read or delays),
#                     clock (a question), silent (another rank), alive
#   rank to rank      value (that no channel can send), clock (question and answer)
#
# Rank 0 passes on those between the driver and ranks without a socket of it.

# Bytes of the JSON text, number of buffers, and a rank: who gets the frame, or towards the driver, who sends it.
_PREFIX = struct.Struct("<IIi")
# The rank of frames that have nothing to do with the driver.
BETWEEN_RANKS = -1
# A frame with more is refused: the other side is not ours.
MAX_TEXT_BYTES, MAX_BUFFERS = 256 << 20, 1 << 20
# Headers are filled up to a multiple of this, so that the numbers of a buffer right behind one are aligned.
_ALIGNED_BYTES = 16
# Values up to this size are sent in one piece with their header.
MAX_JOINED_BYTES = 16 << 10
_READ_BYTES = 64 << 10
# How often a reader that waits looks after other things; a slice counts as at most this long, so that a process that
# was stopped itself does not take the others for dead.
SLICE_SECONDS = 0.1

Tick = Callable[[float], None]
RankTick = Callable[[int, float], None]


@dataclass
class Frame:
    """A message."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    buffers: Sequence[Any] = ()
    """Flat arrays of bytes."""
    rank: int = BETWEEN_RANKS
    """Towards ranks, who gets it; towards the driver, who sends it."""

    def pack(self, rank: int = BETWEEN_RANKS) -> PackedFrame:
        """Return it as bytes and buffers, for a rank or from it."""
        text = json.dumps({"kind": self.kind, "fields": self.fields}, separators=(",", ":")).encode()
        text += b" " * (-(_PREFIX.size + 8 * len(self.buffers) + len(text)) % _ALIGNED_BYTES)
        sizes = struct.pack(f"<{len(self.buffers)}Q", *map(len, self.buffers))
        return PackedFrame(rank, _PREFIX.pack(len(text), len(self.buffers), rank) + sizes + text, self.buffers)


@dataclass
class PackedFrame:
    """A message as bytes, which rank 0 passes on without reading it."""

    rank: int
    header: bytes
    """All but the buffers: the sizes of these, and the text."""
    buffers: Sequence[Any] = ()

    def unpack(self) -> Frame:
        """Return the message."""
        _, count, _ = _PREFIX.unpack_from(self.header)
        data = json.loads(self.header[_PREFIX.size + 8 * count :])
        return Frame(data["kind"], data["fields"], self.buffers, self.rank)

    def join(self) -> bytes:
        """Return the message in one piece; `split` is the inverse."""
        return b"".join((self.header, *self.buffers))

    @staticmethod
    def split(data: Any) -> PackedFrame:
        """Return the message of an array of bytes, whose memory its buffers share."""
        frame, sizes, position = split_header(data)
        ends = list(accumulate(sizes, initial=position))
        frame.buffers = [data[start:end] for start, end in pairwise(ends)]
        return frame


def split_header(data: Any) -> tuple[PackedFrame, list[int], int]:
    """Return a frame without its buffers, their sizes, and the length of its header, from bytes that begin with it."""
    length, count, rank = _PREFIX.unpack_from(data)
    end = _PREFIX.size + 8 * count + length
    sizes = struct.unpack_from(f"<{count}Q", data, _PREFIX.size)
    return PackedFrame(rank, bytes(data[:end])), list(sizes), end


class FrameSocket:
    """A stream socket of frames: any thread may send, one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._socket = connection
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._received = bytearray()

    def send(self, *frames: PackedFrame) -> None:
        """Send frames; blocks while the other side does not read. Raises OSError if it has ended."""
        pieces: list[Any] = [piece for frame in frames for piece in (frame.header, *frame.buffers)]
        if sum(map(len, pieces)) <= _READ_BYTES:
            pieces = [b"".join(pieces)]
        with self._sending:
            for piece in pieces:
                self._socket.sendall(piece)

    def receive(self, tick: Tick) -> PackedFrame:
        """Return the next frame.

        Args:
            tick: Called several times a second while nothing arrives, with the seconds of silence; it may raise.

        Raises EOFError or OSError if the other side has ended.
        """
        self._await_bytes(_PREFIX.size, tick)
        length, count, _ = _PREFIX.unpack_from(self._received)
        if length > MAX_TEXT_BYTES or count > MAX_BUFFERS:
            raise OSError(f"a frame with {length} bytes of text and {count} buffers")
        self._await_bytes(_PREFIX.size + 8 * count + length, tick)
        frame, sizes, end = split_header(self._received)
        del self._received[:end]
        frame.buffers = [self._read_buffer(size, tick) for size in sizes]
        return frame

    def _await_bytes(self, count: int, tick: Tick) -> None:
        """Read until so many bytes are here."""
        while len(self._received) < count:
            self._await_data(tick)
            data = self._socket.recv(max(_READ_BYTES, count - len(self._received)))
            if not data:
                raise EOFError("the other side has ended")
            self._received += data

    def _read_buffer(self, size: int, tick: Tick) -> Any:
        """Return the next bytes as a flat array."""
        buffer: Any = np.empty(size, np.uint8)
        view, known = memoryview(buffer), min(size, len(self._received))
        view[:known] = self._received[:known]
        del self._received[:known]
        view = view[known:]
        while len(view):
            self._await_data(tick)
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError("the other side has ended")
            view = view[count:]
        return buffer

    def _await_data(self, tick: Tick) -> None:
        """Wait until there is something to read."""
        silent = 0.0
        began = time.monotonic()
        while not self._poll.poll(SLICE_SECONDS * 1000):
            silent += min(time.monotonic() - began, 2 * SLICE_SECONDS)
            tick(silent)
            began = time.monotonic()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    @property
    def descriptor(self) -> int:
        """Return the file descriptor."""
        return self._socket.fileno()

    @property
    def has_bytes(self) -> bool:
        """Return whether the next frame, or its beginning, was read."""
        return bool(self._received)


class FrameSockets:
    """The driver's sockets of ranks: any thread may send, one thread receives.

    Args:
        sockets: The socket of each rank that has one. Frames for other ranks, and from them, go through rank 0, which
            has one.
    """

    def __init__(self, sockets: Mapping[int, FrameSocket]) -> None:
        self._sockets = dict(sockets)
        self._ranks = {item.descriptor: rank for rank, item in sockets.items()}
        self._poll = select.poll()
        for descriptor in self._ranks:
            self._poll.register(descriptor, select.POLLIN)
        self._ready: deque[int] = deque()
        self._silent_seconds, self._looked = 0.0, time.monotonic()

    def send(self, frames: Sequence[tuple[int, Frame]]) -> None:
        """Send frames to ranks, those of one socket in one piece if they are small; raises OSError if it has ended."""
        pieces: dict[int, list[PackedFrame]] = {}
        for rank, frame in frames:
            pieces.setdefault(rank if rank in self._sockets else 0, []).append(frame.pack(rank))
        for rank, packed in pieces.items():
            self._sockets[rank].send(*packed)

    def receive(self, tick: RankTick) -> PackedFrame:
        """Return the next frame of any rank.

        Args:
            tick: Called several times a second while nothing arrives, with a rank and the seconds of its silence: rank
                0, which says that it is alive, or one that has sent half a frame. It may raise.

        Raises EOFError or OSError if a rank has ended.
        """
        while not self._ready:
            self._ready.extend(rank for rank, item in self._sockets.items() if item.has_bytes)
            if self._ready:
                break
            self._ready.extend(self._ranks[descriptor] for descriptor, _ in self._poll.poll(SLICE_SECONDS * 1000))
            self._add_silence()
            if not self._ready:
                tick(0, self._silent_seconds)
        rank = self._ready.popleft()
        packed = self._sockets[rank].receive(lambda silent: tick(rank, silent))
        if rank == 0:
            self._silent_seconds = 0.0
        elif self._silent_seconds > SLICE_SECONDS:  # others have much to say
            tick(0, self._silent_seconds)
        return packed

    def _add_silence(self) -> None:
        """Add the time since the last call to the silence of rank 0."""
        now = time.monotonic()
        self._silent_seconds += min(now - self._looked, 2 * SLICE_SECONDS)
        self._looked = now

    def close(self) -> None:
        """Close the sockets."""
        for item in self._sockets.values():
            item.close()
