"""The kinds of devices by name: built-in ones, those of plugins, and those of providers that are packages."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from itertools import islice
from typing import Any

from onnxplace.errors import PluginError
from onnxplace.target.device_kinds import ISOLATE, DeviceAddress, DeviceKind
from onnxplace.utils.control_groups import count_cores

# Kinds by name, in the order in which the default devices of a machine are looked for.
BUILTIN_KINDS = {
    "cpu": "onnxplace.target.cpu:Cpu",
    "cuda": "onnxplace.target.cuda:Cuda",
    "webgpu": "onnxplace.target.webgpu:WebGpu",
}
# What people say: the machine's first devices of a type, whoever provides them.
SHORT_NAMES = ("npu", "gpu", "igpu")


def is_known_kind(name: str) -> bool:
    """Return whether there is a kind of devices of this name.

    >>> is_known_kind("cuda")
    True
    """
    if name in BUILTIN_KINDS or name in SHORT_NAMES:
        return True
    from onnxplace.plugins import list_entries

    if name in list_entries("device_kinds"):
        return True
    from onnxplace.target.plugin_providers import parse_kind_name

    return parse_kind_name(name) is not None


def list_kind_names(*, plugins: bool = True) -> tuple[str, ...]:
    """Return the names of all kinds, built-in ones first; imports none of them.

    Args:
        plugins: Whether to list those of plugins, and of providers of ONNX Runtime that are their own packages.
    """
    if not plugins:
        return tuple(BUILTIN_KINDS)
    from onnxplace.plugins import list_entries
    from onnxplace.target.plugin_providers import list_provider_kinds

    return tuple(dict.fromkeys((*BUILTIN_KINDS, *list_entries("device_kinds"), *list_provider_kinds())))


@cache
def resolve_short_name(kind: str, index: int) -> tuple[str, int] | None:
    """Return kind and index of the machine's usable device that people mean by `npu:0`, `igpu:0` or `gpu:0`.

    GPUs are those of `cuda` first, then of providers that are their own packages, then of `webgpu`.
    """
    names = [name for name in list_kind_names() if name.rpartition("/")[2] == kind]
    if kind == "gpu":
        names = ["cuda", *names, "webgpu"]
    usable = (
        (name, hardware.index)
        for name in names
        for hardware in find_kind(name).list_hardware()
        if find_kind(name).find_problem(DeviceAddress(name, hardware.index)) is None
    )
    return next(islice(usable, index, None), None)


@cache
def find_kind(name: str) -> DeviceKind:
    """Return the kind of devices of a name that `is_known_kind` accepts.

    Raises PluginError if the plugin that provides it cannot be loaded, or is not a DeviceKind.
    """
    if name in BUILTIN_KINDS:
        kind: DeviceKind = import_by_path(BUILTIN_KINDS[name])()
        return kind
    from onnxplace.plugins import list_entries, load_plugin

    if name not in list_entries("device_kinds"):
        if name in SHORT_NAMES and (found := resolve_short_name(name, 0)):
            return find_kind(found[0])
        from onnxplace.target.plugin_providers import make_provider_kind

        return make_provider_kind(name)
    plugin, entry = load_plugin("device_kinds", name)
    where = f"device kind {name!r} from {entry.distribution}"
    if not isinstance(plugin, type) or not issubclass(plugin, DeviceKind):
        hint = "it must subclass onnxplace.devices.DeviceKind"
        raise PluginError("G001", f"{entry.path} is not a DeviceKind", where=where, hint=hint)
    if missing := getattr(plugin, "__abstractmethods__", None):
        raise PluginError("G001", f"{entry.path} does not define {', '.join(sorted(missing))}", where=where)
    made: DeviceKind = plugin()
    return made


def is_isolated(address: DeviceAddress) -> bool:
    """Return whether the sessions of a device are in their own process."""
    kind = find_kind(address.kind)
    # A single thread is the caller's, which is pinned.
    is_default = kind.isolates or (kind.isolates_on_cores and 1 < address.cores < count_cores())
    return address.options.get(ISOLATE, "true" if is_default else "false") == "true" or bool(address.owner)


def import_memory(kind: DeviceKind) -> Any:
    """Return the class of a kind's memory, a subclass of DeviceMemory."""
    return import_by_path(kind.memory)


def import_by_path(path: str) -> Any:
    """Import and return what `module:attribute` names."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)
