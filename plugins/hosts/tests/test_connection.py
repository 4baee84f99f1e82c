"""Hosts that cannot be reached, or do not answer, and launchers that fail."""

import os
import subprocess
import sys

import psutil
import pytest

from onnxplace.errors import ExecutionError, TargetError, UsageError
from onnxplace_hosts import connection as connection_module
from onnxplace_hosts.connection import (
    Connection,
    Mpich,
    OpenMpi,
    find_launcher,
    find_mpi_cause,
    is_this_machine,
    run_together,
)
from tests.support.fault_checks import HUNG_SECONDS, wait_until

MODULE = "onnxplace_hosts.describe_host"


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_unreachable_host_is_named_with_the_message_of_ssh(write_shell):
    shell = write_shell('echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255')
    with pytest.raises(TargetError) as caught:
        Connection(shell).run_on_hosts(["node2"], MODULE, "")
    assert (caught.value.code, caught.value.where) == ("K004", "host node2")
    assert "cannot be reached: ssh: connect to host node2 port 22: No route to host" in caught.value.message
    assert "without a password" in caught.value.hint


def test_a_host_that_does_not_answer_is_given_up_and_its_processes_end(write_shell, tmp_path, monkeypatch):
    started, communicate = tmp_path / "started", subprocess.Popen.communicate
    shell = write_shell(f"sleep 600 & echo $$ $! > {tmp_path}/pids; touch {started}; wait")

    def communicate_once_started(process, timeout):
        wait_until(started.exists)
        return communicate(process, timeout=timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate_once_started)
    with pytest.raises(TargetError, match=r"K004.*host node2: no answer within 0\.5 s"):
        Connection(shell, timeout_seconds=0.5).run_on_hosts(["node2"], MODULE, "")
    process_ids = [int(item) for item in (tmp_path / "pids").read_text().split()]
    assert len(process_ids) == 2
    wait_until(lambda: not any(map(is_alive, process_ids)))


def test_a_host_without_onnxplace_is_named(write_shell):
    shell = write_shell('echo "sh: 1: python: not found" >&2; exit 127')
    with pytest.raises(TargetError, match=r"K005.*host node2: onnxplace cannot be run there: sh: 1: python") as caught:
        Connection(shell).run_on_hosts(["node2"], MODULE, "")
    assert sys.executable in caught.value.hint


def test_a_missing_remote_shell_is_named():
    with pytest.raises(UsageError, match=r"K005.*'no-such-ssh'"):
        Connection("no-such-ssh").run_on_hosts(["node2"], MODULE, "")


def test_arguments_reach_a_host_as_they_are(local_shell, tmp_path, monkeypatch):
    (tmp_path / "show_arguments.py").write_text("import sys; print(sys.argv[1:])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (shown,) = Connection(local_shell).run_on_hosts(["node2"], "show_arguments", "a b", "$HOME;'", "")
    assert shown == "['a b', \"$HOME;'\", '']\n"


def test_this_machine_needs_no_remote_shell(tmp_path, monkeypatch):
    assert is_this_machine("localhost")
    assert not is_this_machine("node2")
    (tmp_path / "show_arguments.py").write_text("import sys; print(sys.argv[1:])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert Connection("no-such-ssh").run_on_hosts(["localhost"], "show_arguments") == ["[]\n"]


def test_an_interrupt_ends_the_processes_of_a_command(monkeypatch):
    started = []

    def interrupt(process, timeout):
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_together([["sleep", "600"], ["sleep", "601"]], 60.0)
    assert started[0].poll() is not None


def test_hosts_are_asked_at_once_and_the_first_bad_one_is_named(write_shell, tmp_path, monkeypatch):
    shell = write_shell(  # node1 answers once the others have been asked
        f"touch {tmp_path}/$host; cd {tmp_path}\n"
        "[ $host = node1 ] && { until [ -e node2 ] && [ -e node3 ]; do sleep 0.02; done; echo hello; exit; }\n"
        "[ $host = node3 ] && exit 255; sleep 600"
    )
    communicate = subprocess.Popen.communicate

    def communicate_patiently_with_the_first(process, timeout):
        return communicate(process, timeout=HUNG_SECONDS if "node1" in process.args else timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate_patiently_with_the_first)
    with pytest.raises(TargetError, match=r"K004.*host node2: no answer within 0\.5 s"):
        Connection(shell, timeout_seconds=0.5).run_on_hosts(["node1", "node2", "node3"], MODULE, "")
    monkeypatch.undo()
    with pytest.raises(TargetError, match=r"K004.*host node3: cannot be reached: exit code 255"):
        Connection(shell, timeout_seconds=HUNG_SECONDS).run_on_hosts(["node1", "node3"], MODULE, "")


@pytest.mark.parametrize(
    ("version", "shown"), [("mpirun (Open MPI) 4.1.8", "which says 'mpirun (Open MPI) 4.1.8'"), ("", "")]
)
def test_another_mpiexec_than_that_of_mpich_or_a_recent_open_mpi_is_refused(monkeypatch, tmp_path, version, shown):
    find_launcher.cache_clear()
    folder = tmp_path / "bin"
    folder.mkdir()
    if version:
        (folder / "mpiexec").write_text(f"#!/bin/sh\necho '{version}'\n")
        (folder / "mpiexec").chmod(0o755)
    monkeypatch.setattr(connection_module.sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(UsageError, match="K005") as caught:
        find_launcher()
    assert shown in caught.value.message
    assert "pip install 'onnxplace[mpi]'" in caught.value.hint


def test_an_mpiexec_that_cannot_be_run_is_refused(monkeypatch, tmp_path):
    find_launcher.cache_clear()
    (tmp_path / "mpiexec").touch(0o755)
    monkeypatch.setattr(connection_module.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UsageError, match=r"K005.*which says 'Exec format error'"):
        find_launcher()


COUNTS = {"node1": 2, "node2": 1}


@pytest.mark.parametrize(
    ("version", "kind", "options"),
    [
        ("HYDRA build details", Mpich, "-hosts node1:2,node2:1 -n 3 -launcher ssh -launcher-exec /bin/ssh"),
        ("mpirun (Open MPI) 5.0.8", OpenMpi, "--host node1:2,node2:1 -n 3 --map-by slot:OVERSUBSCRIBE --bind-to none"),
    ],
)
def test_the_mpiexec_of_this_environment_is_used_whatever_mpi_it_is(monkeypatch, tmp_path, version, kind, options):
    find_launcher.cache_clear()
    for folder in (tmp_path / "bin", tmp_path / "other"):
        folder.mkdir()
        (folder / "mpiexec").write_text(f"#!/bin/sh\necho '{version}'\n")
        (folder / "mpiexec").chmod(0o755)
    monkeypatch.setattr(connection_module.sys, "executable", str(tmp_path / "bin/python"))
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    launcher = find_launcher()
    find_launcher.cache_clear()
    assert (type(launcher), launcher.path) == (kind, str(tmp_path / "bin/mpiexec"))
    command = " ".join(launcher.make_command(COUNTS, "/bin/ssh", "eth7"))
    assert options in command
    assert "/bin/ssh" in command
    assert "eth7" in command
    alone = " ".join(launcher.make_command({"localhost": 2}, "", ""))
    assert "ssh" not in alone
    assert "eth7" not in alone


NO_ROUTE = f"no route to host node3\n{'-' * 60}\nA daemon failed to report back. This could\n{'-' * 60}\n"
NO_NETWORK = f"{'-' * 74}\nNo network interfaces\nwere found. We require\n{'-' * 74}\n"
NO_DAEMON = f"{'-' * 60}\nA daemon failed. It\n\n  Remote host:    node3\n{'-' * 60}\n"


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        ("", "it gave no reason"),
        ("[node1:7] plm:ssh: Warning: setpgid(8,8) failed: denied(13)\n", "it gave no reason"),
        ("Traceback:\nValueError: boom\nAbort(1) on node 1: application called MPI_Abort", "ValueError: boom"),
        ("[mpiexec@a] f (sock.c:4): no interface x\n[mpiexec@a] main (m.c:2): error", "no interface x"),
        ("[proxy:1@a] f (sock.c:4): no route (1)\n[mpiexec@a] main (m.c:2): error", "on node2: no route (1)"),
        ("[mpiexec@a] of another form", "[mpiexec@a] of another form"),
        (NO_ROUTE, "no route to host node3"),
        (NO_DAEMON, "on node3: A daemon failed"),
        (f"[node1:7] plm:ssh: Warning: setpgid(8,8) failed: denied(13)\n{NO_DAEMON}", "on node3: A daemon failed"),
        (NO_NETWORK, "No network interfaces were found"),
        ("no module x\nonnxplace: rank 1 ended with code 1\nKilled\n", "no module x"),
        ("onnxplace: rank 0 ended with code 14\nonnxplace: rank 1 ended with code 137\n", "rank 1 died (SIGKILL)"),
        ("no module x\nonnxplace: rank 0 ended with code 14\nonnxplace: rank 1 ended with code 1\n", "no module x"),
        ("onnxplace: rank 0 ended with code 14\nonnxplace: rank 1 ended with code 1\n", "rank 1 died (exit code 1)"),
    ],
)
def test_the_cause_of_a_failure_is_found_among_the_lines_of_mpi(printed, cause):
    assert find_mpi_cause(printed, ("node1", "node2")) == cause


def test_a_failing_launcher_is_an_error_with_its_last_line(monkeypatch, tmp_path):
    launcher = tmp_path / "mpiexec"
    launcher.write_text("#!/bin/sh\necho 'cannot bind' >&2; exit 3\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(connection_module, "find_launcher", lambda: Mpich(str(launcher)))
    with pytest.raises(ExecutionError, match=r"K007.*node1, localhost: MPI failed with exit code 3: cannot bind"):
        Connection("true").run_ranks(("node1", "localhost"), MODULE, timeout_seconds=HUNG_SECONDS)
    launcher.write_text("#!/bin/sh\nsleep 600\n")
    with pytest.raises(ExecutionError, match=r"K007.*did not arrive within 0\.2 s"):
        Connection("true").run_ranks(("node1", "localhost"), MODULE, timeout_seconds=0.2)
