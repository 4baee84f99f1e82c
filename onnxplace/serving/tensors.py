"""Tensors as the Open Inference Protocol writes them: names of types, numbers in lists, and raw bytes.

Raw bytes are little-endian and row-major. A text (BYTES) is its length in four bytes, then its UTF-8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxplace.errors import FeedError, format_value
from onnxplace.feeds import MAX_DIMENSION, MAX_RANK, Array, Declared, check_feeds, numpy_type

# Types that the protocol does not call by ONNX's name in capitals.
_NAMES = {"float": "FP32", "double": "FP64", "float16": "FP16", "bfloat16": "BF16", "string": "BYTES"}
_LENGTH_BYTES = 4


def name_datatype(dtype: str) -> str:
    """Return the protocol's name of a tensor type; where it has none, ONNX's name in capitals.

    >>> name_datatype("tensor(float)"), name_datatype("tensor(int64)"), name_datatype("tensor(float8e5m2)")
    ('FP32', 'INT64', 'FLOAT8E5M2')
    """
    element = dtype.removeprefix("tensor(").removesuffix(")")
    return _NAMES.get(element, element.upper())


def check_tensor(item: Declared, datatype: object, shape: Any) -> tuple[int, ...]:
    """Return the shape of a tensor in a request; raises FeedError unless type and shape can be those of the input."""
    where, expected = f"input {item.name!r}", name_datatype(item.dtype)
    if datatype != expected:
        raise FeedError("F003", f"its datatype is {format_value(datatype)}, the model takes {expected}", where=where)
    sizes = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else (None,)
    if len(sizes) > MAX_RANK or not all(type(size) is int and 0 <= size <= MAX_DIMENSION for size in sizes):
        message = f"expected a shape of at most {MAX_RANK} sizes from 0 to {MAX_DIMENSION}, got {format_value(shape)}"
        raise FeedError("F003", message, where=where)
    return sizes


def read_raw(item: Declared, shape: tuple[int, ...], data: bytes | memoryview) -> Array:
    """Return the tensor that raw bytes hold; numbers share their memory. Raises FeedError."""
    dtype, where = numpy_type(item.dtype), f"input {item.name!r}"
    if dtype is None:
        return _arrange(np.array(_read_texts(data, where), object), shape, where)
    if len(data) != math.prod(shape) * dtype.itemsize:
        message = f"expected {math.prod(shape) * dtype.itemsize} bytes for the shape {list(shape)}, got {len(data)}"
        raise FeedError("F003", message, where=where)
    array: Array = np.frombuffer(data, dtype).reshape(shape)
    return array if array.flags.aligned else array.copy()


def _read_texts(data: bytes | memoryview, where: str) -> list[bytes]:
    """Return texts, each with its length before it."""
    texts, begin = list[bytes](), 0
    while begin < len(data):
        first = begin + _LENGTH_BYTES
        begin = first + int.from_bytes(data[begin:first], "little")
        if first > len(data) or begin > len(data):
            raise FeedError("F003", f"the text at position {len(texts)} is longer than the data", where=where)
        texts.append(bytes(data[first:begin]))
    return texts


def read_list(item: Declared, shape: tuple[int, ...], data: Any) -> Array:
    """Return the tensor that a list holds, flat or nested as JSON has it; raises FeedError."""
    where, dtype = f"input {item.name!r}", numpy_type(item.dtype)
    if not isinstance(data, list):
        raise FeedError("F003", f"expected a list as data, got {format_value(data)}", where=where)
    if dtype is not None and dtype.kind == "V":  # of ml_dtypes, which numpy does not convert lists to
        array = np.asarray(check_feeds({item.name: data}, [Declared(item.name, "tensor(double)", None)])[item.name])
        converted = array.astype(dtype)
        if "int" in dtype.name and not np.array_equal(converted.astype(np.float64), array):
            raise FeedError("F003", f"not all of its numbers fit into {dtype}", where=where)
        return _arrange(converted, shape, where)
    return _arrange(check_feeds({item.name: data}, [Declared(item.name, item.dtype, None)])[item.name], shape, where)


def _arrange(array: Array, shape: tuple[int, ...], where: str) -> Array:
    if array.size != math.prod(shape):
        message = f"expected {math.prod(shape)} elements for the shape {list(shape)}, got {array.size}"
        raise FeedError("F003", message, where=where)
    return array.reshape(shape)


def write_raw(array: Array) -> bytes | memoryview:
    """Return the raw bytes of a tensor; those of numbers share its memory."""
    if array.dtype.kind not in "OUS":
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    texts = [text.encode() if isinstance(text, str) else bytes(text) for text in array.ravel().tolist()]
    return b"".join(part for text in texts for part in (len(text).to_bytes(_LENGTH_BYTES, "little"), text))


def write_list(array: Array, item: Declared) -> list[Any]:
    """Return the elements of a tensor, flat, as JSON can hold them: null for numbers that are not finite.

    Raises FeedError for complex numbers.
    """
    if array.dtype.kind == "c":
        message = f"JSON has no {name_datatype(item.dtype)}"
        raise FeedError("F003", message, where=f"output {item.name!r}", hint="ask for binary data")
    flat = array.ravel()
    if flat.dtype.kind == "V":
        flat = flat.astype(np.int64 if "int" in flat.dtype.name else np.float64)
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        return [value if math.isfinite(value) else None for value in flat.tolist()]
    values: list[Any] = flat.tolist()
    return [text.decode() if isinstance(text, bytes) else text for text in values] if flat.dtype == object else values
