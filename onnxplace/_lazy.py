"""Packages whose public names are imported on first use.

The public names of a package stand in its `__init__` as plain imports, which only type checkers follow: Python loads
nothing of them until somebody uses one, so that `import onnxplace` and the command line stay fast. They are for code
from outside; the modules of onnxplace import each other.

>>> if TYPE_CHECKING:  # doctest: +SKIP
...     from onnxplace.state import Pass as Pass, State as State
... else:
...     __getattr__, __dir__, __all__ = attach(__name__, __file__)
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def attach(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of the package with this name and file, as its imports say.

    No module may have one of these names: on import, Python sets a module as an attribute of its package.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    origins = {alias.name: str(node.module) for node in imports for alias in node.names}
    names = sorted(origins)

    def get(name: str) -> object:
        # Nothing is cached in the package, so that tests can replace a name where it is defined.
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(origins[name]), name)

    return get, lambda: names, names
