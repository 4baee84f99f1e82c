"""A kind of devices that declares float32, and computes in shorter types: results are changed when they leave it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from onnxplace.machine import device_probe
from onnxplace.target.device_kinds import Hardware
from onnxplace.target.provider_lock import ProviderLock
from tests.support.half_device import Half, offer_kind


def _round_to(kind: Any, source: Any = np.float32) -> Callable[[Any], Any]:
    def lie(value: Any) -> Any:
        with np.errstate(over="ignore", invalid="ignore"):
            return value.astype(kind).astype(source) if value.dtype == source else value

    return lie


def _round_to_tf32(value: Any) -> Any:
    if value.dtype != np.float32:
        return value
    bits = (value.view(np.uint32).astype(np.uint64) + (1 << 12)) & 0xFFFFE000
    return np.where(np.isfinite(value), bits.astype(np.uint32).view(np.float32), value)


def _replace_floats(is_lost: Callable[[Any], Any], by: float) -> Callable[[Any], Any]:
    def lie(value: Any) -> Any:
        return np.where(is_lost(value), np.float32(by), value) if value.dtype == np.float32 else value

    return lie


# What a device may do to its results, by name.
LIES: Mapping[str, Callable[[Any], Any]] = {
    "float16": _round_to(np.float16),
    "bfloat16": _round_to(ml_dtypes.bfloat16),
    "tf32": _round_to_tf32,
    "int64 in int32": _round_to(np.int32, np.int64),
    "uint64 in int32": _round_to(np.int32, np.uint64),
    "int64 in float64": _round_to(np.float64, np.int64),
    "int32 in float32": _round_to(np.float32, np.int32),
    "double in float32": _round_to(np.float32, np.float64),
    "float16 in bfloat16": _round_to(ml_dtypes.bfloat16, np.float16),
    "no NaN": _replace_floats(np.isnan, 0.0),
    "no infinity": _replace_floats(np.isinf, 3e38),
    "no subnormals": _replace_floats(lambda value: (value != 0) & (abs(value) < 2**-126), 0.0),
    "no negative zero": _replace_floats(lambda value: value == 0, 0.0),
}


class _LyingLock(ProviderLock):
    """Changes what runs return, the only lists of arrays that calls do."""

    def call(self, function: Callable[[], Any]) -> Any:
        result = super().call(function)
        for name in Lying.lies if isinstance(result, list) else ():
            result = [LIES[name](value) if isinstance(value, np.ndarray) else value for value in result]
        return result


class Lying(Half):
    """A device whose sessions run on the CPU."""

    name: ClassVar[str] = "lying"
    title: ClassVar[str] = "device that says float32"
    value_options: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    lock: ClassVar[ProviderLock | None] = _LyingLock()
    lies: ClassVar[tuple[str, ...]] = ("float16", "int64 in int32")

    def list_hardware(self) -> tuple[Hardware, ...]:
        return (Hardware(0, f"Liar {', '.join(self.lies)}", 1 << 30, 1 << 30),)


@pytest.fixture(autouse=True)
def lying_kind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `lying:0` be a device of this machine, not asked yet, for the tests of modules that import this."""
    monkeypatch.setattr(device_probe, "_known", {})
    with offer_kind(Lying):
        yield
