"""Help, progress on terminals, closed pipes, and any version of click."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

import onnxplace
from onnxplace.cli import app
from onnxplace.cli.app import main
from onnxplace.cli.shared_options import print_notes
from onnxplace.errors import Diagnostic
from onnxplace.utils.quantities import format_bytes
from tests.support.commands import FAST, load_all_commands

pytestmark = pytest.mark.usefixtures("no_gpus", "work_in_temporary_folder")


def test_the_module_runs_as_the_command_does():
    done = subprocess.run([sys.executable, "-m", "onnxplace", "--help"], capture_output=True, text=True, check=True)
    for command in ("compile", "run", "verify", "bench", "devices", "passes", "runtimes"):
        assert command in done.stdout
    assert "Exit codes" in done.stdout


@pytest.mark.parametrize("command", ["compile", "run", "verify", "bench", "devices", "passes", "runtimes"])
def test_every_command_has_help_and_json(run_cli, command):
    result = run_cli(command, "--help")
    assert result.code == 0
    assert "--json" in result.out


def test_version_is_that_of_the_package(run_cli):
    assert onnxplace.__version__ in run_cli("--version").out


ESCAPE = "\x1b["


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_goes_to_a_terminal_on_stderr_and_nowhere_else(run_cli, model_file, monkeypatch, capsys):
    quiet = run_cli("compile", model_file, *FAST, "-o", "quiet")
    monkeypatch.delenv("CI", raising=False)  # logs of CI get no live line
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["compile", str(model_file), *FAST, "-o", "quietly"]) == 0
    assert ESCAPE in terminal.getvalue()
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == len(quiet.out.splitlines())
    assert ESCAPE not in shown + quiet.out + quiet.err


def test_json_keeps_a_terminal_free_of_progress(model_file, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["compile", str(model_file), *FAST, "--json"]) == 0
    assert ESCAPE not in terminal.getvalue()
    json.loads(capsys.readouterr().out)


def test_notes_go_to_stderr(run_cli, model_file):
    result = run_cli("compile", model_file, *FAST, "--json")
    assert result.err.startswith("note[C001] ")
    assert "note[" not in result.out


NOTE = Diagnostic("P030", "a long message " * 20, where="cpu:1", hint="do something")


def test_notes_follow_the_result(model_file, monkeypatch):
    both = io.StringIO()
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(sys, "stderr", both)
    assert main(["compile", str(model_file), *FAST]) == 0
    lines = both.getvalue().splitlines()
    notes = [index for index, line in enumerate(lines) if line.startswith("note[")]
    (result,) = [index for index, line in enumerate(lines) if line.startswith("bundle: ")]
    assert notes == [*range(result + 1, len(lines))] != []


def test_a_note_is_one_line_and_all_of_it_with_verbose(run_cli, model_file):
    plain, whole = (run_cli("compile", model_file, *FAST, "--force", *more) for more in ((), ("-v",)))
    hints = [line for line in whole.err.splitlines() if line.startswith("  hint: ")]
    assert hints
    assert "hint: " not in plain.err
    for line in plain.err.splitlines():
        assert line in whole.err


def test_notes_are_as_wide_as_the_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    print_notes([NOTE, Diagnostic("P031", "short")])
    first, second, more = terminal.getvalue().splitlines()
    assert first == f"note[P030] cpu:1: {NOTE.message}"[:37] + "..."
    assert second == "note[P031] short"
    assert more == "  more about notes: -v, or onnxplace explain CODE"


def test_a_closed_pipe_is_not_a_failure(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    assert main(["passes", "--json"]) in (0, 141)


def test_loop_compilation_is_announced_once_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import numba

    from onnxplace.cli.shared_options import announce_loop_compilation
    from onnxplace.utils.jit import on_compiling

    on_compiling(lambda: None)
    announce_loop_compilation(False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert numba.njit(lambda x: x + 3)(1) == 4
    announce_loop_compilation(True)  # as with --json
    assert numba.njit(lambda x: x + 4)(1) == 5
    assert capsys.readouterr().err == ""
    announce_loop_compilation(False)
    assert capsys.readouterr().err == ""
    for add in (1, 2):
        assert numba.njit(lambda x, add=add: x + add)(1) == 1 + add
    assert capsys.readouterr().err.count("compiling loops for this machine") == 1


def test_a_reader_that_goes_away_ends_the_examples_without_a_traceback():
    script = Path(__file__).parents[2] / "examples" / "models.py"
    command = [sys.executable, script, "--list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        child.stdout.close()
        assert child.stderr.read() == ""
    assert child.returncode == 0


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 19, "1.5 MiB"),
        (1 << 30, "1.00 GiB"),
    ],
)
def test_small_amounts_of_memory_are_not_rounded_to_zero(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize("name", sorted(load_all_commands()))
def test_flags_mean_the_same_in_every_version_of_click(name):
    """In click 8.3.0 to 8.3.2, `flag_value=False, default=True` is False whether the flag is given or not."""
    for parameter in load_all_commands()[name].params:
        if getattr(parameter, "is_flag", False):
            assert parameter.flag_value is not False, f"{name} {parameter.opts[0]}"


@pytest.mark.parametrize(
    ("arguments", "expected_words"),
    [
        (("compil",), "no such command 'compil'\n  hint: did you mean 'compile'?"),
        (("RUN", "x"), "no such command 'RUN'\n  hint: did you mean 'run'?"),
        (("frobnicate",), "no such command 'frobnicate'\n  hint: known: compile, run,"),
        (("--frobnicate",), "--frobnicate"),
        (("--", "--frobnicate"), "--frobnicate"),
    ],
)
def test_an_unknown_command_gets_the_nearest_one_whatever_click_does(run_cli, arguments, expected_words):
    result = run_cli(*arguments)
    assert (result.code, result.out) == (2, "")
    assert expected_words in result.err


def test_completing_an_unknown_command_in_a_shell_is_not_an_error():
    with app.cli.make_context("onnxplace", ["compil"], resilient_parsing=True) as context:
        assert app.cli.resolve_command(context, ["compil"]) == (None, None, [])
