"""Work in a fresh process, which imports nothing of its caller's, so that it can be done from any script."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from onnxplace.errors import ExecutionError, OnnxplaceError
from onnxplace.utils.leases import hold_lease

Job = TypeVar("Job")
Answer = TypeVar("Answer")


def run_in_child(work: Callable[[Job], Answer], job: Job, what: str, where: str, **environment: str) -> Answer:
    """Return `work(job)` as computed in a fresh process; `work` is a function of a module, and `job` can be pickled.

    Raises whatever OnnxplaceError `work` raises; else, where the process fails, ExecutionError at `where`, saying that
    `what` failed and what the process said last.
    """
    with hold_lease(Path(tempfile.gettempdir())) as lease, lease.temporary_folder() as folder:
        asked, answer_at = Path(folder) / "job", Path(folder) / "answer"
        asked.write_bytes(pickle.dumps((work, job)))
        # -P: files in the current folder are no modules of ours.
        command = [sys.executable, "-P", "-c", f"from {__name__} import answer; answer()", str(asked), str(answer_at)]
        paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        variables = {**os.environ, **environment, "PYTHONPATH": paths}
        ended = subprocess.run(
            command,
            env=variables,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            pass_fds=lease.descriptors,  # so that the folder stays while the child works, even if we are killed
        )
        if ended.returncode or not answer_at.exists():
            raise ExecutionError("X004", f"{what} failed in a process of its own: {_last_words(ended)}", where=where)
        found: Answer | OnnxplaceError = pickle.loads(answer_at.read_bytes())
    if isinstance(found, OnnxplaceError):
        raise found
    return found


def answer() -> None:
    """Do, in the child, the job in the file that the command line names first; answer into the second."""
    asked, answer_at = (Path(name) for name in sys.argv[1:3])
    work, job = pickle.loads(asked.read_bytes())
    try:
        found = work(job)
    except OnnxplaceError as problem:
        found = problem
    answer_at.write_bytes(pickle.dumps(found))


def _last_words(ended: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a process that failed wrote, or how it ended."""
    said = [line for line in ended.stderr.splitlines() if line.strip()]
    if ended.returncode < 0:
        return f"ended by signal {-ended.returncode}" + (", as when memory runs out" if ended.returncode == -9 else "")
    return said[-1].strip() if said else f"exit code {ended.returncode}"
