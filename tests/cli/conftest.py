"""Fixtures of tests about bad input."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from onnxplace.machine.hardware import find_device_problem
from onnxplace.target.target import Device
from tests.support.bad_input import contents


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for temporary files, which must be empty at the end."""
    folder = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def refused(run_cli, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a check that a command is refused.

    It has an exit code, one line, at most one hint, and leaves no files.
    """
    monkeypatch.chdir(tmp_path)

    def check(code: int, expected_words: tuple[str, ...], *arguments: object) -> str:
        before = contents(tmp_path)
        result = run_cli(*arguments)
        assert result.code == code, result
        assert result.out == ""
        message, *rest = result.err.splitlines()
        assert re.match(r"error\[[A-Z]\d{3}\] \S", message)
        assert [line[:8] for line in rest] in ([], ["  hint: "])
        for words in expected_words:
            assert words in result.err
        assert contents(tmp_path) == before
        assert not any(scratch.iterdir())
        return result.err

    return check


@pytest.fixture
def unusable_gpu() -> None:
    if find_device_problem(Device("cuda:0", 0)) is None:
        pytest.skip("ONNX Runtime can use a GPU here")


@pytest.fixture
def work_in_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
