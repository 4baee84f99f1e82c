"""GPUs of any vendor, by ONNX Runtime's WebGPU provider."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import ClassVar

from onnxplace.target.device_kinds import DeviceAddress, DeviceKind, Hardware
from onnxplace.target.provider_lock import ProviderLock
from onnxplace.utils.control_groups import count_free_bytes
from onnxplace.utils.ort import find_provider_problem, import_onnxruntime

# Two threads at once get wrong results, or crash.
WEBGPU_LOCK = ProviderLock()
_SESSION_ENTRIES = {"ep.webgpuexecutionprovider.preserveDevice": "1"}


class WebGpu(DeviceKind):
    """A GPU by Vulkan, Direct3D 12 or Metal; ONNX Runtime uses the machine's first one."""

    name: ClassVar[str] = "webgpu"
    title: ClassVar[str] = "GPU by WebGPU"
    providers: ClassVar[Mapping[str, str]] = {"webgpu": "WebGpuExecutionProvider"}
    memory: ClassVar[str] = "onnxplace.runtimes.execution.bound_memory:BoundMemory"
    lock: ClassVar[ProviderLock | None] = WEBGPU_LOCK
    operations_per_second: ClassVar[float] = 2e12
    memory_bytes_per_second: ClassVar[float] = 100e9
    kernel_seconds: ClassVar[float] = 20e-6
    # Values cross through the host's memory, and a read waits for everything that was enqueued before it.
    link_latency_seconds: ClassVar[float] = 200e-6
    link_bytes_per_second: ClassVar[float] = 4e9
    install_hint: ClassVar[str] = (
        "pip uninstall -y onnxruntime; pip install 'onnxplace[webgpu]'; it needs a driver for Vulkan, Direct3D 12 or "
        "Metal"
    )

    def list_hardware(self) -> tuple[Hardware, ...]:
        """Return one GPU where ONNX Runtime has the provider and a driver; its memory is the host's until it is known.

        WebGPU tells neither name nor memory of an adapter.
        """
        if "WebGpuExecutionProvider" not in import_onnxruntime().get_available_providers():
            return ()
        import psutil

        return (Hardware(0, "", int(psutil.virtual_memory().total), count_free_bytes(), memory_is_known=False),)

    def find_problem(self, address: DeviceAddress) -> str | None:
        """Return why ONNX Runtime cannot use the GPU; None if it can."""
        if address.index:
            return "ONNX Runtime's WebGPU provider uses the machine's first GPU alone, webgpu:0"
        return _find_problem()

    def session_entries(self, address: DeviceAddress) -> dict[str, str]:
        """Keep the GPU's context for the life of the process: values that outlive the last session would be zeros."""
        return _SESSION_ENTRIES

    def list_providers(self, address: DeviceAddress) -> list[tuple[str, dict[str, str]]]:
        """Return the WebGPU provider."""
        return [("WebGpuExecutionProvider", {})]


@cache
def _find_problem() -> str | None:
    reason = "there is no GPU, or no driver that WebGPU accepts"
    return WEBGPU_LOCK.call(lambda: find_provider_problem("WebGpuExecutionProvider", {}, reason, _SESSION_ENTRIES))
