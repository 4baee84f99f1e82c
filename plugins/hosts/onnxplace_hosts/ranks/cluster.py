"""The driver's side of ranks: start them, open the bundle on them, exchange frames, end them.

The driver listens on a Unix socket in a folder that only its user can enter. Rank 0 and the other ranks on this machine
connect to it, so no port is opened for it, and no other user can be taken for a rank. If all ranks run on other hosts,
a bridge on the first of these starts them, and the remote shell connects it with the driver.

In a script that MPI runs itself, as in `mpiexec -n 2 python script.py`, rank 0 leads, and the others serve it. Then
rank 0 is a thread of the driver, and nothing has to be started.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import socket
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.bundle_routes import list_route_devices
from onnxplace.bundle.manifest import Manifest
from onnxplace.errors import ExecutionError, InputError, TargetError, format_count
from onnxplace.target.hosts import split_host
from onnxplace.utils.threads import start_thread
from onnxplace_hosts.connection import INSTALL_HINT, Connection, find_mpi_cause, find_rank_end
from onnxplace_hosts.ranks.bridge import ALIVE_SECONDS, GREETING
from onnxplace_hosts.ranks.driver_sockets import FrameSockets
from onnxplace_hosts.ranks.frames import SLICE_SECONDS, Frame
from onnxplace_hosts.ranks.launcher import CLOSING_SECONDS, REPORTING_SECONDS, Launcher, RankSocket, make_command
from onnxplace_hosts.ranks.opening import Opening, read_piece, rebuild_error
from onnxplace_hosts.ranks.rank_plans import RankPlan
from onnxplace_hosts.ranks.rank_process import RankProcess
from onnxplace_hosts.ranks.shared_blocks import MappedBlocks, SharedBlocks

# Rank 0 says that it is alive four times a second.
MAX_SILENT_SECONDS = 2.5
NEW_SESSION_HINT = "open a new session"

OPEN_CLUSTERS: weakref.WeakSet[Cluster] = weakref.WeakSet()


class Cluster:
    """The ranks of a session.

    Args:
        plan: Devices and hosts by rank.
        connection: How to reach other hosts.
        timeout_seconds: Time to start the ranks and to open the bundle.
    """

    fetches_bundle = True
    """Whether ranks on other machines ask the driver for what they need of the bundle."""

    def __init__(self, plan: RankPlan, connection: Connection, timeout_seconds: float) -> None:
        self.plan = plan
        self.timeout_seconds = timeout_seconds
        self._connection = connection
        self.sockets: FrameSockets | None = None
        """The sockets of ranks while the cluster is open."""
        self._launcher: Launcher | None = None
        self._processes: dict[int, int] = {}
        """Process ids by rank."""
        self._ending = threading.Lock()
        self.is_ended = False
        self.blocks = SharedBlocks()
        self.maps: dict[int, MappedBlocks] = {}
        """The blocks of ranks that can map these, too."""

    def open(self, opening: Opening) -> None:
        """Start the ranks, and open a bundle on them.

        No rank is left if it raises: UsageError or TargetError if MPI is not installed or the bundle cannot be opened,
        ExecutionError if ranks end or take too long.
        """
        deadline = time.monotonic() + self.timeout_seconds
        try:
            self._start(deadline)
            self._await_all("started", "did not start", opening.bundle)
            frame = replace(opening, probe=tuple(self.blocks.make_probe())).to_frame()
            for rank in range(len(self.plan.devices)):
                self.send(rank, frame)
            self._await_all("ready", "did not open the bundle", opening.bundle)
            self.send(0, Frame("watch"))
            if self._launcher is not None:
                self._launcher.note_memory_files()
        except (EOFError, OSError):
            error = self.describe_end()
            self._drop(0.0)
            raise error from None
        except InputError:  # a rank answered, so all may end by themselves
            self.close()
            self._drop(CLOSING_SECONDS)
            raise
        except BaseException:
            self._drop(0.0)
            raise

    def _drop(self, closing_seconds: float) -> None:
        """End the ranks of a cluster that is not open."""
        self.end(closing_seconds)
        self.close_socket()

    def _start(self, deadline: float) -> None:
        """Start the launcher, and wait for the ranks of this machine."""
        require_mpi4py()
        sockets: dict[int, socket.socket] = {}
        count = self.plan.near_count
        try:
            with RankSocket() as ranks:
                command = make_command(self._connection, self.plan.counts, ranks.path, count)
                self._launch(lambda: Launcher(command, ranks.path))
                while len(sockets) < count:
                    rank, sockets[rank] = ranks.accept(lambda: self._check_start(deadline))
        finally:
            self.sockets = FrameSockets(sockets) if sockets else None

    def _launch(self, start: Callable[[], Launcher]) -> None:
        """Start the launcher; raises EOFError if another thread has ended the cluster already."""
        with self._ending:
            if self.is_ended:
                raise EOFError
            self._launcher = start()
        OPEN_CLUSTERS.add(self)

    def _check_start(self, deadline: float) -> None:
        """Raise ExecutionError if the ranks of this machine do not start any more."""
        assert self._launcher is not None
        if not self._launcher.is_running:
            raise self.describe_end()
        self._require_time(deadline, "the ranks did not start")

    def _require_time(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            message = f"{what} within {self.timeout_seconds:g} s"
            hint = "allow more time: --timeout, or InferenceSession(..., timeout=300)"
            raise ExecutionError("K012", message, where=", ".join(self.plan.counts), hint=hint)

    def _await_all(self, kind: str, what: str, bundle: Bundle) -> None:
        """Wait until all ranks have sent a frame of a kind; raises the error of the first that has failed.

        Ranks on other machines fetch what they need of the bundle, and have more time after each piece.
        """
        missing = set(range(len(self.plan.devices)))
        deadline = time.monotonic() + self.timeout_seconds

        while missing:
            frame = self.receive(SLICE_SECONDS)
            late = ", ".join(self.plan.devices[rank] for rank in sorted(missing))
            self._require_time(deadline, f"{late} {what}")
            if frame is None:
                continue
            if frame.kind == "failed":
                raise rebuild_error(frame.fields["error"], self.plan.describe(frame.rank))
            if frame.kind == "need":
                self._send_piece(bundle, frame)
                deadline = time.monotonic() + self.timeout_seconds
            elif frame.kind == "clock":
                self.send(frame.rank, make_clock_frame())
            elif frame.kind == kind:
                self._processes.setdefault(frame.rank, frame.fields.get("pid", 0))
                missing.discard(frame.rank)
                if (probe := frame.fields.get("probe")) and frame.rank < self.plan.near_count:
                    self.maps[frame.rank] = MappedBlocks()
                    self.maps[frame.rank].try_probe(probe)

    def _send_piece(self, bundle: Bundle, frame: Frame) -> None:
        """Send bytes of a file of the bundle to a rank that does not have it."""
        fields = frame.fields
        piece = read_piece(bundle, fields["name"], fields["offset"], fields["length"])
        digest = hashlib.sha256(piece).hexdigest()
        self.send(frame.rank, Frame("piece", {"sha256": digest}, [np.frombuffer(piece, np.uint8)]))

    # -- frames ------------------------------------------------------------------------------------

    def send(self, rank: int, frame: Frame) -> None:
        """Send a frame to a rank; raises OSError if the ranks have ended."""
        if self.sockets is None:
            raise OSError("the ranks have ended")
        self.sockets.send([(rank, frame)])

    def receive(self, seconds: float) -> Frame | None:
        """Return the next frame of any rank, None if none comes in time; raises EOFError or OSError if ranks ended."""
        if self.sockets is None:
            raise EOFError
        return self.sockets.receive(seconds)

    # -- the end ------------------------------------------------------------------------------------

    def describe_end(self) -> ExecutionError:
        """Return the error that says which rank has died, as far as the launcher knows."""
        if self._launcher is None or self._launcher.is_closed:
            return ExecutionError("X002", "the ranks were ended while they started", where=", ".join(self.plan.counts))
        self._launcher.wait(REPORTING_SECONDS)
        printed = self._launcher.read_log()
        if (end := find_rank_end(printed)) is not None:
            message = f"its process on host {self.plan.hosts[end.rank]} died ({end.reason})"
            message = f"{message}: {end.cause}" if end.cause else message
            return ExecutionError("K011", message, where=self.plan.devices[end.rank], hint=NEW_SESSION_HINT)
        cause = find_mpi_cause(printed, list(self.plan.counts))
        hint = "the hosts have to find each other by their names, and to have onnxplace[mpi] at the same path"
        return ExecutionError("K011", f"the ranks ended: {cause}", where=", ".join(self.plan.counts), hint=hint)

    def describe_silence(self, rank: int, seconds: float) -> ExecutionError:
        """Return the error of a rank that does not answer."""
        message = f"its process on host {self.plan.hosts[rank]} has not answered for {seconds:.1f} s"
        hint = f"look for a process that was stopped, or a network that failed; {NEW_SESSION_HINT}"
        return ExecutionError("K011", message, where=self.plan.devices[rank], hint=hint)

    def close(self) -> None:
        """Ask the ranks to end, and end them if they do not."""
        if not self.is_ended:
            with suppress(OSError):
                for rank in reversed(range(len(self.plan.devices))):
                    self.send(rank, Frame("close"))
            self.end(CLOSING_SECONDS)

    def end(self, closing_seconds: float) -> None:
        """End the ranks; may be called by several threads."""
        with self._ending:
            if self.is_ended:
                return
            self.is_ended = True
            self._end_processes(closing_seconds)

    def _end_processes(self, closing_seconds: float) -> None:
        """End the processes of the ranks."""
        if self._launcher is not None:
            self._launcher.end(closing_seconds)

    def close_socket(self) -> None:
        """Close the sockets, after the thread that reads them has ended; or in a forked process."""
        if self.sockets is not None:
            self.sockets.close()
            self.sockets = None
        self.blocks.close()


def make_clock_frame() -> Frame:
    """Return what the clock of the driver shows."""
    return Frame("clock", {"seconds": time.perf_counter()})


def require_mpi4py() -> None:
    """Raise TargetError if mpi4py is not installed."""
    if find_spec("mpi4py") is None:
        raise TargetError("K005", "mpi4py is not installed here", hint=INSTALL_HINT)


def _leave_sockets_to_parent() -> None:
    """Close the sockets that a forked child inherits: ranks would not notice the end of their driver."""
    for cluster in list(OPEN_CLUSTERS):
        cluster.close_socket()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_sockets_to_parent)


# The driver's side of ranks that all run on other hosts: a bridge on the first of these starts them.

BRIDGE_MODULE = "onnxplace_hosts.ranks.bridge"
# What shells may print before the bridge starts.
MAX_NOISE_BYTES = 1 << 16
_LOOK_SECONDS = 0.05


class RemoteCluster(Cluster):
    """The ranks of a session, none of them on this machine: a remote shell connects this process with rank 0."""

    def __init__(self, plan: RankPlan, connection: Connection, timeout_seconds: float) -> None:
        super().__init__(plan, connection, timeout_seconds)
        self._stopped = threading.Event()
        self._alive = threading.Thread(target=self._say_alive, name="onnxplace alive", daemon=True)

    def _start(self, deadline: float) -> None:
        """Start the bridge, and skip what the shell prints before it."""
        require_mpi4py()
        arguments = {
            "counts": self.plan.counts,
            "remote_shell": self._connection.remote_shell,
            "interface": self._connection.interface,
            "timeout": self.timeout_seconds,
        }
        command = [sys.executable, "-P", "-m", BRIDGE_MODULE, json.dumps(arguments)]
        remote = self._connection.make_remote_command(self.plan.hosts[0], command)
        near, far = socket.socketpair()
        with far:
            self._launch(lambda: Launcher(remote, uuid.uuid4().hex, far))
        self.sockets = FrameSockets({0: near})
        read = bytearray()
        while not read.endswith(GREETING):
            if select.select([near], [], [], _LOOK_SECONDS)[0]:
                byte = near.recv(1)
                read += byte
                if not byte or len(read) > MAX_NOISE_BYTES:
                    raise EOFError
            self._require_time(deadline, f"{self.plan.hosts[0]} did not answer")
        start_thread(self._alive)

    def _say_alive(self) -> None:
        """Tell rank 0 now and then that this process lives: a network that fails closes no connection."""
        while not self._stopped.wait(ALIVE_SECONDS):
            try:
                self.send(0, Frame("alive"))
            except OSError:
                return

    def describe_end(self) -> ExecutionError:
        """Return the error that says which rank has died, or why the host was not reached."""
        error = super().describe_end()
        if not self._processes:
            shell, host = self._connection.remote_shell, self.plan.hosts[0]
            hint = f"`{shell} {host} true` has to work without a password, and onnxplace[mpi] be at the same path there"
            return ExecutionError(error.code, error.message, where=error.where, hint=hint)
        return error

    def _end_processes(self, closing_seconds: float) -> None:
        """End the bridge, and with it the ranks."""
        self._stopped.set()
        super()._end_processes(closing_seconds)


# Sessions of a script that MPI runs, as in `mpiexec -n 2 python script.py`: rank 0 leads, the others serve it.

# Variables that launchers of MPI set: MPICH and Slurm, PMIx, Open MPI.
_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


def find_job() -> Any:
    """Return MPI's communicator of all ranks if a launcher of MPI has started this process as one of several."""
    if not any(name in os.environ for name in _RANK_VARIABLES):
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD if MPI.COMM_WORLD.size > 1 else None


def plan_job(manifest: Manifest, size: int) -> RankPlan:
    """Return which device is which rank of a job: in the order of the target.

    Raises TargetError unless there are as many ranks as devices.
    """
    devices = list_route_devices(manifest)
    if len(devices) != size:
        message = f"expected {format_count(len(devices), 'rank')}, one for each device of the bundle, got {size}"
        raise TargetError("K001", message, hint=f"start the script with mpiexec -n {len(devices)}")
    return RankPlan(devices, tuple(split_host(device)[0] or "localhost" for device in devices))


def read_processor_name() -> str:
    """Return the name by which MPI knows this host."""
    from mpi4py import MPI

    return str(MPI.Get_processor_name())


def serve_rank(job: Any) -> None:
    """Serve the session of rank 0 until it is closed."""
    RankProcess(job, None, read_processor_name()).run()


class LedCluster(Cluster):
    """The ranks of a job, of which this process is rank 0: a thread of it follows the first device's program."""

    fetches_bundle = False

    def __init__(self, plan: RankPlan, job: Any, timeout_seconds: float) -> None:
        super().__init__(plan, Connection(), timeout_seconds)
        self._job = job
        self._thread = threading.Thread(target=self._serve, name="onnxplace rank 0", daemon=True)
        self._far: socket.socket | None = None

    def _start(self, deadline: float) -> None:
        """Start the thread of rank 0, which waits until the other ranks open their sessions, too."""
        near, self._far = socket.socketpair()
        self.sockets = FrameSockets({0: near})
        start_thread(self._thread)

    def _serve(self) -> None:
        assert self._far is not None
        with self._far:
            RankProcess(self._job, self._far, read_processor_name()).run()

    def describe_end(self) -> ExecutionError:
        """Return the error of a rank 0 that has ended; where another rank dies, MPI ends the whole job."""
        return ExecutionError("K011", "its thread ended", where=self.plan.devices[0], hint=NEW_SESSION_HINT)

    def _end_processes(self, closing_seconds: float) -> None:
        """Wait for the thread of rank 0; a job whose other ranks do not end is ended by its launcher."""
        self._thread.join(closing_seconds)
