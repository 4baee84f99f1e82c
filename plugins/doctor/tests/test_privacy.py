"""Reports hold no paths, host names or user names."""

import getpass
import json
import platform
import tempfile
from pathlib import Path

import pytest

from onnxplace_doctor.doctor_report import CheckResult, DoctorReport, _list_private, hide_private


@pytest.fixture
def named_machine(monkeypatch):
    """Let this be a machine with recognisable names."""
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    monkeypatch.setattr(platform, "node", lambda: "engine7.example.org")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ada"))
    _list_private.cache_clear()
    yield
    _list_private.cache_clear()


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("cannot open '/data/secret model.onnx'", "cannot open '<path> model.onnx'"),
        ("a.py:3: /usr/lib/libcuda.so.1: no such file", "a.py:3: <path>: no such file"),
        (r"cannot open C:\Users\somebody\model.onnx", "cannot open <path>"),
        (f"it is in {tempfile.gettempdir()}/x/y.onnx now", "it is in <path> now"),
        ("cuda:0/0 -> cuda:0/1 12 GB/s, 3 requests/s, and/or 1/2", None),
        ("cpu:0 -> cpu:1 25 us, 17.2 GB/s", None),
    ],
)
def test_paths_are_hidden_and_devices_are_not(text, hidden):
    assert hide_private(text) == (hidden or text)


def test_names_are_hidden_in_every_text(named_machine):
    value = {"detail": ["user Ada on engine7", ("engine7.example.org", 3)], "flag": None, "canada": "canada"}
    assert hide_private(value) == {
        "detail": ["user <user> on <host>", ["<host>", 3]],
        "flag": None,
        "canada": "canada",
    }


def test_a_report_hides_what_checks_found(named_machine):
    secret = "ada@engine7: /home/ada/models/secret.onnx"
    report = DoctorReport(
        {"system_release": "6.1-engine7"},
        ("cpu:0",),
        (CheckResult("open", ("cpu:0",), "failed", secret, 0, {"x": [secret]}),),
        1,
    )
    text = json.dumps(report.to_json())
    for word in ("ada", "engine7", "secret", "/home"):
        assert word not in text
