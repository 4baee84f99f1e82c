"""NVIDIA GPUs, by ONNX Runtime's CUDA or TensorRT provider."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import ClassVar

from onnxplace.target.device_kinds import DeviceAddress, DeviceKind, Hardware
from onnxplace.utils.ort import find_provider_problem

# By provider, the default first. TensorRT uses TF32 where the GPU has it, and has no option against that
# (onnxruntime #26029); int8 needs a table of calibration.
_PRECISIONS = {"cuda": ("float32", "tf32"), "tensorrt": ("tf32", "float16", "bfloat16")}


class Cuda(DeviceKind):
    """An NVIDIA GPU; runs and copies are enqueued on its streams."""

    name: ClassVar[str] = "cuda"
    title: ClassVar[str] = "NVIDIA GPU"
    providers: ClassVar[Mapping[str, str]] = {"cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
    memory: ClassVar[str] = "onnxplace.runtimes.execution.cuda_memory:CudaMemory"
    is_divisible: ClassVar[bool] = True
    value_options: ClassVar[Mapping[str, tuple[str, ...]]] = {"precision": ("float32", "tf32", "float16", "bfloat16")}
    operations_per_second: ClassVar[float] = 15e12
    memory_bytes_per_second: ClassVar[float] = 800e9
    kernel_seconds: ClassVar[float] = 5e-6
    # PCIe 4.0 x16 through host memory, where CUDA's p2pBandwidthLatencyTest shows 11 to 25 us: deliberately cautious;
    # `devices --calibrate` measures the actual values.
    link_latency_seconds: ClassVar[float] = 20e-6
    link_bytes_per_second: ClassVar[float] = 12e9
    install_hint: ClassVar[str] = (
        "pip uninstall -y onnxruntime; pip install 'onnxplace[gpu]' "
        "(needs Linux or Windows on x86-64 and a driver for CUDA 13)"
    )

    def list_hardware(self) -> tuple[Hardware, ...]:
        """Return the NVIDIA GPUs that the driver lists; empty without a driver or without nvidia-ml-py."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # noqa: BLE001 - without an answer of the driver, no GPU can be used
            return ()
        gpus, driver = [], str(pynvml.nvmlSystemGetDriverVersion())
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory, name = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetName(handle)
            text = name if isinstance(name, str) else name.decode()
            gpus.append(Hardware(index, text, int(memory.total), int(memory.free), vendor="NVIDIA", version=driver))
        return tuple(gpus)

    def list_values(self, name: str, options: Mapping[str, str]) -> tuple[str, ...]:
        """Return the values of an option; the types that float32 can be computed in depend on the provider."""
        values = super().list_values(name, options)
        return _PRECISIONS.get(options.get("provider", "cuda"), values) if name == "precision" else values

    def find_problem(self, address: DeviceAddress) -> str | None:
        """Return why ONNX Runtime cannot use a GPU; None if it can."""
        return _find_problem(self.provider(address.options), address.index)

    def list_providers(self, address: DeviceAddress) -> list[tuple[str, dict[str, str]]]:
        """Return the CUDA provider, after TensorRT's where the device has it.

        The arena of a session grows by what is requested, not by powers of two, and a logical device's only up to its
        limit: all devices of a GPU share its memory. CUDA computes float32 as float32 unless TF32 is asked for.
        """
        options = {"device_id": str(address.index), "arena_extend_strategy": "kSameAsRequested"}
        if address.part is not None and address.memory_bytes:
            options["gpu_mem_limit"] = str(address.memory_bytes)
        options["use_tf32"] = str(int(address.options.get("precision") == "tf32"))
        providers = [("CUDAExecutionProvider", options)]
        if self.provider(address.options) == "TensorrtExecutionProvider":
            names, precision = {"float16": "trt_fp16_enable", "bfloat16": "trt_bf16_enable"}, self.precision(address)
            own = {name: str(int(kind == precision)) for kind, name in names.items()}
            providers.insert(0, ("TensorrtExecutionProvider", {"device_id": str(address.index), **own}))
        return providers

    def find_link(self, first: int, second: int) -> str:
        """Return the link between two GPUs, by index: `memory` (the same GPU), `nvlink`, `pcie` or `host`.

        Two GPUs with peer access have NVLink or PCIe. All other transfers go through the host's memory. So do transfers
        for which the link is unknown (no driver, or no nvidia-ml-py).
        """
        if first == second:
            return "memory"
        with suppress(Exception):  # no driver, or one that does not answer
            import pynvml

            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in (first, second)]
            for capability, name in (
                (pynvml.NVML_P2P_CAPS_INDEX_NVLINK, "nvlink"),
                (pynvml.NVML_P2P_CAPS_INDEX_READ, "pcie"),
            ):
                if pynvml.nvmlDeviceGetP2PStatus(*handles, capability) == pynvml.NVML_P2P_STATUS_OK:
                    return name
        return "host"


@cache
def _find_problem(provider: str, index: int) -> str | None:
    problem = find_provider_problem(provider, {"device_id": str(index)}, "the CUDA libraries or the GPU are missing")
    if problem is None and not _has_bindings():
        return "NVIDIA's Python package cuda-bindings, which copies values of GPUs, is missing"
    return problem


def _has_bindings() -> bool:
    with suppress(ModuleNotFoundError):  # of `cuda`
        return find_spec("cuda.bindings") is not None
    return False
