"""A kind of devices that computes in float16: the CPU's provider, whose results are rounded when they leave it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest

from onnxplace.machine.ort_values import to_python
from onnxplace.runtimes.execution.host_memory import HostMemory
from onnxplace.target import kind_table
from onnxplace.target.device_kinds import DeviceAddress, DeviceKind, Hardware
from onnxplace.target.provider_lock import ProviderLock

NAME = "Half 1"


def round_to_half(value: Any) -> Any:
    """Return an array of float32 rounded to float16, and other values as they are."""
    is_single = isinstance(value, np.ndarray) and value.dtype == np.float32
    with np.errstate(over="ignore"):
        return value.astype(np.float16).astype(np.float32) if is_single else value


class RoundingLock(ProviderLock):
    """Rounds what runs return, the only lists of arrays that calls do."""

    def call(self, function: Callable[[], Any]) -> Any:
        result = super().call(function)
        return list(map(round_to_half, result)) if isinstance(result, list) else result


class Half(DeviceKind):
    """A device whose sessions run on the CPU, and is predicted to be a thousand times faster."""

    name: ClassVar[str] = "half"
    title: ClassVar[str] = "device that computes in float16"
    providers: ClassVar[Mapping[str, str]] = {"cpu": "CPUExecutionProvider"}
    memory: ClassVar[str] = f"{__name__}:HalfMemory"
    value_options: ClassVar[Mapping[str, tuple[str, ...]]] = {"precision": ("float16",)}
    lock: ClassVar[ProviderLock | None] = RoundingLock()
    operations_per_second: ClassVar[float] = 1e15
    memory_bytes_per_second: ClassVar[float] = 1e15
    kernel_seconds: ClassVar[float] = 1e-9
    link_latency_seconds: ClassVar[float] = 1e-9
    link_bytes_per_second: ClassVar[float] = 1e15

    def list_hardware(self) -> tuple[Hardware, ...]:
        return (Hardware(0, NAME, 1 << 30, 1 << 30),)

    def find_problem(self, address: DeviceAddress) -> str | None:
        return None

    def list_providers(self, address: DeviceAddress) -> list[tuple[str, dict[str, str]]]:
        return []


class HalfMemory(HostMemory):
    """Memory of the host, and sessions that hold the lock."""

    def run(
        self, session: Any, inputs: dict[str, Any], outputs: Sequence[str], leaving: Collection[str], options: Any
    ) -> list[Any]:
        results: list[Any] = session.run(outputs, {name: to_python(value) for name, value in inputs.items()}, options)
        return results


@contextmanager
def offer_kind(kind: type[DeviceKind]) -> Iterator[None]:
    """Let this machine have devices of a further kind."""
    kind_table.BUILTIN_KINDS[kind.name] = f"{kind.__module__}:{kind.__name__}"
    kind_table.find_kind.cache_clear()
    try:
        yield
    finally:
        del kind_table.BUILTIN_KINDS[kind.name]
        kind_table.find_kind.cache_clear()


@pytest.fixture(autouse=True)
def half_kind() -> Iterator[None]:
    """Let `half:0` be a device of this machine, for the tests of modules that import this."""
    with offer_kind(Half):
        yield
