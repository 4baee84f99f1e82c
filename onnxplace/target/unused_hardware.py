"""NPUs and GPUs that Linux lists, and that no installed execution provider can reach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from onnxplace.target.kind_table import BUILTIN_KINDS, find_kind
from onnxplace.utils.ort import import_onnxruntime

SYSFS = Path("/sys/class")
_FOLDERS = {"npu": "accel/*", "gpu": "drm/card[0-9]*"}
# Type and PCI vendor of a device -> the vendor's name, and the kinds that reach it, the one to install first.
_PROVIDERS = {
    ("npu", "0x8086"): ("Intel", ("openvino/npu",)),
    ("npu", "0x1022"): ("AMD", ("vitisai/npu",)),
    ("npu", "0x17cb"): ("Qualcomm", ("qnn/npu",)),
    ("npu", "0x5143"): ("Qualcomm", ("qnn/npu",)),
    ("gpu", "0x8086"): ("Intel", ("openvino/gpu", "webgpu", "webgpu/gpu")),
    ("gpu", "0x1002"): ("AMD", ("migraphx/gpu", "webgpu", "webgpu/gpu")),
    ("gpu", "0x10de"): ("NVIDIA", ("cuda", "nv-tensorrt-rtx/gpu", "webgpu", "webgpu/gpu")),
    ("gpu", "0x17cb"): ("Qualcomm", ("qnn/gpu", "webgpu", "webgpu/gpu")),
}


@dataclass(frozen=True)
class UnusedHardware:
    """An accelerator without an execution provider."""

    type: str
    """`npu` or `gpu`."""
    name: str
    """Vendor and type, human-readable."""
    install_hint: str
    """How to get a provider for it."""


def list_unused_hardware() -> tuple[UnusedHardware, ...]:
    """Return the accelerators for which no execution provider is installed; empty on systems other than Linux."""
    return tuple(dict.fromkeys(_find_unused()))


def _find_unused() -> Iterator[UnusedHardware]:
    for kind, folder in _FOLDERS.items():
        for path in sorted(SYSFS.glob(f"{folder}/device/vendor")):
            with suppress(OSError):
                vendor = path.read_text().strip()
                known = _PROVIDERS.get((kind, vendor))
                if known and not any(map(_is_installed, known[1])):
                    yield UnusedHardware(kind, f"{known[0]} {kind.upper()}", find_kind(known[1][0]).install_hint)


def _is_installed(kind: str) -> bool:
    if kind in BUILTIN_KINDS:
        return find_kind(kind).provider({}) in import_onnxruntime().get_available_providers()
    from onnxplace.target.plugin_providers import has_family

    return has_family(kind.partition("/")[0])
