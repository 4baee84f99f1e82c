"""The command as a user runs it."""

import getpass
import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import only_json
from tests.support.fault_checks import HUNG_SECONDS, wait_until

ROOT = Path(__file__).parents[3]
REPORT_FIELDS = ["schema_version", "ok", "interrupted", "seconds", "environment", "devices", "checks"]
CHECK_FIELDS = ["check", "devices", "status", "detail", "seconds", "figures"]
ENVIRONMENT_FIELDS = {
    *("onnxplace", "python", "python_implementation", "system", "system_release", "machine", "libc", "packages"),
    *("onnxruntime_providers", "onnxruntime_build", "processor", "cores", "cores_of_machine", "memory_bytes"),
    *("available_memory_bytes", "nvidia", "variables"),
}
PAIR_CHECKS = ("copies", "contract", "order", "faults", "memory", "link", "prediction", "exit")


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """The output of a whole self-check of two CPU devices, and its report."""
    folder = tmp_path_factory.mktemp("complete")
    # Checks that measure take fractions of a second, and the others as long as a slow machine needs.
    quickly = "from onnxplace.cli.app import entry; from onnxplace_doctor import examination; "
    quickly += "examination.MAX_MEASURING_SHARE = 0.01; entry()"
    # On a slow machine, lines on stderr would say how far it is.
    options = ["--devices", "cpu:0,cpu:1", "--seconds", "600", "--quiet"]
    command = [sys.executable, "-c", quickly, "doctor", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert (done.returncode, done.stderr) == (0, ""), f"{done.stdout}\n{done.stderr}"
    return done.stdout, folder


@pytest.mark.slow
def test_all_checks_of_cpu_devices_pass_and_the_report_has_the_documented_fields(complete):
    _, folder = complete
    report = json.loads((folder / "onnxplace-doctor.json").read_text())
    assert list(report) == REPORT_FIELDS
    assert (report["schema_version"], report["ok"], report["interrupted"]) == (1, True, False)
    assert set(report["environment"]) == ENVIRONMENT_FIELDS
    assert report["devices"] == ["cpu:0", "cpu:1"]
    for check in report["checks"]:
        assert list(check) == CHECK_FIELDS
    pair = [check for check in report["checks"] if check["devices"] == ["cpu:0", "cpu:1"]]
    assert tuple(check["check"] for check in pair) == PAIR_CHECKS
    figures = {check["check"]: check["figures"] for check in pair if check["status"] == "ok"}
    assert figures["copies"]["refused"] == []
    if "link" in figures:
        assert figures["link"]["links"]["cpu:1 -> cpu:0"]["bytes_per_second"] > 0
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert all(f"`{name}`" in page for name in (*REPORT_FIELDS, *CHECK_FIELDS))


@pytest.mark.slow
def test_the_output_shows_each_check_and_what_to_send(complete):
    output, folder = complete
    assert [path.name for path in folder.iterdir()] == ["onnxplace-doctor.json"]
    for check in PAIR_CHECKS[:-1]:
        assert any(line.split()[1:4] == [check, "cpu:0", "cpu:1"] for line in output.splitlines()), check
    assert "What to send us: onnxplace-doctor.json" in output


@pytest.mark.slow
def test_the_report_of_this_machine_has_no_private_names(complete):
    _, folder = complete
    text = (folder / "onnxplace-doctor.json").read_text()
    private = {platform.node(), platform.node().partition(".")[0], getpass.getuser(), Path.home().name, str(folder)}
    words = set(text.replace('"', " ").split())
    assert not {name for name in private if len(name) > 2} & words
    assert str(Path.home()) not in text
    assert sys.prefix not in text
    assert "/tmp" not in text


def test_bad_usage_exits_with_2(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, code in (
        (("--devices", "cudda:0"), "T005"),
        (("--seconds", "0"), "error[U005] --seconds: expected a positive number of seconds, at most 86400, got 0"),
        (("--output", tmp_path / "none" / "report.json"), "U032"),
        (("model.onnx",), "error[U000] onnxplace doctor: got unexpected extra argument"),
    ):
        result = run_cli("doctor", *arguments)
        assert (result.code, result.out) == (2, "")
        assert code in result.err
    assert only_json(run_cli("doctor", "--devices", "cudda:0", "--json"))["error"]["code"] == "T005"
    assert list(tmp_path.iterdir()) == []


def test_help_names_the_options_and_the_exit_code(run_cli):
    text = run_cli("doctor", "--help").out
    for words in ("--devices", "--seconds", "--output", "--json", "Exit 1", "120", "onnxplace-doctor.json"):
        assert words in text
    assert "doctor" in run_cli("--help").out


@pytest.mark.slow
@pytest.mark.usefixtures("faulty_kind")
def test_a_failed_check_exits_with_1_and_json_is_the_only_output(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAULTY_DEVICE", "problem")
    result = run_cli("doctor", "--devices", "faulty:0", "--seconds", "600", "--json")
    report = only_json(result)
    assert (result.code, report["ok"]) == (1, False)
    assert {"open": "failed", "operators": "skipped"}.items() <= {
        check["check"]: check["status"] for check in report["checks"]
    }.items()
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".json"] == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command_and_its_processes(number, code, tmp_path):
    command = [sys.executable, "-m", "onnxplace", "doctor", "--devices", "cpu:0", "--seconds", "600", "-o", "r.json"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: any(path.name.endswith("journal") and path.read_text() for path in tmp_path.rglob("*")))
    process.send_signal(number)
    output, _ = process.communicate(timeout=HUNG_SECONDS)
    assert process.returncode == code
    if number == signal.SIGINT:
        assert "interrupted" in output
        assert json.loads((tmp_path / "r.json").read_text())["interrupted"]
