"""An examination survives crashes and hangs, reports them at their check, and goes on."""

import signal
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from onnxplace.errors import TargetError, UsageError
from onnxplace_doctor.doctor_report import CheckResult, DoctorReport, format_report
from onnxplace_doctor.examination import examine

pytestmark = [pytest.mark.usefixtures("faulty_kind"), pytest.mark.slow]
NAMES = ("copies", "contract", "order", "faults", "memory", "link", "prediction")


def list_results(report: DoctorReport, *devices: str) -> dict[str, CheckResult]:
    """Return the results on some devices by check."""
    return {result.check: result for result in report.checks if result.devices == devices}


def keep_checks(monkeypatch: pytest.MonkeyPatch, *names: str, limit_seconds: float | None = None) -> None:
    """Run only these checks of pairs, and none of single devices; they measure for fractions of a second."""
    from onnxplace_doctor.examination import CHECKS

    checks = tuple(replace(CHECKS[name], limit_seconds=limit_seconds) for name in names)
    monkeypatch.setattr("onnxplace_doctor.examination.DEVICE_CHECKS", ())
    monkeypatch.setattr("onnxplace_doctor.examination.MACHINE_CHECKS", ())
    monkeypatch.setattr("onnxplace_doctor.examination.PAIR_CHECKS", checks)
    monkeypatch.setattr("onnxplace_doctor.examination.MAX_MEASURING_SHARE", 0.005)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_crash_is_reported_at_its_check_and_the_others_still_run(monkeypatch):
    keep_checks(monkeypatch, "order", "memory")
    report = examine("cpu:0,faulty:0{fault=kills}", seconds=600.0)
    results = list_results(report, "cpu:0", "faulty:0{fault=kills}")
    assert list(results) == ["order", "memory"]
    for name in ("order", "memory"):
        assert (results[name].status, results[name].detail) == ("failed", "crashed with SIGSEGV")
    assert list_results(report, "cpu:0")["open"].status == "ok"
    assert not report.ok


def test_a_hang_is_reported_at_its_check_and_the_others_still_run(monkeypatch):
    keep_checks(monkeypatch, "order", "link", limit_seconds=2.0)  # the device opens within its own, longer limit
    before = sorted(Path(tempfile.gettempdir()).iterdir())
    report = examine("cpu:0,faulty:0{fault=hangs}", seconds=600.0)
    results = list_results(report, "cpu:0", "faulty:0{fault=hangs}")
    assert list(results) == ["order", "link"]
    for name in ("order", "link"):
        assert (results[name].status, results[name].detail) == ("failed", "hangs: not finished after 2 s")
    assert sorted(Path(tempfile.gettempdir()).iterdir()) == before


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("quits", "ended the process: exit code 0"),
        ("aborts", "crashed with SIGABRT; its last output: <path>:3: the device is lost"),
    ],
)
def test_an_early_end_of_the_process_is_reported_at_its_check(fault, words, monkeypatch):
    keep_checks(monkeypatch, "order")
    report = examine(f"cpu:0,faulty:0{{fault={fault}}}", seconds=600.0)
    (check,) = [check for check in report.to_json()["checks"] if check["check"] == "order"]
    assert (check["status"], check["detail"]) == ("failed", words)


def test_an_error_is_reported_with_its_text(monkeypatch):
    keep_checks(monkeypatch, "order", "memory")
    results = list_results(examine("cpu:0,faulty:0{fault=raises}", seconds=600.0), "cpu:0", "faulty:0{fault=raises}")
    for name in ("order", "memory"):
        assert results[name].status == "failed"
        assert "the driver lost the device" in results[name].detail
    assert results["exit"].status == "ok"


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_crash_at_the_end_of_the_process_is_reported(monkeypatch):
    keep_checks(monkeypatch, "order")
    results = list_results(examine("cpu:0,faulty:0{fault=exits}", seconds=600.0), "cpu:0", "faulty:0{fault=exits}")
    assert results["order"].status == "ok"
    assert (results["exit"].status, results["exit"].detail) == ("failed", "crashed with SIGSEGV")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_kind_that_crashes_while_its_devices_are_listed_leaves_the_others(monkeypatch):
    monkeypatch.setenv("FAULTY_DEVICE", "kills")
    keep_checks(monkeypatch, "order")
    report = examine(seconds=600.0)
    assert list_results(report, "faulty")["find"].detail == "crashed with SIGSEGV"
    assert not any("faulty" in device for device in report.devices)
    assert list_results(report, "cpu")["find"].status == "ok"


def test_without_devices_every_kind_that_works_is_checked_and_paired_with_the_first_cpu(monkeypatch):
    keep_checks(monkeypatch, "order")
    report = examine(seconds=600.0)
    assert report.devices[0] == "cpu:0"
    assert "faulty:0" in report.devices
    assert list_results(report, "cpu:0", "faulty:0")["order"].status == "ok"
    assert list_results(report, "cuda")["find"].status in ("skipped", "ok")


def test_checks_of_a_device_that_cannot_be_opened_are_skipped(monkeypatch):
    monkeypatch.setenv("FAULTY_DEVICE", "problem")
    keep_checks(monkeypatch, "order")
    report = examine("cpu:0,faulty:0", seconds=600.0)
    assert list_results(report, "faulty:0")["open"].status == "failed"
    pair = list_results(report, "cpu:0", "faulty:0")
    assert [(item.status, item.detail) for item in pair.values()] == [("skipped", "faulty:0 cannot be opened")]
    assert "/opt/secret" not in str(report.to_json())
    assert "/opt/secret" not in format_report(report)


def test_checks_for_which_no_time_is_left_are_skipped_and_fail_nothing():
    report = examine("cpu:0,cpu:1", seconds=0.1)
    results = list_results(report, "cpu:0", "cpu:1")
    assert list(results) == [*NAMES, "exit"]
    assert {results[name].status for name in NAMES} == {"skipped"}
    assert "give more --seconds" in results["link"].detail
    assert report.ok


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interrupt_ends_it_with_the_results_so_far(monkeypatch):
    keep_checks(monkeypatch, "order", "memory")
    main = threading.main_thread().ident

    def interrupt(name: str, _: int, __: int) -> None:
        if name.endswith("order"):
            signal.pthread_kill(main, signal.SIGINT)

    report = examine("cpu:0,cpu:1", seconds=600.0, observer=interrupt)
    assert report.interrupted
    results = list_results(report, "cpu:0", "cpu:1")
    assert [(item.check, item.detail) for item in results.values()] == [("order", "interrupted")]
    assert list_results(report, "cpu:0")["open"].status == "ok"


def test_the_observer_is_told_of_each_check(monkeypatch):
    keep_checks(monkeypatch, "memory")
    calls = []
    examine("cpu:0,cpu:1", seconds=600.0, observer=lambda *call: calls.append(call))
    assert [name for name, _, _ in calls] == ["cpu:0 open", "cpu:1 open", "cpu:0 cpu:1 memory"]
    assert all(0 <= index < count for _, index, count in calls)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_time_that_is_not_a_number_of_seconds_is_refused(seconds):
    with pytest.raises(UsageError, match="U005"):
        examine("cpu:0", seconds=seconds)


@pytest.mark.parametrize(("devices", "code"), [("cudda:0", "T005"), ("", "T005"), ("cpu:0,cpu:0", "T005")])
def test_what_is_not_a_device_is_refused(devices, code):
    with pytest.raises(TargetError, match=code):
        examine(devices)
