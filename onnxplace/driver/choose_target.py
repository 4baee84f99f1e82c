"""Choose the devices of a compilation or a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnxplace.errors import UsageError
from onnxplace.machine import local_target
from onnxplace.target import Target, parse_memory, read_target


def require_one_target(devices: object, target: object) -> None:
    """Raise UsageError if devices are named in two ways."""
    if target is not None and devices is not None:
        hint = "name the devices in the target file"
        raise UsageError("U040", "--devices and --target exclude each other", hint=hint)


def choose_target(
    devices: str | Sequence[str] | None, target: Target | str | Path | None, max_memory: str | int | None
) -> Target:
    """Return the target, or that of a file, or devices of this machine, with memory limits.

    Raises UsageError if devices are given as well.
    """
    require_one_target(devices, target)
    if isinstance(target, (str, Path)):
        target = read_target(target)
    target = target or local_target(devices)
    if not max_memory:
        return target
    return target.limiting(parse_memory(str(max_memory), [device.id for device in target.devices]))
