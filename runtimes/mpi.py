"""Run a bundle on ranks of MPI: a long-lived process per device, on one host or several.

The process that opens the session stays outside of MPI. It starts MPICH's launcher, and talks to rank 0 by a local
socket. So a rank that dies ends the session, and not that process. See docs/hosts.md.
"""

from __future__ import annotations

import sys
from typing import ClassVar

from onnxplace.bundle import Bundle
from onnxplace.errors import UsageError
from onnxplace.hosts import Connection, is_this_machine, list_versions
from onnxplace.machine import list_operator_libraries, uses_optimisations
from onnxplace.runtime import DEFAULT_MAX_IN_FLIGHT, Runtime, RuntimeSession
from onnxplace.runtimes.execution import EngineSession
from onnxplace.runtimes.ranks import (
    Cluster,
    LedCluster,
    Opening,
    find_job,
    make_engine,
    plan_job,
    plan_ranks,
    serve_rank,
)

DEFAULT_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS = 30.0, 86400.0


class Mpi(Runtime):
    """A process per device, with messages of MPI between them.

    Args:
        hosts: Hosts and how many devices may run on each, as in `node1:2,node2:1`; empty for the hosts that the
            bundle's device ids name, or this machine.
        timeout: Seconds that ranks may take to start and to open the bundle, and to end a request that has failed.
        remote_shell: The program that runs a command on a host.
        interface: The network interface for messages, such as `eth0`; empty for MPI's choice.
    """

    name: ClassVar[str] = "mpi"
    summary: ClassVar[str] = "run segments with ONNX Runtime, a process per device, on one host or several"
    keeps_state: ClassVar[bool] = True

    def __init__(
        self,
        hosts: str = "",
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        remote_shell: str = "ssh",
        interface: str = "",
    ) -> None:
        if not 0 < timeout <= MAX_TIMEOUT_SECONDS:
            message = f"expected more than 0 and at most {MAX_TIMEOUT_SECONDS:g} seconds, got {timeout}"
            raise UsageError("K001", message, where="timeout", hint=f"omit it for {DEFAULT_TIMEOUT_SECONDS:g}")
        self._hosts, self._timeout = hosts, timeout
        self._connection = Connection(remote_shell, interface)

    def open(
        self, bundle: Bundle, *, trace: bool = False, max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    ) -> RuntimeSession:
        """Start the ranks, and open all segments on them.

        In a script that MPI has started itself on several ranks, and without `hosts`, these ranks are used: rank 0 gets
        the session; the others serve it, do not return, and exit after its end.

        Raises, before any process starts, UsageError or TargetError if the hosts do not fit the bundle or MPI is not
        installed; and ExecutionError if ranks end or take too long.
        """
        job = None if self._hosts else find_job()
        if job is not None:
            plan = plan_job(bundle.manifest, job.size)
            if job.rank:
                serve_rank(job)
                sys.exit(0)
            cluster: Cluster = LedCluster(plan, job, self._timeout)
        else:
            plan = plan_ranks(bundle.manifest, self._hosts)
            cluster = Cluster(plan, self._connection, self._timeout)
        opening = Opening(
            bundle=bundle,
            devices=plan.devices,
            trace=trace,
            libraries=list_operator_libraries(),
            versions=list_versions(),
            optimises=uses_optimisations(),
            remote=tuple(rank for rank, host in enumerate(plan.hosts) if job is None and not is_this_machine(host)),
        )
        cluster.open(opening)
        return EngineSession(make_engine(bundle, cluster, trace, max_in_flight))
