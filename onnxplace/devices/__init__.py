"""Kinds of devices: what each is called, how it is found and opened, and how values move in and out of it."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.devices.device_kind import (
        DeviceAddress as DeviceAddress,
        DeviceKind as DeviceKind,
        Hardware as Hardware,
    )
    from onnxplace.devices.device_memory import DeviceMemory as DeviceMemory
    from onnxplace.devices.provider_lock import ProviderLock as ProviderLock
    from onnxplace.devices.table import (
        find_kind as find_kind,
        import_memory as import_memory,
        is_known_kind as is_known_kind,
        list_kind_names as list_kind_names,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "device_kind": "DeviceAddress DeviceKind Hardware",
        "device_memory": "DeviceMemory",
        "provider_lock": "ProviderLock",
        "table": "find_kind import_memory is_known_kind list_kind_names",
    },
)
