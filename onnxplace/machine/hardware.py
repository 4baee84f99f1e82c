"""Cores, memory and GPUs of this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from onnxplace.errors import ExecutionError, TargetError
from onnxplace.target import Device, Target, parse_device_ids

# Memory of a process that runs bundles, before it has a model: Python, packages, ONNX Runtime (benchmarks/memory.py).
RUNTIME_BYTES = 141 << 20
# Share of the memory that stays free for what a schedule does not count: structures of the sessions, holes in the
# arena, weights that several segments of a device copy, other programs (docs/measurements.md).
HEADROOM_SHARE = 0.10

INSTALL_HINT = "pip install 'onnxplace[cpu]' (or 'onnxplace[gpu]' on a machine with CUDA 13)"


@lru_cache(maxsize=1)
def import_onnxruntime() -> Any:
    """Import ONNX Runtime once.

    Telemetry is off unless the user set it. Raises ExecutionError for a broken installation.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    installed = [name for name in ("onnxruntime", "onnxruntime-gpu") if _is_installed(name)]
    if len(installed) == 2:
        raise ExecutionError(
            "R001",
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other",
            hint=f"pip uninstall -y onnxruntime onnxruntime-gpu, then {INSTALL_HINT}",
        )
    try:
        import onnxruntime
    except ImportError as problem:
        raise ExecutionError("R002", f"ONNX Runtime cannot be imported: {problem}", hint=INSTALL_HINT) from None
    if not hasattr(onnxruntime, "InferenceSession"):
        raise ExecutionError(
            "R002",
            "the installed onnxruntime is empty: another wheel that shares its files was removed",
            hint=f"pip uninstall -y onnxruntime onnxruntime-gpu, then {INSTALL_HINT}",
        )
    return onnxruntime


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver describes it."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int


def list_gpus() -> tuple[Gpu, ...]:
    """Return the NVIDIA GPUs that the driver lists.

    The result is empty without a driver or without nvidia-ml-py.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - without an answer of the driver, no GPU can be used
        return ()
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory, name = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetName(handle)
        gpus.append(Gpu(index, name if isinstance(name, str) else name.decode(), int(memory.total), int(memory.free)))
    return tuple(gpus)


def find_link_technology(source: str, destination: str) -> str:
    """Return the link between two devices of this machine.

    It is `memory`, `nvlink`, `pcie` or `host`.

    Two GPUs with peer access have NVLink or PCIe. All other transfers with a GPU go through the host's memory. So do
    transfers for which the link is unknown (no driver, or no nvidia-ml-py).

    >>> link_technology("cpu:0", "cpu:1")
    'memory'
    """
    gpu_indices = [int(name.partition(":")[2]) for name in (source, destination) if name.startswith("cuda:")]
    if not gpu_indices:
        return "memory"
    return _find_peer_link(*gpu_indices) if len(gpu_indices) == 2 else "host"


def _find_peer_link(first: int, second: int) -> str:
    """Return the link between two GPUs, by index: `nvlink`, `pcie` or `host`."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in (first, second)]
        for capability, name in (
            (pynvml.NVML_P2P_CAPS_INDEX_NVLINK, "nvlink"),
            (pynvml.NVML_P2P_CAPS_INDEX_READ, "pcie"),
        ):
            if pynvml.nvmlDeviceGetP2PStatus(*handles, capability) == pynvml.NVML_P2P_STATUS_OK:
                return name
    except Exception:  # noqa: BLE001 - no driver, or one that does not answer
        return "host"
    return "host"


def available_cores() -> tuple[int, ...]:
    """Return the processor cores of this process, in order.

    A thread that pinned itself gets all of them too.
    """
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(os.getpid())))
    return tuple(range(os.cpu_count() or 1))


def available_memory_bytes() -> int:
    """Return the free host memory, within the limit of the container."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    with suppress(OSError, ValueError):  # no such control group, or its limit is "max"
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(free, 0)


def divide_cores(count: int) -> list[int]:
    """Return the number of cores of each CPU device, at least one."""
    share, extra = divmod(len(available_cores()), count)
    return [max(share + (index < extra), 1) for index in range(count)]


def assign_cores(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the cores of each CPU device.

    Devices share cores only if there are too few.

    Args:
        sizes: The number of cores of each device.
    """
    cores = available_cores()
    assignment, start = [], 0
    for size in sizes:
        assignment.append(tuple(cores[(start + offset) % len(cores)] for offset in range(min(size, len(cores)))))
        start += size
    return assignment


def local_target(devices: str | Sequence[str] | None = None) -> Target:
    """Return a target of devices of this machine.

    By default, these are all GPUs, or else two CPU devices.

    A memory limit is the memory that is free now, less `HEADROOM_SHARE`. CPU devices share the host's memory equally,
    less `RUNTIME_BYTES`.

    Args:
        devices: Device ids, such as `cuda:0,cuda:1`.

    Raises:
        TargetError: A GPU does not exist, or ONNX Runtime cannot use it.

    >>> [device.id for device in local_target("cpu:0,cpu:1").devices]
    ['cpu:0', 'cpu:1']
    """
    gpus = list_gpus()
    ids = parse_device_ids(devices) if devices else choose_default_device_ids(gpus)
    cpu_count = sum(device_id.startswith("cpu:") for device_id in ids)
    core_counts = iter(divide_cores(cpu_count) if cpu_count else [])
    usable_bytes = max(available_memory_bytes() - RUNTIME_BYTES, 0)
    host_bytes = int(usable_bytes * (1 - HEADROOM_SHARE)) // max(cpu_count, 1)
    result = []
    for device_id in ids:
        kind, _, index = device_id.partition(":")
        if kind == "cuda":
            result.append(_describe_cuda_device(device_id, int(index), gpus))
        else:
            result.append(Device(device_id, host_bytes, cores=next(core_counts)))
    return Target(tuple(result))


def choose_default_device_ids(gpus: tuple[Gpu, ...]) -> tuple[str, ...]:
    """Return the usable GPUs, or else two CPU devices."""
    usable = tuple(f"cuda:{gpu.index}" for gpu in gpus if find_cuda_problem(gpu.index) is None)
    return usable or ("cpu:0", "cpu:1")


def _describe_cuda_device(device_id: str, index: int, gpus: tuple[Gpu, ...]) -> Device:
    """Return a GPU as a device.

    Raises TargetError if it cannot be used.
    """
    require_cuda(device_id)
    gpu = next((gpu for gpu in gpus if gpu.index == index), None)
    if gpu is None:
        raise TargetError(
            "T010",
            "its memory cannot be read: the driver does not list it",
            where=device_id,
            hint="pip install nvidia-ml-py, or describe the machine with --target",
        )
    return Device(device_id, int(gpu.free_bytes * (1 - HEADROOM_SHARE)), model=gpu.name)


def require_cuda(device_id: str, instead: str = "") -> None:
    """Raise TargetError with the reason unless ONNX Runtime can use this GPU.

    Args:
        device_id: The GPU, such as `cuda:0`.
        instead: A way to do without it, for the hint.
    """
    problem = find_cuda_problem(int(device_id.partition(":")[2]))
    if problem:
        raise TargetError(
            "T011",
            problem,
            where=device_id,
            hint="pip uninstall -y onnxruntime; pip install 'onnxplace[gpu]' "
            "(needs Linux or Windows on x86-64 and a driver for CUDA 13); `onnxplace devices` lists all devices"
            + (f"; {instead}" if instead else ""),
        )


@cache
def find_cuda_problem(index: int) -> str | None:
    """Return why ONNX Runtime cannot use GPU `index`; None if it can.

    It opens a session, since the list of available providers names those compiled in, whether they work or not.
    """
    runtime = import_onnxruntime()
    if "CUDAExecutionProvider" not in runtime.get_available_providers():
        return f"the installed onnxruntime {runtime.__version__} has no CUDA provider"
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # failures arrive as exceptions
    providers = [("CUDAExecutionProvider", {"device_id": str(index)})]
    try:
        session = runtime.InferenceSession(build_one_node_model(), options, providers=providers)
    except Exception as problem:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        return f"ONNX Runtime cannot open it: {str(problem).splitlines()[0]}"
    if session.get_providers()[0] != "CUDAExecutionProvider":
        return "ONNX Runtime fell back to the CPU: the CUDA libraries or the GPU are missing"
    return None


def build_one_node_model() -> bytes:
    """Return a serialised model of one node."""
    from onnx import parser

    text = '<ir_version: 8, opset_import: ["": 17]> one_node (float[1] x) => (float[1] y) { y = Relu(x) }'
    return bytes(parser.parse_model(text).SerializeToString())


def describe_machine() -> dict[str, Any]:
    """Return host, GPUs and the version of ONNX Runtime as plain data.

    Each GPU has the reason why it cannot be used, or None.
    """
    gpus = [
        {
            "id": f"cuda:{gpu.index}",
            "name": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "free_bytes": gpu.free_bytes,
            "problem": find_cuda_problem(gpu.index),
        }
        for gpu in list_gpus()
    ]
    return {
        "host": {"cores": list(available_cores()), "available_memory_bytes": available_memory_bytes()},
        "gpus": gpus,
        "onnxruntime": import_onnxruntime().__version__,
    }
