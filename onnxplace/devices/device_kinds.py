"""The kinds of devices: their interface, and the table of all kinds by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, metadata
from typing import Any, ClassVar

from onnxplace.devices.provider_lock import ProviderLock
from onnxplace.errors import PluginError

# The option of all devices that puts their sessions in a process of their own.
ISOLATE = "isolate"

# The interface of device kinds: what a kind of device is called, how it is found and opened, what it can do.


@dataclass(frozen=True)
class DeviceAddress:
    """A device of this machine, as ONNX Runtime has to be told about it."""

    kind: str
    index: int
    part: int | None = None
    """Which logical device of it: `cuda:0/1` is part 1 of GPU 0. None for the whole device."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the device, such as `provider=tensorrt`."""
    memory_bytes: int = 0
    """The limit of its memory; 0 for none."""

    @staticmethod
    def of(device_id: str) -> DeviceAddress:
        """Return the address of a device without options or limit.

        >>> DeviceAddress.of("cuda:0/1").part
        1
        """
        kind, _, number = device_id.partition(":")
        index, slash, part = number.partition("/")
        return DeviceAddress(kind, int(index), int(part) if slash else None)

    @property
    def id(self) -> str:
        """Return the name, as in `cuda:0` or `cuda:0/1`."""
        return f"{self.kind}:{self.index}" + (f"/{self.part}" if self.part is not None else "")

    @property
    def is_isolated(self) -> bool:
        """Return whether its sessions are in a process of their own."""
        return self.options.get(ISOLATE, find_kind(self.kind).options[ISOLATE][0]) == "true"


@dataclass(frozen=True)
class Hardware:
    """An accelerator of this machine, as its driver or ONNX Runtime describes it."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    memory_is_known: bool = True
    """False if the host's memory stands for that of the device, which nothing reports."""


class DeviceKind(ABC):
    """A kind of device: `cpu`, `cuda`, `webgpu`, or one of a plugin (entry point `onnxplace.device_kinds`).

    Subclasses are stateless. All that the compiler, calibration and runtimes know about a kind is here, except for
    how values move in and out of its memory, which is the class that `memory` names.
    """

    name: ClassVar[str]
    """The first part of device ids."""
    title: ClassVar[str]
    """Name for people, such as `NVIDIA GPU`."""
    providers: ClassVar[Mapping[str, str]]
    """Value of the device option `provider` -> ONNX Runtime's execution provider; the first one is the default."""
    memory: ClassVar[str]
    """`module:class` of its memory, a subclass of `onnxplace.devices.DeviceMemory`."""
    is_host: ClassVar[bool] = False
    """Whether it has processor cores, and its values lie in the host's memory."""
    is_divisible: ClassVar[bool] = False
    """Whether one may stand for several logical devices, `cuda:0/0` and `cuda:0/1`."""
    isolates: ClassVar[bool] = False
    """Whether sessions are in a process of their own by default: the provider is known to crash."""
    value_options: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Further options of a device, with their values; the first one is the default."""
    lock: ClassVar[ProviderLock | None] = None
    """Held around all calls of ONNX Runtime for such devices; None where the provider is safe for threads."""
    operations_per_second: ClassVar[float]
    """Typical peak rate of floating-point operations; of one core for hosts."""
    memory_bytes_per_second: ClassVar[float]
    """Typical peak rate of its memory."""
    kernel_seconds: ClassVar[float]
    """Typical least time of an operator."""
    link_latency_seconds: ClassVar[float]
    """Assumed latency of a link with such a device."""
    link_bytes_per_second: ClassVar[float]
    """Assumed bandwidth of a link with such a device."""
    install_hint: ClassVar[str] = ""
    """How to get what it needs."""

    @property
    def options(self) -> Mapping[str, tuple[str, ...]]:
        """Return the options of a device of this kind with their values, the default first."""
        own = {"provider": tuple(self.providers)} if len(self.providers) > 1 else {}
        return {**own, **self.value_options, ISOLATE: ("true", "false") if self.isolates else ("false", "true")}

    def provider(self, options: Mapping[str, str]) -> str:
        """Return the execution provider of a device with these options."""
        return self.providers[options.get("provider", next(iter(self.providers)))]

    @abstractmethod
    def list_hardware(self) -> tuple[Hardware, ...]:
        """Return the devices of this machine, usable or not; fast, and empty where there are none."""

    @abstractmethod
    def find_problem(self, address: DeviceAddress) -> str | None:
        """Return why ONNX Runtime cannot use a device of this machine; None if it can."""

    @abstractmethod
    def list_providers(self, address: DeviceAddress) -> list[tuple[str, dict[str, str]]]:
        """Return the execution providers of a session on a device, with options, except the CPU's."""

    def session_entries(self, address: DeviceAddress) -> dict[str, str]:
        """Return entries for the configuration of sessions on a device."""
        return {}

    def find_link(self, first: int, second: int) -> str:
        """Return the link between two devices of this kind, by index: `memory`, `nvlink`, `pcie` or `host`."""
        return "memory" if first == second else "host"

    def binding(self, address: DeviceAddress) -> tuple[str, int]:
        """Return the type and number of the device to which ONNX Runtime binds outputs."""
        return address.kind, address.index


# The kinds of devices by name: a built-in table, and entry points of plugins.

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
        raise PluginError("G001", f"{point.value} is not a DeviceKind", where=where, hint=hint)
    if missing := getattr(plugin, "__abstractmethods__", None):
        raise PluginError("G001", f"{point.value} does not define {', '.join(sorted(missing))}", where=where)
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
