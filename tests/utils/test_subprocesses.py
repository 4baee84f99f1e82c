"""Work in a child process: its results and its failures. Each child imports this module, so it is small."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onnxplace.errors import ExecutionError, FeedError
from onnxplace.utils.file_locks import sweep_leftovers
from onnxplace.utils.subprocesses import ChildProcess, run_in_child, start_child


def double(job: int) -> tuple[int, int]:
    return 2 * job, os.getpid()


def raise_feed_error(job: str) -> None:
    raise FeedError("F001", job, where="input x", hint="try\nagain")


def raise_value_error(job: str) -> None:
    raise ValueError(job)


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)


def read_variable(name: str) -> str | None:
    return os.environ.get(name)


def test_work_is_done_in_another_process():
    result, process_id = run_in_child(double, 21, "doubling", "cpu:0")
    assert result == 42
    assert process_id != os.getpid()


def test_the_child_gets_additional_environment_variables():
    assert run_in_child(read_variable, "ONNXPLACE_TEST", "reading", "cpu:0", ONNXPLACE_TEST="7") == "7"
    assert "ONNXPLACE_TEST" not in os.environ


def test_an_error_of_the_child_is_raised_in_the_caller():
    with pytest.raises(FeedError) as caught:
        run_in_child(raise_feed_error, "no such input", "reading", "cpu:0")
    assert (caught.value.code, caught.value.where, caught.value.hint) == ("F001", "input x", "try\nagain")


def test_an_unexpected_exception_of_the_child_is_reported_in_one_line():
    message = r"^error\[X004\] cpu:0: reading failed in a process of its own: "
    with pytest.raises(ExecutionError, match=message) as caught:
        run_in_child(raise_value_error, "out of tune", "reading", "cpu:0")
    assert str(caught.value).endswith("ValueError: out of tune")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_killed_child_is_reported_with_its_signal():
    with pytest.raises(ExecutionError, match="SIGKILL, as when memory runs out"):
        run_in_child(kill_self, 9, "reading", "cpu:0")


def test_files_of_the_current_folder_do_not_hide_modules_in_the_child(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit('run by accident')")
    monkeypatch.chdir(tmp_path)
    assert run_in_child(double, 21, "doubling", "cpu:0")[0] == 42


def write_bytes(_: int) -> str:
    os.write(2, b"\xff\xfe")
    return "done"


def exit_silently(_: int) -> None:
    os._exit(0)


def test_a_child_may_write_any_bytes():
    assert run_in_child(write_bytes, 0, "writing", "cpu:0") == "done"


def test_a_child_that_exits_without_an_answer_has_failed():
    with pytest.raises(ExecutionError, match="exiting failed in a process of its own"):
        run_in_child(exit_silently, 0, "exiting", "cpu:0")


KILL_CALLER = """
import os, signal, sys, time
from onnxplace.utils import subprocesses

def kill_caller(process, *arguments, **options):
    while not os.path.exists(f"{sys.argv[1]}.begun"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

subprocesses.subprocess.Popen.wait = kill_caller
from tests.utils.test_subprocesses import wait_for_file
subprocesses.run_in_child(wait_for_file, sys.argv[1], "waiting", "cpu:0")
"""


def wait_for_file(end: str) -> None:
    parent = os.getppid()
    os.getppid = lambda: parent  # as long as the child has not noticed that its parent was killed
    Path(f"{end}.begun").touch()
    while not os.path.exists(end):
        time.sleep(0.01)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="locks")
def test_leftovers_of_a_killed_process_stay_while_its_child_works(tmp_path):
    folder, end = tmp_path / "tmp", tmp_path / "end"
    folder.mkdir()
    command = [sys.executable, "-c", KILL_CALLER, str(end)]
    root = Path(__file__).parents[2]
    process = subprocess.run(command, env={**os.environ, "TMPDIR": str(folder)}, cwd=root, timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert sweep_leftovers(folder) == []
    assert len(list(folder.iterdir())) == 2
    end.touch()
    deadline = time.monotonic() + 120
    while not sweep_leftovers(folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(folder.iterdir()) == []


def write_parent(path: Path) -> None:
    path.write_text(f"{os.getpid()} {os.getppid()}")
    time.sleep(300)


def wait_for_text(path: Path) -> str:
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, "the child does not start"
        time.sleep(0.01)
    return path.read_text()


def wait_for_end(child: ChildProcess) -> int:
    deadline = time.monotonic() + 120
    while child.exit_code is None:
        assert time.monotonic() < deadline, "the child does not end"
        time.sleep(0.01)
    return child.exit_code


def is_alive(process_id: int) -> bool:
    stat = Path(f"/proc/{process_id}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_started_child_is_ended_with_its_block(tmp_path):
    with start_child(write_parent, tmp_path / "ids") as child:
        wait_for_text(tmp_path / "ids")
        assert child.exit_code is None
    assert child.exit_code == -signal.SIGKILL


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_started_child_ends_when_its_parent_was_killed(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from tests.utils.test_subprocesses import write_parent\n"
        "from onnxplace.utils.subprocesses import start_child\n"
        "with start_child(write_parent, Path(sys.argv[1])): time.sleep(300)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "ids")], env=environment)
    process_id, parent_id = map(int, wait_for_text(tmp_path / "ids").split())
    assert parent_id == parent.pid
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 120
    while is_alive(process_id):
        assert time.monotonic() < deadline, "the child outlives its parent"
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_the_end_of_a_started_child_is_described(tmp_path):
    for work, job, end in (
        (kill_self, signal.SIGSEGV, "SIGSEGV"),
        (raise_value_error, "out of tune", "ValueError: out of tune"),
        (sys.exit, 7, "exit code 7"),
    ):
        with start_child(work, job) as child:
            wait_for_end(child)
            assert child.describe_end() == end
