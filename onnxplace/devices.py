"""The interface of kinds of devices, by the name under which plugins know it."""

from onnxplace.target.device_kinds import DeviceAddress as DeviceAddress, DeviceKind as DeviceKind, Hardware as Hardware
from onnxplace.target.device_memory import DeviceMemory as DeviceMemory
from onnxplace.target.kind_table import find_kind as find_kind
