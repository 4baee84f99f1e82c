"""Format help on passes and runtimes from their docstrings and fields."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from onnxplace.utils import read_field_docs

# The names of bounds in annotated_types, in words.
_BOUND_NAMES = {"Ge": "at least", "Gt": "more than", "Le": "at most", "Lt": "less than"}


def format_pass_help(kind: type) -> tuple[str, dict[str, Any]]:
    """Return the help on a plugin, as text and as data."""
    options = []
    if is_dataclass(kind):
        about_fields = read_field_docs(kind)
        options = [
            {
                "name": item.name,
                "type": _format_type(item.type),
                "default": None if item.default is MISSING else item.default,
                "about": about_fields.get(item.name, ""),
            }
            for item in fields(kind)
        ]
    about = inspect.cleandoc(kind.__doc__ or "")
    lines = [
        f"  {option['name']}={option['default']!r}  ({option['type']})\n      {option['about']}" for option in options
    ]
    return about + "\n\n" + ("\n".join(["options:", *lines]) if lines else "no options"), {
        "about": about,
        "options": options,
    }


def _format_type(annotation: object) -> str:
    """Format the type of an option.

    `Annotated[float, Ge(0)]` gives `float, at least 0`.
    """
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    annotated = re.fullmatch(r"(?:typing\.)?Annotated\[([^\[\],]+), (.*)\]", text)
    if not annotated:
        return text
    limits = re.findall(r"\b(Ge|Gt|Le|Lt)\((?:\w+=)?([^()]*)\)", annotated[2])
    return ", ".join([annotated[1], *(f"{_BOUND_NAMES[name]} {value}" for name, value in limits)])
