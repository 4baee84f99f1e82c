"""What is written about the fields of a class, which Python itself does not keep."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise


def read_field_docs(kind: type) -> dict[str, str]:
    """Return the string that follows each field of a class or of those it derives from; reads their source."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        found |= _own_docs(each)
    return found


def _own_docs(kind: type) -> dict[str, str]:
    """Return the string that follows each field in the body of a class; nothing where there is no source."""
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    members = body.body if isinstance(body, ast.ClassDef) else []
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(members)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
