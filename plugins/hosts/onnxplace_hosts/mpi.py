"""Run a bundle on ranks of MPI: a long-lived process per device, on one host or several.

The process that opens the session stays outside of MPI. It starts MPICH's launcher, here or by the remote shell on the
first host, and talks to rank 0. So a rank that dies ends the session, and not that process. See docs/hosts.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.bundle_routes import list_route_devices
from onnxplace.errors import TargetError, UsageError
from onnxplace.runtime.interface import DEFAULT_MAX_IN_FLIGHT, Runtime, RuntimeSession
from onnxplace_hosts.connection import Connection
from onnxplace_hosts.ranks.cluster import Cluster, LedCluster, RemoteCluster, find_job, plan_job, serve_rank
from onnxplace_hosts.ranks.rank_plans import RankPlan, plan_copies, plan_ranks, require_copy_count
from onnxplace_hosts.ranks.rank_worker import open_ranks
from onnxplace_hosts.replicas.replicated_session import ReplicatedSession

DEFAULT_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS = 30.0, 86400.0


class Mpi(Runtime):
    """A process per device, with messages of MPI between them.

    Args:
        hosts: Hosts and how many devices may run on each, as in `node1:2,node2:1`; empty for the hosts that the
            bundle's device ids name, or this machine.
        timeout: Seconds that ranks may take to start and to open the bundle, and to end a request that has failed.
        remote_shell: The program that runs a command on a host.
        interface: The network interface for messages, such as `eth0`; empty for MPI's choice.
        replicas: Copies of the bundle, 1 to 64, behind one session; each needs hosts, or slots, of its own. A request
            goes to the copy with the fewest in flight, and `max_in_flight` holds for each copy.
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
        replicas: int = 1,
    ) -> None:
        require_copy_count(replicas)
        if not 0 < timeout <= MAX_TIMEOUT_SECONDS:
            message = f"expected more than 0 and at most {MAX_TIMEOUT_SECONDS:g} seconds, got {timeout}"
            raise UsageError("K001", message, where="timeout", hint=f"omit it for {DEFAULT_TIMEOUT_SECONDS:g}")
        self._hosts, self._timeout, self._replicas = hosts, timeout, replicas
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
        if bundle.target.choose_devices(list_route_devices(bundle.manifest)).shares_processors:
            message = "its devices share processors, on which they take turns within one process; a rank is one"
            hint = "use --runtime onnxruntime, or compile for devices with processors of their own"
            raise TargetError("K001", message, where=str(bundle.path), hint=hint)
        if self._replicas > 1:
            plans = plan_copies(bundle.manifest, self._hosts, self._replicas)
            copies = [
                RankCopy(
                    plan,
                    self._make_cluster,
                    partial(open_ranks, bundle, trace=trace, max_in_flight=max_in_flight, copy_index=index),
                )
                for index, plan in enumerate(plans)
            ]
            return ReplicatedSession(bundle, copies, max_in_flight)
        job = None if self._hosts else find_job()
        if job is None:
            cluster = self._make_cluster(plan_ranks(bundle.manifest, self._hosts))
            return open_ranks(bundle, cluster, trace, max_in_flight)
        plan = plan_job(bundle.manifest, job.size)
        if job.rank:
            serve_rank(job)
            sys.exit(0)
        return open_ranks(bundle, LedCluster(plan, job, self._timeout), trace, max_in_flight)

    def _make_cluster(self, plan: RankPlan) -> Cluster:
        """Return ranks that are not started."""
        return (RemoteCluster if plan.is_remote else Cluster)(plan, self._connection, self._timeout)


class RankCopy:
    """Opens a copy of a bundle on ranks, perhaps again and again.

    Args:
        plan: Devices and hosts by rank.
        make_cluster: Returns ranks that are not started.
        open_cluster: Starts them, and returns their session.
    """

    def __init__(
        self,
        plan: RankPlan,
        make_cluster: Callable[[RankPlan], Cluster],
        open_cluster: Callable[[Cluster], RuntimeSession],
    ) -> None:
        self.name = ",".join(plan.counts)
        self._plan, self._make_cluster, self._open_cluster = plan, make_cluster, open_cluster
        self._cluster: Cluster | None = None
        self._is_cancelled = False

    def open(self) -> RuntimeSession:
        """Start the ranks, and open the bundle on them; raises OnnxplaceError."""
        self._cluster = self._make_cluster(self._plan)
        if self._is_cancelled:
            self._cluster.end(0.0)
        return self._open_cluster(self._cluster)

    def cancel(self) -> None:
        """Let `open`, in another thread, fail soon; and all later calls."""
        self._is_cancelled = True
        if self._cluster is not None:
            self._cluster.end(0.0)
