"""Training is a part of this distribution that is found like a plugin: by its entry points."""

import doctest
import subprocess
import sys
from importlib import import_module
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest

import onnxplace_training
from onnxplace.plugins import load_plugin

PACKAGE = Path(onnxplace_training.__file__).parent
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>>" in path.read_text(encoding="utf-8")
]
if find_spec("torch") is None:  # the extra `[torch]`
    MODULES = [name for name in MODULES if not name.startswith("onnxplace_training.torch.")]
# What a list of commands, the help of `train` or a model that is not torch's must not wait for.
HEAVY = ("matplotlib", "numpy", "onnx", "safetensors", "torch")


def test_its_command_and_its_source_are_entry_points_of_onnxplace():
    points = distribution("onnxplace").entry_points
    assert "onnxplace_training.train:train" in [point.value for point in points.select(group="onnxplace.commands")]
    sources = [(point.name, point.value) for point in points.select(group="onnxplace.sources")]
    assert sources == [("torch", "onnxplace_training.sources:convert_torch")]
    for group, value in (("recognisers", "recognise_step:recognise"), ("objectives", "step_strategies:find_objective")):
        assert [point.value for point in points.select(group=f"onnxplace.{group}")] == [f"onnxplace_training.{value}"]


def test_its_command_is_listed_with_those_of_the_core_and_described(run_cli):
    lines = run_cli("--help").out.splitlines()
    (line,) = [line for line in lines if line.startswith("  train ")]
    assert line.endswith("Train with BUNDLE, which was compiled from a training step.")
    assert lines.index(line) < next(number for number, other in enumerate(lines) if other.startswith("  verify "))


def test_help_and_the_question_whether_a_model_is_torchs_load_none_of_its_packages(tmp_path):
    script = f"""
import sys
from onnxplace.cli.app import main
codes = [main(["--help"]), main(["train", "--help"])]
from onnxplace.plugins import load_plugin
convert, _ = load_plugin("sources", "torch")
found = [convert(model, None, None) for model in ("m.onnx", "m.pb", 3, {{}})]
print(codes, found, [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stderr.strip() == "[0, 0] [None, None, None, None] []"


def test_defects_of_its_source_are_those_of_onnxplace():
    _, entry = load_plugin("sources", "torch")
    assert entry.distribution == ""


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_show_what_they_do(name):
    assert doctest.testmod(import_module(name)).failed == 0
