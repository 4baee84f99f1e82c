"""Limits on the numbers of a target, and the checks that enforce them."""

from __future__ import annotations

import numpy as np

from onnxplace.errors import TargetError, format_value

# Each pair of devices has its links, so that a target grows with the square of this.
MAX_DEVICES = 256
# Sums of bytes over MAX_DEVICES devices stay within 64 bits.
MAX_MEMORY_BYTES = 1 << 60
# Larger numbers are typing errors: no machine has as many cores, and no device as high an index.
MAX_CORES, MAX_INDEX = 1 << 16, 10**6 - 1
# Beyond these, times and rates lose their meaning, and sums of them their digits.
MAX_SECONDS, MAX_LATENCY_SECONDS, MAX_SLOWDOWN = 1e6, 1e12, 1e6
MAX_RATE = 1e24
MIN_BYTES_PER_SECOND, MAX_BYTES_PER_SECOND = 1e-12, 1e18


def require_number(
    record: object, name: str, where: str, minimum: float, maximum: float, *, whole: bool = False
) -> None:
    """Raise TargetError unless a field of a record is a number from `minimum` to `maximum`."""
    value = getattr(record, name)
    is_number = isinstance(value, (int, np.integer) if whole else (int, float, np.integer, np.floating))
    if not is_number or isinstance(value, bool) or not minimum <= value <= maximum:
        kind = "whole number" if whole else "number"
        message = f"expected a {kind} from {minimum} to {maximum} for {name}, got {format_value(value)}"
        raise TargetError("T007", message, where=where)


def require_device_limit(count: int, where: str) -> None:
    """Raise TargetError for more devices than onnxplace supports."""
    if count > MAX_DEVICES:
        message = f"expected at most {MAX_DEVICES} devices, got {count}"
        raise TargetError("T005", message, where=where, hint="name fewer devices: each pair of them has its links")
