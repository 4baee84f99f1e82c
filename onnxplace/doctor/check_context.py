"""What a check gets, what it returns, and helpers that most checks need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxplace.feeds import Array
from onnxplace.target import Target, parse_devices

# Nothing that a check waits for takes so long; if it does, the process is ended and the check reported as hanging.
WAIT_SECONDS = 600.0


class CheckFailedError(Exception):
    """A check found something wrong; its text says what."""


class CheckSkippedError(Exception):
    """A check does not apply; its text says why."""


@dataclass(frozen=True)
class Finding:
    """What a check found out if nothing is wrong."""

    detail: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckContext:
    """What a check works with."""

    devices: tuple[str, ...]
    """One device or two, with their options, such as `cuda:0{provider=tensorrt}`; or the name of a kind."""
    seconds: float
    """About how long checks that measure should take."""
    folder: Path
    """An empty folder for bundles."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the ids of the devices."""
        return tuple(spec.id for spec in parse_devices(self.devices))

    @property
    def directions(self) -> tuple[tuple[str, str], ...]:
        """Return first and last device in both orders; once for a single device."""
        first, last = self.ids[0], self.ids[-1]
        return ((first, last), (last, first)) if first != last else ((first, first),)

    def make_target(self, memory_bytes: int | None = None) -> Target:
        """Return the devices, with a limit of memory instead of what is free."""
        from onnxplace.machine import local_target

        target = local_target(self.devices)
        if memory_bytes is None:
            return target
        return replace(target, devices=tuple(replace(item, memory_bytes=memory_bytes) for item in target.devices))


@dataclass(frozen=True)
class Check:
    """A check by name, with the function that does it."""

    name: str
    run: Callable[[CheckContext], Finding]
    """Raises CheckFailedError if something is wrong; any other error is a failure too."""
    limit_seconds: float | None = None
    """After which it hangs; None for the limit that most have."""


def require(condition: bool, message: str) -> None:
    """Raise CheckFailedError unless a condition holds."""
    if not condition:
        raise CheckFailedError(message)


def require_same(actual: Array, expected: Array, what: str) -> None:
    """Raise CheckFailedError unless two arrays agree in type, shape and every bit."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    require(
        (actual.dtype, actual.shape) == (expected.dtype, expected.shape),
        f"{what}: expected {expected.dtype}{list(expected.shape)}, got {actual.dtype}{list(actual.shape)}",
    )
    if expected.dtype.hasobject or expected.dtype.kind in "US":
        require(actual.tolist() == expected.tolist(), f"{what}: the texts differ")
    elif actual.tobytes() != expected.tobytes():
        width = expected.dtype.itemsize
        parts = (np.frombuffer(item.tobytes(), np.uint8).reshape(-1, width) for item in (actual, expected))
        different = np.not_equal(*parts).any(axis=1)
        index = int(np.argmax(different))
        raise CheckFailedError(
            f"{what}: {int(different.sum())} of {expected.size} elements differ, the first at {index}: "
            f"expected {expected.ravel()[index]}, got {actual.ravel()[index]}"
        )
