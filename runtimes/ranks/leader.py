"""Sessions of a script that MPI runs, as in `mpiexec -n 2 python script.py`: rank 0 leads, the others serve it."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from onnxplace.bundle import Manifest, list_route_devices
from onnxplace.errors import ExecutionError, TargetError, format_count
from onnxplace.hosts import Connection
from onnxplace.runtimes.ranks.cluster import NEW_SESSION_HINT, Cluster
from onnxplace.runtimes.ranks.frames import FrameSocket, FrameSockets
from onnxplace.runtimes.ranks.rank_plans import RankPlan
from onnxplace.runtimes.ranks.rank_process import RankProcess
from onnxplace.target import split_host
from onnxplace.utils import start_thread

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
        raise TargetError("K009", message, hint=f"start the script with mpiexec -n {len(devices)}")
    return RankPlan(devices, tuple(split_host(device)[0] or "localhost" for device in devices))


def serve_rank(job: Any) -> None:
    """Serve the session of rank 0 until it is closed."""
    RankProcess(job, None).run()


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
        del deadline
        near, self._far = socket.socketpair()
        self._sockets = FrameSockets({0: FrameSocket(near)})
        start_thread(self._thread)

    def _serve(self) -> None:
        assert self._far is not None
        with self._far:
            RankProcess(self._job, self._far).run()

    def describe_end(self) -> ExecutionError:
        """Return the error of a rank 0 that has ended; where another rank dies, MPI ends the whole job."""
        return ExecutionError("K011", "its thread ended", where=self.plan.devices[0], hint=NEW_SESSION_HINT)

    def _end_processes(self, closing_seconds: float) -> None:
        """Wait for the thread of rank 0; a job whose other ranks do not end is ended by its launcher."""
        self._thread.join(closing_seconds)
