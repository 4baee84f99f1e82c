"""Initial values of carried states: ranges of files, which are mapped into memory when they are read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from onnxplace.bundle.manifest import InitialRecord, InputRecord, Manifest
from onnxplace.errors import BundleError
from onnxplace.feeds import Array, numpy_type


def map_initial_value(file: Path, record: InitialRecord, dtype: str) -> Array:
    """Return an initial value that shares the memory of its file, read-only; `dtype` is ONNX Runtime's name."""
    element = numpy_type(dtype)
    assert element is not None, "checked when the bundle was opened"
    if not record.bytes:
        return np.zeros(record.shape, element)
    array = np.asarray(np.memmap(file, element, "r", record.offset, record.shape))
    return array if array.flags.aligned else array.copy()


def check_initial_states(manifest: Manifest, file: Path) -> None:
    """Raise BundleError unless each initial value fits its input, and lies inside a file of the bundle."""
    inputs = {item.name: item for item in manifest.inputs}
    for state in manifest.states:
        if state.initial is None:
            continue
        for fault in _iterate_faults(manifest, state.initial, inputs[state.input]):
            message = f"the initial value of state {state.input!r} {fault}"
            raise BundleError("N002", message, where=str(file), hint="the bundle is damaged; compile the model again")


def _iterate_faults(manifest: Manifest, record: InitialRecord, item: InputRecord) -> Iterator[str]:
    files = manifest.linked if record.linked else manifest.files
    element, listed = numpy_type(item.dtype), files.get(record.file)
    if listed is None:
        yield f"is in {record.file!r}, which is not a file of the bundle"
    elif record.offset + record.bytes > listed.bytes:
        yield f"ends at byte {record.offset + record.bytes} of {record.file!r}, which has {listed.bytes}"
    elif element is None:
        yield f"is of type {item.dtype}, which cannot be stored"
    elif math.prod(record.shape) * element.itemsize != record.bytes:
        yield f"has {record.bytes} bytes, expected {math.prod(record.shape) * element.itemsize}"
    elif item.shape is not None and not _is_compatible(record.shape, item.shape):
        yield f"has the shape {list(record.shape)}, expected {list(item.shape)}"


def _is_compatible(shape: tuple[int, ...], declared: tuple[int | str | None, ...]) -> bool:
    return len(shape) == len(declared) and all(
        size == entry for size, entry in zip(shape, declared) if isinstance(entry, int)
    )
