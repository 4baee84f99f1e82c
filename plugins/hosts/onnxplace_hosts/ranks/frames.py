"""Frames: small fields as JSON, and buffers of bytes, as messages between processes; and a socket of them.

Nothing in a frame is executed when it is read.
"""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
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
            texts = [item.decode() if isinstance(item, bytes) else str(item) for item in value.ravel().tolist()]
            buffers.append(np.frombuffer(json.dumps(texts).encode(), np.uint8))
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


# The kinds of frames are these:
#
#   driver to rank    open, piece (of a file), request, cancel, read (a state), delays (of its threads), free (states),
#                     clock (an answer), watch (report silent ranks from now on), alive (for the bridge), close
#   rank to driver    started, need (a piece), ready or failed, report (of a request), answer (to read or delays),
#                     clock (a question), silent (another rank), alive
#   rank to rank      clock (question and answer); links.py has messages of its own
#
# Rank 0 passes on those between the driver and ranks without a socket of it.

# Bytes of the JSON text, number of buffers, and a rank: who gets the frame, or towards the driver, who sends it.
_PREFIX = struct.Struct("<IIi")
# The rank of frames that have nothing to do with the driver.
BETWEEN_RANKS = -1
# A frame with more is refused: the other side is not ours.
MAX_TEXT_BYTES, MAX_BUFFERS = 256 << 20, 1 << 20
_READ_BYTES = 64 << 10
# How often a reader that waits looks after other things; a slice counts as at most this long, so that a process that
# was stopped itself does not take the others for dead.
SLICE_SECONDS = 0.1

Piece = tuple[Any, list[int]]
"""Bytes to send, and how many of them were sent, one number for each time."""


encode_fields = json.JSONEncoder(separators=(",", ":")).encode
# What frames have in common is decoded once.
_decode_common = lru_cache(64)(json.loads)


@dataclass
class Frame:
    """A message."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    buffers: Sequence[Any] = ()
    """Flat arrays of bytes."""
    rank: int = BETWEEN_RANKS
    """Towards ranks, who gets it; towards the driver, who sends it."""
    common: str = ""
    """More fields, as JSON, which other frames have, too."""

    def pack(self, rank: int = BETWEEN_RANKS) -> PackedFrame:
        """Return it as bytes and buffers, for a rank or from it."""
        text = encode_fields({"kind": self.kind, "fields": self.fields})
        return PackedFrame(rank, (f"{text}\n{self.common}" if self.common else text).encode(), self.buffers)


@dataclass(slots=True)
class PackedFrame:
    """A message as bytes, which rank 0 passes on without reading it."""

    rank: int
    text: bytes
    """JSON, or something else that begins with another byte than its brace."""
    buffers: Sequence[Any] = ()

    @property
    def header(self) -> bytes:
        """Return all but the buffers: the sizes of these, and the text."""
        count = len(self.buffers)
        sizes = struct.pack(f"<{count}Q", *map(len, self.buffers)) if count else b""
        return b"".join((_PREFIX.pack(len(self.text), count, self.rank), sizes, self.text))

    def unpack(self) -> Frame:
        """Return the message; only for JSON."""
        text, _, common = self.text.partition(b"\n")
        data = json.loads(text)
        fields = {**data["fields"], **_decode_common(common)} if common else data["fields"]
        return Frame(data["kind"], fields, self.buffers, self.rank)


class FrameSocket:
    """A stream socket of frames that never blocks: one thread at a time sends, and one receives.

    Ctrl-C may raise in the main thread between any two instructions of Python, so also between a call that has moved
    bytes and the assignment of their count; then nobody would know where the next frame begins. Here one instruction
    does both: in `counts.extend(map(socket.send, ...))`, a loop in C calls the socket and keeps what it returns. All
    else follows from that by steps that may be repeated, and by assignments without a call between them.

    Args:
        connection: A connected socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.frames: list[PackedFrame] = []
        """Frames that were read, for whoever takes them out."""
        self._chunks: list[bytes] = []
        """What was read last, unless it is parsed."""
        self._rest = b""
        """The beginning of a header."""
        self._partial: PackedFrame | None = None
        """A frame whose buffers are not here yet."""
        self._missing: list[tuple[memoryview, list[int]]] = []
        """Its incomplete buffers, with the numbers of bytes that they have."""
        self._unsent: deque[Piece] = deque()

    def push(self, *frames: PackedFrame) -> bool:
        """Begin to send frames, whose buffers must not be altered any more; return whether all is sent.

        Else `flush` sends the rest. Raises OSError if the other side has ended.
        """
        self._unsent += [(item, []) for item in join_small(frames)]
        return self.flush()

    def flush(self) -> bool:
        """Send what the system takes of frames that were pushed; return whether that is all."""
        while self._unsent:
            if not self.send_piece(self._unsent[0]):
                return False
            self._unsent.popleft()
        return True

    def send_piece(self, piece: Piece) -> bool:
        """Send what the system takes of some bytes; return whether all are sent."""
        data, counts = piece
        while (sent := sum(counts)) < len(data):
            try:
                rest = memoryview(data)[sent:] if sent else data
                counts.extend(map(self._socket.send, (rest,), (socket.MSG_DONTWAIT,)))
            except BlockingIOError:
                return False
        return True

    @property
    def is_moving(self) -> bool:
        """Return whether a frame has begun to leave or to arrive."""
        return bool(self._unsent or self._missing)

    @property
    def has_part(self) -> bool:
        """Return whether a frame has begun to arrive."""
        return bool(self._rest or self._missing)

    def read(self) -> list[PackedFrame]:
        """Return the frames that are here; raises what `look` raises."""
        self.look()
        frames, self.frames = self.frames, []
        return frames

    def look(self) -> None:
        """Add the frames that are here to `frames`; what arrives meanwhile is for the next call.

        Raises EOFError or OSError if the other side has ended, and no frame is here.
        """
        try:
            self._read_some()
        except EOFError:
            if not self.frames:
                raise

    def _read_some(self) -> None:
        """Read once."""
        if self._missing and not self._fill():
            return
        if not self._chunks:  # else an interrupt kept them from being parsed
            try:
                size = max(_READ_BYTES, len(self._rest))
                self._chunks.extend(map(self._socket.recv, (size,), (socket.MSG_DONTWAIT,)))
            except BlockingIOError:
                return
        if not self._chunks[0]:
            self._chunks = []
            raise EOFError("the other side has ended")
        data, start = self._rest + self._chunks[0] if self._rest else self._chunks[0], 0
        frames: list[PackedFrame] = []
        missing: list[tuple[memoryview, list[int]]] = []
        while (end := _parse(data, start, frames, missing)) != start:
            start = end
        rest, partial = data[start:], frames.pop() if missing else None
        # No call between these.
        self.frames += frames
        self._chunks, self._rest, self._partial, self._missing = [], rest, partial, missing
        if missing:
            self._fill()

    def _fill(self) -> bool:
        """Read what is here of the partial frame, and add it once it is whole; return whether it is."""
        for view, counts in self._missing:
            while (count := sum(counts)) < len(view):
                counts[:] = (count,)
                try:
                    counts.extend(map(self._socket.recv_into, (view[count:],), (0,), (socket.MSG_DONTWAIT,)))
                except BlockingIOError:
                    return False
                if not counts[-1]:
                    raise EOFError("the other side has ended")
        assert self._partial is not None
        # No call between these.
        self.frames += [self._partial]
        self._partial, self._missing = None, []
        return True

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    @property
    def descriptor(self) -> int:
        """Return the file descriptor."""
        return self._socket.fileno()


def _parse(data: bytes, start: int, frames: list[PackedFrame], missing: list[Any]) -> int:
    """Add the frame that begins at a position; return where the next one does, or `start` if too little is here.

    Buffers that are not complete are added to `missing`, with the numbers of bytes that they have.
    """
    end: int = start + _PREFIX.size
    if end > len(data):
        return start
    length, count, rank = _PREFIX.unpack_from(data, start)
    if length > MAX_TEXT_BYTES or count > MAX_BUFFERS:
        raise OSError(f"a frame with {length} bytes of text and {count} buffers")
    text = end + 8 * count
    if (end := text + length) > len(data):
        return start
    frame = PackedFrame(rank, data[text:end])
    if count:
        frame.buffers = buffers = list[Any]()
        sizes: tuple[int, ...] = struct.unpack_from(f"<{count}Q", data, start + _PREFIX.size)
        for size in sizes:
            buffers.append(np.empty(size, np.uint8))
            view, known = memoryview(buffers[-1]), min(size, len(data) - end)
            view[:known] = data[end : end + known]
            end += known
            if known < size:
                missing.append((view, [known]))
    frames.append(frame)
    return end


def join_small(frames: Sequence[PackedFrame]) -> list[Any]:
    """Return the bytes of frames, in one piece if they are few; large ones are not copied."""
    pieces: list[Any] = []
    for frame in frames:
        pieces.append(frame.header)
        pieces += frame.buffers
    if len(pieces) == 1:
        return pieces
    return [b"".join(pieces)] if sum(map(len, pieces)) <= _READ_BYTES else [piece for piece in pieces if len(piece)]
