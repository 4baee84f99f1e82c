"""Run commands on hosts: by a remote shell such as ssh, or as ranks of MPI."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from onnxplace.errors import ExecutionError, TargetError, UsageError, format_value
from onnxplace.hosts.mpi_launchers import find_launcher, find_mpi_cause, report_end

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
        raise UsageError("K002", message, where="--remote-shell", hint=hint)

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
        return [*command, *report_end([sys.executable, "-P", "-m", "mpi4py", "-m", module, *arguments])]

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
