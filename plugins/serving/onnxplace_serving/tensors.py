"""Requests and answers of the Open Inference Protocol: its names of types, numbers in lists, and raw bytes.

Raw bytes are little-endian and row-major. A text (BYTES) is its length in four bytes, then its UTF-8.
Requests over gRPC are brought into the form that JSON has over HTTP, so that both are read by one function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from onnxplace.errors import FeedError, format_value, suggest_nearest
from onnxplace.feeds.dimensions import MAX_DIMENSION, MAX_RANK
from onnxplace.feeds.feeds import Array, Declared, check_feeds, numpy_type

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


def require_kind(value: Any, kind: type, what: str) -> Any:
    """Return a value of a request; raises FeedError unless it is of a kind."""
    if type(value) is not kind:
        names = {dict: "an object", list: "a list", int: "a whole number", str: "a text", bool: "true or false"}
        raise FeedError("F003", f"expected {names[kind]}, got {format_value(value)}", where=what)
    return value


def read_optional(entry: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return a field, or its default if it is left out or null; raises FeedError unless it is of the default's kind."""
    value = entry.get(name)
    return default if value is None else require_kind(value, type(default), name)


def read_parameters(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a request or tensor; raises FeedError for extensions that this server does not have."""
    parameters: dict[str, Any] = read_optional(entry, "parameters", {})
    for name in {"shared_memory_region", "classification"} & parameters.keys():
        raise FeedError("F003", "this server does not have this extension", where=name, hint="send and take tensors")
    return parameters


def read_inputs(
    request: Mapping[str, Any], inputs: Mapping[str, Declared], take_raw: Callable[[Mapping[str, Any]], Any]
) -> dict[str, Array]:
    """Return the inputs of a request by name; raises FeedError.

    `take_raw` is called with the parameters of each input in order, and returns its raw bytes, or None if it has a
    list of numbers instead.
    """
    feeds: dict[str, Array] = {}
    for entry in require_kind(request.get("inputs"), list, "inputs"):
        name = require_kind(entry, dict, "an input").get("name")
        if not isinstance(name, str) or name not in inputs:
            hint = suggest_nearest(str(name), inputs)
            raise FeedError("F001", f"the model has no input {format_value(name)}", hint=hint)
        if name in feeds:
            raise FeedError("F001", f"input {name!r} is given twice")
        item, raw, shape = inputs[name], take_raw(read_parameters(entry)), entry.get("shape")
        expected, where = name_datatype(item.dtype), f"input {name!r}"
        if raw is not None and entry.get("data"):
            raise FeedError("F003", "it has its elements twice: in raw bytes, and in a list", where=where)
        if entry.get("datatype") != expected:
            message = f"its datatype is {format_value(entry.get('datatype'))}, the model takes {expected}"
            raise FeedError("F003", message, where=where)
        sizes = tuple(require_kind(size, int, f"{where}, shape") for size in require_kind(shape, list, where))
        if len(sizes) > MAX_RANK or not all(0 <= size <= MAX_DIMENSION for size in sizes):
            message = f"expected at most {MAX_RANK} sizes from 0 to {MAX_DIMENSION}, got {format_value(shape)}"
            raise FeedError("F003", message, where=f"{where}, shape")
        array = read_list(item, entry.get("data")) if raw is None else read_raw(item, raw)
        if array.size != math.prod(sizes):
            message = f"expected {math.prod(sizes)} elements for the shape {list(sizes)}, got {array.size}"
            raise FeedError("F003", message, where=where)
        feeds[name] = array.reshape(sizes)
    return feeds


def read_raw(item: Declared, data: bytes | memoryview) -> Array:
    """Return the elements that raw bytes hold; numbers share their memory. Raises FeedError."""
    dtype, texts, begin = numpy_type(item.dtype), list[bytes](), 0
    if dtype is not None:
        if len(data) % dtype.itemsize:
            message = f"{len(data)} bytes hold no whole number of {dtype}"
            raise FeedError("F003", message, where=f"input {item.name!r}")
        array: Array = np.frombuffer(data, dtype)
        if dtype == np.bool_:  # for kernels, true is 1, and no other byte
            array = array.view(np.uint8) != 0
        return array if array.flags.aligned else array.copy()
    while begin < len(data):
        first = begin + _LENGTH_BYTES
        begin = first + int.from_bytes(data[begin:first], "little")
        if first > len(data) or begin > len(data):
            message = f"the text at position {len(texts)} is longer than the data"
            raise FeedError("F003", message, where=f"input {item.name!r}")
        texts.append(bytes(data[first:begin]))
    return np.array(texts, object)


def read_list(item: Declared, data: Any) -> Array:
    """Return the elements of a list, flat or nested as JSON has it; raises FeedError."""
    where, dtype = f"input {item.name!r}", numpy_type(item.dtype)
    require_kind(data, list, f"{where}, data")
    if dtype is None:
        array: Array = np.array(data, object)
        if not all(isinstance(text, str | bytes) for text in array.ravel()):
            raise FeedError("F003", "expected texts", where=where)
        return array
    arrays: dict[str, Array] = check_feeds({item.name: data}, [Declared(item.name, item.dtype, None)])
    return arrays[item.name]


def describe_output(item: Declared, array: Array) -> dict[str, Any]:
    """Return an output of an answer, without its elements."""
    return {"name": item.name, "datatype": name_datatype(item.dtype), "shape": list(array.shape)}


def write_raw(array: Array) -> bytes | memoryview:
    """Return the raw bytes of a tensor; those of numbers share its memory."""
    if array.dtype.kind not in "OUS":
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    texts = [text.encode() if isinstance(text, str) else bytes(text) for text in array.ravel().tolist()]
    return b"".join(part for text in texts for part in (len(text).to_bytes(_LENGTH_BYTES, "little"), text))


def write_list(array: Array) -> list[Any]:
    """Return the elements of a tensor, flat, as JSON can hold them: null for numbers that are not finite.

    Raises FeedError for complex numbers.
    """
    flat = array.ravel()
    if flat.dtype.kind == "c":
        raise FeedError("F003", f"JSON has no {flat.dtype} numbers", hint="ask for binary data")
    if flat.dtype.kind == "V":
        flat = flat.astype(np.int64 if "int" in str(flat.dtype) else np.float64)
    values: list[Any] = flat.tolist()
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        return [value if math.isfinite(value) else None for value in values]
    return [text.decode() if isinstance(text, bytes) else text for text in values] if flat.dtype == object else values
