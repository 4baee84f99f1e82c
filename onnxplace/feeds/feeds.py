"""Declared inputs of a model, and checks of the feeds that users give for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplace.errors import FeedError, format_names, format_value, suggest_nearest

Array = NDArray[Any]
Symbols = dict[str, tuple[int, str]]
"""Name of a dimension -> its size, and the axis that has it."""

# ONNX Runtime's name of a type -> numpy's, where they differ; and those that both share.
_DTYPES = {"tensor(float)": "float32", "tensor(double)": "float64"} | {
    f"tensor({name})": name
    for name in (
        *("float16", "complex64", "complex128", "bool"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    )
}

# Types that the package ml_dtypes adds to numpy.
_ML_DTYPES = {"tensor(float4e2m1)": "float4_e2m1fn"} | {
    f"tensor({name.replace('_', '')})": name
    for name in (
        *("bfloat16", "int4", "uint4", "int2", "uint2"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    )
}


# Kinds of numpy's types: lists of numbers of one can be given where the model takes one of the same or a higher rank.
_RANKS = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}


@cache
def numpy_type(dtype: str) -> np.dtype[Any] | None:
    """Return numpy's type for ONNX Runtime's name of a type; None for strings, and where numpy has none.

    >>> numpy_type("tensor(float)"), numpy_type("tensor(string)")
    (dtype('float32'), None)
    """
    if dtype in _ML_DTYPES:
        import ml_dtypes

        scalar_type = getattr(ml_dtypes, _ML_DTYPES[dtype], None)
        return None if scalar_type is None else np.dtype(scalar_type)
    return np.dtype(_DTYPES[dtype]) if dtype in _DTYPES else None


@dataclass(frozen=True)
class Declared:
    """An input or output, as the model declares it."""

    name: str
    dtype: str
    """ONNX Runtime's name of the type: `tensor(float)`."""
    shape: tuple[int | str | None, ...] | None
    """Sizes, names of symbolic dimensions, or None for an unknown size; None if not even the rank is known."""
    optional: bool = False
    """Whether the model has a default value for it."""

    @property
    def type(self) -> str:
        """Return `dtype`, under the name that ONNX Runtime has for it."""
        return self.dtype


def check_feeds(feeds: Mapping[str, Any], inputs: Sequence[Declared], *, strict: bool = True) -> dict[str, Any]:
    """Return the feeds as arrays, checked against the declared inputs.

    `strict` says whether dimensions of one name have one size, as the name says, or any, as in ONNX Runtime.

    Raises FeedError for a wrong name, type, rank or size, and for missing inputs.

    >>> check_feeds({"x": [True, False]}, [Declared("x", "tensor(bool)", ("n",))])
    {'x': array([ True, False])}
    """
    if not isinstance(feeds, Mapping):
        raise FeedError("U054", f"expected a mapping from input names to arrays, got {format_value(feeds)}")
    known = {item.name: item for item in inputs}
    for name in feeds:
        if name not in known:
            raise FeedError("F001", f"the model has no input {name!r}", hint=suggest_nearest(name, known))
    missing = [item.name for item in inputs if item.name not in feeds and not item.optional]
    if missing:
        hint = f"inputs of this model: {format_names(map(describe_input, inputs), quoted=False)}"
        raise FeedError("F002", f"no value for {format_names(missing)}", hint=hint)
    symbols: Symbols | None = {} if strict else None
    return {
        name: _check_tensor(value, known[name], symbols)
        if known[name].dtype.startswith("tensor(")
        else _check_non_tensor(name, value, known[name].dtype)
        for name, value in feeds.items()
    }


def _check_non_tensor(name: str, value: Any, dtype: str) -> Any:
    """Return the value for a sequence or an optional input: a list of arrays, None, or the optional's content."""
    if dtype.startswith("optional("):
        inner = dtype.removeprefix("optional(").removesuffix(")")
        return None if value is None else _check_non_tensor(name, value, inner)
    if dtype.startswith("tensor("):
        return _check_tensor(value, Declared(name, dtype, None), {})
    if not dtype.startswith("seq(tensor(") or not isinstance(value, (list, tuple)):
        message = f"expected {dtype}, got {type(value).__name__}"
        raise FeedError("F003", message, where=f"input {name!r}", hint="give a list of arrays")
    item = Declared(name, dtype.removeprefix("seq(").removesuffix(")"), None)
    return [_check_tensor(element, item, {}) for element in value]


def _as_array(name: str, value: Any, dtype: str) -> Array:
    """Return a value as an array, numbers of Python with the type of the input; raises FeedError naming the input.

    As in ONNX Runtime, a list of floats is an array of float32 where the model takes that. No fraction is cut off.
    """
    where, declared = f"input {name!r}", numpy_type(dtype)
    try:
        array: Array = np.asarray(value)
        if declared is not None and isinstance(value, (list, tuple)):
            is_whole = "int" in declared.name  # types of ml_dtypes all have the kind "V"
            if is_whole and array.size and array.dtype.kind in "fO":
                exact = np.array(value, dtype=object)  # numpy makes floats of numbers that need 64 bits
                if all(isinstance(number, Integral) for number in exact.ravel()):
                    return _convert_numbers(exact, declared)
            rank = _RANKS["i"] if is_whole else _RANKS.get(declared.kind, _RANKS["f"])
            if array.size == 0 or _RANKS.get(array.dtype.kind, len(_RANKS)) <= rank:
                return _convert_numbers(array, declared)
    except (OverflowError, TypeError, ValueError) as problem:
        raise FeedError("F003", f"expected an array for {dtype}: {problem}", where=where) from None
    if array.dtype == object and dtype != "tensor(string)":
        hint = f"give it as an array: np.asarray(..., {declared.name!r})" if declared is not None else ""
        raise FeedError("F003", f"expected an array, got {format_value(value)}", where=where, hint=hint)
    return array


def _convert_numbers(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array with another type; raises OverflowError for numbers that do not fit."""
    with np.errstate(over="ignore"):
        converted: Array = array.astype(dtype)
    if "int" in dtype.name:
        fits = np.array_equal(converted if dtype.kind != "V" else converted.astype(np.int64), array)
    else:
        fits = np.array_equal(np.isfinite(converted), np.isfinite(array))
    if not fits:
        raise OverflowError(f"its numbers from {array.min()} to {array.max()} do not all fit into {dtype}")
    return converted


def describe_input(item: Declared) -> str:
    """Return an input with its type and shape, as a text.

    >>> describe_input(Declared("tokens", "tensor(int64)", ("batch", None, 8)))
    'tokens tensor(int64) [batch, ?, 8]'
    """
    shape = "?" if item.shape is None else "[" + ", ".join("?" if d is None else str(d) for d in item.shape) + "]"
    return f"{item.name} {item.dtype} {shape}"


def _check_tensor(value: Any, item: Declared, symbols: Symbols | None) -> Array:
    """Return a value as an array of the declared type; raises FeedError if type or shape do not fit."""
    where, array, dtype = f"input {item.name!r}", _as_array(item.name, value, item.dtype), numpy_type(item.dtype)
    if dtype is not None and array.dtype.type is np.void and array.dtype.itemsize == dtype.itemsize:
        array = array.view(dtype)  # .npz files store types of ml_dtypes as plain bytes
    if dtype is not None and array.dtype != dtype:
        message = f"its type is {array.dtype}, the model takes {dtype}"
        hint = f"convert it: feeds[{item.name!r}].astype('{dtype}')"
        raise FeedError("F003", message, where=where, hint=hint)
    if item.dtype == "tensor(string)" and array.dtype.kind == "V" and not array.dtype.names:
        array = array.astype(object)  # elements of bytes, which keep zeros at their end
    if item.dtype == "tensor(string)" and array.dtype.kind not in "OUS":
        message = f"its type is {array.dtype}, the model takes strings"
        raise FeedError("F003", message, where=where, hint="convert it: .astype(str)")
    if item.dtype == "tensor(string)":
        _require_text(array, where)
    check_shape(array.shape, item, symbols, where)
    return array


def _require_text(array: Array, where: str) -> None:
    """Raise FeedError if a text is not UTF-8, or cannot be written as such; elements of other kinds may be anything."""
    for index, element in enumerate(array.ravel().tolist()):
        try:
            if isinstance(element, str):
                element.encode()
            elif isinstance(element, bytes):
                element.decode()
        except (UnicodeEncodeError, UnicodeDecodeError) as problem:
            message = f"expected text in UTF-8, got {format_value(element)} at position {index}: {problem.reason}"
            raise FeedError("F003", message, where=where, hint="decode it: .decode(errors='replace')") from None


def check_shape(shape: tuple[int, ...], item: Declared, symbols: Symbols | None, where: str) -> None:
    """Raise FeedError unless a value of this shape can be fed.

    `symbols` collects the size of each symbol, and the axis that has it, over several inputs; None leaves them open.
    """
    if item.shape is None:
        return
    message = f"its shape is {list(shape)}, the model takes {describe_input(item)}"
    if len(shape) != len(item.shape):
        raise FeedError("F003", message, where=where)
    for axis, (size, entry) in enumerate(zip(shape, item.shape)):
        if isinstance(entry, int) and size != entry:
            raise FeedError("F003", f"{message}: axis {axis} must be {entry}", where=where)
        if isinstance(entry, str) and symbols is not None:
            first, place = symbols.setdefault(entry, (size, f"{item.name}[{axis}]"))
            # Ones may be broadcast, and empty arrays are for branches that are not taken.
            if first != size and not {0, 1} & {first, size}:
                raise FeedError("F003", f"dimension {entry!r} is {size} here and {first} in {place}", where=where)
