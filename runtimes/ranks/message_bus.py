"""Messages between ranks by MPI: frames, and values on their way from device to device.

One lock guards all calls of MPI, so any thread may send and look for messages. Sends return at once; their buffers are
kept until they are through. Nothing waits inside MPI: its own waits would burn a core.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxplace.runtimes.ranks.frames import Frame, unpack_header
from onnxplace.runtimes.ranks.values import flatten, unflatten

# Tags of messages.
_FRAME, _VALUE, _BUFFER, _HEARTBEAT = 1, 2, 3, 4
# Bytes that are sent together with their header.
MAX_JOINED_BYTES = 16 << 10
# Number of the request in the order of the driver, index of the value, element type, number of dimensions.
_VALUE_HEADER = struct.Struct("<qiBB")
# Element types of values that are sent without a frame, by their place here.
_DTYPES = (
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "bool"),
)
_DTYPE_CODES = {np.dtype(name): code for code, name in enumerate(_DTYPES)}
# A time that a thread was held up counts as at most this much silence of others.
MAX_STEP_SECONDS = 0.1
_LOOK_SECONDS = 1e-3


@dataclass
class _Arrival:
    """A message whose buffers may be on their way."""

    frame: Frame | None
    value: tuple[int, int, str, tuple[int, ...]] | None
    buffers: list[Any] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    """Sizes of the buffers that follow as messages of their own."""
    requests: list[Any] = field(default_factory=list)
    """Receives that are not through."""


class MessageBus:
    """The messages of one rank.

    Args:
        communicator: of MPI.
        on_frame: called with the source's rank and a frame, in the order of sending, by any thread, under the lock.
        on_value: called alike with the number of the request, the index of the value, and its array.
    """

    def __init__(
        self,
        communicator: Any,
        on_frame: Callable[[int, Frame], None],
        on_value: Callable[[int, int, Any], None],
    ) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._communicator, duplication = communicator.Idup()
        while not duplication.Test():  # the other ranks may come minutes later
            time.sleep(_LOOK_SECONDS)
        self.rank: int = self._communicator.rank
        self.size: int = self._communicator.size
        self._on_frame, self._on_value = on_frame, on_value
        self._lock = threading.RLock()
        self._status = MPI.Status()
        self._sending: deque[tuple[Any, Any]] = deque()
        self._arrivals: dict[int, deque[_Arrival]] = {rank: deque() for rank in range(self.size)}
        self._open_arrivals = 0
        self.silent_seconds = [0.0] * self.size
        """Time since the last message of each rank."""
        self._aged = time.monotonic()

    # -- sending ------------------------------------------------------------------------------------

    def send(self, rank: int, frame: Frame) -> None:
        """Send a frame to another rank."""
        header = frame.pack_header()
        sizes = [len(item) for item in frame.buffers]
        joined = b"".join(bytes(item) for item in frame.buffers) if sum(sizes) <= MAX_JOINED_BYTES else b""
        with self._lock:
            self._send(rank, _FRAME, np.frombuffer(header + joined, np.uint8))
            if sum(sizes) > MAX_JOINED_BYTES:
                for item in frame.buffers:
                    if len(item):
                        self._send(rank, _BUFFER, np.asarray(item))

    def send_value(self, rank: int, serial: int, index: int, array: Any) -> bool:
        """Send an array; return False, and send nothing, if its type needs a frame.

        Args:
            rank: The receiver.
            serial: Number of the request.
            index: Number of the value.
            array: It must not be altered any more.
        """
        code = _DTYPE_CODES.get(array.dtype)
        if code is None:
            return False
        header = _VALUE_HEADER.pack(serial, index, code, array.ndim) + struct.pack(f"<{array.ndim}q", *array.shape)
        data = flatten(array)
        with self._lock:
            if len(data) <= MAX_JOINED_BYTES:
                self._send(rank, _VALUE, np.frombuffer(header + data.tobytes(), np.uint8))
            else:
                self._send(rank, _VALUE, np.frombuffer(header, np.uint8))
                self._send(rank, _BUFFER, data)
        return True

    def send_heartbeat(self, rank: int) -> None:
        """Tell a rank that this one is alive."""
        with self._lock:
            self._send(rank, _HEARTBEAT, np.empty(0, np.uint8))

    def _send(self, rank: int, tag: int, data: Any) -> None:
        request = self._communicator.Isend([data, self._mpi.BYTE], rank, tag)
        self._sending.append((request, data))

    @property
    def is_sending(self) -> bool:
        """Return whether messages are not through."""
        return bool(self._sending)

    # -- receiving ------------------------------------------------------------------------------------

    def progress(self) -> bool:
        """Look for messages, and let MPI work; return whether something arrived.

        Does nothing if another thread does it.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            while self._sending and self._sending[0][0].Test():
                self._sending.popleft()
            arrived = False
            while (message := self._communicator.Improbe(status=self._status)) is not None:
                arrived = True
                self._accept(message, self._status.source, self._status.tag, self._status.Get_count(self._mpi.BYTE))
            if self._open_arrivals:
                self._hand_over_complete()
            return arrived
        finally:
            self._lock.release()

    def _hand_over_complete(self) -> None:
        """Hand over what is here, in the order of sending of each rank."""
        for source, arrivals in self._arrivals.items():
            while arrivals and self._is_complete(arrivals[0]):
                self._open_arrivals -= 1
                self._hand_over(source, arrivals.popleft())

    def add_silence(self) -> None:
        """Add the time since the last call to the silence of all ranks."""
        now = time.monotonic()
        elapsed, self._aged = min(now - self._aged, MAX_STEP_SECONDS), now
        for rank in range(self.size):
            self.silent_seconds[rank] += elapsed

    def _accept(self, message: Any, source: int, tag: int, size: int) -> None:
        """Receive a message: the start of an arrival, or a buffer of the last one."""
        self.silent_seconds[source] = 0.0
        data = np.empty(size, np.uint8)
        request = message.Irecv([data, self._mpi.BYTE])
        if tag == _BUFFER:
            self._fill(source, data, request)
            return
        while not request.Test():  # it is short, and here already
            pass
        if tag in (_FRAME, _VALUE):
            self._arrivals[source].append(_read_frame(data) if tag == _FRAME else _read_value(data))
            self._open_arrivals += 1

    def _fill(self, source: int, data: Any, request: Any) -> None:
        """Enter a buffer into the arrival that still misses one."""
        arrival = next(item for item in self._arrivals[source] if item.missing)
        while arrival.missing and not arrival.missing[0]:
            arrival.buffers.append(np.empty(0, np.uint8))
            del arrival.missing[0]
        arrival.buffers.append(data)
        arrival.requests.append(request)
        del arrival.missing[0]

    def _is_complete(self, arrival: _Arrival) -> bool:
        """Return whether all bytes of an arrival are here."""
        if any(arrival.missing):
            return False
        arrival.buffers += [np.empty(0, np.uint8) for _ in arrival.missing]
        arrival.missing = []
        arrival.requests = [request for request in arrival.requests if not request.Test()]
        return not arrival.requests

    def _hand_over(self, source: int, arrival: _Arrival) -> None:
        if arrival.frame is not None:
            arrival.frame.buffers = arrival.buffers
            self._on_frame(source, arrival.frame)
        elif arrival.value is not None:
            serial, index, dtype, shape = arrival.value
            self._on_value(serial, index, unflatten(arrival.buffers[0], np.dtype(dtype), shape))


def _read_frame(data: Any) -> _Arrival:
    """Return the arrival that a message begins, with the buffers that it contains."""
    frame, sizes, position = unpack_header(data)
    if sum(sizes) > MAX_JOINED_BYTES:
        return _Arrival(frame, None, missing=sizes)
    buffers = []
    for size in sizes:
        buffers.append(data[position : position + size].copy())
        position += size
    return _Arrival(frame, None, buffers)


def _read_value(data: Any) -> _Arrival:
    """Return the arrival of a value, with its bytes if the message contains them."""
    serial, index, code, count = _VALUE_HEADER.unpack_from(data)
    end = _VALUE_HEADER.size + 8 * count
    shape = struct.unpack_from(f"<{count}q", data, _VALUE_HEADER.size)
    dtype = _DTYPES[code]
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    value = (serial, index, dtype, shape)
    if size > MAX_JOINED_BYTES:
        return _Arrival(None, value, missing=[size])
    return _Arrival(None, value, [data[end : end + size].copy()])
