"""Arguments of the Python interface, checked against the signatures and records that list them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from types import UnionType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from onnxplace.errors import ArgumentError, format_value, suggest_nearest

First = TypeVar("First")
Settings = TypeVar("Settings")
Result = TypeVar("Result")
Fields = ParamSpec("Fields")
_EXAMPLES = {
    "devices": 'write "cuda:0,cuda:1", or a list of such names',
    "shape": 'write shape={"batch": 8}',
    "example_inputs": "write example_inputs=(x, y), or {'x': x} by name",
    "inputs": 'write inputs={"images": array}; onnxplace.feeds.read_npz reads a file',
}
_CHECKED_WHERE_USED = ("output",)  # with the other errors of paths
# numpy's numbers count as well.
_NUMBERS = {int: Integral, float: Real}


def takes_fields_of(
    kind: Callable[Fields, Settings],
) -> Callable[[Callable[[First, Settings], Result]], Callable[Concatenate[First, Fields], Result]]:
    """Let a function of an object and a record take the record's fields as arguments, which `help` then shows.

    The function raises ArgumentError for unknown names and wrong types.
    """
    fields = inspect.signature(kind).parameters
    make: Callable[..., Settings] = kind

    def decorate(function: Callable[[First, Settings], Result]) -> Callable[Concatenate[First, Fields], Result]:
        own = inspect.signature(function)
        first = next(iter(own.parameters.values()))
        signature = own.replace(parameters=[first, *fields.values()])

        @wraps(function)
        def call(*args: Any, **options: Any) -> Result:
            _require_known(options, signature)
            values = signature.bind(*args, **options).arguments
            subject = values.pop(first.name)
            _check_types(kind, values)
            return function(subject, make(**values))

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def checks_arguments(function: Callable[Fields, Result], name: str = "") -> Callable[Fields, Result]:
    """Let a function, maybe under another name, raise ArgumentError for arguments that do not fit its signature."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Fields.args, **options: Fields.kwargs) -> Result:
        _require_known(options, signature)
        _check_types(function, signature.bind(*args, **options).arguments)
        return function(*args, **options)

    call.__name__ = call.__qualname__ = name or function.__name__
    return call


def _require_known(options: Mapping[str, Any], signature: inspect.Signature) -> None:
    for name in options.keys() - signature.parameters.keys():
        hint = suggest_nearest(name, signature.parameters)
        raise ArgumentError("U054", f"there is no option {name!r}", hint=hint)


def _check_types(kind: Any, values: Mapping[str, Any]) -> None:
    types = get_type_hints(kind)
    for name, value in values.items():
        if name not in _CHECKED_WHERE_USED and not _is_of(types[name], value):
            message = f"expected {kind.__annotations__[name]} for {name}, got {format_value(value)}"
            raise ArgumentError(
                "U054", message, hint=_EXAMPLES.get(name, "the docstring of this function describes it")
            )


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
