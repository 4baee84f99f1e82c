"""Each check passes on CPU devices, and fails when what it checks is broken."""

import re
from pathlib import Path

import numpy as np
import pytest

import onnxplace
from onnxplace.errors import ExecutionError, OnnxplaceError
from onnxplace_doctor.check_context import CheckContext, CheckFailedError, CheckSkippedError, require_same
from onnxplace_doctor.examination import CHECKS

PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"
PAIR = ("cpu:0", "cpu:1")


def test_the_documented_checks_are_those_that_run():
    documented = re.findall(
        r"^\| `(\w+)` \| (?:the machine|a kind|a device|a pair|each process)", PAGE.read_text(), re.M
    )
    assert sorted(documented) == sorted([*CHECKS, "exit"])


@pytest.mark.parametrize(
    ("check", "devices"),
    [
        ("environment", ()),
        ("compiler", ()),
        ("find", ("cpu",)),
        *((name, ("cpu:0",)) for name in ("open", "operators", "contract", "call")),
        *((name, PAIR) for name in ("copies", "contract", "order", "faults", "memory", "link", "prediction")),
        *((name, ("cpu:0",)) for name in ("copies", "order", "faults", "prediction")),
    ],
)
@pytest.mark.sampled(3)
def test_a_check_passes_on_cpu_devices(check, devices, make_context):
    assert CHECKS[check].run(make_context(*devices)).detail


@pytest.mark.usefixtures("faulty_kind")
@pytest.mark.parametrize(
    ("check", "fault", "words"),
    [
        ("copies", "corrupts", "elements differ"),
        ("copies", "late", "differ"),
        ("order", "corrupts", "in flight, after"),
        ("order", "late", "in flight, after"),
        ("memory", "corrupts", "the model on both devices"),
        ("operators", "feeds", "its error is"),
        ("open", "feeds", "-x"),
        ("faults", "late", "elements differ|names no|right"),
        ("prediction", "feeds", "error of its output"),
        ("copies", "raises", "the driver lost the device"),
    ],
)
@pytest.mark.sampled(3)
def test_a_check_fails_on_a_device_with_a_fault(check, fault, words, make_context):
    faulty = f"faulty:0{{fault={fault}}}"
    devices = (faulty,) if check in ("operators", "open") else ("cpu:0", faulty)
    with pytest.raises((CheckFailedError, OnnxplaceError), match=words):
        CHECKS[check].run(make_context(*devices))


@pytest.mark.usefixtures("faulty_kind")
def test_contract_fails_on_a_device_with_a_fault(make_context, monkeypatch):
    monkeypatch.setenv("FAULTY_DEVICE", "late")
    with pytest.raises(CheckFailedError, match="request 1: output"):
        CHECKS["contract"].run(make_context("cpu:0", "faulty:0"))


def test_contract_is_skipped_for_devices_with_options(make_context):
    with pytest.raises(CheckSkippedError, match="options"):
        CHECKS["contract"].run(make_context("cuda:0{provider=tensorrt}"))


@pytest.mark.usefixtures("faulty_kind")
@pytest.mark.parametrize("check", ["open", "operators", "copies", "order", "faults", "memory"])
@pytest.mark.sampled(3)
def test_the_same_device_without_a_fault_passes(check, make_context):
    devices = ("faulty:0",) if check in ("open", "operators") else ("cpu:0", "faulty:0")
    assert CHECKS[check].run(make_context(*devices)).detail


def test_memory_fails_if_a_device_accepts_more_than_its_limit(make_context, monkeypatch):
    plain = CheckContext.make_target
    monkeypatch.setattr(CheckContext, "make_target", lambda self, memory_bytes=None: plain(self, 1 << 30))
    with pytest.raises(CheckFailedError, match=r"cpu:0 with 24\.0 MiB accepted 32\.0 MiB"):
        CHECKS["memory"].run(make_context(*PAIR))


def test_faults_fails_if_an_error_does_not_name_its_device(make_context, monkeypatch):
    monkeypatch.setattr(ExecutionError, "__str__", lambda self: "it failed somewhere")
    with pytest.raises(CheckFailedError, match="does not name its device cpu:0"):
        CHECKS["faults"].run(make_context(*PAIR))


def test_faults_fails_if_a_run_with_a_failing_node_returns(make_context, monkeypatch):
    monkeypatch.setattr("onnxplace_doctor.session_checks._require_error", lambda *_: None)
    plain = onnxplace.InferenceSession.run

    def run(self, names, feeds, **options):
        return plain(self, names, {**feeds, "p": feeds["p"][:2], "q": feeds["q"][:2]}, **options)

    monkeypatch.setattr(onnxplace.InferenceSession, "run", run)
    with pytest.raises(CheckFailedError, match="a failing node on cpu:0 returned outputs"):
        CHECKS["faults"].run(make_context(*PAIR))


def test_faults_fails_if_a_timeout_has_no_effect(make_context, monkeypatch):
    monkeypatch.setattr("onnxplace_doctor.session_checks._ENDLESS_ROUNDS", 3)
    with pytest.raises(CheckFailedError, match="an endless run on cpu:0 returned"):
        CHECKS["faults"].run(make_context(*PAIR))


def test_find_skips_a_kind_without_its_provider(make_context):
    with pytest.raises(CheckSkippedError, match="has no CUDAExecutionProvider"):
        CHECKS["find"].run(make_context("cuda"))


@pytest.mark.usefixtures("faulty_kind")
def test_find_fails_if_no_device_of_a_kind_works(make_context, monkeypatch):
    monkeypatch.setenv("FAULTY_DEVICE", "problem")
    with pytest.raises(CheckFailedError, match="faulty:0: cannot open"):
        CHECKS["find"].run(make_context("faulty"))


def test_link_needs_two_devices(make_context):
    with pytest.raises(CheckSkippedError, match="one device"):
        CHECKS["link"].run(make_context("cpu:0"))


@pytest.mark.parametrize(
    ("actual", "expected", "words"),
    [
        (np.array([1.0, -0.0]), np.array([1.0, 0.0]), "1 of 2 elements differ, the first at 1"),
        (np.array([1], np.int64), np.array([1], np.int32), r"expected int32\[1\], got int64\[1\]"),
        (np.zeros((0, 2)), np.zeros((2, 0)), r"expected float64\[2, 0\]"),
        (np.array(["a", "b"], object), np.array(["a", "c"], object), "the texts differ"),
    ],
)
def test_arrays_are_compared_bit_for_bit(actual, expected, words):
    with pytest.raises(CheckFailedError, match=words):
        require_same(actual, expected, "value")
    require_same(expected, expected.copy(), "value")
