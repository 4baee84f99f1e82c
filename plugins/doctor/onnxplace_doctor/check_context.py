"""What a check gets, what it returns, and helpers that most checks need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxplace.errors import ExecutionError, ModelError
from onnxplace.feeds.feeds import Array
from onnxplace.machine.hardware import local_target, probe_device
from onnxplace.session.inference_session import InferenceSession
from onnxplace.target.parsing import parse_devices
from onnxplace.target.target import Target
from onnxplace.testing.runtime_contract import compile_placed
from onnxplace.utils.differences import relative_error

if TYPE_CHECKING:
    from onnx import ModelProto

# Nothing that a check waits for takes so long; if it does, the process is ended and the check reported as hanging.
WAIT_SECONDS = 600.0
# Types that a GPU need not have.
OPTIONAL_TYPES = ("float16", "bfloat16", "double")


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

    def list_changed_types(self) -> dict[str, str]:
        """Return the types that a device does not keep, and those that it has instead: nodes with them go elsewhere."""
        traits = filter(None, map(probe_device, self.make_target().devices))
        return {name: found for item in traits for name, found in item.changes.items()}

    def make_target(self, memory_bytes: int | None = None) -> Target:
        """Return the devices, with a limit of memory instead of what is free."""
        target = local_target(self.devices)
        if memory_bytes is None:
            return target
        return replace(target, devices=tuple(replace(item, memory_bytes=memory_bytes) for item in target.devices))

    def open_session(self, model: ModelProto, places: Mapping[str, str], **sizes: Any) -> InferenceSession:
        """Compile a model with its nodes on these devices (`compile_placed`), and open the bundle."""
        folder = self.folder / f"model-{len(list(self.folder.iterdir()))}"
        return InferenceSession(compile_placed(model, folder, self.make_target(), places, **sizes))


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


def find_error(actual: Array, expected: Array, limit: float, what: str) -> float:
    """Return the largest error relative to the largest value; raises CheckFailedError if it exceeds a limit."""
    error = relative_error(actual, expected)
    require(error <= limit, f"{what} is {error:.2g} of the largest value, allowed {limit}")
    return error


def run_cases(cases: Mapping[str, tuple[str, Callable[[], float]]], all_hosts: bool) -> tuple[list[float], list[str]]:
    """Run cases by name, each with its type; return the results, and the names of those whose type a GPU refuses.

    Raises CheckFailedError with all that is wrong.
    """
    results, refused, wrong = [], [], []
    for name, (kind, run) in cases.items():
        try:
            results.append(run())
        except CheckFailedError as problem:
            wrong.append(f"{name}: {problem}")
        except (ExecutionError, ModelError) as problem:
            if all_hosts or kind not in OPTIONAL_TYPES:
                wrong.append(f"{name}: {problem.message}")
            refused.append(name)
    require(not wrong, "; ".join(wrong))
    return results, refused
