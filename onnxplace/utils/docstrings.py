"""The documentation strings of fields, which Python does not keep at run time."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise


def read_field_docs(kind: type) -> dict[str, str]:
    """Return the string that follows each field of a class, inherited fields included.

    Reads the source of the class and its bases.
    """
    return {name: text for base in reversed(kind.__mro__) for name, text in _read_own_docs(base).items()}


def _read_own_docs(kind: type) -> dict[str, str]:
    """Return the string that follows each field in the body of a class; empty without source."""
    try:
        members = _parse_classes(kind.__module__)[kind.__qualname__].body
    except (OSError, TypeError, SyntaxError, KeyError):
        return {}
    docs = {}
    for pair in pairwise(members):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = inspect.cleandoc(text)
    return docs


@cache
def _parse_classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module, by name; `inspect` goes through the whole file for each of them."""
    nodes = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
