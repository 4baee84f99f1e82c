"""Run commands on hosts: by a remote shell such as ssh, or as ranks of MPI, by whichever launcher is installed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from onnxplace.errors import ExecutionError, TargetError, UsageError, format_value

# Launchers of MPI: which one is installed, and the command with which it starts ranks on hosts.

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
        raise UsageError("K005", "there is no mpiexec, which starts processes on several hosts", hint=INSTALL_HINT)
    path = str(Path(path).absolute())
    version = _read_version(path)
    if "HYDRA" in version:
        return Mpich(path)
    match = _OPEN_MPI.search(version)
    if match is not None and int(match[1]) >= MIN_OPEN_MPI:
        return OpenMpi(path)
    first = next(iter(version.splitlines()), "nothing")
    expected = f"MPICH's mpiexec (HYDRA), or that of Open MPI {MIN_OPEN_MPI} or later"
    raise UsageError("K005", f"expected {expected}, got {path}, which says {format_value(first)}", hint=INSTALL_HINT)


def _read_version(path: str) -> str:
    """Return what a launcher prints about its version, or why it cannot be run."""
    try:
        return subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace").stdout
    except OSError as problem:
        return str(problem.strerror)


def _join_counts(counts: Mapping[str, int]) -> str:
    """Return hosts with their numbers of ranks, as both launchers read them."""
    return ",".join(f"{host}:{count}" for host, count in counts.items())


# How ranks of MPI end: a shell around each rank says so, whatever the launcher of MPI prints, or does not notice.
#
# MPICH's launcher does not end a job in which a process exits before it has joined: without onnxplace there, all others
# would wait for it.

# A shell that runs a command, says how it ended badly, and then dies by a signal, which every launcher notices.
_SCRIPT = (
    '"$@"; code=$?; [ $code = 0 ] && exit; '
    'echo "onnxplace: rank ${PMI_RANK:-${PMIX_RANK:-$OMPI_COMM_WORLD_RANK}} ended with code $code" >&2; kill -KILL $$'
)
_END = re.compile(r"onnxplace: rank (\d+) ended with code (\d+)")
# Shells add this to the number of a signal.
_SIGNAL_BASE = 128
# How ranks of Open MPI end whose peer has ended.
_LOST_PEER = 14
# A line of MPICH's launcher, or of its proxy on the host of this index: `[proxy:1@name] function (file:line): message`.
_LAUNCHER_LINE = re.compile(r"\[(?:mpiexec|proxy:(?P<index>\d+))@[^]]*\] \w+ \([^)]*\): (?P<message>.*)")
# An explanation of Open MPI's launcher, between two lines of hyphens, and the host that some name in it.
_BOX = re.compile(r"^-{40,}\n(.*?)^-{40,}$", re.MULTILINE | re.DOTALL)
_REMOTE_HOST = re.compile(r"Remote host: +(\S+)")


@dataclass(frozen=True)
class RankEnd:
    """A rank that ended badly."""

    rank: int
    reason: str
    """A signal or an exit code, such as `SIGKILL`."""
    cause: str
    """The last line that was written before it exited; empty if it was killed."""


def find_rank_end(printed: str) -> RankEnd | None:
    r"""Return the rank that probably ended badly first: one that was killed, if any was; None if none wrote it.

    >>> find_rank_end("No module named mpi4py\nonnxplace: rank 1 ended with code 1\n")
    RankEnd(rank=1, reason='exit code 1', cause='No module named mpi4py')
    """
    ends = list(_END.finditer(printed))
    if not ends:
        return None
    # Launchers end the others without such a line. But a rank that lost its peer may fail, and write, before that: with
    # Open MPI by a code of its own.
    match = min(ends, key=lambda item: (int(item[2]) == _LOST_PEER, int(item[2]) <= _SIGNAL_BASE))
    rank, code = map(int, match.groups())
    if code > _SIGNAL_BASE:
        with suppress(ValueError):
            return RankEnd(rank, signal.Signals(code - _SIGNAL_BASE).name, "")
    lines = (line.strip() for line in printed[: match.start()].splitlines())
    before = [line for line in lines if line and not _END.fullmatch(line)]
    return RankEnd(rank, f"exit code {code}", before[-1] if before else "")


def find_mpi_cause(printed: str, hosts: Sequence[str]) -> str:
    r"""Return the line that says why MPI failed: that of a rank, the last one of a program, or one of the launcher.

    Args:
        printed: What ranks and the launcher wrote.
        hosts: Hosts in the order in which the launcher numbers them.

    >>> find_mpi_cause("[proxy:1@vm] connect (sock.c:140): no route\n[mpiexec@vm] main (m.c:1): error", ["a", "b"])
    'on b: no route'
    """
    # Open MPI warns where it runs as root, and may say nothing else.
    printed = "\n".join(line for line in printed.splitlines() if ": Warning: " not in line)
    if end := find_rank_end(printed):
        return end.cause or f"rank {end.rank} died ({end.reason})"
    box = _BOX.search(printed)
    if box is not None:  # Open MPI explains at length; what was written before it is the cause
        if before := printed[: box.start()].strip():
            return before.splitlines()[-1].strip()
        host = _REMOTE_HOST.search(box[1])
        return f"{f'on {host[1]}: ' if host else ''}{' '.join(box[1].split()).partition('. ')[0]}"
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    launcher = [match for line in lines if (match := _LAUNCHER_LINE.fullmatch(line))]
    others = [line for line in lines if not line.startswith(("[mpiexec", "[proxy", "Abort("))]
    if others or not launcher:
        return (others or lines or ["it gave no reason"])[-1]
    index, message = launcher[0]["index"], launcher[0]["message"]
    return message if index is None else f"on {hosts[int(index)]}: {message}"


# Run commands on hosts: by a remote shell such as ssh, or as ranks of MPI.

# Seconds for a remote shell to say that there is no host, and for a process to end after it was asked to.
CONNECT_SECONDS, ENDING_SECONDS = 10, 1.0
# To read what a process wrote that has ended while others were waited for.
READING_SECONDS = 0.1
# How ssh reports that it did not reach the host.
UNREACHABLE = 255


@dataclass(frozen=True)
class Connection:
    """How commands reach other hosts."""

    remote_shell: str = "ssh"
    """The program that runs a command on a host: `PROGRAM [OPTIONS] HOST COMMAND`."""
    interface: str = ""
    """The network interface for messages, such as `eth0`; empty for MPI's choice."""
    timeout_seconds: float = 30.0
    """How long one command on a host may take."""

    def find_remote_shell(self) -> str:
        """Return the path of the remote shell; raises UsageError if there is none."""
        if path := shutil.which(self.remote_shell):
            return str(Path(path).absolute())
        hint = "install an ssh client, or name another program with --remote-shell"
        message = f"expected a program, got {format_value(self.remote_shell)}"
        raise UsageError("K005", message, where="--remote-shell", hint=hint)

    def run_on_hosts(self, hosts: Sequence[str], module: str, *arguments: str) -> list[str]:
        """Return what a module of onnxplace prints on each host; it runs on all of them at once.

        Raises TargetError if a host cannot be reached, or onnxplace cannot be run there.
        """
        command = [sys.executable, "-P", "-m", module, *arguments]
        commands = [command if is_this_machine(host) else self.make_remote_command(host, command) for host in hosts]
        processes = run_together(commands, self.timeout_seconds)
        return [self._require_success(host, process) for host, process in zip(hosts, processes)]

    def make_remote_command(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the command that runs another one on a host; raises UsageError without a remote shell."""
        # Only ssh is known to have these options.
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
        shell = self.find_remote_shell()
        return [shell, *(options if Path(shell).name == "ssh" else []), host, shlex.join(command)]

    def _require_success(self, host: str, process: subprocess.CompletedProcess[str] | None) -> str:
        """Return what a process printed; raises TargetError unless it ended well."""
        if process is None:
            message = f"no answer within {self.timeout_seconds:g} s"
            hint = f"try `{self.remote_shell} {host} true`, or allow more time with --timeout"
            raise TargetError("K004", message, where=f"host {host}", hint=hint)
        if process.returncode == UNREACHABLE:
            message = f"cannot be reached: {_last_line(process)}"
            hint = f"`{self.remote_shell} {host} true` has to work without a password"
            raise TargetError("K004", message, where=f"host {host}", hint=hint)
        if process.returncode:
            message = f"onnxplace cannot be run there: {_last_line(process)}"
            hint = f"it needs an onnxplace of the same version, and the same Python at the same path: {sys.executable}"
            raise TargetError("K005", message, where=f"host {host}", hint=hint)
        return process.stdout

    def make_ranks_command(self, counts: Mapping[str, int], module: str, *arguments: str) -> list[str]:
        """Return the command that runs a module as ranks of MPI; raises UsageError without mpiexec or a remote shell.

        Args:
            counts: The number of ranks of each host, in the order of the ranks.
            module: The module, which `mpi4py` runs.
            arguments: Its arguments.
        """
        remote_shell = "" if all(map(is_this_machine, counts)) else self.find_remote_shell()
        command = find_launcher().make_command(counts, remote_shell, self.interface)
        # Without `-m mpi4py`, the other ranks wait for one that raised an exception.
        rank = [sys.executable, "-P", "-m", "mpi4py", "-m", module, *arguments]
        return [*command, "/bin/sh", "-c", _SCRIPT, "sh", *rank]

    def run_ranks(self, hosts: Sequence[str], module: str, *arguments: str, timeout_seconds: float) -> str:
        """Return what a module prints that runs as one rank of MPI on each host.

        Raises ExecutionError if a rank fails, or if they take longer than the timeout.
        """
        command = self.make_ranks_command(dict.fromkeys(hosts, 1), module, *arguments)
        where = ", ".join(hosts)
        (process,) = run_together([command], timeout_seconds)
        if process is None:
            message = f"messages did not arrive within {timeout_seconds:g} s"
            hint = (
                "MPI needs free TCP ports in both directions: look for a firewall, or name the network with --interface"
            )
            raise ExecutionError("K007", message, where=where, hint=hint)
        if process.returncode:
            cause = find_mpi_cause(process.stderr if process.stderr.strip() else process.stdout, hosts)
            message = f"MPI failed with exit code {process.returncode}: {cause}"
            hint = "the hosts have to find each other by their names; --interface names the network between them"
            raise ExecutionError("K007", message, where=where, hint=hint)
        return process.stdout


def is_this_machine(host: str) -> bool:
    """Return whether a name is that of this machine, so that no remote shell is needed.

    >>> is_this_machine("localhost")
    True
    """
    return host in ("localhost", "127.0.0.1", socket.gethostname().lower())


def run_together(commands: Sequence[Sequence[str]], seconds: float) -> list[subprocess.CompletedProcess[str] | None]:
    """Run commands at once, each in a session of its own; return None for those that take longer.

    All their processes have ended when it returns, also after an interrupt.

    >>> [process.stdout.strip() for process in run_together([[sys.executable, "-c", "print(1)"]], 60.0)]
    ['1']
    """
    end = time.monotonic() + seconds
    results: list[subprocess.CompletedProcess[str] | None] = []
    with ExitStack() as stack:
        processes = [stack.enter_context(_start_session(command)) for command in commands]
        for process in processes:
            try:
                out, err = process.communicate(timeout=max(end - time.monotonic(), READING_SECONDS))
            except subprocess.TimeoutExpired:
                results.append(None)
            else:
                results.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return results


@contextmanager
def _start_session(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a session of its own, which ends with this block."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            _end_session(process)


def _end_session(process: subprocess.Popen[str]) -> None:
    """End the processes of a session: a launcher ends its ranks when it is asked to."""
    if process.poll() is not None:
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(process: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a failed command wrote, or how it ended."""
    lines = [line.strip() for line in (process.stderr or process.stdout).splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {process.returncode}"
