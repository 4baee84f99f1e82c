"""Run work in a fresh process, which does not import its caller's script."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from onnxplace.errors import ExecutionError, OnnxplaceError
from onnxplace.utils.file_locks import hold_file_lock

# How often a child looks whether its parent is still there.
PARENT_CHECK_SECONDS = 1.0

Job = TypeVar("Job")
Answer = TypeVar("Answer")


def run_in_child(work: Callable[[Job], Answer], job: Job, what: str, where: str, **environment: str) -> Answer:
    """Return `work(job)`, computed in a fresh process.

    Args:
        work: a function at the top level of a module.
        job: its argument, which must be picklable, as must be its result.
        what: names the work in errors.
        where: the place in errors.
        environment: additional environment variables of the process.

    Raises:
        OnnxplaceError: as `work` raises it.
        ExecutionError: if the process fails otherwise; its message ends with the last line that the process wrote.
    """
    with start_child(work, job, None, **environment) as child:
        end = child.describe_end()
        if child.exit_code or not child.answer.exists():
            cause = ", as when memory runs out" if end == "SIGKILL" else ""
            raise ExecutionError("X004", f"{what} failed in a process of its own: {end}{cause}", where=where)
        answer: Answer | OnnxplaceError = pickle.loads(child.answer.read_bytes())
    if isinstance(answer, OnnxplaceError):
        raise answer
    return answer


class ChildProcess:
    """A running child process of `start_child`."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process, self._output = process, folder / "output"
        self.answer = folder / "answer"
        """The file with the pickled result of its work, once that is done."""
        self.pipes: Any = process.stdout, process.stdin
        """Its stdout, to read, and its stdin, to write; None each unless `start_child` connects them."""

    @property
    def exit_code(self) -> int | None:
        """Return how the child ended, negative after a signal; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End the child and its own children at once; nothing if it has ended."""
        if self._process.poll() is None:
            with suppress(OSError):  # it ends at this moment
                if hasattr(os, "killpg"):
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    self._process.kill()
        self._process.wait()

    def describe_end(self) -> str:
        """Wait for its end; return how it ended: `SIGSEGV`, the last line that it wrote, or its exit code."""
        code = self._process.wait()
        if code < 0:
            with suppress(ValueError):
                return signal.Signals(-code).name
            return f"signal {-code}"
        # Windows reports crashes as large exit codes, such as 0xC0000005.
        is_crash = code >= 1 << 16
        return (code and not is_crash and self.read_last_line()) or f"exit code {hex(code) if is_crash else code}"

    def read_last_line(self) -> str:
        """Return the last line that the child wrote to stdout or stderr so far; empty if there is none."""
        written = self._output.read_text(encoding="utf-8", errors="replace")
        return next((line.strip() for line in reversed(written.splitlines()) if line.strip()), "")


@contextmanager
def start_child(
    work: Callable[[Job], object], job: Job, connects: Sequence[int] | None = None, **environment: str
) -> Iterator[ChildProcess]:
    """Start `work(job)` in a fresh process, which ends with this block or with this process at the latest.

    Its own output is kept from the user. The child gets no Ctrl-C of the terminal.

    Args:
        work: a function at the top level of a module.
        job: its argument, which must be picklable.
        connects: file descriptors that it inherits under the same numbers, perhaps none; its stdin and stdout are pipes
            then, which the caller closes.
        environment: additional environment variables of the process.
    """
    with hold_file_lock(Path(tempfile.gettempdir())) as lock, lock.temporary_folder() as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps((work, job)))
        with (folder / "output").open("wb") as stream:
            process = subprocess.Popen(
                # -P: files in the current folder do not hide modules.
                [sys.executable, "-P", "-c", f"from {__name__} import run_job; run_job()", name],
                # It imports what this process can import.
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(i or os.getcwd() for i in sys.path)},
                stdin=subprocess.DEVNULL if connects is None else subprocess.PIPE,
                stdout=stream if connects is None else subprocess.PIPE,
                stderr=stream,
                start_new_session=True,
                # The folder stays while the child works, even if this process is killed.
                pass_fds=(*lock.descriptors, *(connects or ())),
            )
        child = ChildProcess(process, folder)
        try:
            yield child
        finally:
            child.kill()


def run_job() -> None:
    """Run, in the child, the job in the folder that the command line names; end when the parent has ended."""
    parent, folder = os.getppid(), Path(sys.argv[1])

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="onnxplace watches its parent", daemon=True).start()
    work, job = pickle.loads((folder / "job").read_bytes())
    try:
        answer = work(job)
    except OnnxplaceError as problem:
        answer = problem
    (folder / "answer").write_bytes(pickle.dumps(answer))
