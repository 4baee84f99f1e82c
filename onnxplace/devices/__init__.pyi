from onnxplace.devices.device_kinds import (
    ISOLATE as ISOLATE,
    DeviceAddress as DeviceAddress,
    DeviceKind as DeviceKind,
    Hardware as Hardware,
    find_kind as find_kind,
    import_memory as import_memory,
    is_known_kind as is_known_kind,
    list_kind_names as list_kind_names,
)
from onnxplace.devices.device_memory import DeviceMemory as DeviceMemory
from onnxplace.devices.provider_lock import ProviderLock as ProviderLock
