"""A rank: `mpiexec ... python -m mpi4py -m onnxplace_hosts.ranks.rank_process SOCKET RANKS HOSTS INTERFACE`.

The first ranks, those on the machine of the driver, the process that opened the session, connect to its socket. Rank 0
passes frames on between the driver and the others. The main thread follows programs, and takes messages while it waits.
A helper takes them while the main thread computes for long, and tells the others that this rank is alive.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

from onnxplace.errors import ExecutionError, OnnxplaceError
from onnxplace.machine.repeated_runs import read_run_delays
from onnxplace.runtimes.execution.programs import Condition
from onnxplace_hosts.describe_host import describe_error
from onnxplace_hosts.ranks.frames import BETWEEN_RANKS, Frame, FrameSocket, PackedFrame, encode_value
from onnxplace_hosts.ranks.launcher import connect_rank
from onnxplace_hosts.ranks.links import DRIVER, Links
from onnxplace_hosts.ranks.opening import Opening
from onnxplace_hosts.ranks.rank_loop import RankLoop, open_rank

# What a rank asks of the system for its process: memory that is kept, an end with its parent.


def keep_memory() -> None:
    """Keep freed memory: glibc maps large arrays again each time, and touching them costs more than copying."""
    trim_threshold, map_threshold = -1, -3
    with suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(trim_threshold, 1 << 30)
        library.mallopt(map_threshold, 32 << 20)


def end_with_parent() -> None:
    """Let this process be killed when its parent ends, where the system can: a launcher may end its children only."""
    set_parent_death_signal = 1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)


# A rank that waits takes messages without pause at first: waking a thread that sleeps takes some 40 us, and more where
# its core sleeps, too. After a short wait the next one may be as short, so it looks for longer, but others get the core
# in between. So it does while a message is on its way. Then it sleeps until one comes, or for so long: another thread
# may end a request.
SPIN_SECONDS, SHORT_SECONDS, NEAR_SECONDS, SLEEP_SECONDS = 200e-6, 1e-3, 10e-3, 0.05
HEARTBEAT_SECONDS = 0.25
# While a request is in progress, the helper looks that often whether the main thread computes for long.
CHECK_SECONDS = 0.05
# A rank that is silent for longer is reported by rank 0; the others end by themselves if rank 0 is.
MAX_SILENT_SECONDS, MAX_ROOT_SILENT_SECONDS = 2.0, 10.0
# Clocks of machines drift apart by some us a second, so they are compared again and again while requests are traced.
CLOCK_TRIPS, CLOCK_SECONDS = 50, 60.0
# Time for messages to go through before the end.
FLUSHING_SECONDS = 2.0


class RankProcess:
    """The main thread and the helper.

    Args:
        communicator: A communicator of MPI.
        connection: A connected socket of the driver; rank 0 has one, and all others on the driver's machine.
        host: The name of this host; ranks with one name share memory.
        interface: The network interface for messages between hosts; empty for any.
    """

    def __init__(
        self,
        communicator: Any,
        connection: socket.socket | None,
        host: str,
        interface: str = "",
    ) -> None:
        self._abort_all = communicator.Abort
        self._inbox: deque[Frame] = deque()
        self._loop: RankLoop | None = None
        self._parts: dict[Generator[Condition, None, Frame], Condition] = {}
        """This rank's parts of requests in progress, in their order, and what each waits for."""
        self._ended = False
        self._spin_seconds = {True: SPIN_SECONDS, False: SPIN_SECONDS}
        """How long a wait looks for messages, one that spins and one that does not, unless one is on its way."""
        self._is_computing = True
        """Whether the main thread does not take messages."""
        self._clock_answers: deque[float] = deque()
        self._next_clock_time = 0.0
        self._is_closing = False
        self._is_watching = False
        """Whether silent ranks are reported: only after all have opened the bundle."""
        self._is_opened = False
        """Whether rank 0 has said what to open; before that, it need not be alive yet."""
        self._reported: set[int] = set()
        self._has_driver = connection is not None
        driver = FrameSocket(connection) if connection is not None else None
        self.links = Links(communicator, host, driver, interface, self._accept, self._note_end)

    # -- frames ------------------------------------------------------------------------------------

    def _accept(self, source: int, packed: PackedFrame) -> None:
        """Take a frame: one of the driver for this rank, or one for the driver or another rank, which is passed on."""
        if source == DRIVER and packed.rank != self.links.rank:
            self.links.send(packed.rank, packed)
            return
        if source != DRIVER and self.links.rank == 0 and packed.rank != BETWEEN_RANKS:
            self.links.send(DRIVER, packed)
            return
        frame = packed.unpack()
        if frame.kind == "clock" and source != DRIVER and self.links.rank == 0:  # it knows the driver's clock
            offset = self._loop.clock_offset_seconds if self._loop is not None else 0.0
            self.links.send(source, Frame("clock", {"seconds": time.perf_counter() - offset}))
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

    def _note_end(self, rank: int) -> None:
        """End all ranks if the driver has ended; ranks that have ended are reported by their launcher."""
        if rank == DRIVER and not self._is_closing:
            self._abort("the driver has ended")

    def _answer(self, frame: Frame) -> None:
        """Send a frame to the driver, and give back what other ranks have lent: this one may not wait for long."""
        self.links.send(DRIVER if self._has_driver else 0, frame.pack(self.links.rank))
        self.links.return_blocks()

    def wait(self, is_ready: Callable[[], bool], spins: bool = True) -> None:
        """Wait until something is ready, by messages or by another thread.

        Args:
            is_ready: What to wait for.
            spins: Whether to look without pause at first; else others get the core after each look, such as the
                driver's threads.
        """
        self._is_computing = False
        with self.links.lock:  # what the helper takes right now is there
            pass
        if not (self.links.watch(is_ready) if spins else is_ready()):
            began, spin_seconds = time.perf_counter(), self._spin_seconds[spins]
            while (waited := time.perf_counter() - began) < spin_seconds or (
                waited < NEAR_SECONDS and self.links.is_moving
            ):
                if waited > SPIN_SECONDS or not spins:
                    os.sched_yield()
                self.links.look(0.0)
                if is_ready():
                    break
            else:
                self.links.return_blocks()
                while not is_ready():
                    self.links.look(SLEEP_SECONDS if spins else HEARTBEAT_SECONDS)
            is_short = time.perf_counter() - began < SHORT_SECONDS
            self._spin_seconds[spins] = SHORT_SECONDS if is_short else SPIN_SECONDS
        self._is_computing = True

    # -- threads ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve the driver until it closes the session."""
        keep_memory()
        helper = threading.Thread(target=self._help, daemon=True, name="onnxplace helper")
        helper.start()
        self._answer(Frame("started", {"pid": os.getpid()}))
        while True:
            self.wait(self._can_go_on, spins=bool(self._parts))
            for part, condition in tuple(self._parts.items()):
                if condition():
                    self._advance(part)
            if self._can_serve():
                frame = self._inbox.popleft()
                if frame.kind == "close":
                    break
                self._serve(frame)
        if self._loop is not None:
            self._loop.close()
        end = time.monotonic() + FLUSHING_SECONDS
        while self.links.is_sending and time.monotonic() < end:
            self.links.look(1e-3)
        self._ended = True
        self.links.call_helper()
        helper.join()  # no thread may use MPI after its end
        self.links.close()

    def _can_go_on(self) -> bool:
        """Return whether a request in progress can go on, or a frame can be served."""
        for condition in self._parts.values():
            if condition():
                return True
        return self._can_serve()

    def _can_serve(self) -> bool:
        """Return whether the next frame of the driver can be served: requests need room, the end waits for them."""
        if not self._inbox or not self._parts or self._loop is None:
            return bool(self._inbox)
        kind = self._inbox[0].kind
        return len(self._parts) < self._loop.max_in_progress if kind == "request" else kind != "close"

    def _advance(self, part: Generator[Condition, None, Frame]) -> None:
        """Go on with a request until it has to wait, or report its end."""
        try:
            self._parts[part] = next(part)
        except StopIteration as end:
            self._parts.pop(part, None)
            self._answer(end.value)

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
            self._advance(self._loop.follow(frame))
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
            self._loop = open_rank(Opening.from_frame(frame), self.links, self._fetch)
        except OnnxplaceError as problem:
            return Frame("failed", {"error": describe_error(problem)})
        except Exception as problem:  # noqa: BLE001 - the driver reports it
            text = f"{type(problem).__name__}: {problem}"
            return Frame("failed", {"error": describe_error(ExecutionError("X001", f"opening failed: {text}"))})
        if self._loop.compares_clocks and self.links.rank == 0:  # before others compare theirs with it
            self._loop.clock_offset_seconds = self._measure_clock_offset()
        probe = self.links.blocks.make_probe() if self._loop.shares_memory else []
        return Frame("ready", {"probe": probe})

    def _measure_clock_offset(self) -> float:
        """Return what this clock shows more than the driver's, by the quickest of some round trips to rank 0.

        Rank 0 compares with the driver itself. Its error is at most half of that round trip.
        """
        trips = []
        for _ in range(CLOCK_TRIPS):
            sent = time.perf_counter()
            if self.links.rank == 0:
                self._answer(Frame("clock"))
            else:
                self.links.send(0, Frame("clock"))
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

    def _help(self) -> None:
        """Take messages while the main thread computes for long, say that this rank is alive, and watch the others."""
        next_heartbeat = 0.0
        try:
            while not self._ended:
                if (seconds := next_heartbeat - time.monotonic()) <= 0:
                    next_heartbeat, seconds = time.monotonic() + HEARTBEAT_SECONDS, HEARTBEAT_SECONDS
                    self.links.add_silence()
                    self._say_alive()
                    self._watch()
                is_busy = self._loop is not None and self._loop.is_busy
                self.links.attend(min(seconds, CHECK_SECONDS) if is_busy else seconds, lambda: self._is_computing)
        except BaseException as problem:  # noqa: BLE001 - without this thread, nobody would end this rank
            if not self._is_closing:
                self._abort(f"the helper failed: {type(problem).__name__}: {problem}")

    def _say_alive(self) -> None:
        """Send a heartbeat: to rank 0, or from rank 0 to all and the driver."""
        if self._is_closing:
            return
        if self.links.rank:
            self.links.send_heartbeat(0)
            return
        for rank in range(1, self.links.size):
            if rank not in self._reported:
                self.links.send_heartbeat(rank)
        self.links.send(DRIVER, Frame("alive").pack(0))

    def _watch(self) -> None:
        """Report silent ranks; end if rank 0 is silent."""
        if self.links.rank:
            if self._is_opened and self.links.silent_seconds[0] > MAX_ROOT_SILENT_SECONDS and not self._is_closing:
                self._abort("rank 0 is silent")
            return
        for rank in range(1, self.links.size):
            silent = self.links.silent_seconds[rank]
            if self._is_watching and silent > MAX_SILENT_SECONDS and rank not in self._reported:
                self._reported.add(rank)
                self.links.send(DRIVER, Frame("silent", {"seconds": silent}).pack(rank))

    def _abort(self, reason: str) -> None:
        """End all ranks at once."""
        with suppress(OSError):
            sys.stderr.write(f"onnxplace: rank {self.links.rank} ends all ranks: {reason}\n")
            sys.stderr.flush()
        try:
            self._abort_all(1)
        finally:
            os._exit(1)


def main() -> None:
    """Serve as a rank of the session whose socket is the first argument."""
    end_with_parent()
    from mpi4py import MPI

    path, connected, counts, interface = sys.argv[1:]
    hosts = [host for host, count in json.loads(counts).items() for _ in range(count)]
    rank = MPI.COMM_WORLD.rank
    connection = connect_rank(path, rank) if rank < int(connected) else None
    try:
        process = RankProcess(MPI.COMM_WORLD, connection, hosts[rank], interface)
    except OnnxplaceError as problem:
        sys.exit(f"onnxplace: {problem}")
    process.run()


if __name__ == "__main__":
    main()
