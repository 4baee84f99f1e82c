"""Errors of the command line itself: each has a code, the command, and the name that was probably meant."""

import pytest

from onnxplace.cli import app
from onnxplace.utils.files import disk_error
from tests.support.commands import only_json

pytestmark = pytest.mark.usefixtures("no_gpus", "work_in_temporary_folder")


@pytest.mark.parametrize(
    ("arguments", "where", "message", "hint"),
    [
        (("compile", "m", "--sed", "1"), "onnxplace compile", "no such option '--sed'", "did you mean '--seed'?; "),
        (("devices", "--devises", "x"), "onnxplace devices",
         "no such option '--devises'", "did you mean '--devices'?; "),
        (("doctor", "-Z"), "onnxplace doctor", "no such option '-Z'", "known: --devices, --seconds, -o, "),
        (("--versio",), "onnxplace", "no such option '--versio'", "did you mean '--version'?; "),
        (("compil", "m"), "onnxplace", "no such command 'compil'", "did you mean 'compile'?; "),
        ((), "onnxplace", "missing command", ""),
        (("compile",), "onnxplace compile", "missing argument 'MODEL'", ""),
        (("compile", "m", "--shape"), "onnxplace compile", "option '--shape' requires an argument", ""),
        (("compile", "m", "--strict=3"), "onnxplace compile", "option '--strict' does not take a value", ""),
        (("compile", "m", "n"), "onnxplace compile", "got unexpected extra argument (n)", ""),
        (("compile", "m", "--seed", "x"), "onnxplace compile",
         "invalid value for '--seed': 'x' is not a valid integer", ""),
        (("bench", "b", "--repeat", "0"), "onnxplace bench", "0 is not in the range x>=1", ""),
        (("compile", "m", "--effort", "hihg"), "onnxplace compile", "'hihg' is not one of 'low', 'default', 'high'",
         "did you mean 'high'?; "),
        (("completion", "fsh"), "onnxplace completion",
         "'fsh' is not one of 'bash', 'zsh', 'fish'", "did you mean 'fish'?; "),
        (("compile", "a\nb", "c\nd"), "onnxplace compile", "got unexpected extra argument (c d)", ""),
    ],
)  # fmt: skip
def test_wrong_arguments_have_a_code_and_a_hint(run_cli, arguments, where, message, hint):
    result = run_cli(*arguments)
    assert (result.code, result.out) == (2, "")
    first, second = result.err.splitlines()
    assert first.startswith(f"error[U000] {where}: ")
    assert message in first
    assert second.startswith(f"  hint: {hint}")
    assert second.endswith(f"`{where} --help` says more")
    if not arguments or arguments[-1] != "--shape":  # which would take --json as its value
        described = run_cli(*arguments, "--json")
        error = only_json(described)["error"] if arguments else None
        if error:
            assert (described.code, error["code"], error["where"]) == (2, "U000", where)
            assert error["message"] == first.removeprefix(f"error[U000] {where}: ")
            assert error["hint"].startswith(hint)


@pytest.mark.parametrize(
    "text",
    [
        "libffi.so.7: cannot open shared object file: No such file or directory",
        "/opt/x.so: undefined symbol: begin",
        "dlopen(/opt/x.dylib, 0x0006): tried: '/opt/x.dylib' (no such file)",
        "/opt/x.so: invalid ELF header",
        "/opt/x.so: file too short",
    ],
)
@pytest.mark.parametrize("kind", [OSError, ImportError])
def test_a_library_that_cannot_be_loaded_is_no_file_to_write(run_cli, monkeypatch, kind, text):
    def fail(*_: object, **__: object) -> None:
        raise kind(text)

    monkeypatch.setattr(app.cli, "main", fail)
    result = run_cli("passes")
    assert result.code == 2
    assert result.err.startswith(f"error[U110] a library cannot be loaded: {text}\n  hint: reinstall the package")


def test_other_errors_of_files_are_as_before():
    assert disk_error(PermissionError(13, "Permission denied", "x.so"), "x.so").code == "U032"
    assert disk_error(OSError("1024 requested and 512 written"), "x").code == "U032"
    assert disk_error(OSError(28, "No space left", "lib.so"), "x").code == "E001"


def test_a_missing_module_is_still_a_defect(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ImportError("No module named 'absent'")

    monkeypatch.setattr(app.cli, "main", fail)
    with pytest.raises(ImportError, match="absent"):
        app.main(["passes"])
