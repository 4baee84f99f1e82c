"""Fixtures of the tests of models."""

from collections.abc import Callable
from pathlib import Path

import pytest
from onnx import ModelProto


@pytest.fixture
def require_refusal(run_cli, tmp_path: Path, fast_pipeline: str) -> Callable[..., str]:
    """Return a function that compiles a model, and checks its refusal: exit code 2, one line, no files left."""

    def check(model: ModelProto | Path, *expected_words: str, pipeline: str = fast_pipeline) -> str:
        path = model if isinstance(model, Path) else tmp_path / "m.onnx"
        if isinstance(model, ModelProto):
            path.write_bytes(model.SerializeToString())
        before = sorted(tmp_path.rglob("*"))
        result = run_cli("compile", path, "--pipeline", pipeline)
        assert result.code == 2, result
        assert result.err.startswith("error["), result.err
        assert [line[:8] for line in result.err.splitlines()[1:]] in ([], ["  hint: "])
        for words in expected_words:
            assert words in result.err
        assert len(result.err) < 2000
        assert sorted(tmp_path.rglob("*")) == before
        return result.err

    return check
