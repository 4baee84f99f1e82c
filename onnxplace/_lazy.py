"""Packages whose public names are imported when they are first used.

The command line and `import onnxplace` stay fast that way: a package lists what it offers, and loads none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def attach(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package.

    Args:
        package: the full name of the package.
        modules: the names that each of its modules offers, separated by spaces; no names, to offer the module itself.
            No module may be called as one of these names is: Python sets a module as an attribute of its package when
            it is imported.
    """
    whole = {module for module, names in modules.items() if not names}
    homes = {name: f"{package}.{module}" for module, names in modules.items() for name in names.split() or [module]}
    names = sorted(homes)

    def get(name: str) -> object:
        # Nothing is stored in the package, so that tests can replace a name where it is defined.
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(homes[name])
        return module if name in whole else getattr(module, name)

    return get, lambda: names, names
