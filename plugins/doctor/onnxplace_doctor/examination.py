"""Run all checks, each group of them in its own process, and collect the results.

The child notes each beginning and end of a check in a journal, which survives a crash.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

from onnxplace.errors import OnnxplaceError, UsageError, format_one_line
from onnxplace.machine.hardware import resolve_device
from onnxplace.target.kind_table import find_kind, list_kind_names
from onnxplace.target.parsing import parse_devices
from onnxplace.utils.file_locks import temporary_folder
from onnxplace.utils.subprocesses import start_child
from onnxplace_doctor.check_context import CheckContext, CheckFailedError, CheckSkippedError, Finding
from onnxplace_doctor.device_checks import check_copies, check_memory, check_operators, check_order
from onnxplace_doctor.doctor_report import EXIT_CHECK, CheckResult, DoctorReport, Status
from onnxplace_doctor.machine_checks import check_compiler, check_environment, check_find, check_open
from onnxplace_doctor.session_checks import check_call, check_contract, check_faults, check_link, check_prediction

# --------------------------------------------------------------------------------------------------------------- checks


@dataclass(frozen=True)
class Check:
    """A check by name, with the function that does it."""

    name: str
    run: Callable[[CheckContext], Finding]
    """Raises CheckFailedError if something is wrong; any other error is a failure too."""
    limit_seconds: float | None = None
    """After which it hangs; None for the limit that most have."""
    is_timed: bool = False
    """Whether it measures for the seconds of its context."""
    needs_pair: bool = False
    """Of the checks of pairs: whether a device that has no other goes without it."""


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
    Check("call", check_call, is_timed=True),
)
PAIR_CHECKS = (
    Check("copies", check_copies),
    Check("contract", check_contract, needs_pair=True),
    Check("order", check_order, is_timed=True),
    Check("faults", check_faults),
    Check("memory", check_memory, needs_pair=True),
    Check("link", check_link, SLOW_SECONDS, is_timed=True, needs_pair=True),
    Check("prediction", check_prediction, SLOW_SECONDS),
)
CHECKS = {check.name: check for check in (*MACHINE_CHECKS, *KIND_CHECKS, *OPEN_CHECKS, *DEVICE_CHECKS, *PAIR_CHECKS)}


# ---------------------------------------------------------------------------------------------------- the child process


NO_TIME_LEFT = "no time was left: give more --seconds, or fewer --devices"
JOURNAL = "journal"


def run_checks(job: tuple[Sequence[str], CheckContext, float]) -> None:
    """Run checks by name one after the other, until no time is left; the last item is the end, of `time.time`.

    A line of the journal is the name of a check that begins, or a result.
    """
    names, context, deadline = job
    with (context.folder / JOURNAL).open("a", encoding="utf-8") as journal:
        for name in names:
            if time.time() > deadline:
                result = CheckResult(name, context.devices, "skipped", NO_TIME_LEFT)
            else:
                print(json.dumps(name), file=journal, flush=True)
                folder = context.folder / name
                folder.mkdir()
                result = _run_check(CHECKS[name], replace(context, folder=folder))
            print(json.dumps(asdict(result)), file=journal, flush=True)


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
    except Exception as problem:  # noqa: BLE001 - also of plugins and drivers
        name = "" if isinstance(problem, OnnxplaceError) else f"{type(problem).__name__}: "
        status, finding = "failed", Finding(name + format_one_line(problem))
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
        examination.run(names)
    except KeyboardInterrupt:
        return examination.summarise(interrupted=True)
    return examination.summarise()


def _name_devices(devices: str | Sequence[str]) -> tuple[str, ...]:
    """Return devices as texts with their options, and `npu:0` as the device of this machine that is meant."""
    texts = []
    for spec in map(resolve_device, parse_devices(devices)):
        options = ",".join(f"{key}={value}" for key, value in spec.options.items())
        texts.append(f"{spec.id}{{{options}}}" if options else spec.id)
    return tuple(texts)


class _Examination:
    """The state of one examination."""

    def __init__(self, seconds: float, limit_seconds: float | None, observer: Observer) -> None:
        self._seconds, self._limit_seconds, self._observer = seconds, limit_seconds, observer
        self._usual_limit = min(max(LIMIT_SHARE * seconds, MIN_LIMIT_SECONDS), MAX_LIMIT_SECONDS)
        self._devices: tuple[str, ...] = ()
        self._results: list[CheckResult] = []
        self._planned = 0
        self._began = self._budget_began = self._check_began = time.perf_counter()
        # The check that runs, on what; no name while a process begins or ends.
        self._running: tuple[str, tuple[str, ...]] = ("", ())

    def run(self, devices: tuple[str, ...] | None) -> None:
        """Run all checks."""
        self._run_groups([(MACHINE_CHECKS, ())])
        # The first use on a machine compiles loops, which is not part of the user's seconds.
        self._budget_began = time.perf_counter()
        if devices is None:
            self._run_groups([(KIND_CHECKS, (name,)) for name in list_kind_names()])
            self._devices, pairs = self._list_usable()
        else:
            self._devices, pairs = devices, list(combinations(devices, 2))
        self._run_groups([(OPEN_CHECKS, (device,)) for device in self._devices])
        lone = [check for check in PAIR_CHECKS if not check.needs_pair] if not pairs else []
        groups = [((*DEVICE_CHECKS, *lone), (device,)) for device in self._devices]
        self._run_groups([*groups, *((PAIR_CHECKS, pair) for pair in pairs)])

    def _list_usable(self) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
        """Return the devices that `find` found, and the pairs to check."""
        figures = [result.figures for result in self._results if result.check == "find" and result.status == "ok"]
        usable = tuple(device for item in figures for device in item["usable"])
        hosts = [device for device in usable if find_kind(device.partition(":")[0]).is_host]
        others = [device for device in usable if device not in hosts]
        pairs = [*combinations(hosts, 2), *((hosts[0], device) for device in others), *combinations(others, 2)]
        return usable, [*pairs, *(tuple(item["parts"]) for item in figures if item["parts"])]

    def _run_groups(self, groups: Sequence[tuple[Sequence[Check], tuple[str, ...]]]) -> None:
        """Run checks on what belongs to them; skip those of a device that cannot be opened."""
        self._planned += sum(len(checks) for checks, _ in groups)
        for number, (checks, devices) in enumerate(groups):
            failed = {item.devices for item in self._results if (item.check, item.status) == ("open", "failed")}
            if unusable := [device for device in devices if (device,) in failed]:
                reason = f"{' and '.join(unusable)} cannot be opened"
                self._results += [CheckResult(check.name, devices, "skipped", reason) for check in checks]
                continue
            left = self._seconds - (time.perf_counter() - self._budget_began)
            measuring = sum(check.is_timed for check in checks)
            share = MEASURING_SHARE * left / (len(groups) - number) / max(measuring, 1)
            most = (self._limit_seconds or self._usual_limit) * MAX_MEASURING_SHARE
            self._run_group(checks, devices, min(max(share, MIN_MEASURING_SECONDS), most), time.time() + left)

    def _run_group(self, checks: Sequence[Check], devices: tuple[str, ...], seconds: float, deadline: float) -> None:
        """Run checks in a process; after a crash or hang, the checks after it in a new one."""
        remaining = {check.name: check for check in checks}
        while remaining:
            with temporary_folder() as folder:
                problem = self._run_process(remaining, CheckContext(devices, seconds, folder), deadline)
            if remaining:
                name = self._running[0] or next(iter(remaining))
                self._end_check(name, "failed", problem)
                del remaining[name]
            else:
                status: Status = "failed" if problem else "ok"
                self._results.append(CheckResult(EXIT_CHECK, devices, status, problem))

    def _run_process(self, remaining: dict[str, Check], context: CheckContext, deadline: float) -> str:
        """Run checks in a child, and drop those that it ends; return how it crashed or hung, or an empty text."""
        self._begin_check("", context.devices)
        journal, line_count = context.folder / JOURNAL, 0
        journal.touch()
        # What an ended process leaves among temporary files is removed with the folder.
        temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(context.folder))
        with start_child(run_checks, (tuple(remaining), context, deadline), None, **temporary) as child:
            has_exited = False
            while not has_exited:
                has_exited = child.exit_code is not None
                for line in journal.read_text(encoding="utf-8").split("\n")[line_count:-1]:  # the last one may grow
                    line_count += 1
                    self._read_entry(json.loads(line), remaining)
                limit = MAX_START_SECONDS
                if name := self._running[0]:
                    limit = self._limit_seconds or remaining[name].limit_seconds or self._usual_limit
                if not has_exited and time.perf_counter() - self._check_began > limit:
                    return f"hangs: not finished after {limit:.0f} s"
                time.sleep(POLL_SECONDS)
            if child.exit_code == 0 and not remaining:
                return ""
            end = child.describe_end()
            if (child.exit_code or 0) >= 0:
                return f"ended the process: {end}"
            output = child.read_last_line()
            return f"crashed with {end}{f'; its last output: {output}' if output else ''}"

    def _read_entry(self, entry: str | Mapping[str, Any], remaining: dict[str, Check]) -> None:
        """Take the beginning or the result of a check from the journal."""
        devices = self._running[1]
        if isinstance(entry, str):
            self._begin_check(entry, devices)
            done = sum(result.check != EXIT_CHECK for result in self._results)
            self._observer(" ".join((*devices, entry)), done, self._planned)
        else:
            self._results.append(CheckResult(**{**entry, "devices": devices}))
            self._begin_check("", devices)
            del remaining[entry["check"]]

    def _begin_check(self, name: str, devices: tuple[str, ...]) -> None:
        self._running, self._check_began = (name, devices), time.perf_counter()

    def _end_check(self, name: str, status: Status, detail: str) -> None:
        """Add the result of a check that did not end by itself."""
        devices, seconds = self._running[1], time.perf_counter() - self._check_began
        self._results.append(CheckResult(name, devices, status, detail, seconds))
        self._begin_check("", devices)

    def summarise(self, *, interrupted: bool = False) -> DoctorReport:
        """Return the report; a check that runs was interrupted."""
        if interrupted and (name := self._running[0]):
            self._end_check(name, "skipped", "interrupted")
        environment = next((item.figures for item in self._results if item.check == "environment"), {})
        checks = tuple(replace(item, figures={}) if item.check == "environment" else item for item in self._results)
        return DoctorReport(environment, self._devices, checks, time.perf_counter() - self._began, interrupted)
