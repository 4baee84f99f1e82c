"""The kinds of devices by name: a built-in table, and entry points of plugins."""

from __future__ import annotations

from functools import cache
from importlib import import_module, metadata
from typing import Any

from onnxplace.devices.device_kind import DeviceKind
from onnxplace.errors import PluginError

# Kinds by name, in the order in which the default devices of a machine are looked for.
BUILTIN_KINDS = {
    "cpu": "onnxplace.devices.cpu:Cpu",
    "cuda": "onnxplace.devices.cuda:Cuda",
    "webgpu": "onnxplace.devices.webgpu:WebGpu",
}
ENTRY_POINTS = "onnxplace.device_kinds"


def is_known_kind(name: str) -> bool:
    """Return whether there is a kind of devices of this name.

    >>> is_known_kind("cuda")
    True
    """
    return name in BUILTIN_KINDS or name in _list_plugins()


def list_kind_names(*, plugins: bool = True) -> tuple[str, ...]:
    """Return the names of all kinds, built-in ones first; imports none of them.

    Args:
        plugins: Whether to list those of plugins.
    """
    return tuple(dict.fromkeys((*BUILTIN_KINDS, *(_list_plugins() if plugins else ()))))


@cache
def find_kind(name: str) -> DeviceKind:
    """Return the kind of devices of a name that `is_known_kind` accepts.

    Raises PluginError if the plugin that provides it cannot be loaded, or is not a DeviceKind.
    """
    if name in BUILTIN_KINDS:
        kind: DeviceKind = _import(BUILTIN_KINDS[name])()
        return kind
    point = _list_plugins()[name]
    distribution = point.dist.name if point.dist else "an unnamed distribution"
    where = f"device kind {name!r} from {distribution}"
    hint = f"update or uninstall {distribution}; its author sees where with --verbose"
    try:
        plugin = _import(point.value)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # a plugin may fail in any way, even exit; the error names it
        message = f"cannot be loaded: {type(problem).__name__}: {problem}"
        raise PluginError("G001", message, where=where, hint=hint) from problem
    if not isinstance(plugin, type) or not issubclass(plugin, DeviceKind):
        hint = "it must subclass onnxplace.devices.DeviceKind"
        raise PluginError("G002", f"{point.value} is not a DeviceKind", where=where, hint=hint)
    if missing := getattr(plugin, "__abstractmethods__", None):
        raise PluginError("G003", f"{point.value} does not define {', '.join(sorted(missing))}", where=where)
    return plugin()


def import_memory(kind: DeviceKind) -> Any:
    """Return the class of a kind's memory, a subclass of DeviceMemory."""
    return _import(kind.memory)


@cache
def _list_plugins() -> dict[str, metadata.EntryPoint]:
    points = metadata.entry_points(group=ENTRY_POINTS)
    return {point.name: point for point in points if point.name not in BUILTIN_KINDS}


def _import(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)
