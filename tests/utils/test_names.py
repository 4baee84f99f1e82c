"""Users' patterns match as regular expressions do, and every match takes bounded time."""

import re

import pytest
from hypothesis import given, strategies as st

from onnxplace.errors import UsageError
from onnxplace.utils import names
from onnxplace.utils.names import match_names, match_stars
from tests.conftest import branches

NAMES = ["encoder/0/MatMul", "encoder/1/MatMul", "decoder.0.attn", "a+b", "a" * 40, ""]
CATASTROPHIC = [
    "(a+)+b",
    "(a|aa)+b",
    "(a*)*b",
    "(?x)(a+) + b",
    "(a+)(?#comment)+b",
    ".*" * 20 + "b",
    "a?" * 40 + "a" * 40 + "b",
    "(a|a)" * 40 + "b",
    r"(a+)+\1b",
    "((a{1,20}){1,20}){1,20}b",
]


@pytest.mark.parametrize(
    "pattern",
    ["encoder.*", "a+b", r"a\+b", "decoder.0.attn", "", ".*", "(?i)ENCODER.*", "[de].*", "(?!dec)(.*)/M.*"],
)
def test_patterns_match_as_regular_expressions(pattern):
    (positions,) = match_names([pattern], NAMES, "--colocate")
    assert positions == [i for i, name in enumerate(NAMES) if re.fullmatch(pattern, name)]


@pytest.mark.parametrize("pattern", CATASTROPHIC)
def test_a_pattern_that_may_take_too_long_is_refused_by_name(pattern):
    with pytest.raises(UsageError) as caught:
        match_names(["encoder.*", pattern], NAMES, "map.json")
    assert caught.value.code == "U023"
    assert repr(pattern[:100])[:-1] in caught.value.message
    assert caught.value.where == "map.json"
    assert caught.value.hint


def test_many_names_are_matched_within_a_limit_of_time(monkeypatch):
    assert match_names([".*attention.*"], ["layer/attention/MatMul"] * 100_000, "--colocate") == [[*range(100_000)]]
    monkeypatch.setattr(names, "MAX_SECONDS", 0.0)
    with pytest.raises(UsageError, match=r"U023.*'\.\*a\.\*' can match in too many ways"):
        match_names([".*a.*"], NAMES, "--colocate")


@pytest.mark.parametrize(
    "pattern", ["(", "a{99999999999}", "(" * 20_000 + ")" * 20_000, "[z-a]", "*", "\\", "(?P<n>a)(?P<n>b)", "(?<=a+)b"]
)
def test_an_invalid_regular_expression_gives_a_short_error(pattern):
    with pytest.raises(UsageError) as caught:
        match_names([pattern], NAMES, "--colocate")
    assert caught.value.code == "U023"
    assert len(caught.value.message) < 500


def test_syntax_that_python_may_change_gives_no_warning():
    assert match_names(["[[a]+b"], ["a+b", "[b"], "--colocate") == [[1]]  # warnings are errors in tests


@pytest.mark.parametrize("source", ["map", "colocate"])
def test_a_command_with_a_catastrophic_pattern_ends(run_cli, tmp_path, source):
    model = branches()
    model.graph.node[0].name = "a" * 60
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "map.json").write_text('{"relu": "cpu:1", "(a+)+b": "cpu:0"}')
    options = ("--device-map", tmp_path / "map.json") if source == "map" else ("--colocate", "(a+)+b")
    result = run_cli("compile", tmp_path / "model.onnx", "-o", tmp_path / "b", "--devices", "cpu:0,cpu:1",
                  "--shape", "batch=4", "--no-trial", *options)  # fmt: skip
    assert result.code == 2
    where = tmp_path / "map.json" if source == "map" else "--colocate"
    assert f"error[U023] {where}: '(a+)+b' can match in too many ways" in result.err


# ---------------------------------------------------------------------------------------------- states


def match_by_expression(left: str, right: str, first: str, second: str) -> bool:
    """Return the expected result of `match_stars`, by a regular expression with back references."""

    def build_expression(text: str, backwards: bool) -> str:
        parts = [re.escape(part) for part in text.split("*")]
        stars = [rf"(?:\{number})" if backwards else "([^\0]*)" for number in range(1, len(parts))]
        return "".join(part + star for part, star in zip(parts, [*stars, ""]))

    pattern = re.compile(f"{build_expression(left, False)}\0{build_expression(right, True)}", re.DOTALL)
    return pattern.fullmatch(f"{first}\0{second}") is not None


TEXTS = st.text("ab.", max_size=6)


@given(
    parts=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4),
    stars=st.lists(TEXTS, min_size=3, max_size=3),
    first=TEXTS,
    second=TEXTS,
)
def test_stars_match_the_same_text_on_both_sides(parts, stars, first, second):
    left, right = ("*".join(column) for column in zip(*parts))
    filled = ["".join(p + s for p, s in zip(column, [*stars[: len(parts) - 1], ""])) for column in zip(*parts)]
    for left_text, right_text in [(first, second), (filled[0], second), tuple(filled)]:
        matched = match_stars(left, right, left_text, right_text)
        assert (matched is not None) == match_by_expression(left, right, left_text, right_text)
        if matched is not None:
            for text, column in zip((left_text, right_text), zip(*parts)):
                assert text == "".join(p + s for p, s in zip(column, [*matched, ""]))


def test_many_stars_and_long_names_are_matched_quickly():
    name = "a" * 2000
    assert match_stars("*a" * 60 + "b", "*a" * 60 + "b", name, name) is None
    assert match_stars("*a" * 60, "*a" * 60, name, name) is not None
