"""CPU devices: sets of cores of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from onnxplace.target.device_kinds import DeviceAddress, DeviceKind, Hardware


class Cpu(DeviceKind):
    """A set of processor cores; its values are numpy arrays in the host's memory."""

    name: ClassVar[str] = "cpu"
    title: ClassVar[str] = "processor cores"
    providers: ClassVar[Mapping[str, str]] = {"cpu": "CPUExecutionProvider"}
    memory: ClassVar[str] = "onnxplace.runtimes.execution.host_memory:HostMemory"
    is_host: ClassVar[bool] = True
    has_cores: ClassVar[bool] = True
    # Deliberately round, as for all kinds: these order placements, they do not predict step times.
    operations_per_second: ClassVar[float] = 40e9
    memory_bytes_per_second: ClassVar[float] = 8e9
    kernel_seconds: ClassVar[float] = 2e-6
    # A hand-off between two worker threads, and a copy: measured by `devices --calibrate` on a machine with two cores.
    link_latency_seconds: ClassVar[float] = 45e-6
    link_bytes_per_second: ClassVar[float] = 10e9

    def list_hardware(self) -> tuple[Hardware, ...]:
        """Return nothing: cores are divided among as many devices as the user names."""
        return ()

    def find_problem(self, address: DeviceAddress) -> str | None:
        """Return None: every machine has cores."""
        return None

    def list_providers(self, address: DeviceAddress) -> list[tuple[str, dict[str, str]]]:
        """Return nothing: each session has the CPU's provider."""
        return []

    def find_link(self, first: int, second: int) -> str:
        """Return `memory`."""
        return "memory"
