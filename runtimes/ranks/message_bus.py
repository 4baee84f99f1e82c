"""Messages between ranks by MPI: frames, heartbeats, and the bytes of values.

Frames and heartbeats may come at any time, and say themselves what they are: each look takes all that are here. Values
come when the program says so, with a tag and a buffer of their own (see `value_channels`). They have a communicator of
their own, so that no look takes them for frames. Both are seen only when a thread looks: MPI has no thread of its own.

One lock guards all calls of MPI, so any thread may send and look for messages. Sends return at once; their buffers are
kept until they are through. Nothing waits inside MPI: its own waits would burn a core.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from onnxplace.runtimes.ranks.frames import Frame, PackedFrame

# Tags of messages; those of values have a communicator of their own.
_FRAME, _HEARTBEAT = 1, 2
# A time that a thread was held up counts as at most this much silence of others.
MAX_STEP_SECONDS = 0.1
_LOOK_SECONDS = 1e-3
# Shorter messages leave at once; longer ones may wait for looks of both ends.
_EAGER_BYTES = 16 << 10


class MessageBus:
    """The messages of one rank.

    Args:
        communicator: of MPI.
        on_frame: called with the source's rank and a frame, in the order of sending, by any thread, under the lock.
    """

    def __init__(self, communicator: Any, on_frame: Callable[[int, PackedFrame], None]) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._communicator, self._value_communicator = _duplicate(communicator), _duplicate(communicator)
        self.rank: int = self._communicator.rank
        self.size: int = self._communicator.size
        self.max_tag: int = self._value_communicator.Get_attr(MPI.TAG_UB)
        self._on_frame = on_frame
        self.lock = threading.RLock()
        """Guards all calls of MPI."""
        self._status = MPI.Status()
        self._sending: deque[tuple[Any, Any, bool]] = deque()
        """Sends that are not known to be through: the request of MPI, what is sent, and whether it is long."""
        self._long_sends = 0
        self._arrivals: dict[int, deque[tuple[Any, Any]]] = {rank: deque() for rank in range(self.size)}
        """Frames on their way, by sender: their memory and the request of MPI."""
        self._open_arrivals = 0
        self.is_unattended = threading.Event()
        """Set when the thread that looks for messages begins to compute while some are on their way."""
        self.silent_seconds = [0.0] * self.size
        """Time since the last message of each rank."""
        self._aged = time.monotonic()

    # -- sending ------------------------------------------------------------------------------------

    def send(self, rank: int, frame: Frame | PackedFrame) -> None:
        """Send a frame to another rank."""
        packed = frame.pack() if isinstance(frame, Frame) else frame
        with self.lock:
            self._send(rank, _FRAME, packed.join())

    def send_value(self, rank: int, tag: int, data: Any) -> None:
        """Begin to send bytes of a value; they must not be altered any more."""
        with self.lock:
            self._keep(self._value_communicator.Isend([data, self._mpi.BYTE], rank, tag), data)

    def receive_value(self, rank: int, tag: int, buffer: Any) -> Any:
        """Begin to receive bytes of a value, and return the request of MPI; under the lock, as all calls of it."""
        return self._value_communicator.Irecv([buffer, self._mpi.BYTE], rank, tag)

    def send_heartbeat(self, rank: int) -> None:
        """Tell a rank that this one is alive."""
        with self.lock:
            self._send(rank, _HEARTBEAT, np.empty(0, np.uint8))

    def _send(self, rank: int, tag: int, data: Any) -> None:
        self._keep(self._communicator.Isend([data, self._mpi.BYTE], rank, tag), data)

    def _keep(self, request: Any, data: Any) -> None:
        """Keep what is sent until it is through."""
        is_long = (data.nbytes if hasattr(data, "nbytes") else len(data)) > _EAGER_BYTES
        self._long_sends += is_long
        self._sending.append((request, data, is_long))

    @property
    def is_sending(self) -> bool:
        """Return whether messages are not through."""
        return bool(self._sending)

    @property
    def is_moving(self) -> bool:
        """Return whether long messages are on their way, from here or to here."""
        return self._long_sends > 0 or self._open_arrivals > 0

    # -- receiving ------------------------------------------------------------------------------------

    def progress(self) -> bool:
        """Look for messages, and let MPI work; return whether something arrived.

        Does nothing if another thread does it.
        """
        if not self.lock.acquire(blocking=False):
            return False
        try:
            while self._sending and self._sending[0][0].Test():
                self._long_sends -= self._sending.popleft()[2]
            arrived = False
            while (message := self._communicator.Improbe(status=self._status)) is not None:
                arrived = True
                self._accept(message, self._status.source, self._status.tag, self._status.Get_count(self._mpi.BYTE))
            if self._open_arrivals:
                self._hand_over()
            return arrived
        finally:
            self.lock.release()

    def _hand_over(self) -> None:
        """Hand over the frames that are here, in the order of sending of each rank."""
        for source, arrivals in self._arrivals.items():
            while arrivals and arrivals[0][1].Test():
                self._open_arrivals -= 1
                self._on_frame(source, PackedFrame.split(arrivals.popleft()[0]))

    def add_silence(self) -> None:
        """Add the time since the last call to the silence of all ranks."""
        now = time.monotonic()
        elapsed, self._aged = min(now - self._aged, MAX_STEP_SECONDS), now
        for rank in range(self.size):
            self.silent_seconds[rank] += elapsed

    def _accept(self, message: Any, source: int, tag: int, size: int) -> None:
        """Begin to receive a message: a frame, or a heartbeat, whose arrival is all that it says."""
        self.silent_seconds[source] = 0.0
        data = np.empty(size, np.uint8)
        request = message.Irecv([data, self._mpi.BYTE])
        if tag == _FRAME:
            self._arrivals[source].append((data, request))
            self._open_arrivals += 1
            return
        while not request.Test():  # it is empty, and here already
            pass


def _duplicate(communicator: Any) -> Any:
    """Return a duplicate; the other ranks may come minutes later, and waits of MPI would burn a core until then."""
    duplicate, duplication = communicator.Idup()
    while not duplication.Test():
        time.sleep(_LOOK_SECONDS)
    return duplicate
