"""OrtValues as feeds and as results.

An OrtValue that is made of an array borrows its memory, and an array that is made of an OrtValue borrows from there.
Here each keeps alive what it borrows from, or owns a copy.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxplace.errors import FeedError
from onnxplace.machine import is_native_array, to_ort_value, to_python
from onnxplace.ort import import_onnxruntime


class _Borrowed:
    """The memory of an array, for numpy, together with the OrtValue that owns it."""

    def __init__(self, array: Any, owner: Any) -> None:
        self.__array_interface__ = array.__array_interface__
        self.owner = owner


def unwrap_ort_values(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return feeds with arrays, or lists of arrays, in place of OrtValues; tensors on the CPU are not copied.

    Raises FeedError for sparse tensors.
    """
    ort_value = getattr(sys.modules.get("onnxruntime"), "OrtValue", None)  # before its import, there is no OrtValue
    if ort_value is None or not isinstance(feeds, Mapping):
        return feeds
    return {name: _to_array(name, value) if isinstance(value, ort_value) else value for name, value in feeds.items()}


def _to_array(name: str, value: Any) -> Any:
    if value.is_sparse_tensor():
        message, hint = "expected a dense tensor, got a sparse one", "give it as an array"
        raise FeedError("F003", message, where=f"input {name!r}", hint=hint)
    array = to_python(value)
    return np.asarray(_Borrowed(array, value)) if is_native_array(array) else array


def to_owned_ort_value(value: Any, declared: str) -> Any:
    """Return an output as an OrtValue that owns its memory; None for an absent optional.

    `declared` is its type in the model, which an empty list needs.
    """
    result = to_ort_value(value, declared)
    if result is None or not result.is_tensor() or result.data_type() == "tensor(string)":
        return result
    owned = import_onnxruntime().OrtValue.ortvalue_from_shape_and_type(result.shape(), result.element_type())
    ctypes.memmove(owned.data_ptr(), result.data_ptr(), result.tensor_size_in_bytes())
    return owned
