"""The tree of errors is as it is drawn, and every error can travel between processes."""

import copy
import inspect
import pickle
import re

import pytest
from hypothesis import given, strategies as st

import onnxplace
from onnxplace import errors
from onnxplace.cli import app
from onnxplace.errors import OnnxplaceError, nearest

CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ == errors.__name__
}
EVERY_CLASS = pytest.mark.parametrize("name", CLASSES)


def drawn() -> dict[str, tuple[str, int | None]]:
    """Read the tree at the top of errors.py: name -> (parent, exit code, which is the parent's unless one is said)."""
    found: dict[str, tuple[str, int | None]] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        match = re.fullmatch(
            r"    (?P<indent>[| ]*)(?:[|`]-- )?(?P<name>[A-Z]\w+)(?: +(?:exit (?P<code>\d))?.*)?", line
        )
        if match:
            depth = len(match["indent"]) // 4 + ("-- " in line)
            path = [*path[:depth], match["name"]]
            parent = path[-2] if depth else "Exception"
            code = int(match["code"]) if match["code"] else found.get(parent, ("", None))[1]
            found[match["name"]] = (parent, code)
    return found


def test_every_class_is_in_the_drawing_and_the_other_way_round():
    assert set(drawn()) == set(CLASSES)
    assert len(CLASSES) > 8


@EVERY_CLASS
def test_the_drawing_shows_its_parent(name):
    assert CLASSES[name].__bases__[0].__name__ == drawn()[name][0]


@EVERY_CLASS
def test_the_drawing_shows_its_exit_code(name):
    expected = drawn()[name][1]
    if expected is not None:  # the root says none: it is 4
        assert CLASSES[name].exit_code == expected
    assert CLASSES[name].exit_code in (2, 3, 4)


def make(kind: type[OnnxplaceError]) -> OnnxplaceError:
    return kind("X001", "it is broken", where="node 'left'", hint="mend it")


@EVERY_CLASS
def test_it_says_code_place_problem_and_hint(name):
    assert str(make(CLASSES[name])) == "error[X001] node 'left': it is broken\n  hint: mend it"


def test_place_and_hint_may_be_missing():
    assert str(OnnxplaceError("X001", "it is broken")) == "error[X001] it is broken"
    assert str(OnnxplaceError("X001", "it is broken", where="here")) == "error[X001] here: it is broken"


@EVERY_CLASS
@pytest.mark.parametrize("travel", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_it_survives_a_journey(name, travel):
    error = make(CLASSES[name])
    arrived = travel(error)
    assert type(arrived) is type(error)
    assert vars(arrived) == vars(error)
    assert str(arrived) == str(error)


@EVERY_CLASS
def test_the_command_returns_its_exit_code_and_prints_it_once(name, monkeypatch, capsys):
    def refuse(*_: object, **__: object) -> None:
        raise make(CLASSES[name])

    monkeypatch.setattr(app.cli, "main", refuse)
    assert app.main(["passes"]) == CLASSES[name].exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"{make(CLASSES[name])}\n"


@EVERY_CLASS
def test_it_is_public_and_documented(name):
    assert getattr(onnxplace, name) is CLASSES[name]
    assert CLASSES[name].__doc__


def test_the_nearest_name_is_offered():
    assert nearest("m-eft", ["single", "m-topo", "m-etf"]) == "did you mean 'm-etf'?"
    assert nearest("cpu", ["cpu", "cuda"]) == "did you mean 'cpu'?"


def test_case_and_underscores_do_not_matter():
    assert nearest("M_ETF", ["single", "m-etf"]) == "did you mean 'm-etf'?"
    assert nearest("prof", ["coplace", "profile"]) == "did you mean 'profile'?"


def test_a_gpu_is_a_cuda_device_never_a_cpu():
    assert nearest("gpu:1", ["cpu:1", "cuda:0", "cuda:1"]) == "did you mean 'cuda:1'?"
    assert nearest("GPU", ["cpu", "cuda"]) == "did you mean 'cuda'?"
    assert nearest("gpu:0", ["cpu:0", "cpu:1"]) == "known: cpu:0, cpu:1"


def test_all_names_are_listed_when_none_is_near():
    assert nearest("zzz", ["single", "m-etf"]) == "known: single, m-etf"


@given(st.sampled_from(["optimize", "profile", "coplace"]), st.data())
def test_one_wrong_letter_is_forgiven(name, data):
    position = data.draw(st.integers(0, len(name) - 1))
    misspelt = name[:position] + data.draw(st.sampled_from("abcxyz")) + name[position + 1 :]
    assert nearest(misspelt, ["optimize", "profile", "coplace"]) == f"did you mean '{name}'?"
