"""The tree of errors matches its drawing, and every error can be copied and pickled."""

import copy
import inspect
import pickle
import re

import pytest
from hypothesis import given, strategies as st

import onnxplace
from onnxplace import errors
from onnxplace.cli import app
from onnxplace.errors import OnnxplaceError, suggest_nearest

CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, OnnxplaceError) and kind.__module__ == errors.__name__
}
FOR_EVERY_CLASS = pytest.mark.parametrize("name", CLASSES)


def read_drawing() -> dict[str, tuple[str, int | None]]:
    """Read the tree at the top of errors.py: name -> (parent, exit code, inherited where none is written)."""
    tree: dict[str, tuple[str, int | None]] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        match = re.fullmatch(
            r"    (?P<indent>[| ]*)(?:[|`]-- )?(?P<name>[A-Z]\w+)(?: +(?:exit (?P<code>\d))?.*)?", line
        )
        if match:
            depth = len(match["indent"]) // 4 + ("-- " in line)
            path = [*path[:depth], match["name"]]
            parent = path[-2] if depth else "Exception"
            code = int(match["code"]) if match["code"] else tree.get(parent, ("", None))[1]
            tree[match["name"]] = (parent, code)
    return tree


def test_the_drawing_shows_exactly_the_error_classes():
    assert set(read_drawing()) == set(CLASSES)
    assert len(CLASSES) > 8


@FOR_EVERY_CLASS
def test_the_drawing_shows_its_parent(name):
    assert CLASSES[name].__bases__[0].__name__ == read_drawing()[name][0]


@FOR_EVERY_CLASS
def test_the_drawing_shows_its_exit_code(name):
    expected = read_drawing()[name][1]
    if expected is not None:  # the root has none in the drawing: it is 4
        assert CLASSES[name].exit_code == expected
    assert CLASSES[name].exit_code in (2, 3, 4)


def make_error(kind: type[OnnxplaceError]) -> OnnxplaceError:
    return kind("X001", "it is broken", where="node 'left'", hint="repair it")


@FOR_EVERY_CLASS
def test_the_text_has_code_place_message_and_hint(name):
    assert str(make_error(CLASSES[name])) == "error[X001] node 'left': it is broken\n  hint: repair it"


def test_place_and_hint_may_be_missing():
    assert str(OnnxplaceError("X001", "it is broken")) == "error[X001] it is broken"
    assert str(OnnxplaceError("X001", "it is broken", where="left")) == "error[X001] left: it is broken"


@FOR_EVERY_CLASS
@pytest.mark.parametrize("transfer", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_copied_or_pickled_error_is_equal(name, transfer):
    error = make_error(CLASSES[name])
    copied = transfer(error)
    assert type(copied) is type(error)
    assert vars(copied) == vars(error)
    assert str(copied) == str(error)


@FOR_EVERY_CLASS
def test_the_command_line_returns_its_exit_code_and_prints_it_once(name, monkeypatch, capsys):
    def refuse(*_: object, **__: object) -> None:
        raise make_error(CLASSES[name])

    monkeypatch.setattr(app.cli, "main", refuse)
    assert app.main(["passes"]) == CLASSES[name].exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"{make_error(CLASSES[name])}\n"


@FOR_EVERY_CLASS
def test_every_class_is_public_and_documented(name):
    assert getattr(onnxplace, name) is CLASSES[name]
    assert CLASSES[name].__doc__


def test_the_nearest_name_is_offered():
    assert suggest_nearest("m-eft", ["single", "m-topo", "m-etf"]) == "did you mean 'm-etf'?"
    assert suggest_nearest("cpu", ["cpu", "cuda"]) == "did you mean 'cpu'?"


def test_case_and_underscores_do_not_matter():
    assert suggest_nearest("M_ETF", ["single", "m-etf"]) == "did you mean 'm-etf'?"
    assert suggest_nearest("prof", ["coplace", "profile"]) == "did you mean 'profile'?"


def test_a_gpu_is_a_cuda_device_never_a_cpu():
    assert suggest_nearest("gpu:1", ["cpu:1", "cuda:0", "cuda:1"]) == "did you mean 'cuda:1'?"
    assert suggest_nearest("GPU", ["cpu", "cuda"]) == "did you mean 'cuda'?"
    assert suggest_nearest("gpu:0", ["cpu:0", "cpu:1"]) == "known: cpu:0, cpu:1"


def test_all_names_are_listed_when_none_is_near():
    assert suggest_nearest("zzz", ["single", "m-etf"]) == "known: single, m-etf"


@given(st.sampled_from(["optimize", "profile", "coplace"]), st.data())
def test_one_wrong_letter_is_corrected(name, data):
    position = data.draw(st.integers(0, len(name) - 1))
    misspelled = name[:position] + data.draw(st.sampled_from("abcxyz")) + name[position + 1 :]
    assert suggest_nearest(misspelled, ["optimize", "profile", "coplace"]) == f"did you mean '{name}'?"
