"""Values as plain JSON and flat buffers of bytes: arrays, strings, sequences, maps, absent optionals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

# Element types that ONNX has and numpy lacks are looked up in ml_dtypes.
_STRING_KINDS = "OUS"


def encode_value(value: Any, buffers: list[Any]) -> Any:
    """Return a description of a value as plain JSON; its bytes are appended to `buffers`.

    >>> encode_value([np.zeros((2, 1), np.int8), None], [])
    ['list', [['array', 'int8', [2, 1]], ['none']]]
    """
    if value is None:
        return ["none"]
    if isinstance(value, np.generic):
        return ["scalar", encode_value(np.asarray(value), buffers)]
    if isinstance(value, np.ndarray):
        if value.dtype.kind in _STRING_KINDS:
            buffers.append(_encode_strings(value))
            return ["strings", list(value.shape)]
        buffers.append(flatten(value))
        return ["array", value.dtype.name, list(value.shape)]
    if isinstance(value, Mapping):
        return ["map", list(value), [encode_value(item, buffers) for item in value.values()]]
    if isinstance(value, list):
        return ["list", [encode_value(item, buffers) for item in value]]
    return ["plain", value]


def decode_value(description: Any, buffers: Iterator[Any]) -> Any:
    """Return the value of a description; its arrays share the memory of the buffers."""
    kind, *rest = description
    if kind == "none":
        return None
    if kind == "scalar":
        return decode_value(rest[0], buffers)[()]
    if kind == "strings":
        texts = json.loads(bytes(next(buffers)))
        array = np.empty(len(texts), object)
        array[:] = texts
        return array.reshape(rest[0])
    if kind == "array":
        return unflatten(next(buffers), find_dtype(rest[0]), rest[1])
    if kind == "map":
        return dict(zip(rest[0], [decode_value(item, buffers) for item in rest[1]]))
    return [decode_value(item, buffers) for item in rest[0]] if kind == "list" else rest[0]


def encode_values(values: Mapping[str, Any], buffers: list[Any]) -> dict[str, Any]:
    """Return descriptions of values by name; their bytes are appended to `buffers`."""
    return {name: encode_value(value, buffers) for name, value in values.items()}


def decode_values(descriptions: Mapping[str, Any], buffers: Iterator[Any]) -> dict[str, Any]:
    """Return the values of descriptions by name."""
    return {name: decode_value(item, buffers) for name, item in descriptions.items()}


def flatten(array: Any) -> Any:
    """Return the bytes of an array as a flat array, which shares its memory if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def unflatten(buffer: Any, dtype: np.dtype[Any], shape: Any) -> Any:
    """Return the array that has these bytes; it shares their memory where its numbers are aligned there."""
    array = np.asarray(buffer).view(dtype).reshape(shape)
    return array if array.flags.aligned else array.copy()


def find_dtype(name: str) -> np.dtype[Any]:
    """Return an element type by its name, such as `float32` or `bfloat16`."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype


def _encode_strings(array: Any) -> Any:
    """Return strings as JSON in bytes."""
    texts = [item.decode() if isinstance(item, bytes) else str(item) for item in array.ravel().tolist()]
    return np.frombuffer(json.dumps(texts).encode(), np.uint8)
