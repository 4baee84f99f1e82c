"""A kind of devices whose memory only sessions reach, as WebGPU's: the CPU's provider behind a lock."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import ClassVar

from onnxplace.target.device_kinds import DeviceAddress, DeviceKind, Hardware
from onnxplace.target.provider_lock import ProviderLock
from tests.support.half_device import offer_kind


class Bound(DeviceKind):
    """A device whose sessions run on the CPU."""

    name: ClassVar[str] = "bound"
    title: ClassVar[str] = "device that only sessions reach"
    providers: ClassVar[Mapping[str, str]] = {"cpu": "CPUExecutionProvider"}
    memory: ClassVar[str] = "onnxplace.runtimes.execution.bound_memory:BoundMemory"
    lock: ClassVar[ProviderLock | None] = ProviderLock()
    operations_per_second: ClassVar[float] = 80e9
    memory_bytes_per_second: ClassVar[float] = 16e9
    kernel_seconds: ClassVar[float] = 4e-6
    link_latency_seconds: ClassVar[float] = 20e-6
    link_bytes_per_second: ClassVar[float] = 10e9

    def list_hardware(self) -> tuple[Hardware, ...]:
        return (Hardware(0, "Bound 1", 1 << 30, 1 << 30),)

    def find_problem(self, address: DeviceAddress) -> str | None:
        return None

    def list_providers(self, address: DeviceAddress) -> list[tuple[str, dict[str, str]]]:
        return []

    def binding(self, address: DeviceAddress) -> tuple[str, int]:
        return ("cpu", 0)


def bound_kind() -> AbstractContextManager[None]:
    """Let `bound:0` be a device of this machine."""
    return offer_kind(Bound)
