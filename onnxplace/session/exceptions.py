"""Errors that are also exceptions of ONNX Runtime, so that `except` clauses written for it catch them."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

from onnxplace.errors import OnnxplaceError, UsageError

E = TypeVar("E", bound=OnnxplaceError)

# Code -> the exception that ONNX Runtime's Python interface raises for the same mistake.
_BUILT_IN: dict[str, type[Exception]] = {"F002": ValueError}
# Code -> name of the exception of ONNX Runtime's own.
_NAMES = {
    "N001": "InvalidProtobuf",
    **dict.fromkeys(("F001", "F003"), "InvalidArgument"),
    **dict.fromkeys(("X001", "X014"), "Fail"),
    "N002": "InvalidProtobuf",
    "N003": "Fail",
}


def match_onnxruntime(error: OnnxplaceError, name: str = "") -> None:
    """Let an error also be the exception that ONNX Runtime raises in its place, where there is one.

    Its own exceptions are only known once it is imported; before that, no `except` clause can name them. `name` is that
    of the exception where the code of the error does not decide it.

    >>> from onnxplace.errors import FeedError
    >>> error = FeedError("F002", "no value for 'x'")
    >>> match_onnxruntime(error)
    >>> isinstance(error, ValueError), isinstance(error, FeedError), type(error).__name__
    (True, True, 'FeedError')
    """
    if hasattr(error, "plain_type"):
        return
    exceptions = getattr(sys.modules.get("onnxruntime.capi"), "onnxruntime_pybind11_state", None)
    kind: Any = _BUILT_IN.get(error.code)
    if kind is None and (name or error.code in _NAMES):
        cause = type(error.__cause__)
        is_own = cause.__module__ == getattr(exceptions, "__name__", "")
        kind = cause if is_own else getattr(exceptions, name or _NAMES[error.code], None)
    if kind is not None:
        also_raise_as(error, kind)


def also_raise_as(error: E, kind: type[Exception]) -> E:
    """Return an error that is also an exception of another type; it keeps its traceback and its own type.

    >>> from onnxplace.errors import UsageError
    >>> error = also_raise_as(UsageError("U088", "a bundle has its own devices"), NotImplementedError)
    >>> isinstance(error, NotImplementedError)
    True
    """
    if not isinstance(error, kind):
        combined: Any = _combine(type(error), kind)
        error.__class__ = combined
    return error


def argument_error(kind: type[Exception], message: str, where: str = "", hint: str = "") -> UsageError:
    """Return the error for an argument that is not as ONNX Runtime has it, which raises an exception of this type."""
    return also_raise_as(UsageError("U054", message, where=where, hint=hint), kind)


def _combine(own: type[OnnxplaceError], other: type[Exception]) -> type[OnnxplaceError]:
    """Return a type with the name of `own` that derives from both; copies and pickles are of `own` alone."""
    if (own, other) not in _combined:
        plain = getattr(own, "plain_type", own)

        def reduce(self: OnnxplaceError) -> tuple[object, ...]:
            error = plain(self.code, self.message, where=self.where, hint=self.hint)
            return OnnxplaceError.__reduce__(error)

        names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
        _combined[own, other] = type(own.__name__, (own, other), {**names, "__reduce__": reduce, "plain_type": plain})
    return _combined[own, other]


_combined: dict[tuple[type[OnnxplaceError], type[Exception]], type[OnnxplaceError]] = {}
