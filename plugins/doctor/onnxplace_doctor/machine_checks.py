"""Describe the machine and its software, and find the devices that work."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any

import numpy as np

from onnxplace._version import __version__
from onnxplace.machine import measurement_cache
from onnxplace.machine.hardware import available_cores, available_memory_bytes, probe_device, require_device
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.kind_table import find_kind
from onnxplace.testing.runtime_contract import parse_model
from onnxplace.utils.ort import import_onnxruntime
from onnxplace.utils.quantities import format_bytes
from onnxplace_doctor.check_context import CheckContext, CheckFailedError, CheckSkippedError, Finding, require_same

# Distributions by name, or by the beginning of their names.
PACKAGES = ("onnx", "numpy", "numba", "ml-dtypes", "pydantic", "protobuf", "highspy", "psutil", "torch")
PACKAGE_PREFIXES = ("onnxruntime", "onnxplace", "nvidia-", "cuda-")
# Only whether they are set, except for those whose values are numbers.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS")


def check_environment(context: CheckContext) -> Finding:
    """Describe versions, wheels, cores, memory and drivers."""
    import psutil

    runtime, cores, memory = import_onnxruntime(), available_cores(), psutil.virtual_memory()
    processor = measurement_cache.processor()
    if processor.startswith("{"):
        processor = json.loads(processor).get("model name", "unknown processor")
    facts = {
        "onnxplace": __version__,
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        "system": platform.system(),
        "system_release": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "packages": list_packages(),
        "onnxruntime_providers": list(runtime.get_available_providers()),
        "onnxruntime_build": runtime.get_build_info(),
        "processor": processor,
        "cores": list(cores),
        "cores_of_machine": os.cpu_count(),
        "memory_bytes": int(memory.total),
        "available_memory_bytes": available_memory_bytes(),
        "nvidia": describe_nvidia_driver(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    wheels = [f"{name} {version}" for name, version in facts["packages"].items() if name.startswith("onnxruntime")]
    detail = f"Python {facts['python']}, {', '.join(wheels)}; {processor}, {len(cores)} cores"
    return Finding(detail, facts)


def list_packages() -> dict[str, str]:
    """Return the versions of the installed packages that matter, by name."""
    names = {str(item.metadata["Name"]).lower().replace("_", "-"): item.version for item in metadata.distributions()}
    return {name: names[name] for name in sorted(names) if name in PACKAGES or name.startswith(PACKAGE_PREFIXES)}


def describe_nvidia_driver() -> Mapping[str, Any]:
    """Return the versions of NVIDIA's driver and the CUDA that it supports, and its GPUs; empty without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return {
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "cuda": pynvml.nvmlSystemGetCudaDriverVersion_v2(),
            "gpus": [
                {
                    "name": gpu.name,
                    "memory_bytes": gpu.memory_bytes,
                    "free_bytes": gpu.free_bytes,
                    "compute_capability": list(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
                }
                for gpu, handle in zip(find_kind("cuda").list_hardware(), handles)
            ],
        }
    except Exception:  # noqa: BLE001 - no driver, no package, or a driver that does not answer
        return {}


def check_compiler(context: CheckContext) -> Finding:
    """Compile a small model for one CPU device and run it; the first time on a machine compiles loops."""
    model = parse_model("compiler (float[4] x) => (float[4] y) { h = Neg(x) y = Add(h, x) }")
    with replace(context, devices=("cpu:0",)).open_session(model, {".*": "cpu:0"}) as session:
        (y,) = session.run(None, {"x": np.ones(4, np.float32)})
    require_same(y, np.zeros(4, np.float32), "x - x")
    return Finding("a model of two nodes compiles and runs")


def check_find(context: CheckContext) -> Finding:
    """Find the devices of a kind that work; its figures hold their ids as `usable`."""
    (name,) = context.devices
    kind = find_kind(name)
    if kind.is_host:
        usable = [f"{name}:{index}" for index in range(min(len(available_cores()), 2))]
        return Finding(f"{' and '.join(usable)}, each with cores of its own", {"usable": usable, "parts": []})
    hardware = kind.list_hardware()
    provider = kind.provider({})
    is_missing = provider not in import_onnxruntime().get_available_providers()
    if not hardware:
        raise CheckSkippedError(
            f"the installed onnxruntime has no {provider}" if is_missing else f"the driver lists no {kind.title}"
        )
    problems = {
        f"{name}:{item.index}": problem
        for item in hardware
        if (problem := kind.find_problem(DeviceAddress(name, item.index)))
    }
    usable = [device for item in hardware if (device := f"{name}:{item.index}") not in problems]
    text = "; ".join(f"{device}: {problem}" for device, problem in problems.items())
    if problems and is_missing:
        raise CheckSkippedError("; to use it: ".join(filter(None, (text, kind.install_hint))))
    if not usable:
        raise CheckFailedError("; ".join(filter(None, (text, kind.install_hint))))
    figures = {
        "usable": usable,
        "parts": [f"{usable[0]}/0", f"{usable[0]}/1"] if kind.is_divisible else [],
        "hardware": [{"index": item.index, "name": item.name, "memory_bytes": item.memory_bytes} for item in hardware],
        "problems": problems,
    }
    names = [f"{name}:{item.index} {item.name}".strip() for item in hardware if f"{name}:{item.index}" in usable]
    return Finding("; ".join(filter(None, (", ".join(names), text))), figures)


def check_open(context: CheckContext) -> Finding:
    """Open a session on a device and run it; ask the device what it computes."""
    (device,) = context.make_target().devices
    require_device(device)
    model = parse_model("opening (float[4] x) => (float[4] y) { y = Neg(x) }")
    with context.open_session(model, {".*": device.id}) as session:
        (y,) = session.run(None, {"x": np.ones(4, np.float32)})
    require_same(y, np.full(4, -1, np.float32), "-x")
    detail = " ".join(filter(None, (device.model, f"{format_bytes(device.memory_bytes)} for models")))
    traits = probe_device(device)
    figures = {"memory_bytes": device.memory_bytes, "cores": device.cores, "computes": traits and asdict(traits)}
    return Finding("; ".join((detail, *(traits.describe() if traits else ()))), figures)
