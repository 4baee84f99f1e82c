"""Survey hosts: reach each, compare versions, describe devices, and measure the links between them."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxplace.errors import ExecutionError, TargetError, UsageError
from onnxplace.target.target import Link, Target, default_link
from onnxplace.target.target_file import read_target
from onnxplace.utils.progress import report_time_limit
from onnxplace_doctor.link_fit import LinkFit, fit_link
from onnxplace_hosts.connection import INSTALL_HINT, Connection, find_launcher
from onnxplace_hosts.describe_host import require_versions

# Time to measure links, all pairs together; and beyond it to start ranks, and for pairs of slow links.
DEFAULT_SECONDS, MAX_SECONDS = 10.0, 3600.0
STARTING_SECONDS = 60.0
# Samples of one size that count: as in calibration, the lower quartile.
QUANTILE = 0.25

Observer = Callable[[str, int, int], object]


@dataclass(frozen=True)
class HostDescription:
    """A host that was reached."""

    name: str
    versions: Mapping[str, str]
    """Versions of onnxplace, onnxruntime, python, mpi4py, mpich and openmpi; empty for what is not installed."""
    target: Target
    """Its devices and the links between them, without the host's name."""


@dataclass(frozen=True)
class HostLink:
    """The measured link between two hosts, assumed symmetric: half the round-trip time."""

    hosts: tuple[str, str]
    fit: LinkFit
    """The fit of messages alone."""
    waking_seconds: float
    """Assumed time to hand a value over and to wake its reader, as between devices of one host; not measured."""

    def to_links(self) -> tuple[Link, Link]:
        """Return the links of a target, one for each direction."""
        first, second = self.hosts
        latency, rate = self.fit.latency_seconds + self.waking_seconds, self.fit.bytes_per_second
        return Link(first, second, latency, rate, "tcp"), Link(second, first, latency, rate, "tcp")


@dataclass(frozen=True)
class HostSurvey:
    """Hosts and their links."""

    hosts: tuple[HostDescription, ...]
    links: tuple[HostLink, ...]

    @property
    def target(self) -> Target:
        """Return the target of all devices of all hosts."""
        devices, links, pools = [], [], []
        for host in self.hosts:
            devices += [replace(item, id=f"{host.name}/{item.id}") for item in host.target.devices]
            links += [
                replace(item, source=f"{host.name}/{item.source}", destination=f"{host.name}/{item.destination}")
                for item in host.target.links
            ]
            for pool in host.target.pools:
                pools.append(replace(pool, devices=tuple(f"{host.name}/{name}" for name in pool.devices)))
        links += [link for pair in self.links for link in pair.to_links()]
        return Target(tuple(devices), tuple(links), pools=tuple(pools))


def survey_hosts(
    hosts: Sequence[str],
    *,
    devices: str = "",
    seconds: float = DEFAULT_SECONDS,
    connection: Connection | None = None,
    observer: Observer | None = None,
) -> HostSurvey:
    """Describe hosts, and measure the links between them, by values that travel as those of bundles.

    Args:
        hosts: Their names, as `parse_hosts` returns them.
        devices: Devices of each host, such as `cpu:0,cpu:1`; by default those of `onnxplace devices`.
        seconds: Approximate time to measure all links.
        connection: How to reach the hosts.
        observer: Called before each part with its name, its position and their number.

    Raises:
        UsageError: mpiexec or the remote shell is missing, or the time is impossible.
        TargetError: a host cannot be reached, has other versions, or no such device.
        ExecutionError: messages do not arrive.
    """
    if not 0 < seconds <= MAX_SECONDS:
        message = f"expected more than 0 and at most {MAX_SECONDS:g} seconds, got {seconds}"
        raise UsageError("K001", message, where="--seconds", hint=f"omit it for {DEFAULT_SECONDS:g}")
    connection = connection or Connection()
    find_launcher()
    notify = observer or (lambda name, position, count: None)
    notify("reaching hosts", 0, 2)
    printed = connection.run_on_hosts(hosts, "onnxplace_hosts.describe_host", devices)
    described = tuple(_read_description(host, text) for host, text in zip(hosts, printed))
    _require_equal_versions(described)
    notify("measuring links", 1, 2)
    report_time_limit(seconds)
    module, options = "onnxplace_hosts.ranks.link_ranks", (str(seconds), ",".join(hosts), connection.interface)
    times = connection.run_ranks(hosts, module, *options, timeout_seconds=3 * seconds + STARTING_SECONDS)
    return HostSurvey(described, _fit_links(described, _read_line(times, ", ".join(hosts))))


def _read_description(host: str, printed: str) -> HostDescription:
    """Return what a host says about itself; raises TargetError with its own error if it cannot."""
    description = _read_line(printed, f"host {host}")
    if error := description.get("error"):
        where = ", ".join(filter(None, (f"host {host}", error["where"])))
        raise TargetError(error["code"], error["message"], where=where, hint=error["hint"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{host}.toml"
        path.write_text(description["target"], encoding="utf-8")
        return HostDescription(host, description["versions"], read_target(path))


def _read_line(printed: str, where: str) -> Any:
    """Return the JSON in the last line that a module printed: shells and MPI may print lines before it."""
    lines = printed.strip().splitlines()
    try:
        return json.loads(lines[-1] if lines else "")
    except ValueError:
        shown = lines[-1] if lines else "nothing"
        message = f"expected a line of JSON from onnxplace there, got {shown!r}"
        hint = "look for output of the shell's start-up files"
        raise ExecutionError("K007", message, where=where, hint=hint) from None


def _require_equal_versions(hosts: Sequence[HostDescription]) -> None:
    """Raise TargetError unless all hosts have MPI, and the same versions of everything."""
    for host in hosts:
        if not host.versions["mpi4py"]:
            raise TargetError("K005", "mpi4py is not installed there", where=f"host {host.name}", hint=INSTALL_HINT)
    first = hosts[0]
    for host in hosts[1:]:
        require_versions(host.versions, first.versions, f"as on {first.name}", f"host {host.name}")


def _fit_links(
    hosts: Sequence[HostDescription], samples: Sequence[tuple[int, int, int, float]]
) -> tuple[HostLink, ...]:
    """Fit latency and bandwidth of each pair of hosts to the lower quartiles of its samples."""
    times: dict[tuple[int, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for first, second, size, seconds in samples:
        times[first, second][size].append(seconds)
    cpus = [replace(hosts[0].target.devices[0], id=f"cpu:{index}", options={}) for index in range(2)]
    waking = default_link(*cpus).latency_seconds
    links = []
    for (first, second), by_size in times.items():
        quartiles = [float(np.quantile(by_size[size], QUANTILE)) for size in by_size]
        links.append(HostLink((hosts[first].name, hosts[second].name), fit_link(list(by_size), quartiles), waking))
    return tuple(links)
