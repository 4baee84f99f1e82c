from onnxplace.devices.device_kinds import (
    ISOLATE as ISOLATE,
    DeviceAddress as DeviceAddress,
    DeviceKind as DeviceKind,
    Hardware as Hardware,
)
from onnxplace.devices.device_memory import DeviceMemory as DeviceMemory
from onnxplace.devices.kind_table import (
    SHORT_NAMES as SHORT_NAMES,
    find_kind as find_kind,
    import_memory as import_memory,
    is_isolated as is_isolated,
    is_known_kind as is_known_kind,
    list_kind_names as list_kind_names,
    resolve_short_name as resolve_short_name,
)
from onnxplace.devices.provider_lock import ProviderLock as ProviderLock
from onnxplace.devices.unused_hardware import (
    UnusedHardware as UnusedHardware,
    list_unused_hardware as list_unused_hardware,
)
