"""The interface of kinds of devices: what one is called, how it is found and opened, what it can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from onnxplace.target.provider_lock import ProviderLock
from onnxplace.utils.ort import import_onnxruntime

# The option of all devices that puts their sessions in their own process.
ISOLATE = "isolate"
# The option of devices on processor cores: how many of them compute.
THREADS = "threads"
# Options that begin with this are those of the execution provider, as they are: `option.device_memory_limit`.
PROVIDER_OPTION = "option."


@dataclass(frozen=True)
class DeviceAddress:
    """A device of this machine, as ONNX Runtime has to be told about it."""

    kind: str
    index: int
    part: int | str | None = None
    """Which logical device of it: `cuda:0/1` is part 1 of GPU 0, and `cuda:0/tf32` the same GPU with other options.

    None for the whole device.
    """
    last: int | None = None
    """The last index of several processors that one session has: `cpu:0-3` has those of four devices."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the device, such as `provider=tensorrt`."""
    memory_bytes: int = 0
    """The limit of its memory; 0 for none."""
    cores: int = 0
    """Of the processor that it computes with; 0 where that has no cores, or all of them are used."""
    owner: str = ""
    """The session that has its own process for it, which is opened again after its death; empty for none."""

    @staticmethod
    def of(device_id: str) -> DeviceAddress:
        """Return the address of a device without options or limit.

        >>> DeviceAddress.of("cuda:0/1").part
        1
        """
        kind, _, number = device_id.partition(":")
        indices, slash, part = number.partition("/")
        first, dash, last = indices.partition("-")
        variant = (int(part) if part.isdecimal() else part) if slash else None
        return DeviceAddress(kind, int(first), variant, int(last) if dash else None)

    @property
    def id(self) -> str:
        """Return the name, as in `cuda:0`, `cuda:0/1` or `cpu:0-3`."""
        indices = f"{self.index}" + (f"-{self.last}" if self.last is not None else "")
        return f"{self.kind}:{indices}" + (f"/{self.part}" if self.part is not None else "")


@dataclass(frozen=True)
class Hardware:
    """An accelerator of this machine, as its driver or ONNX Runtime describes it."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    memory_is_known: bool = True
    """False if the host's memory stands for that of the device, which nothing reports."""
    vendor: str = ""
    package: str = ""
    """What brings its execution provider, such as `onnxruntime-qnn`; empty for the package of ONNX Runtime itself."""
    version: str = ""
    """Of the package; of the driver where there is none."""


class DeviceKind(ABC):
    """A kind of device: `cpu`, `cuda`, `webgpu`, or one of a plugin (entry point `onnxplace.device_kinds`).

    Subclasses are stateless. All that the compiler, calibration and runtimes know about a kind is here, except for
    how values move in and out of its memory, which is the class that `memory` names.
    """

    name: ClassVar[str]
    """The first part of device ids."""
    title: ClassVar[str]
    """Human-readable name, such as `NVIDIA GPU`."""
    providers: ClassVar[Mapping[str, str]]
    """Value of the device option `provider` -> ONNX Runtime's execution provider; the first one is the default."""
    memory: ClassVar[str]
    """`module:class` of its memory, a subclass of `onnxplace.devices.DeviceMemory`."""
    is_host: ClassVar[bool] = False
    """Whether it is ONNX Runtime's own provider on processor cores, and its values lie in the host's memory."""
    has_cores: ClassVar[bool] = False
    """Whether it computes on cores of the processor, as hosts do; `openvino/cpu:1` has those of `cpu:1`."""
    is_divisible: ClassVar[bool] = False
    """Whether one may stand for several logical devices, `cuda:0/0` and `cuda:0/1`."""
    isolates: ClassVar[bool] = False
    """Whether sessions are in their own process by default: the provider is known to crash."""
    isolates_on_cores: ClassVar[bool] = False
    """Whether sessions of several threads on a part of the cores have their own process: the provider pins threads."""
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
    needs_static_shapes: ClassVar[bool] = False
    """Whether its sessions need the sizes of all inputs."""
    compiles: ClassVar[bool] = False
    """Whether its provider makes one kernel of neighbouring nodes, and refuses some nodes."""
    install_hint: ClassVar[str] = ""
    """How to get what it needs."""

    @property
    def options(self) -> Mapping[str, tuple[str, ...]]:
        """Return the options of a device of this kind with their values, the default first; none for a number."""
        own: dict[str, tuple[str, ...]] = {"provider": tuple(self.providers)} if len(self.providers) > 1 else {}
        own |= {THREADS: ()} if self.has_cores else {}
        return {**own, **self.value_options, ISOLATE: ("true", "false") if self.isolates else ("false", "true")}

    def provider(self, options: Mapping[str, str]) -> str:
        """Return the execution provider of a device with these options."""
        return self.providers[options.get("provider", next(iter(self.providers)))]

    def precision(self, address: DeviceAddress) -> str:
        """Return the least precise type in which a device computes values of float32.

        It is `float32`, `tf32`, `float16`, `bfloat16` or `int8`: the device's option `precision`, if its kind has one.
        """
        return address.options.get("precision", (*self.list_values("precision", address.options), "float32")[0])

    def list_values(self, name: str, options: Mapping[str, str]) -> tuple[str, ...]:
        """Return the values that an option may have next to others, the default first."""
        return self.options.get(name, ())

    @abstractmethod
    def list_hardware(self) -> tuple[Hardware, ...]:
        """Return the devices of this machine, usable or not; fast, and empty where there are none."""

    @abstractmethod
    def find_problem(self, address: DeviceAddress) -> str | None:
        """Return why ONNX Runtime cannot use a device of this machine; None if it can."""

    def list_taken(self, address: DeviceAddress) -> list[str]:
        """Return which sorts of operators a usable device was found to take; empty where that was not tried."""
        return []

    @abstractmethod
    def list_providers(self, address: DeviceAddress) -> list[tuple[str, dict[str, str]]]:
        """Return the execution providers of a session on a device, with options, except the CPU's."""

    def create_session(
        self, model: str | bytes, options: Any, address: DeviceAddress, provider_options: Mapping[str, str]
    ) -> Any:
        """Return ONNX Runtime's session for a model on a device, or on the CPU where its provider cannot be opened.

        Args:
            model: Path or bytes.
            options: ONNX Runtime's SessionOptions.
            address: The device.
            provider_options: More options of the device's execution providers.
        """
        own = [(name, {**entries, **provider_options}) for name, entries in self.list_providers(address)]
        for _, entries in own[:1]:  # those behind it, such as CUDA's behind TensorRT's, have other options
            entries |= {**list_provider_options(address.options), **provider_options}
        # Without `enable_fallback`, ONNX Runtime would print the reason of a fallback to the CPU, and go on.
        providers = [*own, "CPUExecutionProvider"]
        return import_onnxruntime().InferenceSession(model, options, providers=providers, enable_fallback=0)

    def describe_compiler(self, address: DeviceAddress) -> str:
        """Return all that a compiled model for a device depends on; empty if its provider writes none.

        Such a model may be opened wherever the text is the same.
        """
        return ""

    def session_entries(self, address: DeviceAddress) -> dict[str, str]:
        """Return entries for the configuration of sessions on a device."""
        return {}

    @property
    def libraries(self) -> tuple[str, ...]:
        """Return the paths of its own libraries, on which measurements depend."""
        return ()

    def find_link(self, first: int, second: int) -> str:
        """Return the link between two devices of this kind, by index: `memory`, `nvlink`, `pcie` or `host`."""
        return "memory" if first == second else "host"

    def shares_memory(self, index: int) -> bool:
        """Return whether a device reads and writes the host's memory, so that its values need no copy."""
        return self.is_host

    def binding(self, address: DeviceAddress) -> tuple[str, int]:
        """Return the type and number of the device to which ONNX Runtime binds outputs."""
        return address.kind, address.index


def list_provider_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return those options of a device that are its execution provider's own.

    >>> list_provider_options({"precision": "float16", "option.enable_skip_layer_norm_strict_mode": "1"})
    {'enable_skip_layer_norm_strict_mode': '1'}
    """
    own = (name for name in options if name.startswith(PROVIDER_OPTION))
    return {name.removeprefix(PROVIDER_OPTION): options[name] for name in own}
