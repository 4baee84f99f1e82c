"""What a check gets, what it returns, and helpers that most checks need."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxplace.bundle import Bundle
from onnxplace.feeds import Array
from onnxplace.target import Target, parse_devices

if TYPE_CHECKING:
    from onnx import ModelProto

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


def parse_model(text: str, **weights: Array) -> ModelProto:
    """Return a model from ONNX's text form, without its header, and with these weights."""
    from onnx import numpy_helper, parser

    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    for node in model.graph.node:
        node.name = node.name or node.output[0]
    return model


def compile_placed(
    model: ModelProto,
    folder: Path,
    target: Target,
    places: Mapping[str, str],
    *,
    state: Sequence[str] = (),
    **sizes: int,
) -> Bundle:
    """Compile a model with each node on the device that is given, by estimated costs, so that nothing is measured.

    Args:
        model: its nodes are named as their first output.
        folder: where to write the bundle; a new one.
        target: the devices.
        places: device ids by pattern of node names.
        state: pairs of a state's output and input.
        sizes: of symbolic dimensions.
    """
    from onnxplace.driver import compile_model
    from onnxplace.pipeline import make_pass, make_spec

    folder.mkdir(parents=True)
    device_map = folder / "map.json"
    device_map.write_text(json.dumps(places), encoding="utf-8")
    coplace = replace(make_pass("coplace"), join="never", device_map=str(device_map))  # type: ignore[call-arg]
    passes = f"profile{{estimate=true}},{make_spec(coplace)},fuse,m-etf,split,emit"
    output = folder / "bundle"
    return compile_model(model, output, target=target, shape=sizes, pipeline=passes, state=state, trial=False).bundle


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
        different = (_as_bytes(actual).reshape(-1, width) != _as_bytes(expected).reshape(-1, width)).any(axis=1)
        index = int(np.argmax(different))
        raise CheckFailedError(
            f"{what}: {int(different.sum())} of {expected.size} elements differ, the first at {index}: "
            f"expected {expected.ravel()[index]}, got {actual.ravel()[index]}"
        )


def _as_bytes(array: Array) -> Array:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
