"""Run work in a fresh process, which does not import its caller's script."""

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
    with hold_lease(Path(tempfile.gettempdir())) as lease, lease.temporary_folder() as folder:
        job_path, answer_path = Path(folder) / "job", Path(folder) / "answer"
        job_path.write_bytes(pickle.dumps((work, job)))
        # -P: files in the current folder do not hide modules.
        script = f"from {__name__} import run_job; run_job()"
        command = [sys.executable, "-P", "-c", script, str(job_path), str(answer_path)]
        paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        variables = {**os.environ, **environment, "PYTHONPATH": paths}
        process = subprocess.run(
            command,
            env=variables,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            pass_fds=lease.descriptors,  # the folder stays while the child works, even if this process is killed
        )
        if process.returncode or not answer_path.exists():
            message = f"{what} failed in a process of its own: {_describe_failure(process)}"
            raise ExecutionError("X004", message, where=where)
        answer: Answer | OnnxplaceError = pickle.loads(answer_path.read_bytes())
    if isinstance(answer, OnnxplaceError):
        raise answer
    return answer


def run_job() -> None:
    """Run, in the child, the job in the first file that the command line names; write the answer to the second."""
    job_path, answer_path = (Path(name) for name in sys.argv[1:3])
    work, job = pickle.loads(job_path.read_bytes())
    try:
        answer = work(job)
    except OnnxplaceError as problem:
        answer = problem
    answer_path.write_bytes(pickle.dumps(answer))


def _describe_failure(process: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a failed process wrote, or how it ended."""
    lines = [line for line in process.stderr.splitlines() if line.strip()]
    if process.returncode < 0:
        cause = ", as when memory runs out" if process.returncode == -9 else ""
        return f"ended by signal {-process.returncode}{cause}"
    return lines[-1].strip() if lines else f"exit code {process.returncode}"
