"""Names of a stranger's files reach no terminal as they are, whichever command prints them."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st

import onnxplace
from onnxplace.cli import app, shared_options, terminal
from onnxplace.cli.terminal import Display
from onnxplace.errors import MAX_CHARACTERS, Diagnostic, OnnxplaceError, format_name
from tests.conftest import FAST_PIPELINE, Ran, branches
from tests.support.training_models import make_mlp

pytestmark = pytest.mark.usefixtures("no_gpus", "work_in_temporary_folder")

ROOT = Path(onnxplace.__file__).parent
# It sets the title of the terminal, overwrites the line, changes colours, turns the text round, and begins a line that
# seems to be the command's own.
HOSTILE = "\x1b]0;owned\x07\r\x9b31m\u202e\u2028\nFAKE verdict"
# Three parts of a line, escaped and shortened, with a few words between them.
MAX_LINE = 3 * (MAX_CHARACTERS + 100)


def require_harmless(text: str) -> None:
    """Fail for control characters, a line of absurd length, and one that a name began."""
    assert [char for char in set(text) if not char.isprintable() and char != "\n"] == []
    for line in text.splitlines():
        assert len(line) < MAX_LINE
        assert not line.startswith("FAKE")


def rename(model: onnx.ModelProto, suffix: str, *kept: str) -> onnx.ModelProto:
    """Return a model whose graph, nodes, values and weights have a suffix, except for `kept`."""
    new = lambda name: name if name in kept else f"{name}{suffix}"  # noqa: E731
    model.graph.name = f"{model.graph.name}{suffix}"
    for node in model.graph.node:
        node.name = f"{node.name}{suffix}"
        node.input[:] = map(new, node.input)
        node.output[:] = map(new, node.output)
    for item in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        item.name = new(item.name)
    return model


@pytest.fixture
def harmless(run_cli: Callable[..., Ran]) -> Callable[..., Ran]:
    def run(*arguments: object, code: int = 0) -> Ran:
        result = run_cli(*arguments)
        assert result.code == code, result.err
        require_harmless(result.out)
        require_harmless(result.err)
        return result

    return run


@pytest.mark.parametrize("suffix", [HOSTILE, "x" * 200_000], ids=["control", "long"])
@pytest.mark.slow
def test_names_of_a_model_are_harmless_in_every_command(harmless, suffix):
    model, bundle, shape = Path("m.onnx"), Path("b"), ("--shape", "batch=4")
    model.write_bytes(rename(branches(), suffix).SerializeToString())
    placed = ("--devices", "cpu:0,cpu:1", *shape, "--pipeline", FAST_PIPELINE, "-o", bundle)
    assert "placer m-etf" in harmless("compile", model, *placed, "-v").out
    harmless("compile", model, *placed, code=2)  # it exists already
    harmless("plan", model, "--estimate", *shape)
    harmless("plan", model, "--estimate", code=2)  # without a size
    assert "float32 [4, 64]" in harmless("run", bundle).out
    assert harmless("verify", bundle).out.startswith("equal ")
    harmless("bench", bundle, "--repeat", 1, "--no-memory")
    harmless("merge", bundle, "-o", "merged.onnx")
    harmless("report", bundle, "-o", "page.html")
    harmless("export", bundle, "--to", "stages", "-o", "stages")
    harmless("export", bundle, "--to", "onnx-metadata", "-o", "metadata")
    harmless("export", bundle, "--to", "ort-layers", "-o", "layers")
    np.savez("x.npz", **{f"other{HOSTILE}": np.zeros(3)})
    harmless("run", bundle, "--inputs", "x.npz", code=2)


def test_json_has_names_whole_and_in_ascii(harmless, run_cli):
    Path("m.onnx").write_bytes(rename(branches(), HOSTILE + "x" * 10_000).SerializeToString())
    harmless("compile", "m.onnx", "--devices", "cpu:0", "--shape", "batch=4", "--pipeline", FAST_PIPELINE, "-o", "b")
    result = run_cli("run", "b", "--json")
    assert list(json.loads(result.out)["outputs"]) == [f"y{HOSTILE}{'x' * 10_000}"]
    assert result.out.isascii()
    assert not set(result.out) - {"\n"} & set(map(chr, range(32)))


def test_names_of_a_training_step_and_of_files_are_harmless(harmless):
    step = make_mlp("sgd")
    step.graph.name = f"mlp{HOSTILE}"
    onnx.save(step, "step.onnx")
    options = (
        "--pipeline",
        "optimize,profile{estimate=true},coplace{join=never},m-topo,split,emit",
        "--devices",
        "cpu:0,cpu:1",
    )
    folder = "b\x1b[2J\x9b1m"
    harmless("compile", "step.onnx", *options, "-o", folder)
    np.savez("data.npz", x=np.ones((8, 8), np.float32), target=np.ones((8, 4), np.float32))
    harmless("train", folder, "--data", "data.npz", "--steps", 2, "--save", "s\x1b[2J.safetensors")
    harmless("train", folder, "--data", "nothing\x1b[2J.npz", "--steps", 2, code=2)
    harmless("run", folder + "\nFAKE verdict", code=2)


def test_names_of_graphs_targets_and_options_are_harmless(harmless):
    for suffix in (HOSTILE, "x" * 1_000_000):
        nodes = [{"id": f"{number}{suffix}", "memory_bytes": 8, "group": f"g{suffix}"} for number in range(2)]
        devices = [{"id": f"{number}{suffix}", "memory_bytes": 1000} for number in range(2)]
        graph = {"name": f"graph{suffix}", "devices": devices, "nodes": nodes}
        Path("g.json").write_text(json.dumps(graph))
        assert "placer" in harmless("place", "g.json").out
        graph["edges"] = [{"src": f"0{suffix}", "dst": f"unknown{suffix}"}]
        Path("g.json").write_text(json.dumps(graph))
        harmless("place", "g.json", code=2)
        Path("t.toml").write_text(f"[[devices]]\nid = {json.dumps('cpu:0' + suffix)}\nmemory_bytes = 8\n")
        harmless("compile", "m.onnx", "--target", "t.toml", code=2)
    harmless("place", "g.json", f"--unknown{HOSTILE}", code=2)
    harmless(f"compile{HOSTILE}", code=2)
    harmless("explain", f"Z999{HOSTILE}", code=2)


def test_errors_and_notes_take_one_line_for_their_place(capsys):
    error = OnnxplaceError("X001", f"message {HOSTILE!r}", where=f"node {HOSTILE}", hint="hint")
    shared_options.print_notes([Diagnostic("C001", "message", where=f"node {HOSTILE}")])
    for text in (str(error), capsys.readouterr().err.rstrip()):
        require_harmless(text)
    assert str(error).count("\n") == 1


@given(st.text(st.characters(codec=None, categories=None), max_size=2 * MAX_CHARACTERS))
def test_printed_text_holds_no_control_characters_and_no_long_line(text):
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr(terminal.click, "echo", lambda text, err: printed.append(text))
        terminal.print_text(text)
    (shown,) = printed
    require_harmless(shown.replace("FAKE", ""))
    assert shown.count("\n") == text.count("\n")


@given(st.text(st.characters(codec=None, categories=None), max_size=1000))
def test_a_name_and_a_step_of_progress_take_one_line(name):
    for text in (format_name(name), Display(name).describe()):
        assert text.isprintable()
        assert len(text) < 320


def test_a_defect_is_printed_without_control_characters(harmless, monkeypatch, capsys):
    def fail(*_: object) -> None:
        raise ValueError(HOSTILE)

    monkeypatch.setattr("onnxplace.cli.explain.suggest_code", fail)
    try:
        onnxplace.cli.main(["explain", "Z999"])
    except ValueError as defect:
        app._print_defect(defect)
    assert [char for char in capsys.readouterr().err if not char.isprintable() and char != "\n"] == []


def test_commands_print_by_one_module_only():
    """`print_text` escapes names; what prints by itself would forget to."""
    printing = re.compile(r"click\.s?echo\(|(?<!\.)\bprint\(|(?:stdout|stderr)\.write\(|print_exc\(")
    found = {path.name for path in (ROOT / "cli").glob("*.py") if printing.search(path.read_text(encoding="utf-8"))}
    assert found == {"terminal.py"}
