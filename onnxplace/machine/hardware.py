"""What this machine has: cores, memory, GPUs, and what the installed ONNX Runtime can use of them."""

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

# Of a process that runs bundles, before it has a model: Python, its packages, ONNX Runtime (benchmarks/memory.py).
RUNTIME_BYTES = 141 << 20
# Left free by default beside that, for what a schedule does not count: the sessions' own structures, holes in the
# arena, a weight that several segments of a device copy, and whatever else the machine does (docs/measurements.md).
HEADROOM = 0.10

INSTALL_HINT = "pip install 'onnxplace[cpu]' (or 'onnxplace[gpu]' on a machine with CUDA 13)"


@lru_cache(maxsize=1)
def import_onnxruntime() -> Any:
    """Import ONNX Runtime once, with telemetry off unless the user has set it; raises ExecutionError if broken."""
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
            "the installed onnxruntime is empty (a wheel was removed over another)",
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
    """One GPU as its driver describes it."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int


def list_gpus() -> tuple[Gpu, ...]:
    """List the NVIDIA GPUs that the driver shows; empty without a driver or without nvidia-ml-py."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - any failure to talk to a driver means that there is none to use
        return ()
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory, name = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetName(handle)
        found.append(Gpu(index, name if isinstance(name, str) else name.decode(), int(memory.total), int(memory.free)))
    return tuple(found)


def link_technology(source: str, destination: str) -> str:
    """Return what connects two devices of this machine: `memory`, `nvlink`, `pcie` or `host`.

    Two GPUs with peer access are connected by NVLink or PCIe; whatever else there is with a GPU goes through the
    host's memory, also where nobody can say (no driver, or no nvidia-ml-py).
    """
    gpu_indices = [int(name.partition(":")[2]) for name in (source, destination) if name.startswith("cuda:")]
    if not gpu_indices:
        return "memory"
    return _peer_link(*gpu_indices) if len(gpu_indices) == 2 else "host"


def _peer_link(first: int, second: int) -> str:
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
    except Exception:  # noqa: BLE001 - no driver, or one that cannot tell
        return "host"
    return "host"


def available_cores() -> tuple[int, ...]:
    """Return the processor cores this process may use, in order; a thread that pinned itself sees them all."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(os.getpid())))
    return tuple(range(os.cpu_count() or 1))


def available_memory_bytes() -> int:
    """Return the host memory that is free for us, within the container's limit if there is one."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    with suppress(OSError, ValueError):  # no such control group, or its limit is "max"
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(free, 0)


def core_shares(count: int) -> list[int]:
    """Return how many of this machine's cores each of `count` CPU devices gets; at least one each."""
    share, extra = divmod(len(available_cores()), count)
    return [max(share + (index < extra), 1) for index in range(count)]


def assign_cores(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Give CPU devices cores of their own, as many as each wants; they share cores only when there are too few."""
    have = available_cores()
    sets, start = [], 0
    for size in sizes:
        sets.append(tuple(have[(start + offset) % len(have)] for offset in range(min(size, len(have)))))
        start += size
    return sets


def local_target(devices: str | Sequence[str] | None = None) -> Target:
    """Describe devices of this machine; all GPUs, or else two CPU devices, unless named.

    Raises TargetError for a GPU that is not here or that ONNX Runtime cannot use. Memory limits are what is free
    now, less a headroom of 10 %; CPU devices share the host's memory equally, less what a process takes by itself.
    """
    found = list_gpus()
    ids = parse_device_ids(devices) if devices else default_device_ids(found)
    cpu_count = sum(device_id.startswith("cpu:") for device_id in ids)
    shares = iter(core_shares(cpu_count) if cpu_count else [])
    room = max(available_memory_bytes() - RUNTIME_BYTES, 0)
    host_bytes = int(room * (1 - HEADROOM)) // max(cpu_count, 1)
    result = []
    for device_id in ids:
        kind, _, index = device_id.partition(":")
        if kind == "cuda":
            result.append(_cuda_device(device_id, int(index), found))
        else:
            result.append(Device(device_id, host_bytes, cores=next(shares)))
    return Target(tuple(result))


def default_device_ids(found: tuple[Gpu, ...]) -> tuple[str, ...]:
    """Return every GPU that ONNX Runtime can use, else two CPU devices."""
    usable = tuple(f"cuda:{gpu.index}" for gpu in found if cuda_problem(gpu.index) is None)
    return usable or ("cpu:0", "cpu:1")


def _cuda_device(device_id: str, index: int, found: tuple[Gpu, ...]) -> Device:
    require_cuda(device_id)
    gpu = next((gpu for gpu in found if gpu.index == index), None)
    if gpu is None:
        raise TargetError(
            "T010",
            "its memory cannot be read: the driver does not list it",
            where=device_id,
            hint="pip install nvidia-ml-py, or describe the machine with --target",
        )
    return Device(device_id, int(gpu.free_bytes * (1 - HEADROOM)), model=gpu.name)


def require_cuda(device_id: str, instead: str = "") -> None:
    """Raise TargetError, saying why and how to get it, unless ONNX Runtime can really use this GPU.

    `instead` is what can be done without it, for the hint.
    """
    problem = cuda_problem(int(device_id.partition(":")[2]))
    if problem:
        raise TargetError(
            "T011",
            problem,
            where=device_id,
            hint="pip uninstall -y onnxruntime; pip install 'onnxplace[gpu]' "
            "(needs Linux or Windows on x86-64 and a driver for CUDA 13); `onnxplace devices` lists what is here"
            + (f"; {instead}" if instead else ""),
        )


@cache
def cuda_problem(index: int) -> str | None:
    """Say why ONNX Runtime cannot use GPU `index`, or None if it can.

    Opens a one-node session: the list of available providers names what was compiled in, not what works.
    """
    runtime = import_onnxruntime()
    if "CUDAExecutionProvider" not in runtime.get_available_providers():
        return f"the installed onnxruntime {runtime.__version__} has no CUDA provider"
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    providers = [("CUDAExecutionProvider", {"device_id": str(index)})]
    try:
        session = runtime.InferenceSession(one_node_model(), options, providers=providers)
    except Exception as problem:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        return f"ONNX Runtime cannot open it: {str(problem).splitlines()[0]}"
    if session.get_providers()[0] != "CUDAExecutionProvider":
        return "ONNX Runtime fell back to the CPU: the CUDA libraries or the GPU are missing"
    return None


def one_node_model() -> bytes:
    """Return the smallest model there is."""
    from onnx import parser

    text = '<ir_version: 8, opset_import: ["": 17]> one_node (float[1] x) => (float[1] y) { y = Relu(x) }'
    return bytes(parser.parse_model(text).SerializeToString())


def describe_machine() -> dict[str, Any]:
    """Return what is here as plain data: host, GPUs with what keeps ONNX Runtime from using them, its version."""
    found = [
        {
            "id": f"cuda:{gpu.index}",
            "name": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "free_bytes": gpu.free_bytes,
            "problem": cuda_problem(gpu.index),
        }
        for gpu in list_gpus()
    ]
    return {
        "host": {"cores": list(available_cores()), "available_memory_bytes": available_memory_bytes()},
        "gpus": found,
        "onnxruntime": import_onnxruntime().__version__,
    }
