"""With --json, errors are JSON too."""

import json
import sys

import pytest

from onnxplace.cli import app
from tests.support.commands import only_json

pytestmark = pytest.mark.usefixtures("no_gpus", "work_in_temporary_folder")


@pytest.mark.parametrize(
    ("arguments", "code", "exit_code"),
    [
        (("compile", "none.onnx"), "M001", 2),
        (("compile", "none.onnx", "--shape", "n=1,n=2"), "M022", 2),
        (("compile", "none.onnx", "--seed", "-1"), "U005", 2),
        (("run", "none"), "N001", 2),
        (("verify", "none"), "N001", 2),
        (("bench", "none"), "N001", 2),
        (("place", "none"), "D001", 2),
        (("devices", "--devices", "cudda:0"), "T005", 2),
        (("passes", "none"), "U001", 2),
        (("runtimes", "none"), "U001", 2),
        (("place", "none", "--devices", "0"), "U000", 2),
        (("compile",), "U000", 2),
        (("frobnicate",), "U000", 2),
    ],
)
def test_with_json_an_error_is_the_one_object_on_stdout_and_text_on_stderr(run_cli, arguments, code, exit_code):
    result, without = run_cli(*arguments, "--json"), run_cli(*arguments)
    assert (result.code, without.code) == (exit_code, exit_code)
    (error,) = only_json(result).values()
    assert set(error) == {"code", "message", "where", "hint"}
    assert error["code"] == code
    assert error["message"] in result.err
    assert without.out == ""
    assert without.err == result.err


@pytest.mark.parametrize(
    ("raised", "code", "exit_code"),
    [
        (KeyboardInterrupt(), "X011", 130),
        (SystemExit(app.SIGTERM_EXIT_CODE), "X011", 143),
        (MemoryError(), "X010", 4),
        (OSError(28, "full", "disk"), "E001", 4),
    ],
)
def test_interruptions_are_reported_as_json_too(run_cli, monkeypatch, raised, code, exit_code):
    def stop(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(app.cli, "main", stop)
    result = run_cli("passes", "--json")
    assert (result.code, only_json(result)["error"]["code"]) == (exit_code, code)


def test_a_defect_does_not_exit_with_1(monkeypatch, capsys):
    def break_down() -> int:
        raise ZeroDivisionError("something of ours")

    monkeypatch.setattr(app, "main", break_down)
    monkeypatch.setattr(app.signal, "signal", lambda *_: None)
    monkeypatch.setattr(app.sys, "unraisablehook", sys.unraisablehook)  # what `entry` sets is undone with it
    monkeypatch.setattr(app.sys, "argv", ["onnxplace", "passes", "--json"])
    with pytest.raises(SystemExit) as left:
        app.entry()
    assert left.value.code == 4
    expected_words = capsys.readouterr()
    assert "ZeroDivisionError: something of ours" in expected_words.err
    assert "please report it" in expected_words.err
    assert json.loads(expected_words.out)["error"]["code"] == "X012"
