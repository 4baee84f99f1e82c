"""The Python snippets of all pages are valid, and use names and arguments that onnxplace has."""

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from onnxplace.pipeline.registry import find_plugin

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
SNIPPETS = [
    pytest.param(block, id=f"{page.relative_to(ROOT).as_posix()}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S))
]


def list_problems(text: str) -> Iterator[str]:
    """Yield what a snippet uses of onnxplace that does not exist; raises SyntaxError."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onnxplace"):
            module = import_module(node.module)
            for alias in node.names:  # that it is listed is enough: to load it may need PyTorch
                if (
                    alias.name not in dir(module)
                    and not hasattr(module, alias.name)
                    and find_spec(f"{node.module}.{alias.name}") is None
                ):
                    yield f"{node.module} has no {alias.name}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "onnxplace":
            if not hasattr(import_module("onnxplace"), node.attr):
                yield f"onnxplace has no {node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from list_wrong_arguments(node)


def list_wrong_arguments(call: ast.Call) -> Iterator[str]:
    """Yield the names of arguments that a function of onnxplace does not take."""
    function = getattr(import_module("onnxplace"), call.func.attr, None)
    if ast.unparse(call.func.value) != "onnxplace" or function is None:
        return
    names = set(inspect.signature(function).parameters)
    for keyword in call.keywords:
        if keyword.arg == "runtime" and isinstance(keyword.value, ast.Constant):
            names |= set(inspect.signature(find_plugin("runtimes", keyword.value.value)).parameters)
    for keyword in call.keywords:
        if keyword.arg and keyword.arg not in names:
            yield f"onnxplace.{call.func.attr} takes no {keyword.arg}"


@pytest.mark.parametrize("text", SNIPPETS)
def test_a_snippet_uses_what_onnxplace_has(text):
    assert list(list_problems(text)) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import onnxplace\nonnxplace.compyle('m.onnx')", "onnxplace has no compyle"),
        ("import onnxplace\nonnxplace.compile('m.onnx', device='cpu:0')", "onnxplace.compile takes no device"),
        ("from onnxplace.testing import check_passes", "onnxplace.testing has no check_passes"),
    ],
)
def test_a_wrong_snippet_is_found(text, problem):
    assert list(list_problems(text)) == [problem]


def test_there_are_snippets():
    assert len(SNIPPETS) > 25
