"""Read and write pipelines as text: `profile{repeat=5},coplace,m-etf,split`.

Grammar: passes are separated by commas; options are `key=value` in braces; a value is a word, or a string in double
quotes with backslash escapes. A pipeline that was read is written as the same text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType
from typing import Any, get_type_hints

from onnxplace.errors import UsageError, format_value, suggest_nearest
from onnxplace.state import Pass

_TOKEN = re.compile(r'\s*(?:(?P<word>[^\s{}=,"]+)|(?P<string>"(?:[^"\\]|\\.)*")|(?P<mark>[{}=,]))')
_PLAIN = re.compile(r'[^\s{}=,"]+')


@dataclass(frozen=True)
class PassSpec:
    """A pass by name, with its options as text."""

    name: str
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        options = ",".join(f"{_quote(key)}={_quote(value)}" for key, value in self.options.items())
        return f"{_quote(self.name)}{{{options}}}" if options else _quote(self.name)


def _quote(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)


def format_pipeline(specs: Iterable[PassSpec]) -> str:
    """Return the text of a pipeline, which `parse_pipeline` reads.

    >>> format_pipeline([PassSpec("profile", {"repeat": "5"}), PassSpec("split")])
    'profile{repeat=5},split'
    """
    return ",".join(str(spec) for spec in specs)


def parse_pipeline(text: str) -> tuple[PassSpec, ...]:
    """Read a pipeline; a UsageError points at the wrong character.

    >>> [str(spec) for spec in parse_pipeline("profile{repeat=5}, split")]
    ['profile{repeat=5}', 'split']
    """
    reader = _Reader(text)
    specs = [reader.read_pass()]
    while reader.take(","):
        specs.append(reader.read_pass())
    if reader.kind != "end":
        raise reader.make_mismatch("',' between passes")
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

    def read_word(self, expected: str) -> str:
        if self.kind not in ("word", "string"):
            raise self.make_mismatch(expected)
        try:
            token = str(json.loads(self.token)) if self.kind == "string" else self.token
        except ValueError:
            raise self.make_mismatch(f"{expected} with escapes as in JSON") from None
        self.advance()
        return token

    def read_pass(self) -> PassSpec:
        name, options = self.read_word("the name of a pass"), dict[str, str]()
        if self.take("{") and not self.take("}"):
            while True:
                start = self.start
                key = self.read_word("the name of an option")
                if key in options:
                    raise self.make_error(f"option {key!r} is given twice, again at character {start + 1}")
                if not self.take("="):
                    raise self.make_mismatch(f"'=' after {key!r}")
                options[key] = self.read_word(f"a value for {key!r}")
                if self.take("}"):
                    break
                if not self.take(","):
                    raise self.make_mismatch("',' or '}'")
        return PassSpec(name, MappingProxyType(options))

    def make_mismatch(self, expected: str) -> UsageError:
        token = repr(self.token) if self.token else "the end"
        return self.make_error(f"expected {expected} at character {self.start + 1}, got {token}")

    def make_error(self, message: str) -> UsageError:
        return UsageError(
            "U002",
            message,
            where=f"pipeline {self.text!r}",
            hint="write it like profile{repeat=5},coplace,fuse,m-etf,split,emit",
        )


def build_pass(kind: type[Pass], options: Mapping[str, object]) -> Pass:
    """Build a pass with options that the types of its fields read: texts, or values.

    Raises UsageError for unknown options and wrong values.
    """
    from pydantic import TypeAdapter, ValidationError

    known = {item.name: item for item in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in known:
            hint = suggest_nearest(key, known) if known else "it has no options"
            raise UsageError("U004", f"pass {kind.name!r} has no option {key!r}", hint=hint)
        option_type = get_type_hints(kind, include_extras=True)[key]
        try:
            values[key] = TypeAdapter(option_type).validate_python(_read_value(value, option_type))
            is_nan = isinstance(values[key], float) and math.isnan(values[key])  # NaN passes every limit
            reason = "Input should be a number" if is_nan else ""
        except ValidationError as problem:
            reason = problem.errors()[0]["msg"]
        if reason:
            message = f"option {key!r} cannot be {format_value(str(value))}: {reason}"
            raise UsageError("U005", message, where=f"pass {kind.name!r}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as problem:
        message, hint = f"cannot build it with these options: {problem}", f"`onnxplace passes {kind.name}` lists them"
        raise UsageError("U005", message, where=f"pass {kind.name!r}", hint=hint) from None


def format_tuple(items: Iterable[str]) -> str:
    """Format a list as an option: words and semicolons, or JSON.

    JSON is for words that contain semicolons.

    >>> format_tuple(["enc.*", "dec.*"]), format_tuple(["a;b"])
    ('enc.*;dec.*', '["a;b"]')
    """
    words = list(items)
    plain = ";".join(words)
    return plain if _parse_tuple(plain) == words else json.dumps(words, ensure_ascii=False)


def _parse_tuple(text: str) -> list[str]:
    if text.startswith("["):
        try:
            items = json.loads(text)
        except ValueError:
            items = None
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return items
    return text.split(";") if text else []


def _read_value(text: object, option_type: Any) -> object:
    if not isinstance(text, str):
        return text
    if "tuple[" in str(option_type):
        return tuple(_parse_tuple(text))
    return None if text == "none" and "None" in str(option_type) else text


def make_spec(step: Pass) -> PassSpec:
    """Return the spec of a pass: its name and options without defaults."""
    options = {}
    for item in fields(step):
        value = getattr(step, item.name)
        if item.default is MISSING or value != item.default:
            options[item.name] = _format_value(value)
    return PassSpec(step.name, MappingProxyType(options))


def _format_value(value: object) -> str:
    if isinstance(value, tuple):
        return format_tuple(str(item) for item in value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)
