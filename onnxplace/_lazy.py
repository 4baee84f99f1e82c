"""Packages whose public names are imported on first use.

The stub of a package, `__init__.pyi`, imports its public names, for type checkers. The package itself loads none of
their modules, so that `import onnxplace` and the command line stay fast. This is how SPEC 1 of Scientific Python does
it; its lazy_loader keeps what it has loaded, though, and tests replace names where they are defined.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def attach(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of the package with this name and file, as its stub lists them.

    No module may have one of these names: on import, Python sets a module as an attribute of its package.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    origins = {alias.name: str(node.module) for node in imports for alias in node.names}
    names = sorted(origins)

    def get(name: str) -> object:
        # Nothing is cached in the package, so that tests can replace a name where it is defined.
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if origins[name] == package:
            return import_module(f"{package}.{name}")
        return getattr(import_module(origins[name]), name)

    return get, lambda: names, names
