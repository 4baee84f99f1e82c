"""A rank: `mpiexec ... python -m mpi4py -m onnxplace.runtimes.ranks.rank_process SOCKET [RANKS]`.

The first ranks, those on the machine of the driver, the process that opened the session, connect to its socket. Rank 0
passes frames on between the driver and the others. The main thread follows programs. A helper looks for messages each
millisecond while some are on their way, so that they move while the main thread computes, and tells the others that
this rank is alive.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from onnxplace.errors import ExecutionError, OnnxplaceError
from onnxplace.hosts import describe_error
from onnxplace.machine import pin_thread, read_run_delays
from onnxplace.runtimes.ranks.frames import BETWEEN_RANKS, Frame, FrameSocket, PackedFrame, encode_value
from onnxplace.runtimes.ranks.launcher import connect_rank
from onnxplace.runtimes.ranks.mpi_messages import MessageBus
from onnxplace.runtimes.ranks.opening import Opening
from onnxplace.runtimes.ranks.rank_loop import RankLoop, open_rank

# What a rank asks of the system for its process: exact sleeps, memory that is kept, an end with its parent.


def sleep_exactly() -> None:
    """Let naps of this thread, and of threads that it starts, take no longer than asked, and keep freed memory.

    Linux lengthens naps by 50 us. glibc maps large arrays again each time, and touching them costs more than copying.
    """
    set_timer_slack, trim_threshold, map_threshold = 29, -1, -3
    with suppress(OSError, AttributeError):  # another system or C library
        library = ctypes.CDLL(None)
        library.prctl(set_timer_slack, 1, 0, 0, 0)
        library.mallopt(trim_threshold, 1 << 30)
        library.mallopt(map_threshold, 32 << 20)


def end_with_parent() -> None:
    """Let this process be killed when its parent ends, where the system can: a launcher may end its children only."""
    set_parent_death_signal = 1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)


# How a rank waits: it looks for messages without pause, then naps, then takes longer naps, then leaves the looking to
# its helper.
SPIN_SECONDS, NAP_SECONDS, LONG_WAIT_SECONDS, LONG_NAP_SECONDS, IDLE_SECONDS = 200e-6, 20e-6, 5e-3, 100e-6, 0.05
# It looks without pause where messages are on their way, which some of MPI's ways of sending need both ends for.
NEAR_SECONDS = 10e-3
# Pauses of the helper: when messages have begun to move, while some still do, while none do, and while the main thread
# waits. A look takes some 50 us of the core, as data of the main thread replaced those of the helper in its caches.
QUICK_SECONDS, HELPER_SECONDS, CALM_SECONDS, IDLE_HELPER_SECONDS, LOOKS_PER_CHECK = 200e-6, 1e-3, 5e-3, 1.5e-3, 20
# Messages that still move after this time may wait for the other side.
QUICK_LOOKS_SECONDS = 8e-3
HEARTBEAT_SECONDS = 0.25
# A rank that is silent for longer is reported by rank 0; the others end by themselves if rank 0 is.
MAX_SILENT_SECONDS, MAX_ROOT_SILENT_SECONDS = 2.0, 10.0
# Clocks of machines drift apart by some us a second, so they are compared again and again while requests are traced.
CLOCK_TRIPS, CLOCK_SECONDS = 50, 60.0
# Time for messages to go through before the end.
FLUSHING_SECONDS = 2.0


class RankProcess:
    """The main thread, the helper, and on rank 0 the reader of the driver's socket.

    Args:
        communicator: A communicator of MPI.
        connection: A connected socket of the driver; rank 0 has one.
        connected: The number of ranks that have one, which come first.
    """

    def __init__(self, communicator: Any, connection: socket.socket | None, connected: int = 1) -> None:
        self._abort_all = communicator.Abort
        self.bus = MessageBus(communicator, self._accept)
        self._inbox: deque[Frame] = deque()
        self._wakeup = threading.Event()
        self._outgoing: deque[PackedFrame] = deque()
        self._flushing = threading.Lock()
        self._loop: RankLoop | None = None
        self._ended = threading.Event()
        self._is_awaited: Callable[[], bool] | None = None
        """What the main thread waits for while only the helper looks."""
        self._is_looking = False
        """Whether the main thread looks for messages."""
        self._clock_question_time = 0.0
        """When another rank last asked for the time."""
        self._still_time = 0.0
        """When the helper last saw no message on its way."""
        self._clock_answers: deque[float] = deque()
        self._next_clock_time = 0.0
        self._is_closing = False
        self._is_watching = False
        """Whether silent ranks are reported: only after all have opened the bundle."""
        self._is_opened = False
        """Whether rank 0 has said what to open; before that, it need not be alive yet."""
        self._reported: set[int] = set()
        self._driver = FrameSocket(connection) if connection is not None else None
        self._is_relay = self.bus.rank == 0 and connected < self.bus.size
        """Whether ranks without a connection need this one to look for messages."""

    # -- frames ------------------------------------------------------------------------------------

    def _accept(self, source: int, packed: PackedFrame) -> None:
        """Take a frame of another rank: one of the driver for this rank, or one for the driver, which is passed on."""
        if self.bus.rank == 0 and packed.rank != BETWEEN_RANKS:
            self._outgoing.append(packed)
            return
        frame = packed.unpack()
        if frame.kind == "value":
            assert self._loop is not None
            self._loop.accept_value(frame)
        elif frame.kind == "clock":
            if self.bus.rank == 0:  # it knows the driver's clock
                self._clock_question_time = time.monotonic()
                offset = self._loop.clock_offset_seconds if self._loop is not None else 0.0
                self.bus.send(source, Frame("clock", {"seconds": time.perf_counter() - offset}))
            else:
                self._clock_answers.append(frame.fields["seconds"])
        else:
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        """Take a frame of the driver for this rank; a request may be ended at once."""
        if frame.kind == "alive":  # for the bridge
            return
        if frame.kind == "cancel":
            if self._loop is not None:
                self._loop.cancel(frame.fields["serial"])
        elif frame.kind == "watch":
            self._is_watching = True
        elif frame.kind == "clock":
            self._clock_answers.append(frame.fields["seconds"])
        else:
            self._is_opened = True
            self._is_closing = self._is_closing or frame.kind == "close"
            self._inbox.append(frame)
        self._wakeup.set()

    def _answer(self, frame: Frame) -> None:
        """Send a frame to the driver."""
        packed = frame.pack(self.bus.rank)
        if self._driver is not None:
            self._outgoing.append(packed)
            self._flush()
        else:
            self.bus.send(0, packed)

    def _flush(self) -> None:
        """Write frames for the driver to its socket, in their order, unless another thread does."""
        while self._outgoing and self._driver is not None:
            if not self._flushing.acquire(blocking=False):
                return
            try:
                while self._outgoing:
                    self._driver.send(self._outgoing.popleft())
            except OSError:
                self._abort("the driver has ended")
            finally:
                self._flushing.release()

    def _look(self) -> None:
        """Look for messages."""
        if self.bus.progress():
            self._wakeup.set()
        self._flush()

    def _look_for_main(self) -> None:
        """Look for messages, also while the main thread computes; wake it if what it waits for is ready."""
        self._look()
        is_awaited = self._is_awaited
        if is_awaited is None:
            if self._loop is not None:
                self._loop.look_ahead()
        elif is_awaited():
            self._wakeup.set()

    def wait(
        self, is_ready: Callable[[], bool], is_near: Callable[[], bool] = lambda: False, spins: bool = True
    ) -> None:
        """Wait until something is ready, by messages or by another thread.

        Args:
            is_ready: Called by the helper, too.
            is_near: Whether it is on its way, so that naps would delay it.
            spins: Whether it looks without pause at first; else others get the core, such as the driver's threads, and
                the reader of the driver's frames wakes this thread.
        """
        naps = spins or self._driver is None or self._is_relay
        began = far_time = time.perf_counter()
        while not is_ready():
            self._is_looking = True
            self._look()
            now = time.perf_counter()
            waited = now - began
            if spins and waited < SPIN_SECONDS:
                continue
            if not (is_near() or self.bus.is_sending):
                far_time = now
            elif now - far_time < NEAR_SECONDS:
                continue
            if naps and waited < IDLE_SECONDS:
                time.sleep(NAP_SECONDS if waited < LONG_WAIT_SECONDS else LONG_NAP_SECONDS)
                continue
            self._is_looking = False
            self._wakeup.clear()
            self._is_awaited = is_ready if naps else None
            if not is_ready():
                self._wakeup.wait(1.0)
            self._is_awaited = None
        self._is_looking = False

    # -- threads ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve the driver until it closes the session."""
        sleep_exactly()
        threads = [threading.Thread(target=self._help, daemon=True, name="onnxplace helper")]
        if self._driver is not None:
            threads.append(threading.Thread(target=self._read_driver, daemon=True, name="onnxplace reader"))
        for thread in threads:
            thread.start()
        helper = threads[0]
        self._answer(Frame("started", {"pid": os.getpid()}))
        while True:
            self.wait(lambda: bool(self._inbox), spins=False)
            frame = self._inbox.popleft()
            if frame.kind == "close":
                break
            self._serve(frame)
        if self._loop is not None:
            self._loop.close()
        end = time.monotonic() + FLUSHING_SECONDS
        while self.bus.is_sending and time.monotonic() < end:
            self._look()
        self._ended.set()
        helper.join()  # no thread may use MPI after its end

    def _serve(self, frame: Frame) -> None:
        """Do what a frame of the driver says, in the main thread."""
        fields = frame.fields
        if frame.kind == "open":
            self._answer(self._open(frame))
        elif self._loop is None:
            return
        elif frame.kind == "request":
            if self._loop.compares_clocks and time.monotonic() >= self._next_clock_time:
                self._loop.clock_offset_seconds = self._measure_clock_offset()
            self._answer(self._loop.follow(frame))
        elif frame.kind == "free":
            self._loop.free(fields["handles"])
        elif frame.kind in ("read", "delays"):
            is_read, buffers = frame.kind == "read", list[Any]()
            value = self._loop.read(fields["serial"], fields["name"]) if is_read else read_run_delays(pool=True)
            answer = {"call": fields["call"], "value": encode_value(value, buffers)}
            self._answer(Frame("answer", answer, buffers))

    def _open(self, frame: Frame) -> Frame:
        """Open the bundle; return the answer."""
        try:
            self._loop = open_rank(Opening.from_frame(frame), self.bus, self.wait, self._fetch)
        except OnnxplaceError as problem:
            return Frame("failed", {"error": describe_error(problem)})
        except Exception as problem:  # noqa: BLE001 - the driver reports it
            text = f"{type(problem).__name__}: {problem}"
            return Frame("failed", {"error": describe_error(ExecutionError("X001", f"opening failed: {text}"))})
        pin_thread(self._loop.cores).__enter__()
        if self._loop.compares_clocks and self.bus.rank == 0:  # before others compare theirs with it
            self._loop.clock_offset_seconds = self._measure_clock_offset()
        return Frame("ready", {"shares": self._loop.shares_memory})

    def _measure_clock_offset(self) -> float:
        """Return what this clock shows more than the driver's, by the quickest of some round trips to rank 0.

        Rank 0 compares with the driver itself. Its error is at most half of that round trip.
        """
        trips = []
        for _ in range(CLOCK_TRIPS):
            sent = time.perf_counter()
            if self.bus.rank == 0:
                self._answer(Frame("clock"))
            else:
                self.bus.send(0, Frame("clock"))
            self.wait(lambda: bool(self._clock_answers))
            received = time.perf_counter()
            trips.append((received - sent, (sent + received) / 2 - self._clock_answers.popleft()))
        self._next_clock_time = time.monotonic() + CLOCK_SECONDS
        return min(trips)[1]

    def _fetch(self, name: str, offset: int, length: int) -> Any:
        """Return bytes of a file of the driver's bundle; raises ExecutionError if it does not send them."""
        self._answer(Frame("need", {"name": name, "offset": offset, "length": length}))
        self.wait(lambda: bool(self._inbox))
        frame = self._inbox.popleft()
        if frame.kind != "piece":
            self._inbox.appendleft(frame)
            raise ExecutionError("X002", "the session was closed while it was opened")
        (piece,) = frame.buffers
        if hashlib.sha256(piece).hexdigest() != frame.fields["sha256"]:
            raise ExecutionError("K007", f"bytes of {name!r} at {offset} were damaged on their way")
        return piece

    def _read_driver(self) -> None:
        """Take the frames of the driver, and pass on those for other ranks; its end is the end of all ranks."""
        assert self._driver is not None
        try:
            while True:
                packed = self._driver.receive(lambda silent: None)
                if packed.rank == self.bus.rank:
                    self._take(packed.unpack())
                else:
                    self.bus.send(packed.rank, packed)
        except (EOFError, OSError):
            if not self._is_closing:
                self._abort("the driver has ended")
        except BaseException as problem:  # noqa: BLE001 - without this thread, nobody would end this rank
            self._abort(f"the reader failed: {type(problem).__name__}: {problem}")

    def _help(self) -> None:
        """Look for messages each few milliseconds, say that this rank is alive, and watch the others."""
        next_heartbeat = 0.0
        try:
            while not self._ended.is_set():
                for _ in range(LOOKS_PER_CHECK):
                    self._pause()
                    if not self._is_looking:
                        self._look_for_main()
                self.bus.add_silence()
                if time.monotonic() >= next_heartbeat:
                    next_heartbeat = time.monotonic() + HEARTBEAT_SECONDS
                    self._say_alive()
                self._watch()
        except BaseException as problem:  # noqa: BLE001 - without this thread, nobody would end this rank
            if not self._is_closing:
                self._abort(f"the helper failed: {type(problem).__name__}: {problem}")

    def _pause(self) -> None:
        """Let the helper sleep until it is worth a look."""
        bus, loop, now = self.bus, self._loop, time.monotonic()
        bus.is_unattended.clear()
        if now - self._clock_question_time < QUICK_LOOKS_SECONDS:  # the next question follows the answer
            time.sleep(QUICK_SECONDS)
        elif not self._is_looking and (bus.is_moving or (loop is not None and loop.is_receiving)):
            time.sleep(QUICK_SECONDS if now - self._still_time < QUICK_LOOKS_SECONDS else HELPER_SECONDS)
        else:
            if self._is_awaited is not None:
                time.sleep(IDLE_HELPER_SECONDS)
            else:
                bus.is_unattended.wait(CALM_SECONDS)
            self._still_time = time.monotonic()

    def _say_alive(self) -> None:
        """Send a heartbeat: to rank 0, or from rank 0 to all and the driver."""
        if self._is_closing:
            return
        if self.bus.rank:
            self.bus.send_heartbeat(0)
            return
        for rank in range(1, self.bus.size):
            if rank not in self._reported:
                self.bus.send_heartbeat(rank)
        self._outgoing.append(Frame("alive").pack(0))
        self._flush()

    def _watch(self) -> None:
        """Report silent ranks; end if rank 0 is silent."""
        if self.bus.rank:
            if self._is_opened and self.bus.silent_seconds[0] > MAX_ROOT_SILENT_SECONDS and not self._is_closing:
                self._abort("rank 0 is silent")
            return
        for rank in range(1, self.bus.size):
            silent = self.bus.silent_seconds[rank]
            if self._is_watching and silent > MAX_SILENT_SECONDS and rank not in self._reported:
                self._reported.add(rank)
                self._outgoing.append(Frame("silent", {"seconds": silent}).pack(rank))

    def _abort(self, reason: str) -> None:
        """End all ranks at once."""
        with suppress(OSError):
            sys.stderr.write(f"onnxplace: rank {self.bus.rank} ends all ranks: {reason}\n")
            sys.stderr.flush()
        try:
            self._abort_all(1)
        finally:
            os._exit(1)


def main() -> None:
    """Serve as a rank of the session whose socket is the argument."""
    end_with_parent()
    from mpi4py import MPI

    rank, connected = MPI.COMM_WORLD.rank, int(sys.argv[2]) if len(sys.argv) > 2 else 1
    connection = connect_rank(sys.argv[1], rank) if rank < connected else None
    RankProcess(MPI.COMM_WORLD, connection, connected).run()


if __name__ == "__main__":
    main()
