"""Devices as one session of ONNX Runtime has them: one of each execution provider, and the words that settings use.

`session.layer_assignment_settings` names them by words such as `gpu`, or by the name of a provider. Two devices of one
provider cannot be told apart in one session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onnxplace.target.device_kinds import list_provider_options
from onnxplace.target.kind_table import find_kind
from onnxplace.target.plugin_providers import find_record, parse_kind_name
from onnxplace.target.target import Device

CPU_PROVIDER = "CPUExecutionProvider"
# Providers that come as packages say their names themselves, once they are loaded; a machine without them knows these.
_KNOWN_NAMES = {
    "openvino": "OpenVINOExecutionProvider",
    "qnn": "QNNExecutionProvider",
    "nv-tensorrt-rtx": "NvTensorRTRTXExecutionProvider",
}
# Providers whose nodes cannot be chosen.
_TAKES_ALL = ("openvino",)
# Vendors by which `gpu:VENDOR` may name a GPU.
_VENDORS = {"nvidia": ("cuda", "nv-tensorrt-rtx"), "intel": ("openvino",), "amd": ("migraphx", "vitisai")}


@dataclass(frozen=True)
class SessionProvider:
    """An execution provider of a session, as the file of its options describes it."""

    name: str
    options: dict[str, str]
    library: str = ""
    """The name under which its library is registered; empty for a provider that ONNX Runtime has built in."""
    module: str = ""
    """The Python module that knows where the library is."""
    type: str = ""
    """`NPU`, `GPU` or `CPU`: the type of its device, as ONNX Runtime says it."""
    index: int = 0
    """Which of its devices of this type it is."""

    def describe(self) -> dict[str, Any]:
        """Return the fields that say something, for JSON."""
        return {key: value for key, value in vars(self).items() if key in ("name", "options") or value}


def name_provider(device: Device) -> str:
    """Return ONNX Runtime's name of a device's execution provider, also where that is not installed.

    >>> name_provider(Device("cpu:3", 1)), name_provider(Device("cuda:0", 1, options={"provider": "tensorrt"}))
    ('CPUExecutionProvider', 'TensorrtExecutionProvider')
    """
    name = CPU_PROVIDER if device.is_host else find_kind(device.kind).provider(device.options)
    family = device.kind.partition("/")[0]
    if name != family or _is_loaded(device):
        return name
    return find_record(family).built_in or _KNOWN_NAMES.get(family, name)


def _is_loaded(device: Device) -> bool:
    return bool(find_kind(device.kind).libraries)


def designate(device: Device) -> str:
    """Return the word by which settings of layers name the provider of a device.

    The name is the narrowest word: `cpu` also fits OpenVINO on a processor. But CUDA's provider has another name if it
    comes as a package, and a provider that is not installed here may have one: `cuda`, `npu` and `gpu` fit all names.

    >>> designate(Device("cuda:0", 1)), designate(Device("cpu:0", 1))
    ('cuda', 'CPUExecutionProvider')
    """
    hardware = _hardware(device)
    if name_provider(device) == "CUDAExecutionProvider":
        return "cuda"
    has_name = find_record(device.kind.partition("/")[0]).built_in or _is_loaded(device) or hardware == "cpu"
    return name_provider(device) if has_name or "/" not in device.kind else hardware


def describe_providers(devices: Sequence[Device]) -> list[SessionProvider]:
    """Return the providers of a session on these devices, in the order in which ONNX Runtime asks them.

    The CPU's is the last, unless it has to be the first.
    """
    providers: list[SessionProvider] = []
    for device in devices:
        family, slash, _ = device.kind.partition("/")
        own = list_provider_options(device.options)
        listed = [] if device.is_host else find_kind(device.kind).list_providers(device.address)
        for position, (_, options) in enumerate(listed):
            entries = options | own if position == 0 else options
            name = name_provider(device) if position == 0 else listed[position][0]
            if not slash or find_record(family).built_in:
                providers.append(SessionProvider(name, entries))
                continue
            package = find_record(family).package or f"onnxruntime-ep-{family}"
            hardware = _hardware(device).upper()
            index = 0 if device.has_cores else device.address.index
            module = package.replace("-", "_")
            providers.append(SessionProvider(name, entries, family, module, hardware, index))
    host = [SessionProvider(CPU_PROVIDER, {})]
    return host + providers if orders_host_first(devices) else providers + host


def explain_conflict(devices: Sequence[Device]) -> str:
    """Return why one session of ONNX Runtime cannot have nodes on each of these devices; empty if it can.

    Of CPU devices, any number are one in a session. Providers that compile their nodes sort all that they are shown
    (`CreateSupportedPartitionNodeGroups`), and miss an edge to each node that is hidden from them because its layer is
    another accelerator's: the session is not opened. Nodes of the CPU need not be hidden, if it takes its own first.
    OpenVINO claims those too, and then gets none. Tried with ONNX Runtime 1.32, QNN 2.7 and OpenVINO 1.8.

    >>> explain_conflict([Device("cpu:0", 1), Device("cpu:1", 1), Device("cuda:0", 1)])
    ''
    """
    accelerators = [device for device in devices if not device.is_host]
    by_provider: dict[str, list[str]] = {}
    for device in accelerators:
        behind = find_kind(device.kind).list_providers(device.address)[1:]  # as CUDA's behind TensorRT's
        for name in (name_provider(device), *(name for name, _ in behind)):
            by_provider.setdefault(name, []).append(device.id)
    for provider, ids in by_provider.items():
        if len(ids) > 1:
            return f"{' and '.join(ids)} are devices of {provider}, of which a session of ONNX Runtime has one"
    for device in devices:
        others = [item.id for item in devices if item is not device]
        if others and device.kind.partition("/")[0] in _TAKES_ALL:
            return f"{device.id} shares no session with {others[0]}: its provider claims all nodes, and then gets none"
    for device in accelerators:
        others = [item.id for item in accelerators if item is not device]
        if others and device.compiles:
            return (
                f"{device.id} shares a session with the CPU only, not with {others[0]}: its provider compiles its nodes"
            )
    return ""


def orders_host_first(devices: Sequence[Device]) -> bool:
    """Return whether the CPU's provider has to take its nodes before another one is asked (`explain_conflict`)."""
    return len(devices) > 1 and any(device.compiles for device in devices)


def find_designated(word: str, devices: Sequence[Device]) -> list[Device]:
    """Return the devices that a word of the settings may mean.

    The words are those of ONNX Runtime: `cpu`, `gpu`, `gpu:INDEX`, `gpu:VENDOR`, `cuda`, `dml`, `npu`, `accelerator`,
    or the name of a provider.

    >>> [device.id for device in find_designated("gpu", [Device("cuda:0", 1), Device("cpu:0", 1)])]
    ['cuda:0']
    """
    kind, _, which = word.casefold().partition(":")
    if kind == "cpu":
        return [device for device in devices if device.is_host] or [item for item in devices if item.has_cores]
    if kind == "gpu":
        gpus = [device for device in devices if _hardware(device) == "gpu"]
        if which.isdecimal():
            return [device for device in gpus if device.address.index == int(which)]
        return [device for device in gpus if not which or device.kind.partition("/")[0] in _VENDORS.get(which, ())]
    if kind == "npu":
        return [device for device in devices if _hardware(device) == "npu"]
    if kind == "accelerator":
        return [device for device in devices if not device.has_cores]
    if kind in ("cuda", "dml"):
        name = {"cuda": "cuda", "dml": "directml/gpu"}[kind]
        return [device for device in devices if device.kind == name]
    return [device for device in devices if word == name_provider(device)]


def _hardware(device: Device) -> str:
    """Return `cpu`, `gpu` or `npu`: what a device computes on."""
    parsed = parse_kind_name(device.kind)
    return parsed[1].removeprefix("i") if parsed else "cpu" if device.has_cores else "gpu"
