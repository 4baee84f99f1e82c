"""Run checks in a child process, which notes each beginning and end in a journal that survives a crash."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onnxplace.doctor.context import Check, CheckContext, CheckFailedError, CheckSkippedError
from onnxplace.doctor.report import CheckResult, Status
from onnxplace.errors import OnnxplaceError, format_one_line
from onnxplace.utils import temporary_folder

NO_TIME_LEFT = "no time was left: give more --seconds, or fewer --devices"


@dataclass(frozen=True)
class Job:
    """Checks to run in one process."""

    checks: tuple[str, ...]
    devices: tuple[str, ...]
    seconds: float
    """About how long each check that measures may take."""
    deadline: float
    """When no further check begins, in seconds of `time.time`."""
    journal: Path


def run_checks(job: Job) -> None:
    """Run the checks of a job, one after the other."""
    from onnxplace.doctor.checks import CHECKS

    with job.journal.open("a", encoding="utf-8") as journal, temporary_folder() as folder:

        def note(**entry: Any) -> None:
            journal.write(json.dumps(entry) + "\n")
            journal.flush()

        for number, name in enumerate(job.checks):
            if time.time() > job.deadline:
                note(result=asdict(CheckResult(name, job.devices, "skipped", NO_TIME_LEFT)))
                continue
            note(begins=name)
            own_folder = folder / str(number)
            own_folder.mkdir()
            note(result=asdict(_run_check(CHECKS[name], CheckContext(job.devices, job.seconds, own_folder))))
        note(ended=True)


def _run_check(check: Check, context: CheckContext) -> CheckResult:
    """Run a check; whatever it raises becomes its result."""
    began = time.perf_counter()
    status: Status = "ok"
    detail = ""
    figures: Mapping[str, Any] = {}
    try:
        finding = check.run(context)
        detail, figures = finding.detail, finding.figures
    except CheckSkippedError as reason:
        status, detail = "skipped", str(reason)
    except CheckFailedError as problem:
        status, detail = "failed", str(problem)
    except OnnxplaceError as problem:
        status, detail = "failed", format_one_line(problem)
    except Exception as problem:  # noqa: BLE001 - also of plugins and drivers
        status, detail = "failed", f"{type(problem).__name__}: {format_one_line(problem)}"
    return CheckResult(check.name, context.devices, status, detail, time.perf_counter() - began, figures)
