"""The driver's sockets of ranks, used by any of its threads, also by the main thread, which Ctrl-C interrupts."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from onnxplace_hosts.ranks.frames import SLICE_SECONDS, Frame, FrameSocket, PackedFrame, Piece, join_small


class FrameSockets:
    """The driver's sockets of ranks: any thread may send, one thread at a time receives.

    Args:
        sockets: The connected socket of each rank that has one. Frames for other ranks, and from them, go through rank
            0, which has one.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = {rank: FrameSocket(item) for rank, item in sockets.items()}
        self._ranks = {item.descriptor: rank for rank, item in self._sockets.items()}
        self.sending = threading.Lock()
        """Held by whoever changes `unsent`."""
        self.unsent: tuple[tuple[FrameSocket, Piece], ...] = ()
        """What is to be sent, in its order. The assignment is the decision: any thread goes on from there."""
        self._silent_seconds = dict.fromkeys(self._sockets, 0.0)
        self._looked = time.monotonic()
        self._heard: list[int] = []
        """Ranks whose bytes are being read."""
        self._alarm, self._alarmed = socket.socketpair()
        for end in (self._alarm, self._alarmed):
            end.setblocking(False)
        self._poll, self._poll_with_alarm = self._make_poll(), self._make_poll(self._alarmed)

    # -- sending -----------------------------------------------------------------------------------

    def send(self, frames: Sequence[tuple[int, Frame]]) -> None:
        """Send frames to ranks; what sockets do not take now follows while frames are received.

        Raises OSError if a rank has ended.
        """
        pieces = self.pack([(rank, frame.pack(rank)) for rank, frame in frames])
        with self.sending:
            self.unsent += pieces
            self.flush()

    def pack(self, frames: Sequence[tuple[int, PackedFrame]]) -> tuple[tuple[FrameSocket, Piece], ...]:
        """Return frames for ranks as more of `unsent`; those of one socket are one piece if they are small."""
        by_socket: dict[int, list[PackedFrame]] = {}
        for rank, packed in frames:
            by_socket.setdefault(rank if rank in self._sockets else 0, []).append(packed)
        return tuple(
            (self._sockets[rank], (data, [])) for rank, items in by_socket.items() for data in join_small(items)
        )

    def flush(self) -> None:
        """Send as much as sockets take, for whoever holds `sending`; raises OSError if a rank has ended."""
        blocked: list[FrameSocket] = []
        left = []
        for item in self.unsent:
            if item[0] in blocked:
                left.append(item)
            elif not item[0].send_piece(item[1]):
                blocked.append(item[0])
                left.append(item)
        self.unsent = tuple(left)

    # -- receiving ---------------------------------------------------------------------------------

    def receive(self, seconds: float) -> Frame | None:
        """Return the next frame of any rank; None if none comes in time, or `wake` was called.

        Raises EOFError or OSError if a rank has ended.
        """
        found = self.find(seconds, until_woken=True)
        if found is None:
            return None
        packed, found.frames = found.frames[0], found.frames[1:]
        return packed.unpack()

    def find(self, seconds: float, until_woken: bool = False) -> FrameSocket | None:
        """Return a socket with a frame, which stays there; None if there is none in time, or `wake` was called.

        Raises EOFError or OSError if a rank has ended.
        """
        deadline, is_over = time.monotonic() + seconds, False
        while (found := next((item for item in self._sockets.values() if item.frames), None)) is None and not is_over:
            alarm = self._alarmed if until_woken else None
            poll = self._make_poll(alarm) if self.unsent else self._poll_with_alarm if until_woken else self._poll
            events = dict(poll.poll(0 if self._heard else max(deadline - time.monotonic(), 0) * 1000))
            is_over = not events and not self._heard
            if until_woken and events.pop(self._alarmed.fileno(), 0):
                self._end_alarm()
                is_over = True
            if self.unsent:
                with suppress(OSError), self.sending:  # reading says why
                    self.flush()
            heard = [self._ranks[descriptor] for descriptor, event in events.items() if event != select.POLLOUT]
            self._add_silence(heard)
            # What an interrupt keeps from being taken apart is not announced again.
            self._heard += heard
            for rank in self._heard:
                self._sockets[rank].look()
            self._heard = []
        return found

    def _make_poll(self, alarm: socket.socket | None = None, reads: bool = True) -> select.poll:
        """Return what waits for sockets that take more of what is unsent, for frames, and for `wake`."""
        poll, unsent = select.poll(), {item.descriptor for item, _ in self.unsent}
        for descriptor in self._ranks if reads else unsent:
            poll.register(descriptor, select.POLLIN * reads | (select.POLLOUT if descriptor in unsent else 0))
        if alarm is not None:
            poll.register(alarm, select.POLLIN)
        return poll

    def _add_silence(self, heard: Sequence[int]) -> None:
        """Add the time since the last call to the silence of the ranks that should have been heard.

        A long time counts as short, so that a process that was stopped itself does not take others for dead.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * SLICE_SECONDS), now
        for rank, item in self._sockets.items():
            is_silent = rank not in heard and (rank == 0 or item.has_part)
            self._silent_seconds[rank] = self._silent_seconds[rank] + passed if is_silent else 0.0

    def find_silence(self) -> tuple[int, float]:
        """Return the rank that has been silent for the longest time, and its seconds.

        That is rank 0, which says that it is alive, or one that has sent half a frame.
        """
        return max(self._silent_seconds.items(), key=lambda item: item[1])

    # -- waking ------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let `receive` or `sleep` return in another thread, or the next time; for any thread, also in finalizers."""
        with suppress(OSError):  # it is closed, or has not been heard yet
            self._alarm.send(b"\0")

    def sleep(self, seconds: float) -> None:
        """Wait until `wake` is called, or until sockets take more of what is unsent."""
        self._make_poll(self._alarmed, reads=False).poll(seconds * 1000)
        self._end_alarm()

    def _end_alarm(self) -> None:
        with suppress(OSError):
            self._alarmed.recv(1 << 16)

    def close(self) -> None:
        """Close the sockets."""
        for item in self._sockets.values():
            item.close()
        self._alarm.close()
        self._alarmed.close()
