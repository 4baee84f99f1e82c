"""Parsers of device ids, and of amounts of memory, as they are written on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from onnxplace.errors import MAX_SHOWN, TargetError, UsageError, format_value, suggest_nearest
from onnxplace.target.limits import MAX_INDEX, MAX_MEMORY_BYTES, require_device_limit

# The first part of a device id, `cpu:0`.
DEVICE_KINDS = ("cpu", "cuda")


def parse_device_id(text: str, where: str) -> str:
    """Return a device id in its canonical spelling; raises TargetError with the nearest kind.

    >>> parse_device_id("cpu:00", "--devices")
    'cpu:0'
    """
    kind, _, index = text.partition(":")
    if kind not in DEVICE_KINDS:
        if match := re.fullmatch(r"([A-Za-z]+)([0-9]+)", text):  # the colon is missing
            kind, index = match.groups()
        number = index if index.isascii() and index.isdecimal() else "0"
        hint = suggest_nearest(f"{kind}:{number}", [f"{known}:{number}" for known in DEVICE_KINDS])
        hint += " (devices are written kind:index, such as cpu:0)"
        raise TargetError("T005", f"unknown device {text!r}", where=where, hint=hint)
    if not (index.isascii() and index.isdecimal()):
        hint = f"write {kind}:0 for the first one"
        raise TargetError("T005", f"device {text!r} has no index", where=where, hint=hint)
    index = index.lstrip("0") or "0"
    if len(index) > len(str(MAX_INDEX)):
        message = f"expected an index of at most {MAX_INDEX}, got device {format_value(text)}"
        raise TargetError("T005", message, where=where)
    return f"{kind}:{index}"


def parse_device_ids(text: str | Sequence[str], where: str = "--devices") -> tuple[str, ...]:
    """Parse `cuda:0,cpu:1` into ids; raises TargetError that names the bad one.

    >>> parse_device_ids("cuda:0, cpu:1")
    ('cuda:0', 'cpu:1')
    """
    items = text.split(",") if isinstance(text, str) else list(text)
    items = [item.strip() for item in items if item.strip()]
    require_device_limit(len(items), where)
    ids = tuple(parse_device_id(item, where) for item in items)
    if not ids:
        raise TargetError("T001", "the list of devices is empty", where=where, hint="try --devices cpu:0,cpu:1")
    if len(set(ids)) < len(ids):
        raise TargetError(
            "T002", "a device is named twice", where=f"{where} {','.join(ids)}", hint="name each device once"
        )
    return ids


# Lower-case unit -> bytes: decimal ones, and binary ones with an i.
_UNIT_BYTES = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "t": 10**12,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(text: str) -> int:
    """Parse an amount of memory such as `16GiB`, `500MB` or `1024`.

    >>> parse_bytes("1.5KiB")
    1536
    """
    hint = "write it as 16GiB, 500MB or 1048576"
    # Texts that are too long to be shown are no amounts; matching them could take long.
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text if len(text) <= MAX_SHOWN else "")
    if not match or match[2].lower() not in _UNIT_BYTES:
        raise UsageError("U010", f"expected an amount of memory, got {format_value(text)}", hint=hint)
    amount = float(match[1]) * _UNIT_BYTES[match[2].lower()]
    if amount > MAX_MEMORY_BYTES:
        raise UsageError("U010", f"expected at most 2**60 bytes of memory, got {text!r}", hint=hint)
    return int(amount)


def parse_memory(text: str, device_ids: Iterable[str]) -> dict[str, int]:
    """Parse `16GiB` (every device) or `cuda:0=16GiB,cpu:0=64GiB` into bytes by device id.

    >>> parse_memory("1KiB", ["cpu:0", "cpu:1"])
    {'cpu:0': 1024, 'cpu:1': 1024}
    """
    ids = list(device_ids)
    if "=" not in text:
        return dict.fromkeys(ids, parse_bytes(text))
    limits: dict[str, int] = {}
    for item in text.split(","):
        device_id, _, amount = item.strip().partition("=")
        if device_id not in ids:
            message = f"no device {device_id!r} to limit"
            raise TargetError("T004", message, where="--max-memory", hint=suggest_nearest(device_id, ids))
        if device_id in limits:
            raise TargetError(
                "T002", f"{device_id} is limited twice", where="--max-memory", hint="name each device once"
            )
        limits[device_id] = parse_bytes(amount)
    return limits
