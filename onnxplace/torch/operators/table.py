"""The table of translations: ATen operators by name, such as `aten.add.Tensor`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Translation = Callable[..., Any]
"""Takes a `Context` and the arguments of the operator; returns a name, an `Operand`, or several of them."""

Function = TypeVar("Function", bound=Translation)

TRANSLATIONS: dict[str, Translation] = {}


def translates(*names: str) -> Callable[[Function], Function]:
    """Enter a function into the table, under one or more names of operators."""

    def enter(function: Function) -> Function:
        TRANSLATIONS.update(dict.fromkeys((f"aten.{name}" for name in names), function))
        return function

    return enter
