"""Work in a process of its own: what it gives, and how it fails. Each process imports this module, so it is small."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onnxplace.errors import ExecutionError, FeedError
from onnxplace.utils import run_in_child, sweep_leftovers


def double(job: int) -> tuple[int, int]:
    return 2 * job, os.getpid()


def refuse(job: str) -> None:
    raise FeedError("F001", job, where="there", hint="try\nagain")


def break_down(job: str) -> None:
    raise ValueError(job)


def die(number: int) -> None:
    os.kill(os.getpid(), number)


def variable(name: str) -> str | None:
    return os.environ.get(name)


def test_work_is_done_in_another_process():
    found, process = run_in_child(double, 21, "doubling", "here")
    assert found == 42
    assert process != os.getpid()


def test_the_other_process_gets_the_environment_asked_for():
    assert run_in_child(variable, "ONNXPLACE_TEST", "asking", "here", ONNXPLACE_TEST="7") == "7"
    assert "ONNXPLACE_TEST" not in os.environ


def test_what_is_refused_there_is_refused_here():
    with pytest.raises(FeedError) as caught:
        run_in_child(refuse, "no such input", "asking", "here")
    assert (caught.value.code, caught.value.where, caught.value.hint) == ("F001", "there", "try\nagain")


def test_what_breaks_down_there_is_told_in_a_line():
    with pytest.raises(ExecutionError, match=r"^error\[X004\] here: asking failed in a process of its own: ") as caught:
        run_in_child(break_down, "out of tune", "asking", "here")
    assert str(caught.value).endswith("ValueError: out of tune")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_process_that_is_killed_is_told_by_its_signal():
    with pytest.raises(ExecutionError, match="ended by signal 9, as when memory runs out"):
        run_in_child(die, 9, "asking", "here")


def test_files_of_the_current_folder_are_no_modules_of_the_child(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit('run by accident')")
    monkeypatch.chdir(tmp_path)
    assert run_in_child(double, 21, "doubling", "here")[0] == 42


def mutter(_: int) -> str:
    os.write(2, b"\xff\xfe")
    return "done"


def leave(_: int) -> None:
    os._exit(0)


def test_what_a_child_says_may_be_any_bytes():
    assert run_in_child(mutter, 0, "muttering", "here") == "done"


def test_a_child_that_leaves_without_an_answer_has_failed():
    with pytest.raises(ExecutionError, match="leaving failed in a process of its own"):
        run_in_child(leave, 0, "leaving", "here")


KILLED = """
import os, signal, sys
from onnxplace.utils import subprocesses
actual = subprocesses.subprocess.Popen.communicate

def killed(process, *arguments, **options):
    process.stderr.readline()  # until the child works
    os.kill(os.getpid(), signal.SIGKILL)

subprocesses.subprocess.Popen.communicate = killed
from tests.utils.test_subprocesses import linger
subprocesses.run_in_child(linger, sys.argv[1], "lingering", "here")
"""


def linger(end: str) -> None:
    os.write(2, b"working\n")
    while not os.path.exists(end):
        time.sleep(0.01)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="locks")
def test_what_a_killed_process_left_stays_as_long_as_its_child_works(tmp_path):
    folder, end = tmp_path / "tmp", tmp_path / "end"
    folder.mkdir()
    command = [sys.executable, "-c", KILLED, str(end)]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, env={**os.environ, "TMPDIR": str(folder)}, cwd=root, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert sweep_leftovers(folder) == []
    assert len(list(folder.iterdir())) == 2
    end.touch()
    patience = time.monotonic() + 30
    while not sweep_leftovers(folder) and time.monotonic() < patience:
        time.sleep(0.01)
    assert list(folder.iterdir()) == []
