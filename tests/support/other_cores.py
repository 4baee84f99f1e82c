"""A provider of devices on processor cores: the CPU's own, under another name, as OpenVINO's is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from onnxplace.target.device_kinds import DeviceAddress, DeviceKind, Hardware


class OtherCores(DeviceKind):
    """Devices `other/cpu:0`, `other/cpu:1`, on the processors of `cpu:0`, `cpu:1`."""

    name: ClassVar[str] = "other/cpu"
    title: ClassVar[str] = "processor by another provider"
    providers: ClassVar[Mapping[str, str]] = {"cpu": "CPUExecutionProvider"}
    memory: ClassVar[str] = "onnxplace.runtimes.execution.host_memory:HostMemory"
    has_cores: ClassVar[bool] = True
    compiles: ClassVar[bool] = True
    value_options: ClassVar[Mapping[str, tuple[str, ...]]] = {"precision": ("float32", "bfloat16")}
    operations_per_second: ClassVar[float] = 40e9
    memory_bytes_per_second: ClassVar[float] = 8e9
    kernel_seconds: ClassVar[float] = 2e-6
    link_latency_seconds: ClassVar[float] = 45e-6
    link_bytes_per_second: ClassVar[float] = 10e9

    def list_hardware(self) -> tuple[Hardware, ...]:
        return (Hardware(0, "Other 1", 1 << 30, 1 << 30),)

    def find_problem(self, address: DeviceAddress) -> str | None:
        return None

    def list_providers(self, address: DeviceAddress) -> list[tuple[str, dict[str, str]]]:
        return []

    def shares_memory(self, index: int) -> bool:
        return True
