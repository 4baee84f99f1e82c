"""The driver's side of ranks that all run on other hosts: a bridge on the first of these starts them."""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
import uuid

from onnxplace.errors import ExecutionError
from onnxplace.hosts import Connection
from onnxplace.runtimes.ranks.bridge import ALIVE_SECONDS, GREETING
from onnxplace.runtimes.ranks.cluster import Cluster, require_mpi4py
from onnxplace.runtimes.ranks.frames import Frame, FrameSocket, FrameSockets
from onnxplace.runtimes.ranks.launcher import Launcher
from onnxplace.runtimes.ranks.plan import RankPlan
from onnxplace.utils import start_thread

BRIDGE_MODULE = "onnxplace.runtimes.ranks.bridge"
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
        self._sockets = FrameSockets({0: FrameSocket(near)})
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
