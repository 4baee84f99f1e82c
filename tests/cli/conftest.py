"""Fixtures of tests about bad input."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from onnxplace.machine import cuda_problem
from tests.support.bad_input import contents


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, which must be empty again at the end."""
    folder = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def refused(run_cli, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command that must be refused: exit code, one line and perhaps one hint, no trace of it on disk."""
    monkeypatch.chdir(tmp_path)

    def check(code: int, said: tuple[str, ...], *arguments: object) -> str:
        before = contents(tmp_path)
        ran = run_cli(*arguments)
        assert ran.code == code, ran
        assert ran.out == ""
        message, *rest = ran.err.splitlines()
        assert re.match(r"error\[[A-Z]\d{3}\] \S", message)
        assert [line[:8] for line in rest] in ([], ["  hint: "])
        for words in said:
            assert words in ran.err
        assert contents(tmp_path) == before
        assert not any(scratch.iterdir())
        return ran.err

    return check


@pytest.fixture
def unusable_gpu() -> None:
    if cuda_problem(0) is None:
        pytest.skip("ONNX Runtime can use a GPU here")
