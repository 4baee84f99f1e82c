"""The plugin as a whole: its placers are passes as any other, its commands are listed, and its examples hold."""

import doctest
import inspect
from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

import onnxplace_learned
from onnxplace.cli.app import cli
from onnxplace.pipeline.registry import find_plugin
from onnxplace.plugins import OFFERED, list_entries
from onnxplace.state import Pass
from onnxplace.utils.docstrings import read_field_docs

PACKAGE = Path(onnxplace_learned.__file__).parent
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if ">>>" in path.read_text(encoding="utf-8")]
PLACERS = ("placeto", "hierarchical", "go", "guided")


def offer(line):
    *words, incomplete = line.split(" ")
    found = ShellComplete(cli, {}, "onnxplace", "_COMPLETE").get_completions(words, incomplete)
    return [item.value for item in found if item.type == "plain"]


def test_the_core_says_where_everything_is_that_the_plugin_adds():
    points = distribution("onnxplace-learned").entry_points
    for kind in ("passes", "commands"):
        names = {point.name for point in points if point.group == f"onnxplace.{kind}"}
        assert names == {name for name, plugin in OFFERED[kind].items() if plugin == "onnxplace-learned"}
        assert {list_entries(kind)[name].distribution for name in names} == {"onnxplace-learned"}


@pytest.mark.parametrize("name", PLACERS)
def test_a_placer_is_a_documented_frozen_dataclass(name):
    kind = find_plugin("passes", name)
    assert issubclass(kind, Pass)
    assert is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
    assert kind.name == name
    assert kind.__module__ == f"onnxplace_learned.{name}"
    assert inspect.getdoc(kind)
    documented = read_field_docs(kind)
    assert all(documented[item.name] for item in fields(kind()))


def test_commands_are_listed_and_completed_like_those_of_the_core(run_cli):
    listed = run_cli("--help").out
    assert "learn " in listed
    assert "study " in listed
    assert run_cli("learn", "placeto", "--help").code == 0
    assert offer("lea") == ["learn"]
    assert offer("learn pl") == ["placeto"]
    assert offer("study traversal --qu") == ["--quiet"]
    assert set(PLACERS) <= set(offer("compile m.onnx --placer "))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_in_docstrings_show_what_they_do(path):
    module = import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    assert doctest.testmod(module).failed == 0
