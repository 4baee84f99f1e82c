"""Packages whose public names are imported on first use.

A package lists its public names and loads none of their modules, so that `import onnxplace` and the command line stay
fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def attach(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package.

    >>> get, _, names = attach("json", {"decoder": "JSONDecoder", "encoder": ""})
    >>> names, get("JSONDecoder").__name__
    (['JSONDecoder', 'encoder'], 'JSONDecoder')

    Args:
        package: the full name of the package.
        modules: the public names of each module, separated by spaces; an empty text makes the module itself public.
            No module may have one of these names: on import, Python sets a module as an attribute of its package.
    """
    public_modules = {module for module, names in modules.items() if not names}
    origins = {name: f"{package}.{module}" for module, names in modules.items() for name in names.split() or [module]}
    names = sorted(origins)

    def get(name: str) -> object:
        # Nothing is cached in the package, so that tests can replace a name where it is defined.
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(origins[name])
        return module if name in public_modules else getattr(module, name)

    return get, lambda: names, names
