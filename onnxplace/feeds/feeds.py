"""Inputs as the user gives them: read from a file, held against what the model declares."""

from __future__ import annotations

import io
import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipInfo

import numpy as np
from numpy.typing import NDArray

from onnxplace.errors import MAX_LISTED, FeedError, InputError, nearest, one_line
from onnxplace.feeds.expressions import NoSizeError, complete_sizes, parse_size, symbols_of
from onnxplace.utils import open_input

Array = NDArray[Any]
# An archive may hold more than this only if it is not packed much smaller than it is.
MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO = 1 << 30, 100
_NPY = b"\x93NUMPY"
_ADDRESSABLE_BYTES = 1 << 47

_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(int16)": np.int16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
    "tensor(uint16)": np.uint16,
    "tensor(uint32)": np.uint32,
    "tensor(uint64)": np.uint64,
    "tensor(bool)": np.bool_,
    "tensor(complex64)": np.complex64,
    "tensor(complex128)": np.complex128,
}

# Types that numpy has from the package ml_dtypes.
_MORE_DTYPES = {
    "tensor(bfloat16)": "bfloat16",
    "tensor(float8e4m3fn)": "float8_e4m3fn",
    "tensor(float8e4m3fnuz)": "float8_e4m3fnuz",
    "tensor(float8e5m2)": "float8_e5m2",
    "tensor(float8e5m2fnuz)": "float8_e5m2fnuz",
    "tensor(float4e2m1)": "float4_e2m1fn",
    "tensor(int4)": "int4",
    "tensor(uint4)": "uint4",
    "tensor(int2)": "int2",
    "tensor(uint2)": "uint2",
}


@cache
def numpy_type(dtype: str) -> np.dtype[Any] | None:
    """Return numpy's type for ONNX Runtime's name of one, `tensor(float)`; None for strings and where it has none."""
    if dtype in _MORE_DTYPES:
        import ml_dtypes

        found = getattr(ml_dtypes, _MORE_DTYPES[dtype], None)
        return None if found is None else np.dtype(found)
    return np.dtype(_DTYPES[dtype]) if dtype in _DTYPES else None


@dataclass(frozen=True)
class Declared:
    """An input or output as the model declares it."""

    name: str
    dtype: str
    """ONNX Runtime's name of the type: `tensor(float)`."""
    shape: tuple[int | str | None, ...] | None
    """Sizes, names of symbolic dimensions, or None where nothing is known."""
    optional: bool = False
    """Whether the model has a default for it."""

    @property
    def type(self) -> str:
        """Return what ONNX Runtime calls `type`."""
        return self.dtype


def check_feeds(feeds: Mapping[str, Any], inputs: Sequence[Declared]) -> dict[str, Any]:
    """Return the feeds as arrays; raises FeedError for a wrong name, type, rank or size, and for what is missing."""
    if not isinstance(feeds, Mapping):
        raise FeedError("F007", f"inputs are a mapping from names to arrays, not {feeds!r}")
    known = {item.name: item for item in inputs}
    for name in feeds:
        if name not in known:
            raise FeedError("F001", f"the model has no input {name!r}", hint=nearest(name, known))
    missing = [item.name for item in inputs if item.name not in feeds and not item.optional]
    if missing:
        raise FeedError(
            "F002",
            f"no value for {_listed([repr(name) for name in missing])}",
            hint=f"inputs of this model: {_listed([describe_input(item) for item in inputs])}",
        )
    symbols: dict[str, tuple[int, str]] = {}
    return {
        name: _check_feed(_array(name, value), known[name], symbols)
        if known[name].dtype.startswith("tensor(")
        else _other(name, value, known[name].dtype)
        for name, value in feeds.items()
    }


def _listed(texts: Sequence[str]) -> str:
    more = f", and {len(texts) - MAX_LISTED} more" if len(texts) > MAX_LISTED else ""
    return ", ".join(texts[:MAX_LISTED]) + more


def _other(name: str, value: Any, dtype: str) -> Any:
    """Return what is fed to an input that is no tensor: a list, or for an optional None or what it holds."""
    if dtype.startswith("optional("):
        inner = dtype.removeprefix("optional(").removesuffix(")")
        return None if value is None else _other(name, value, inner)
    if dtype.startswith("tensor("):
        return _check_feed(_array(name, value), Declared(name, dtype, None), {})
    if not dtype.startswith("seq(tensor(") or not isinstance(value, (list, tuple)):
        raise FeedError("F003", f"the model takes {dtype}", where=f"input {name!r}", hint="give a list of arrays")
    return [_array(name, part) for part in value]


def _array(name: str, value: Any) -> Array:
    try:
        return np.asarray(value)
    except ValueError as problem:
        raise FeedError("F003", f"not an array: {problem}", where=f"input {name!r}") from None


def describe_input(item: Declared) -> str:
    """Return an input as people write it: `tokens tensor(int64) [batch, seq]`."""
    shape = "?" if item.shape is None else "[" + ", ".join("?" if d is None else str(d) for d in item.shape) + "]"
    return f"{item.name} {item.dtype} {shape}"


def _check_feed(array: Array, item: Declared, symbols: dict[str, tuple[int, str]]) -> Array:
    where = f"input {item.name!r}"
    want = numpy_type(item.dtype)
    if want is not None and array.dtype.type is np.void and array.dtype.itemsize == want.itemsize:
        array = array.view(want)  # as .npz files keep the types that are not numpy's own
    if want is not None and array.dtype != want:
        raise FeedError(
            "F003",
            f"its type is {array.dtype}, the model takes {want}",
            where=where,
            hint=f"convert it: feeds[{item.name!r}].astype('{want}')",
        )
    if item.dtype == "tensor(string)" and array.dtype.kind not in "OUS":
        raise FeedError(
            "F003", f"its type is {array.dtype}, the model takes strings", where=where, hint="convert it: .astype(str)"
        )
    check_shape(array.shape, item, symbols, where)
    return array


def check_shape(shape: tuple[int, ...], item: Declared, symbols: dict[str, tuple[int, str]], where: str) -> None:
    """Raise FeedError unless a value of this shape can be fed; `symbols` collects size and place of each symbol."""
    if item.shape is None:
        return
    if len(shape) != len(item.shape):
        raise FeedError("F004", f"its shape is {list(shape)}, the model takes {describe_input(item)}", where=where)
    for axis, (size, entry) in enumerate(zip(shape, item.shape)):
        if isinstance(entry, int) and size != entry:
            raise FeedError(
                "F004",
                f"its shape is {list(shape)}, the model takes {describe_input(item)}: axis {axis} must be {entry}",
                where=where,
            )
        if isinstance(entry, str):
            first, place = symbols.setdefault(entry, (size, f"{item.name}[{axis}]"))
            if first != size and 1 not in (first, size):  # ones may broadcast
                raise FeedError("F005", f"dimension {entry!r} is {size} here and {first} in {place}", where=where)


def random_feeds(inputs: Sequence[Declared], dimensions: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
    """Return random inputs: floats standard normal, whole numbers 0 or 1, which are valid indices nearly everywhere.

    `dimensions` gives sizes to symbolic dimensions, by symbol or as `input.axis`. Raises FeedError listing those
    that have none, and for inputs that cannot be invented.
    """
    shapes = resolve_shapes(inputs, dimensions)
    _require_room(shapes)
    random = np.random.default_rng(seed)
    return {item.name: _random_array(random, item, shapes[item.name]) for item in inputs if item.name in shapes}


def zero_feeds(inputs: Sequence[Declared], dimensions: Mapping[str, int]) -> dict[str, Array]:
    """Return zeros, false or empty texts for inputs; sizes and errors as in `random_feeds`."""
    shapes = resolve_shapes(inputs, dimensions)
    _require_room(shapes)
    needed = [item for item in inputs if item.name in shapes]
    return {
        item.name: np.full(shapes[item.name], "", object)
        if item.dtype == "tensor(string)"
        else np.zeros(shapes[item.name], _drawable(item))
        for item in needed
    }


def resolve_shapes(inputs: Sequence[Declared], dimensions: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input that must be fed; raises FeedError listing the dimensions that have no value.

    Dimensions named by an expression, `past + seq`, follow from their symbols.
    """
    needed = {item.name: dimension_keys(item) for item in inputs if not item.optional}
    keys = dict.fromkeys(key for keys in needed.values() for key, size in keys if size is None)
    sizes = complete_dimensions(keys, dimensions)
    if unbound := [name for key in keys if key not in sizes for name in symbols_of_dimension(key) if name not in sizes]:
        raise _unbound(list(dict.fromkeys(unbound)))
    return {name: tuple(sizes[key] if size is None else size for key, size in keys) for name, keys in needed.items()}


def _require_room(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise FeedError if inputs of these shapes, with 8 bytes an element, would take more than half of all memory.

    They are drawn in one type and converted to another, so that the largest is there twice for a moment.
    """
    try:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that does not tell
        memory_bytes = _ADDRESSABLE_BYTES
    sizes = {name: 8 * math.prod(shape) for name, shape in shapes.items()}
    if 2 * sum(sizes.values()) > memory_bytes:
        name = max(sizes, key=sizes.__getitem__)
        message = f"inputs of these sizes take {sum(sizes.values())} bytes, and this machine has {memory_bytes}"
        hint = "give smaller sizes with --shape, or real inputs with --inputs F.npz"
        raise FeedError("F009", message, where=f"input {name!r} {list(shapes[name])}", hint=hint)


def complete_dimensions(keys: Iterable[str], dimensions: Mapping[str, int]) -> dict[str, int]:
    """Return `dimensions` with all sizes that follow from them; raises FeedError where they contradict each other."""
    try:
        return complete_sizes(keys, dimensions)
    except NoSizeError as problem:
        hint = "give the sizes of symbols alone: those of expressions follow from them"
        raise FeedError("M022", str(problem), where="--shape", hint=hint) from None


def symbols_of_dimension(key: str) -> list[str]:
    """Return the names whose sizes decide the size of a dimension: its own, or the symbols of an expression."""
    term = parse_size(key)
    return [key] if term is None else list(dict.fromkeys(symbols_of(term)))


def _unbound(names: Sequence[str]) -> FeedError:
    shown = names[:MAX_LISTED]
    example = shlex.quote(",".join(f"{name}=1" for name in shown) + ",..." * (len(names) > MAX_LISTED))
    hint = f"give them, such as --shape {example}, or real inputs with --inputs F.npz"
    return FeedError("M020", f"symbolic dimensions without a value: {_listed(names)}", hint=hint)


def dimensions_of_feeds(feeds: Mapping[str, Any], inputs: Sequence[Declared]) -> dict[str, int]:
    """Return the sizes that arrays give to symbolic dimensions, and those that follow from them.

    Of one symbol with several sizes, of which all but one are 1, it is the other. Raises FeedError if they contradict
    a dimension that is an expression of others.
    """
    sizes: dict[str, int] = {}
    for item in inputs:
        if item.name in feeds and item.dtype.startswith("tensor(") and item.shape is not None:
            for (key, fixed), size in zip(dimension_keys(item), feeds[item.name].shape):
                if fixed is None and sizes.get(key, 1) == 1:
                    sizes[key] = size
    # As with symbols, ones may broadcast.
    certain = {key: size for key, size in sizes.items() if size != 1 or parse_size(key) is None}
    try:
        return {**sizes, **complete_sizes(sizes, certain)}
    except NoSizeError as problem:
        raise FeedError("F005", f"the inputs contradict each other: {problem}") from None


def dimension_keys(item: Declared) -> list[tuple[str, int | None]]:
    """Return each dimension as (key the user can bind, size if known)."""
    if not item.dtype.startswith("tensor("):
        return []
    if item.shape is None:
        return [(f"{item.name}.shape", None)]
    return [
        (entry, None) if isinstance(entry, str) else (f"{item.name}.{axis}", entry)
        for axis, entry in enumerate(item.shape)
    ]


def _random_array(random: np.random.Generator, item: Declared, shape: tuple[int, ...]) -> Array:
    if item.dtype == "tensor(string)":
        return np.full(shape, "a", dtype=object)
    dtype = _drawable(item)
    if dtype.kind in "iub" or dtype.name.startswith(("int", "uint")):
        return random.integers(0, 2, shape).astype(dtype)
    if dtype.kind == "c":
        return (random.standard_normal(shape) + 1j * random.standard_normal(shape)).astype(dtype)
    return random.standard_normal(shape).astype(dtype)


def _drawable(item: Declared) -> np.dtype[Any]:
    """Return the numpy type of an input; raises FeedError if numpy has none."""
    if (dtype := numpy_type(item.dtype)) is None:
        raise FeedError(
            "M021",
            f"cannot invent a value of type {item.dtype}",
            where=f"input {item.name!r}",
            hint="give real inputs with --inputs F.npz",
        )
    return dtype


def _require_bounded(members: Sequence[ZipInfo], packed_bytes: int) -> None:
    """Raise ValueError for an archive made to fill the memory: of a size that no arrays are packed into."""
    size = sum(member.file_size for member in members)
    if size > max(MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO * packed_bytes):
        raise ValueError(f"its {packed_bytes} bytes expand to {size}")


def read_npz(path: str | Path) -> dict[str, Array]:
    """Read arrays by name from an .npz file; raises FeedError naming the file. Nothing in it is executed."""
    hint = "write it with numpy.savez(path, input_name=array)"
    try:
        with io.BufferedReader(open_input(path, "F006")) as stream:
            begins = stream.read(len(_NPY))
            if begins == _NPY:
                reason = "it is one array without a name (.npy)"
            elif begins[:2] != b"PK":
                reason = "it is another kind of file" if begins else "it is empty"
            else:
                stream.seek(0)
                with np.load(stream, allow_pickle=False) as archive:
                    _require_bounded(archive.zip.infolist(), stream.seek(0, os.SEEK_END))
                    return {name: archive[name] for name in archive.files}
    except InputError as problem:
        raise FeedError("F006", problem.message, where=problem.where, hint=hint) from None
    except OSError as problem:
        reason = problem.strerror or str(problem)
    except ValueError as problem:
        reason = "it holds objects, not plain arrays" if "allow_pickle" in str(problem) else one_line(problem)
    except MemoryError:
        reason = "an array in it is too large for this machine's memory"
    except Exception as problem:  # noqa: BLE001 - numpy, zipfile and what unpacks raise all kinds of types
        reason = f"it is cut off or damaged ({one_line(problem)})"
    raise FeedError("F006", f"not an .npz file of plain arrays: {reason}", where=str(path), hint=hint)
