"""The text form of a pipeline: `profile{repeat=5},coplace,m-etf,split`, read and written.

Grammar: passes separated by commas; options in braces as `key=value`; a value is a word, or a string in double
quotes with backslash escapes. Printing what was parsed gives the same text back.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType
from typing import Any

from onnxplace.errors import UsageError, nearest, shown
from onnxplace.state import Pass

_TOKEN = re.compile(r'\s*(?:(?P<word>[^\s{}=,"]+)|(?P<string>"(?:[^"\\]|\\.)*")|(?P<mark>[{}=,]))')
_PLAIN = re.compile(r'[^\s{}=,"]+')


@dataclass(frozen=True)
class PassSpec:
    """A pass by name, with its options as text."""

    name: str
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        options = ",".join(f"{_quoted(key)}={_quoted(value)}" for key, value in self.options.items())
        return f"{_quoted(self.name)}{{{options}}}" if options else _quoted(self.name)


def _quoted(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)


def format_pipeline(specs: Iterable[PassSpec]) -> str:
    """Return the text of a pipeline; `parse_pipeline` reads it back equal."""
    return ",".join(str(spec) for spec in specs)


def parse_pipeline(text: str) -> tuple[PassSpec, ...]:
    """Read a pipeline; raises UsageError that points at the character where it goes wrong.

    >>> [str(spec) for spec in parse_pipeline("profile{repeat=5}, split")]
    ['profile{repeat=5}', 'split']
    """
    reader = _Reader(text)
    specs = [reader.read_pass()]
    while reader.take(","):
        specs.append(reader.read_pass())
    if reader.kind != "end":
        raise reader.problem("',' between passes")
    return tuple(specs)


class _Reader:
    """A cursor over the tokens of a pipeline's text."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0
        self.kind, self.token, self.start = "", "", 0
        self.advance()

    def advance(self) -> None:
        match = _TOKEN.match(self.text, self.position)
        if match:
            self.kind, self.position = match.lastgroup or "", match.end()
            self.token, self.start = match[self.kind], match.start(self.kind)
        else:
            rest = self.text[self.position :]
            self.start = self.position + len(rest) - len(rest.lstrip())
            self.kind, self.token = ("end", "") if not rest.strip() else ("bad", rest.strip()[0])

    def take(self, mark: str) -> bool:
        if self.kind == "mark" and self.token == mark:
            self.advance()
            return True
        return False

    def word(self, what: str) -> str:
        if self.kind not in ("word", "string"):
            raise self.problem(what)
        try:
            token = str(json.loads(self.token)) if self.kind == "string" else self.token
        except ValueError:
            raise self.problem(f"{what} with escapes as in JSON") from None
        self.advance()
        return token

    def read_pass(self) -> PassSpec:
        name, options = self.word("the name of a pass"), dict[str, str]()
        if self.take("{") and not self.take("}"):
            while True:
                begins = self.start
                key = self.word("the name of an option")
                if key in options:
                    raise self.refusal(f"option {key!r} is given twice, again at character {begins + 1}")
                if not self.take("="):
                    raise self.problem(f"'=' after {key!r}")
                options[key] = self.word(f"a value for {key!r}")
                if self.take("}"):
                    break
                if not self.take(","):
                    raise self.problem("',' or '}'")
        return PassSpec(name, MappingProxyType(options))

    def problem(self, expected: str) -> UsageError:
        found = repr(self.token) if self.token else "the end"
        return self.refusal(f"expected {expected} at character {self.start + 1}, found {found}")

    def refusal(self, message: str) -> UsageError:
        return UsageError(
            "U003",
            message,
            where=f"pipeline {self.text!r}",
            hint="write it like profile{repeat=5},coplace,fuse,m-etf,split,emit",
        )


def build_pass(kind: type[Pass], options: Mapping[str, str]) -> Pass:
    """Return a pass with its options read from text by the types of its fields; raises UsageError."""
    from pydantic import TypeAdapter, ValidationError

    known = {item.name: item for item in fields(kind)}
    values: dict[str, Any] = {}
    for key, text in options.items():
        if key not in known:
            raise UsageError(
                "U004",
                f"pass {kind.name!r} has no option {key!r}",
                hint=nearest(key, known) if known else "it has none at all",
            )
        hint = _type_of(kind, key)
        try:
            values[key] = TypeAdapter(hint).validate_python(_from_text(text, hint))
            not_a_number = isinstance(values[key], float) and math.isnan(values[key])  # which is within every limit
            reason = "Input should be a number" if not_a_number else ""
        except ValidationError as problem:
            reason = problem.errors()[0]["msg"]
        if reason:
            message = f"option {key!r} cannot be {shown(text)}: {reason}"
            raise UsageError("U005", message, where=f"pass {kind.name!r}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as problem:
        raise UsageError(
            "U006",
            f"it cannot be made with these options: {problem}",
            where=f"pass {kind.name!r}",
            hint=f"`onnxplace passes {kind.name}` lists them",
        ) from None


def _type_of(kind: type[Pass], key: str) -> Any:
    from typing import get_type_hints

    return get_type_hints(kind, include_extras=True)[key]


def format_tuple(items: Iterable[str]) -> str:
    """Return a list as the text of an option: words between semicolons, or JSON where that would be ambiguous.

    >>> tuple_text(["enc.*", "dec.*"]), tuple_text(["a;b"])
    ('enc.*;dec.*', '["a;b"]')
    """
    words = list(items)
    plain = ";".join(words)
    return plain if _tuple_from(plain) == words else json.dumps(words, ensure_ascii=False)


def _tuple_from(text: str) -> list[str]:
    if text.startswith("["):
        try:
            items = json.loads(text)
        except ValueError:
            items = None
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return items
    return text.split(";") if text else []


def _from_text(text: str, hint: Any) -> object:
    if "tuple[" in str(hint):
        return tuple(_tuple_from(text))
    optional = "None" in str(hint)
    return None if text == "none" and optional else text


def spec_of(step: Pass) -> PassSpec:
    """Return the spec that builds this pass: its name and the options that differ from their defaults."""
    options = {}
    for item in fields(step):
        value = getattr(step, item.name)
        if item.default is MISSING or value != item.default:
            options[item.name] = _text(value)
    return PassSpec(step.name, MappingProxyType(options))


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return format_tuple(str(item) for item in value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)
