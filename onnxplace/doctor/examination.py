"""Run all checks, each group of them in its own process, and collect the results.

The child notes each beginning and end of a check in a journal, which survives a crash.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from onnxplace.devices import find_kind, list_kind_names
from onnxplace.doctor.check_context import Check, CheckContext, CheckFailedError, CheckSkippedError, Finding
from onnxplace.doctor.device_checks import check_copies, check_memory, check_operators, check_order
from onnxplace.doctor.doctor_report import EXIT_CHECK, CheckResult, DoctorReport, Status
from onnxplace.doctor.machine_checks import check_compiler, check_environment, check_find, check_open
from onnxplace.doctor.session_checks import (
    check_call,
    check_contract,
    check_faults,
    check_link,
    check_prediction,
)
from onnxplace.errors import OnnxplaceError, UsageError, format_one_line
from onnxplace.machine import resolve_device
from onnxplace.target import parse_devices
from onnxplace.utils import ChildProcess, start_child, temporary_folder

# --------------------------------------------------------------------------------------------------------------- checks


# The first use on a machine compiles loops, on slow machines for minutes.
FIRST_USE_SECONDS = 300.0
# Profiling and calibration open many sessions.
SLOW_SECONDS = 180.0

MACHINE_CHECKS = (Check("environment", check_environment), Check("compiler", check_compiler, FIRST_USE_SECONDS))
KIND_CHECKS = (Check("find", check_find),)
OPEN_CHECKS = (Check("open", check_open),)
DEVICE_CHECKS = (
    Check("operators", check_operators),
    Check("contract", check_contract),
    Check("call", check_call),
)
PAIR_CHECKS = (
    Check("copies", check_copies),
    Check("contract", check_contract),
    Check("order", check_order),
    Check("faults", check_faults),
    Check("memory", check_memory),
    Check("link", check_link, SLOW_SECONDS),
    Check("prediction", check_prediction, SLOW_SECONDS),
)
# Also on a single device if there is no other one.
LONE_CHECKS = tuple(check for check in PAIR_CHECKS if check.name not in ("contract", "memory", "link"))
CHECKS = {check.name: check for check in (*MACHINE_CHECKS, *KIND_CHECKS, *OPEN_CHECKS, *DEVICE_CHECKS, *PAIR_CHECKS)}
# Those that use the seconds of their context.
TIMED_CHECKS = ("call", "order", "link")


# ---------------------------------------------------------------------------------------------------- the child process


NO_TIME_LEFT = "no time was left: give more --seconds, or fewer --devices"


@dataclass(frozen=True)
class CheckJob:
    """Checks to run in one process."""

    checks: tuple[str, ...]
    devices: tuple[str, ...]
    seconds: float
    """About how long each check that measures may take."""
    deadline: float
    """When no further check begins, in seconds of `time.time`."""
    journal: Path


def run_checks(job: CheckJob) -> None:
    """Run the checks of a job, one after the other."""
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
    try:
        finding = check.run(context)
    except CheckSkippedError as reason:
        status, finding = "skipped", Finding(str(reason))
    except CheckFailedError as problem:
        status, finding = "failed", Finding(str(problem))
    except OnnxplaceError as problem:
        status, finding = "failed", Finding(format_one_line(problem))
    except Exception as problem:  # noqa: BLE001 - also of plugins and drivers
        status, finding = "failed", Finding(f"{type(problem).__name__}: {format_one_line(problem)}")
    seconds = time.perf_counter() - began
    return CheckResult(check.name, context.devices, status, finding.detail, seconds, finding.figures)


# ------------------------------------------------------------------------------------------------------ the examination


DEFAULT_SECONDS = 120.0
MAX_SECONDS = 86400.0
Observer = Callable[[str, int, int], None]
"""Called with the next check, its index, and the number of all that are known so far."""

# A check that takes longer than this share of all seconds hangs, within these bounds.
LIMIT_SHARE, MIN_LIMIT_SECONDS, MAX_LIMIT_SECONDS = 0.5, 20.0, 60.0
# A process begins and ends its work within this time.
MAX_START_SECONDS = 120.0
POLL_SECONDS = 0.02
# Checks that measure share this part of the time that is left for their group; the others take what they need.
MEASURING_SHARE, MIN_MEASURING_SECONDS = 0.6, 0.2
# At most this share of the limit after which a check hangs.
MAX_MEASURING_SHARE = 0.3


@dataclass(frozen=True)
class Group:
    """Checks that run one after the other in one process, on the same devices."""

    checks: tuple[Check, ...]
    devices: tuple[str, ...] = ()


def examine(
    devices: str | Sequence[str] | None = None,
    *,
    seconds: float = DEFAULT_SECONDS,
    limit_seconds: float | None = None,
    observer: Observer | None = None,
) -> DoctorReport:
    """Check devices of this machine, one by one and in pairs, as docs/doctor.md describes.

    Crashes and hangs end a child process only, and are results. Ctrl-C ends the examination with the results so far.

    Args:
        devices: ids with options; by default, all that work.
        seconds: about how long it takes.
        limit_seconds: after which any check hangs; by default half of `seconds`, between 20 and 60, or the check's own.
        observer: called before each check.

    Raises:
        UsageError: for seconds that are not positive, or more than a day.
        TargetError: for names that are not devices.

    >>> examine("cpu:0,cpu:1", seconds=20.0).ok  # doctest: +SKIP
    True
    """
    if not 0 < seconds <= MAX_SECONDS:
        message = f"expected a positive number of seconds, at most {MAX_SECONDS:.0f}, got {seconds:g}"
        raise UsageError("U005", message, where="--seconds", hint="120 seconds suffice for most machines")
    names = _name_devices(devices) if devices is not None else None
    examination = _Examination(seconds, limit_seconds, observer or (lambda *_: None))
    try:
        checked = examination.run(names)
    except KeyboardInterrupt:
        examination.note_interrupt()
        checked = examination.devices
    return examination.summarise(checked)


def _name_devices(devices: str | Sequence[str]) -> tuple[str, ...]:
    """Return devices as texts with their options, and `npu:0` as the device of this machine that is meant."""
    texts = []
    for spec in map(resolve_device, parse_devices(devices)):
        options = ",".join(f"{key}={value}" for key, value in spec.options.items())
        texts.append(f"{spec.id}{{{options}}}" if options else spec.id)
    return tuple(texts)


@dataclass
class _Running:
    """A check that has begun in a child process."""

    name: str
    began: float = field(default_factory=time.perf_counter)


class _Examination:
    """The state of one examination."""

    def __init__(self, seconds: float, limit_seconds: float | None, observer: Observer) -> None:
        self.devices: tuple[str, ...] = ()
        self._began, self._seconds, self._limit_seconds = time.perf_counter(), seconds, limit_seconds
        self._budget_began = self._began
        self._usual_limit = min(max(LIMIT_SHARE * seconds, MIN_LIMIT_SECONDS), MAX_LIMIT_SECONDS)
        self._results: list[CheckResult] = []
        self._observer, self._planned = observer, 0
        self._group, self._running = Group(()), _Running("")
        self._is_complete, self._interrupted = False, False

    def run(self, devices: tuple[str, ...] | None) -> tuple[str, ...]:
        """Run all checks; return the devices that were checked."""
        self._run_groups([Group(MACHINE_CHECKS)])
        # The first use on a machine compiles loops, which is not part of the user's seconds.
        self._budget_began = time.perf_counter()
        if devices is None:
            self._run_groups([Group(KIND_CHECKS, (name,)) for name in list_kind_names()])
            self.devices, pairs = self._list_usable()
        else:
            self.devices, pairs = devices, list(combinations(devices, 2))
        self._run_groups([Group(OPEN_CHECKS, (device,)) for device in self.devices])
        lone = LONE_CHECKS if not pairs else ()
        groups = [Group((*DEVICE_CHECKS, *lone), (device,)) for device in self.devices]
        self._run_groups([*groups, *(Group(PAIR_CHECKS, pair) for pair in pairs)])
        return self.devices

    def _list_usable(self) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
        """Return the devices that `find` found, and the pairs to check."""
        figures = [result.figures for result in self._results if result.check == "find" and result.status == "ok"]
        usable = tuple(device for item in figures for device in item["usable"])
        hosts = [device for device in usable if find_kind(device.partition(":")[0]).is_host]
        others = [device for device in usable if device not in hosts]
        pairs = [*combinations(hosts, 2), *((hosts[0], device) for device in others), *combinations(others, 2)]
        return usable, [*pairs, *(tuple(item["parts"]) for item in figures if item["parts"])]

    def _run_groups(self, groups: Sequence[Group]) -> None:
        self._planned += sum(len(group.checks) for group in groups)
        for number, group in enumerate(groups):
            self._group = group
            failed = {item.devices for item in self._results if (item.check, item.status) == ("open", "failed")}
            if unusable := [device for device in group.devices if (device,) in failed]:
                reason = f"{' and '.join(unusable)} cannot be opened"
                self._results += [CheckResult(item.name, group.devices, "skipped", reason) for item in group.checks]
            else:
                self._run_group(group, len(groups) - number)

    def _run_group(self, group: Group, groups_left: int) -> None:
        """Run the checks of a group in a process; after a crash or hang, the checks after it in a new one."""
        left = self._seconds - (time.perf_counter() - self._budget_began)
        measuring = sum(check.name in TIMED_CHECKS for check in group.checks)
        share = MEASURING_SHARE * left / groups_left / max(measuring, 1)
        checks, deadline = list(group.checks), time.time() + left
        while checks:
            with temporary_folder() as folder:
                job = CheckJob(
                    checks=tuple(check.name for check in checks),
                    devices=group.devices,
                    seconds=min(
                        max(share, MIN_MEASURING_SECONDS),
                        (self._limit_seconds or self._usual_limit) * MAX_MEASURING_SHARE,
                    ),
                    deadline=deadline,
                    journal=folder / "journal",
                )
                count = len(self._results)
                problem = self._run_job(job, {check.name: check for check in checks})
            done = {result.check for result in self._results[count:]}
            checks = [check for check in checks if check.name not in done]
            if not checks:
                status = "failed" if problem else "ok"
                self._results.append(CheckResult(EXIT_CHECK, group.devices, status, problem))  # type: ignore[arg-type]
            elif problem:
                name = self._running.name or checks[0].name
                self._end_check(name, "failed", problem)
                checks = [check for check in checks if check.name != name]

    def _end_check(self, name: str, status: Status, detail: str) -> None:
        """Add the result of a check that did not end by itself."""
        seconds = time.perf_counter() - self._running.began
        self._results.append(CheckResult(name, self._group.devices, status, detail, seconds))
        self._running = _Running("")

    def _run_job(self, job: CheckJob, checks: Mapping[str, Check]) -> str:
        """Run a job, and add its results; return how its process crashed or hung, or an empty text."""
        self._running, self._is_complete = _Running(""), False
        job.journal.touch()
        # What an ended process leaves among temporary files is removed with the folder.
        temporary = str(job.journal.parent)
        with start_child(run_checks, job, TMPDIR=temporary, TEMP=temporary, TMP=temporary) as child:
            for entries, exited in _follow(child, job.journal):
                for entry in entries:
                    self._note(entry)
                limit = self._choose_limit(checks)
                if not exited and time.perf_counter() - self._running.began > limit:
                    return f"hangs: not finished after {limit:.0f} s"
            if child.exit_code == 0 and self._is_complete:
                return ""
            end = child.describe_end()
            if (child.exit_code or 0) >= 0:
                return f"ended the process: {end}"
            line = child.read_last_line()
            return f"crashed with {end}{f'; its last output: {line}' if line else ''}"

    def _choose_limit(self, checks: Mapping[str, Check]) -> float:
        """Return after how many seconds the running check hangs, or the beginning or end of its process."""
        if not self._running.name:
            return MAX_START_SECONDS
        return self._limit_seconds or checks[self._running.name].limit_seconds or self._usual_limit

    def _note(self, entry: Mapping[str, Any]) -> None:
        """Take note of an entry of the journal."""
        if "begins" in entry:
            self._running = _Running(entry["begins"])
            title = " ".join((*self._group.devices, entry["begins"]))
            done = sum(result.check != EXIT_CHECK for result in self._results)
            self._observer(title, done, self._planned)
        elif "result" in entry:
            result = entry["result"]
            self._results.append(CheckResult(**{**result, "devices": tuple(result["devices"])}))
            self._running = _Running("")
        else:
            self._is_complete = True

    def note_interrupt(self) -> None:
        """Add the check that was interrupted."""
        self._interrupted = True
        if self._running.name:
            self._end_check(self._running.name, "skipped", "interrupted")

    def summarise(self, devices: tuple[str, ...]) -> DoctorReport:
        """Return the report."""
        environment = next((item.figures for item in self._results if item.check == "environment"), {})
        checks = tuple(replace(item, figures={}) if item.check == "environment" else item for item in self._results)
        seconds = time.perf_counter() - self._began
        return DoctorReport(environment, devices, checks, seconds, self._interrupted)


def _follow(child: ChildProcess, journal: Path) -> Iterator[tuple[list[dict[str, Any]], bool]]:
    """Yield new entries of a journal, and whether the child has exited, until it has."""
    with journal.open("rb") as stream:
        begun = b""
        while True:
            exited = child.exit_code is not None
            *lines, begun = (begun + stream.read()).split(b"\n")
            yield [json.loads(line) for line in lines], exited
            if exited:
                return
            time.sleep(POLL_SECONDS)
