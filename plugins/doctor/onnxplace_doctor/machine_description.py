"""What a machine has, as plain data: cores and memory, accelerators, and what ONNX Runtime lacks to use them."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from onnxplace.machine.hardware import (
    available_cores,
    available_memory_bytes,
    find_install_hint,
    list_accelerators,
    probe_device,
)
from onnxplace.target.device_kinds import Hardware
from onnxplace.target.kind_table import find_kind
from onnxplace.target.target import Device
from onnxplace.target.unused_hardware import list_unused_hardware
from onnxplace.utils.control_groups import find_core_limit
from onnxplace.utils.ort import import_onnxruntime, list_installed_wheels


def describe_machine() -> dict[str, Any]:
    """Return host, accelerators and the version of ONNX Runtime as plain data.

    Each accelerator has the reason why it cannot be used, or None. Those without a provider are `without_provider`.
    """
    return {
        "host": {
            "cores": list(available_cores()),
            "core_limit": None if math.isinf(find_core_limit()) else find_core_limit(),
            "available_memory_bytes": available_memory_bytes(),
        },
        "accelerators": [_describe_accelerator(*item) for item in list_accelerators(plugins=True)],
        "without_provider": [asdict(item) for item in list_unused_hardware()],
        "onnxruntime": import_onnxruntime().__version__,
    }


def _describe_accelerator(device_id: str, hardware: Hardware, problem: str | None) -> dict[str, Any]:
    """Return an accelerator as plain data."""
    described = {
        "id": device_id,
        "name": hardware.name,
        "vendor": hardware.vendor,
        "package": hardware.package or next(iter(list_installed_wheels()), "onnxruntime"),
        "version": hardware.version if hardware.package else import_onnxruntime().__version__,
        "memory_is_known": hardware.memory_is_known,
        "memory_bytes": hardware.memory_bytes,
        "free_bytes": hardware.free_bytes,
        "problem": problem,
    }
    if ":" not in device_id:  # a plugin that cannot be loaded
        return described
    device = Device(device_id, 0)
    kind, traits = find_kind(device.kind), None if problem else probe_device(device)
    return {
        **described,
        "name": hardware.name or kind.title,
        "provider": kind.provider({}),
        "precision": kind.precision(device.address),
        "probed": traits and asdict(traits),
        "takes": [] if problem else kind.list_taken(device.address),
        "needs_static_shapes": kind.needs_static_shapes,
        "install_hint": find_install_hint(device) if problem else "",
    }
