"""The documentation strings of fields, which Python does not keep at run time."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise


def read_field_docs(kind: type) -> dict[str, str]:
    """Return the string that follows each field of a class, inherited fields included.

    Reads the source of the class and its bases.
    """
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        docs |= _read_own_docs(base)
    return docs


def _read_own_docs(kind: type) -> dict[str, str]:
    """Return the string that follows each field in the body of a class; empty without source."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    members = definition.body if isinstance(definition, ast.ClassDef) else []
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(members)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
