"""Completion of command lines: what is offered, and that bash takes it."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from onnxplace.cli import app
from onnxplace.cli.completion import COMPLETE_VARIABLE, SHELLS
from tests.support.commands import only_json

BASH = shutil.which("bash")
# Completes a line as bash does when the user presses the tabulator key.
PRESS_TAB = """
source "$1"
COMP_LINE=$2 COMP_POINT=${#2}
_onnxplace_completion onnxplace
printf '%s\\n' "${COMPREPLY[@]}"
"""


def offer(line: str) -> list[str]:
    """Return what is offered for the last word of a command line."""
    *words, incomplete = line.split(" ")
    found = ShellComplete(app.cli, {}, "onnxplace", COMPLETE_VARIABLE).get_completions(words, incomplete)
    return [str(item.value) for item in found if item.type == "plain"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("comp", ["compile", "completion"]),
        ("compile m.onnx --qu", ["--quiet"]),
        ("compile m.onnx --objective la", ["latency"]),
        ("compile m.onnx --placer m-", ["m-topo", "m-etf", "m-sct"]),
        ("place g.json --placer ex", ["exact"]),
        ("place g.json --placer spl", []),  # a pass, and no placer
        ("compile m.onnx --pipeline opt", ["optimize"]),
        ("compile m.onnx --pipeline profile{repeat=5,seconds=2},cop", ["profile{repeat=5,seconds=2},coplace"]),
        ("compile m.onnx --pipeline profile{rep", []),
        ("run b --runtime s", ["simulated"]),
        ("passes multi", ["multilevel"]),
        ("runtimes on", ["onnxruntime"]),
        ("explain p01", ["P010", "P011", "P012"]),
        ("completion z", ["zsh"]),
        ("frobnicate x", []),
    ],
)
def test_names_are_completed(line, expected):
    assert offer(line) == expected


def test_every_placer_is_offered():
    offered = offer("compile m.onnx --placer ")
    assert {"auto", "single", "stages"} <= set(offered)
    assert not {"optimize", "profile", "split", "emit"} & set(offered)


def test_devices_are_completed_after_a_comma_and_once_each(monkeypatch):
    monkeypatch.setattr("onnxplace.cli.completion._list_devices", lambda: ["cuda:0", "cpu:0", "cpu:1"])
    assert offer("compile m.onnx --devices c") == ["cuda:0", "cpu:0", "cpu:1"]
    assert offer("plan m.onnx --devices cpu:0,c") == ["cpu:0,cuda:0", "cpu:0,cpu:1"]


def test_bundles_are_completed_here_and_one_level_below(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.bundle", "models/b.bundle", "models/other", "models/deep/c.bundle"):
        (tmp_path / name).mkdir(parents=True)
        if name.endswith(".bundle"):
            (tmp_path / name / "manifest.json").touch()
    assert offer("run ") == ["a.bundle", "models/b.bundle"]
    assert offer("bench models/deep/") == ["models/deep/c.bundle"]
    (other,) = ShellComplete(app.cli, {}, "onnxplace", COMPLETE_VARIABLE).get_completions(["run"], "nothing")
    assert other.type == "dir"  # the shell offers folders


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory) -> Path:
    """The script for bash, with the program of this environment."""
    folder = tmp_path_factory.mktemp("completion")
    program = folder / "onnxplace"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m onnxplace "$@"\n')
    program.chmod(0o755)
    done = subprocess.run([program, "completion", "bash"], capture_output=True, text=True, check=True)
    (folder / "script").write_text(done.stdout)
    return folder / "script"


@pytest.mark.skipif(BASH is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("onnxplace comp", ["compile", "completion"]),
        ("onnxplace compile m.onnx --pipeline 'profile{repeat=5},cop", ["5},coplace"]),  # what follows the `=`
        ("onnxplace passes mul", ["multilevel"]),
        ("onnxplace compile m.onnx --devices cpu:", ["0"]),  # what follows the colon
    ],
)
def test_bash_completes_lines(bash_script, line, expected):
    environment = {**os.environ, "PATH": f"{bash_script.parent}{os.pathsep}{os.environ['PATH']}"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [BASH, "--norc", "-c", PRESS_TAB, "bash", str(bash_script), line], capture_output=True, text=True, check=True,
        env=environment,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stderr == ""
    assert done.stdout.split()[: len(expected)] == expected
    assert after.ru_utime - before.ru_utime < 3  # processor time; 0.1 s on an idle machine


def test_completion_imports_nothing_heavy():
    script = (
        "import sys; from onnxplace.cli import app; from click.shell_completion import ShellComplete as S; "
        "c = S(app.cli, {}, 'onnxplace', 'X'); "
        "[c.get_completions(*w) for w in ((['compile', 'm', '--placer'], 'm'), (['run'], ''), (['explain'], 'P'))]; "
        "print([name for name in ('numpy', 'onnx', 'onnxruntime', 'rich', 'pydantic', 'numba') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_a_script(run_cli, shell):
    result = run_cli("completion", shell)
    assert result.code == 0
    assert COMPLETE_VARIABLE in result.out
    assert only_json(run_cli("completion", shell, "--json"))["shell"] == shell


def test_without_a_name_it_is_the_shell_of_the_user(run_cli, monkeypatch):
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert run_cli("completion").out == run_cli("completion", "fish").out
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    refused = run_cli("completion")
    assert (refused.code, refused.out) == (2, "")
    assert "expected a shell, one of bash, zsh, fish, got tcsh" in refused.err


def test_a_line_that_cannot_be_completed_is_silent():
    environment = {**os.environ, COMPLETE_VARIABLE: "bash_complete", "COMP_LINE": "onnxplace run", "COMP_POINT": "x"}
    done = subprocess.run([sys.executable, "-m", "onnxplace"], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("", "")
