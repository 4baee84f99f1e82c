"""A plugin with a kind of devices whose memory is faulty, for tests of `doctor`.

The option `fault` of a device says in which way, or else the environment.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from onnxplace.runtimes.execution.host_memory import HostMemory
from onnxplace.target.device_kinds import DeviceAddress, DeviceKind, Hardware

FAULTS = ("none", "corrupts", "late", "feeds", "raises", "hangs", "kills", "quits", "aborts", "exits")


class Faulty(DeviceKind):
    """A device whose sessions run on the CPU."""

    name: ClassVar[str] = "faulty"
    title: ClassVar[str] = "faulty device"
    providers: ClassVar[Mapping[str, str]] = {"cpu": "CPUExecutionProvider"}
    memory: ClassVar[str] = "faulty_device:FaultyMemory"
    value_options: ClassVar[Mapping[str, tuple[str, ...]]] = {"fault": FAULTS}
    operations_per_second: ClassVar[float] = 80e9
    memory_bytes_per_second: ClassVar[float] = 16e9
    kernel_seconds: ClassVar[float] = 4e-6
    link_latency_seconds: ClassVar[float] = 20e-6
    link_bytes_per_second: ClassVar[float] = 10e9

    def list_hardware(self) -> tuple[Hardware, ...]:
        """Return one device; end the process if the environment says so."""
        if os.environ.get("FAULTY_DEVICE") == "kills":
            os.kill(os.getpid(), signal.SIGSEGV)
        return (Hardware(0, "Faulty 1", 1 << 30, 1 << 30),)

    def find_problem(self, address: DeviceAddress) -> str | None:
        """Return a problem if the environment says so; its text has a path."""
        if os.environ.get("FAULTY_DEVICE") == "looking":
            os.kill(os.getpid(), signal.SIGSEGV)
        return "cannot open /opt/secret/driver.so" if os.environ.get("FAULTY_DEVICE") == "problem" else None

    def list_providers(self, address: DeviceAddress) -> list[tuple[str, dict[str, str]]]:
        """Return nothing: each session has the CPU's provider; end the process if the environment says so."""
        if os.environ.get("FAULTY_DEVICE") == "opening":
            os.kill(os.getpid(), signal.SIGSEGV)
        if os.environ.get("FAULTY_DEVICE") == "leaving":
            os.write(2, b"the firmware of the device is too old\n")
            os._exit(3)
        return []


class FaultyMemory(HostMemory):
    """Memory of the host that does something wrong with values which are fed or received."""

    def __init__(self, address: DeviceAddress, cores: Sequence[int]) -> None:
        super().__init__(address, cores)
        self._fault = address.options.get("fault", os.environ.get("FAULTY_DEVICE", "none"))
        self._last: dict[Any, Any] = {}
        if self._fault == "exits":
            atexit.register(os.kill, os.getpid(), signal.SIGSEGV)

    def feed(self, array: Any, declared: str) -> Any:
        """Return an input, doubled if that is the fault."""
        wrong = self._fault == "feeds" and getattr(array, "dtype", None) == np.float32
        return super().feed(array * 2 if wrong else array, declared)

    def receive(self, sent: Any, source: Any) -> Any:
        """Return a received value, or do what is wrong."""
        value = super().receive(sent, source)
        if self._fault == "raises":
            raise RuntimeError("the driver lost the device")
        if self._fault == "hangs":
            time.sleep(1000)
        if self._fault == "kills":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._fault == "quits":
            os._exit(0)
        if self._fault == "aborts":
            os.write(2, b"/opt/secret/driver.cc:3: the device is lost\n")
            os.abort()
        if not isinstance(value, np.ndarray) or not value.size:
            return value
        if self._fault == "corrupts" and value.size > 1000:
            value.view(np.uint8).reshape(-1)[-1] ^= 1
        if self._fault == "late":
            previous = self._last.get((value.dtype, value.shape), value)
            self._last[value.dtype, value.shape] = value
            return previous
        return value
