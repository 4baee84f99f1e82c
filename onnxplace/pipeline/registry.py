"""Passes and runtimes by name: their classes, and the options that plugins add to runtimes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from onnxplace.errors import PluginError, UsageError
from onnxplace.plugins import list_entries, load_plugin

if TYPE_CHECKING:
    from onnxplace.runtime.interface import Runtime


def find_plugin(kind: Literal["passes", "runtimes"], name: str) -> type:
    """Import and return the class behind a name; raises UsageError or PluginError."""
    from onnxplace.runtime.interface import Runtime
    from onnxplace.state import Pass

    plugin, entry = load_plugin(kind, name)
    where = f"{name!r} from {entry.distribution or 'onnxplace'}"
    base = Pass if kind == "passes" else Runtime
    if not isinstance(plugin, type) or not issubclass(plugin, base):
        expected = f"a {base.__name__}" if isinstance(plugin, type) else "a class"
        hint = f"it must subclass onnxplace.{base.__name__}"
        raise PluginError("G001", f"{entry.path} is not {expected}", where=where, hint=hint)
    if inspect.isabstract(plugin):
        missing = ", ".join(sorted(plugin.__abstractmethods__))
        raise PluginError("G001", f"{entry.path} does not define {missing}", where=where)
    return plugin


def create_runtime(name: str, **options: Any) -> Runtime:
    """Return a runtime with the options that are not None.

    Raises UsageError if there is no such runtime, or it does not have them, and PluginError.
    """
    runtime_class = find_plugin("runtimes", name)
    chosen = {key: value for key, value in options.items() if value is not None}
    for key in chosen:
        if key not in inspect.signature(runtime_class).parameters:
            owners = dict.fromkeys(("fallback", "isolate"), "onnxruntime")
            for owner, added in list_options("runtime_options").items():
                owners |= dict.fromkeys(added, owner)
            other = f", or use the runtime {owners[key]}, which has {key}" if key in owners else ""
            hint = f"leave it out{other}"
            raise UsageError("U045", f"runtime {name!r} has no option {key!r}", where=key, hint=hint)
    runtime: Runtime = runtime_class(**chosen)
    return runtime


def is_runtime_option(name: str, option: str) -> bool:
    """Return whether a runtime, or any other one whose plugin adds its options to commands, has an option."""
    parameters = inspect.signature(find_plugin("runtimes", name)).parameters
    return option in parameters or any(option in found for found in list_options("runtime_options").values())


@cache
def list_options(kind: Literal["runtime_options", "export_options"]) -> Mapping[str, Mapping[str, Any]]:
    """Import and return the options, each a `click.Option`, that plugins add to commands.

    They are by the name of the runtime or format, and by its argument. Those of a broken plugin are left out: what has
    these options fails on use.
    """
    found = {}
    for name in list_entries(kind):
        with suppress(PluginError):
            found[name], _ = load_plugin(kind, name)
    return MappingProxyType({name: options for name, options in found.items() if isinstance(options, Mapping)})
