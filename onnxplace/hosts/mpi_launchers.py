"""Launchers of MPI: which one is installed, and the command with which it starts ranks on hosts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from onnxplace.errors import UsageError, format_value

INSTALL_HINT = "pip install 'onnxplace[mpi]'"
MIN_OPEN_MPI = 5
_OPEN_MPI = re.compile(r"\(Open MPI\) (\d+)")


@dataclass(frozen=True)
class MpiLauncher(ABC):
    """An `mpiexec` of one kind of MPI."""

    path: str
    """Absolute, as the folder of programs of this environment need not be on the path of other hosts."""

    @abstractmethod
    def make_command(self, counts: Mapping[str, int], remote_shell: str, interface: str) -> list[str]:
        """Return the command without the program that ranks run.

        Args:
            counts: The number of ranks of each host, in the order of the ranks.
            remote_shell: The path of the program that runs a command on a host; empty if all are this machine.
            interface: The network interface for messages, such as `eth0`; empty for MPI's choice.
        """


@dataclass(frozen=True)
class Mpich(MpiLauncher):
    """MPICH's launcher, Hydra."""

    def make_command(self, counts: Mapping[str, int], remote_shell: str, interface: str) -> list[str]:
        """Return the command; messages take plain TCP between hosts, and shared memory inside one."""
        command = [self.path, "-hosts", _join_counts(counts), "-n", str(sum(counts.values()))]
        if remote_shell:
            command += ["-launcher", "ssh", "-launcher-exec", remote_shell]
        # Its default network takes shared memory between two network namespaces of one machine.
        environment = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
        if interface:
            command += ["-iface", interface]
            environment["FI_TCP_IFACE"] = interface
        return [*command, *(item for pair in environment.items() for item in ("-genv", *pair))]


@dataclass(frozen=True)
class OpenMpi(MpiLauncher):
    """Open MPI's launcher, PRRTE."""

    def make_command(self, counts: Mapping[str, int], remote_shell: str, interface: str) -> list[str]:
        """Return the command; components are named, as Open MPI would look for networks for a second."""
        # Its programs are at the same path on all hosts. Ranks choose their cores themselves.
        command = [self.path, "--prefix", str(Path(self.path).parents[1]), "--host", _join_counts(counts)]
        command += ["-n", str(sum(counts.values())), "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.append("--allow-run-as-root")
        command += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]
        if interface:
            command += ["--mca", "btl_tcp_if_include", interface, "--prtemca", "prte_if_include", interface]
        return [*command, "--prtemca", "plm_ssh_agent", remote_shell] if remote_shell else command


@cache
def find_launcher() -> MpiLauncher:
    """Return the launcher of MPI, that of this Python's environment first; raises UsageError if there is none."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    path = shutil.which("mpiexec", path=folders)
    if path is None:
        raise UsageError("K003", "there is no mpiexec, which starts processes on several hosts", hint=INSTALL_HINT)
    path = str(Path(path).absolute())
    version = _read_version(path)
    if "HYDRA" in version:
        return Mpich(path)
    match = _OPEN_MPI.search(version)
    if match is not None and int(match[1]) >= MIN_OPEN_MPI:
        return OpenMpi(path)
    first = next(iter(version.splitlines()), "nothing")
    expected = f"MPICH's mpiexec (HYDRA), or that of Open MPI {MIN_OPEN_MPI} or later"
    raise UsageError("K003", f"expected {expected}, got {path}, which says {format_value(first)}", hint=INSTALL_HINT)


def _read_version(path: str) -> str:
    """Return what a launcher prints about its version, or why it cannot be run."""
    try:
        return subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace").stdout
    except OSError as problem:
        return str(problem.strerror)


def _join_counts(counts: Mapping[str, int]) -> str:
    """Return hosts with their numbers of ranks, as both launchers read them."""
    return ",".join(f"{host}:{count}" for host, count in counts.items())
