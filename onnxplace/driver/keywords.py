"""Keyword arguments of the Python interface, checked against the records that list them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from onnxplace.errors import UsageError, format_value, suggest_nearest

Settings = TypeVar("Settings")
_EXAMPLES = {
    "devices": 'write "cuda:0,cuda:1", or a list of such names',
    "shape": 'write shape={"batch": 8}',
    "inputs": 'write inputs={"images": array}; onnxplace.feeds.read_npz reads a file',
}
# numpy's numbers count as well.
_NUMBERS = {int: Integral, float: Real}


def build_settings(kind: type[Settings], options: Mapping[str, Any]) -> Settings:
    """Return keyword arguments as a record; raises UsageError for unknown names and wrong types."""
    types = get_type_hints(kind)
    for name, value in options.items():
        if name not in types:
            raise UsageError("U054", f"there is no option {name!r}", hint=suggest_nearest(name, types))
        if not _is_of(types[name], value):
            message = f"expected {kind.__annotations__[name]} for {name}, got {format_value(value)}"
            raise UsageError("U054", message, hint=_EXAMPLES.get(name, "the docstring of this function describes it"))
    return kind(**options)


def _is_of(hint: Any, value: object) -> bool:
    """Return whether a value has an annotated type; items of mappings, and the words of Literal, are not looked at."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_is_of(part, value) for part in parts)
    if kind is Sequence:
        if not isinstance(value, Sequence) or isinstance(value, str):
            return False
        return all(_is_of(parts[0], item) for item in value)
    return isinstance(value, str if kind is Literal else _NUMBERS.get(kind, kind))
