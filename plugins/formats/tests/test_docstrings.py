"""Examples in docstrings show what they do."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import onnxplace_formats

FOLDER = Path(onnxplace_formats.__file__).parent
EXAMPLES = [path for path in sorted(FOLDER.rglob("*.py")) if ">>>" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_in_docstrings_show_what_they_do(path):
    name = ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
    assert doctest.testmod(import_module(name)).failed == 0
