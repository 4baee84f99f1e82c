"""The server is a part of this distribution that is found like a plugin: by its entry point."""

import doctest
import subprocess
import sys
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path

import pytest

import onnxplace_serving

PACKAGE = Path(onnxplace_serving.__file__).parent
FILES = [path for path in sorted(PACKAGE.glob("*.py")) if ">>>" in path.read_text(encoding="utf-8")]
# What a list of commands or the help of `serve` must not wait for.
HEAVY = ("asyncio", "grpc", "h11", "numpy", "onnx", "starlette", "uvicorn")


def test_its_command_is_an_entry_point_of_onnxplace():
    points = distribution("onnxplace").entry_points.select(group="onnxplace.commands")
    assert ("serve", "onnxplace_serving.serve:serve") in [(point.name, point.value) for point in points]


def test_its_command_is_listed_with_those_of_the_core_and_described(run_cli):
    lines = run_cli("--help").out.splitlines()
    (line,) = [line for line in lines if line.startswith("  serve ")]
    assert line.endswith("Answer requests over HTTP and gRPC (KServe v2).")
    assert lines.index(line) < next(number for number, other in enumerate(lines) if other.startswith("  verify "))


def test_help_loads_none_of_its_packages():
    script = f"""
import sys
from onnxplace.cli.app import main
codes = [main(["--help"]), main(["serve", "--help"])]
print(codes, [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stderr.strip() == "[0, 0] []"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_in_docstrings_show_what_they_do(path):
    assert doctest.testmod(import_module(f"onnxplace_serving.{path.stem}")).failed == 0
