"""The text form of a pipeline round-trips, and errors point at the wrong character."""

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
from hypothesis import given, strategies as st

from onnxplace.errors import UsageError
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.pipeline.text_form import PassSpec, build_pass, format_pipeline, make_spec, parse_pipeline
from onnxplace.plugins import BUILTIN
from onnxplace.state import Pass, State

words = st.from_regex(r"[A-Za-z0-9_./:;|+*?^$()-]+", fullmatch=True)
# Whatever a file name or a regular expression may hold.
values = st.one_of(words, st.text(max_size=20), st.text(alphabet='ab{}=," \\\t\n', max_size=10))
specs = st.builds(PassSpec, words, st.dictionaries(words, values, max_size=4))
pipelines = st.lists(specs, min_size=1, max_size=5).map(tuple)


@given(pipelines)
def test_written_pipelines_are_read_back_equal(pipeline):
    assert parse_pipeline(format_pipeline(pipeline)) == pipeline


@given(pipelines)
def test_a_pipeline_that_was_read_is_written_as_the_same_text(pipeline):
    text = format_pipeline(pipeline)
    assert format_pipeline(parse_pipeline(text)) == text


@given(pipelines, st.sampled_from(["", " ", "\t", "\n  "]))
def test_blanks_between_tokens_are_ignored(pipeline, blank):
    spaced = f"{blank},{blank}".join(
        f"{spec.name}{blank}{{{blank}"
        + f"{blank},{blank}".join(
            f"{key}{blank}={blank}{str(PassSpec('x', {key: value}))[len(key) + 3 : -1]}"
            for key, value in spec.options.items()
        )
        + f"{blank}}}{blank}"
        for spec in pipeline
    )
    assert parse_pipeline(blank + spaced) == pipeline


def test_a_pass_with_empty_braces_has_no_options():
    assert parse_pipeline("fuse{}") == parse_pipeline("fuse") == (PassSpec("fuse"),)


@pytest.mark.parametrize(
    ("text", "character", "expected", "token"),
    [
        ("", 1, "the name of a pass", "the end"),
        ("   ", 4, "the name of a pass", "the end"),
        ("fuse,", 6, "the name of a pass", "the end"),
        ("fuse,,split", 6, "the name of a pass", "','"),
        (",fuse", 1, "the name of a pass", "','"),
        ("fuse split", 6, "',' between passes", "'split'"),
        ("fuse}", 5, "',' between passes", "'}'"),
        ("fuse=3", 5, "',' between passes", "'='"),
        ("profile{", 9, "the name of an option", "the end"),
        ("profile{=3}", 9, "the name of an option", "'='"),
        ("profile{repeat}", 15, "'=' after 'repeat'", "'}'"),
        ("profile{repeat=}", 16, "a value for 'repeat'", "'}'"),
        ("profile{repeat=3", 17, "',' or '}'", "the end"),
        ("profile{repeat=3 seconds=4}", 18, "',' or '}'", "'seconds'"),
        ("profile{repeat=3,}", 18, "the name of an option", "'}'"),
        ("profile{repeat={}}", 16, "a value for 'repeat'", "'{'"),
        ('profile{costs="a}', 15, "a value for 'costs'", "'\"'"),
    ],
)
def test_an_error_names_the_character_and_the_expected_token(text, character, expected, token):
    with pytest.raises(UsageError) as caught:
        parse_pipeline(text)
    assert caught.value.code == "U002"
    assert caught.value.message == f"expected {expected} at character {character}, got {token}"
    assert caught.value.where == f"pipeline {text!r}"
    assert parse_pipeline(re.search(r"profile.*", caught.value.hint)[0])


@given(st.text(alphabet='ab{}=,"; ', max_size=12))
def test_any_text_is_read_or_refused_within_its_length(text):
    try:
        parse_pipeline(text)
        character = 1
    except UsageError as problem:
        character = int(re.search(r"at character (\d+)", problem.message)[1])
    assert 1 <= character <= len(text) + 1


@pytest.mark.parametrize("text", [r'a{b="\x"}', 'a{b="\n"}', r'a{b="\u12"}'])
def test_a_string_with_a_bad_escape_is_refused(text):
    with pytest.raises(UsageError, match="at character 5"):
        parse_pipeline(text)


@pytest.mark.parametrize("text", ['"a b"', 'a{"b c"=1}', '""'])
def test_quoted_names_round_trip_or_are_refused(text):
    try:
        parsed = parse_pipeline(text)
    except UsageError:
        return
    assert parse_pipeline(format_pipeline(parsed)) == parsed


def test_an_option_given_twice_is_refused():
    with pytest.raises(UsageError, match="twice"):
        parse_pipeline("a{b=1,b=2}")


# ---------------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class Rich(Pass):
    """A pass with an option of each type."""

    name: ClassVar[str] = "rich"

    count: int = 1
    seconds: float = 1.5
    deep: bool = False
    path: str = ""
    perhaps: str | None = None
    how: Literal["one", "other"] = "one"
    patterns: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (1, 2)

    def run(self, state: State) -> State:
        return state


# Not in a tuple: the semicolon separates its items. Not alone: `none` stands for None.
items = st.text(min_size=1, max_size=8).filter(lambda text: ";" not in text)
texts = st.text(max_size=8).filter(lambda text: text != "none")
rich = st.builds(
    Rich,
    count=st.integers(),
    seconds=st.floats(allow_nan=False),
    deep=st.booleans(),
    path=texts,
    perhaps=st.none() | texts,
    how=st.sampled_from(["one", "other"]),
    patterns=st.lists(items, max_size=3).map(tuple),
    sizes=st.lists(st.integers(), max_size=3).map(tuple),
)


@given(rich)
def test_a_pass_is_read_back_equal_from_its_text(step):
    (spec,) = parse_pipeline(str(make_spec(step)))
    assert build_pass(Rich, spec.options) == step


def test_options_at_their_defaults_are_not_written():
    assert str(make_spec(Rich())) == "rich"
    assert str(make_spec(Rich(count=2, sizes=()))) == 'rich{count=2,sizes=""}'


@pytest.mark.parametrize("name", BUILTIN["passes"])
def test_every_built_in_pass_round_trips_through_its_text(name):
    assert str(Pipeline.parse(name)) == name


def test_the_pipeline_of_the_design_round_trips():
    text = "optimize,profile{repeat=5},coplace{join=never},fuse,m-etf,split,emit"
    assert str(Pipeline.parse(text)) == text
    assert Pipeline.parse(str(Pipeline.parse(text))) == Pipeline.parse(text)


@pytest.mark.parametrize(
    ("options", "expected_words"),
    [
        ({"coun": "1"}, ("'rich'", "'coun'", "did you mean 'count'?")),
        ({"count": "many"}, ("'rich'", "'count'", "'many'", "integer")),
        ({"count": "1.5"}, ("'count'", "'1.5'")),
        ({"deep": "perhaps"}, ("'deep'", "'perhaps'", "boolean")),
        ({"how": "neither"}, ("'how'", "'neither'", "'one'", "'other'")),
        ({"sizes": "1;x"}, ("'sizes'", "'1;x'")),
    ],
)
def test_a_wrong_option_is_named_with_valid_values(options, expected_words):
    with pytest.raises(UsageError) as caught:
        build_pass(Rich, options)
    for words in expected_words:
        assert words in str(caught.value)


def test_none_is_plain_text_if_none_is_not_allowed():
    assert build_pass(Rich, {"path": "none"}) == Rich(path="none")


def test_a_semicolon_in_an_item_of_a_tuple_survives():
    step = Rich(patterns=("a;b",))
    assert build_pass(Rich, make_spec(step).options) == step


@dataclass(frozen=True)
class Demanding(Pass):
    """A pass whose option has no default, and that refuses some values itself."""

    name: ClassVar[str] = "demanding"

    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("count is negative")

    def run(self, state: State) -> State:
        return state


@pytest.mark.parametrize("options", [{}, {"count": "-1"}])
def test_a_pass_that_cannot_be_built_is_refused_by_name(options):
    with pytest.raises(UsageError, match="demanding"):
        build_pass(Demanding, options)
