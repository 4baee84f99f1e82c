"""Tensors as a model holds them: types, sizes, consistency and bytes; and parts of tensors that stay in their file."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import TypeGuard

import numpy as np
from onnx import StringStringEntryProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from onnxplace.errors import ModelError, format_one_line
from onnxplace.feeds.dimensions import MAX_DIMENSION, MAX_RANK

# Bytes of files are read in pieces of this size, so that a large weight never has to fit into memory.
READ_BYTES = 16 << 20
# Larger initializers hold no shapes or axes.
MAX_SHAPE_BYTES = 1024
# onnx, numpy and ONNX Runtime count elements in 64 bits.
_MAX_ELEMENTS = (1 << 63) - 1
# Longer paths are cut in messages.
_MAX_SHOWN_CHARACTERS = 500
_DAMAGED_HINT = "the model is damaged; export it again"
_NEXT_HINT = "keep the weights file next to the model"
_DATA_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")

_ELEMENT_TYPES = frozenset(TensorProto.DataType.values())
# Older versions of onnx lack some of these types: -1 stands for them, which no tensor has.
FOUR_BIT_TYPES = {TensorProto.INT4, TensorProto.UINT4, *(getattr(TensorProto, name, -1) for name in ("FLOAT4E2M1",))}
TWO_BIT_TYPES = {getattr(TensorProto, name, -1) for name in ("INT2", "UINT2")}


def tensor_size(tensor: TensorProto) -> int:
    """Return the bytes of a tensor in memory.

    A string counts its characters.

    >>> tensor_size(helper.make_tensor("w", TensorProto.FLOAT, [2, 3], [0.0] * 6))
    24
    """
    if tensor.data_type == TensorProto.STRING:
        return sum(len(item) for item in tensor.string_data)
    return packed_size(tensor.data_type, tensor.dims)


def packed_size(data_type: int, dims: Iterable[int]) -> int:
    """Return the bytes of a tensor of this element type and shape.

    The type must not be strings.

    >>> packed_size(TensorProto.INT4, [3])
    2
    """
    count: int = math.prod(dims)
    if data_type in FOUR_BIT_TYPES:
        return (count + 1) // 2
    if data_type in TWO_BIT_TYPES:
        return (count + 3) // 4
    return count * _compute_element_bytes(data_type)


@cache
def _compute_element_bytes(data_type: int) -> int:
    return int(np.dtype(helper.tensor_dtype_to_np_dtype(data_type)).itemsize)


def check_tensor(tensor: TensorProto) -> None:
    """Raise ModelError naming an inconsistent weight.

    Its type or shape is impossible, or its data does not fill it.
    """
    require_shape(tensor)
    external = tensor.data_location == TensorProto.EXTERNAL
    if external and tensor.data_type == TensorProto.STRING:
        raise _build_damage_error(tensor, "its strings are external data, which can only hold numbers")
    filled = [field for field in _DATA_FIELDS if len(getattr(tensor, field))]
    filled += ["raw_data"] * tensor.HasField("raw_data")
    if len(filled) + external > 1:
        places = " and ".join([*filled, *["external data"] * external])
        raise _build_damage_error(tensor, f"its data is given in {places}, expected one of them")
    if external:
        return
    field, expected_count = _choose_data_field(tensor, "raw_data" in filled)
    count = len(getattr(tensor, field))
    if count != expected_count or (filled and filled != [field]):
        unit = "bytes" if field == "raw_data" else f"entries of {field}"
        other = f"; it has data in {filled[0]}" if filled and filled != [field] else ""
        raise _build_damage_error(tensor, f"it has {count} {unit}, expected {expected_count}{other}")


def require_shape(tensor: TensorProto) -> None:
    """Raise ModelError naming a tensor with an impossible type or shape."""
    if tensor.data_type not in _ELEMENT_TYPES or tensor.data_type == TensorProto.UNDEFINED:
        raise _build_damage_error(tensor, f"its element type is {tensor.data_type}, which ONNX does not have")
    if len(tensor.dims) > MAX_RANK:
        raise _build_damage_error(tensor, f"it has {len(tensor.dims)} dimensions, expected at most {MAX_RANK}")
    if any(size < 0 for size in tensor.dims) or math.prod(filter(None, tensor.dims)) > _MAX_ELEMENTS:
        message = f"its shape is {list(tensor.dims)}, expected sizes of at least 0 and at most {_MAX_ELEMENTS} elements"
        raise _build_damage_error(tensor, message)


def find_unknown_element(kind: TypeProto) -> int | None:
    """Return an element type that ONNX does not have, by its number.

    It may be anywhere in the type. Returns None if there is none.
    """
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        number: int = getattr(kind, which).elem_type
        return None if number in _ELEMENT_TYPES else number
    if which in ("sequence_type", "optional_type"):
        return find_unknown_element(getattr(kind, which).elem_type)
    if which == "map_type":
        key: int = kind.map_type.key_type
        return find_unknown_element(kind.map_type.value_type) if key in _ELEMENT_TYPES else key
    return None


def _choose_data_field(tensor: TensorProto, raw: bool) -> tuple[str, int]:
    """Return the data field of a tensor, and its expected length."""
    count = math.prod(tensor.dims)
    if tensor.data_type == TensorProto.STRING:
        return "string_data", count
    if raw:
        return "raw_data", packed_size(tensor.data_type, tensor.dims)
    if tensor.data_type in FOUR_BIT_TYPES | TWO_BIT_TYPES:
        count = packed_size(tensor.data_type, tensor.dims)
    elif tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        count *= 2
    return helper.tensor_dtype_to_field(tensor.data_type), count


def _build_damage_error(tensor: TensorProto, message: str) -> ModelError:
    return ModelError("M008", message, where=f"weight {tensor.name!r}", hint=_DAMAGED_HINT)


def find_repository(folder: Path) -> Path | None:
    """Return the repository in Hugging Face's cache that a folder belongs to.

    Its files, as in `snapshots/REVISION/onnx`, are links to `blobs` next to `snapshots`. Returns None elsewhere.
    """
    snapshots = (parent for parent in folder.resolve().parents if parent.name == "snapshots")
    return next((item.parent for item in snapshots if (item.parent / "blobs").is_dir()), None)


def relocate_external_data(tensor: TensorProto, folder: Path, root: Path) -> None:
    """Let a tensor name its external data by the path below another folder, without links; in place."""
    file = find_external_file(tensor, folder).resolve()
    for entry in tensor.external_data:
        if entry.key == "location":
            entry.value = file.relative_to(root).as_posix()


def find_external_file(tensor: TensorProto, folder: Path | None) -> Path:
    """Return the file of a tensor's external data.

    Raises ModelError for a file that is missing, unreadable, or outside the model's folder. The files of a model in
    Hugging Face's cache may be links to blobs of its repository.
    """
    if folder is None:
        message = "it has external data, but the model is an object without a folder"
        raise _build_data_error(tensor, message, "pass the path of the model file")
    location = _read_entries(tensor).get("location", "")
    file = folder / location
    shown = str(file) if len(str(file)) < _MAX_SHOWN_CHARACTERS else f"{str(file)[:_MAX_SHOWN_CHARACTERS]}..."
    try:
        repository = find_repository(folder)  # its folder of blobs is not resolved: as a link, it could lead anywhere
        places = (folder.resolve(), *([repository / "blobs"] if repository else ()))
        named = "\0" not in location and bool(location)
        inside = named and any(map(file.resolve().is_relative_to, places))
        exists = inside and file.is_file()
    except (OSError, RuntimeError, ValueError) as problem:  # a name that is too long, a circle of links
        message = f"its external data file cannot be opened: {format_one_line(problem)[:_MAX_SHOWN_CHARACTERS]}"
        raise _build_data_error(tensor, message) from None
    if not inside:
        is_link = named and Path(os.path.abspath(file)).is_relative_to(os.path.abspath(folder))
        kind = "a link that leads outside" if is_link else "outside"
        message = f"its external data is {kind} the model's folder: {location[:_MAX_SHOWN_CHARACTERS]!r}"
        raise _build_data_error(
            tensor, message, "replace the link by the file itself: cp -L" if is_link else _NEXT_HINT
        )
    if not exists:
        raise _build_data_error(tensor, f"its external data file is missing: {shown}", _NEXT_HINT)
    if not os.access(file, os.R_OK):
        raise _build_data_error(tensor, f"its external data file cannot be read: {file}", f"chmod +r {file}")
    return file


def _build_data_error(tensor: TensorProto, message: str, hint: str = _DAMAGED_HINT) -> ModelError:
    return ModelError("M005", message, where=f"weight {tensor.name!r}", hint=hint)


def find_external_range(tensor: TensorProto, folder: Path | None) -> tuple[Path, int, int]:
    """Return (file, offset, length) of a tensor's external data.

    Raises ModelError naming the tensor and the file if the file is missing, too short, or outside the folder.
    """
    file, size, (offset, length) = find_external_file(tensor, folder), tensor_size(tensor), read_external_range(tensor)
    file_size = file.stat().st_size
    if length != size or offset + length > file_size:
        message = f"its external data is too short: expected {size} bytes at {offset} of {file}, which has {file_size}"
        raise _build_data_error(tensor, message, "the file was cut, or it belongs to another model; copy it again")
    return file, offset, length


def read_external_range(tensor: TensorProto) -> tuple[int, int]:
    """Return (offset, length) of a tensor's external data, in a file that may be absent; raises ModelError."""
    entries = _read_entries(tensor)
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or tensor_size(tensor))
    except ValueError:
        offset = length = -1
    if offset < 0 or length < 0:
        raise _build_data_error(tensor, f"its external data has an impossible range: {entries}")
    return offset, length


def read_tensor_bytes(tensor: TensorProto, folder: Path | None) -> Iterator[bytes]:
    """Yield the bytes of a tensor, little-endian.

    External data, and parts of it, come in pieces of `READ_BYTES`.
    """
    if is_tensor_part(tensor):
        yield from _read_part_bytes(tensor, folder)
    elif tensor.data_location == TensorProto.EXTERNAL:
        file, offset, length = find_external_range(tensor, folder)
        with file.open("rb") as stream:
            stream.seek(offset)
            for start in range(0, length, READ_BYTES):
                yield stream.read(min(READ_BYTES, length - start))
    elif tensor.HasField("raw_data"):
        yield tensor.raw_data
    else:
        yield numpy_helper.to_array(tensor).tobytes()


def embed_tensor(tensor: TensorProto, folder: Path | None) -> TensorProto:
    """Return a tensor that holds its own bytes; one without external data as it is.

    Raises ModelError as `find_external_range` does.
    """
    if tensor.data_location != TensorProto.EXTERNAL:
        return tensor
    data = b"".join(read_tensor_bytes(tensor, folder))
    return TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=data)


def make_reference(
    name: str, data_type: int, dims: Iterable[int], location: str, offset: int, length: int
) -> TensorProto:
    """Return a tensor whose bytes are at `offset` of a file."""
    return _make_external(name, data_type, dims, {"location": location, "offset": offset, "length": length})


def _make_external(name: str, data_type: int, dims: Iterable[int], entries: Mapping[str, object]) -> TensorProto:
    """Return a tensor with these entries about its external data."""
    data = [StringStringEntryProto(key=key, value=str(value)) for key, value in entries.items()]
    place = TensorProto.EXTERNAL
    return TensorProto(name=name, data_type=data_type, dims=dims, data_location=place, external_data=data)


def _read_entries(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


Fingerprint = tuple[int, int, int, int]
"""Size in bytes, times of the last writing and of the last change in nanoseconds, and inode of a file."""


def take_fingerprint(file: Path) -> Fingerprint:
    """Return a fingerprint that changes when a file is written or replaced, also if its time is put back.

    Raises OSError if the file does not exist.
    """
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def strip_data(tensor: TensorProto) -> TensorProto:
    """Return a tensor without its data, unless it may hold shapes or axes, which shape inference has to see.

    The data is declared external, in a file that does not exist.
    """
    if tensor_size(tensor) <= MAX_SHAPE_BYTES:
        return tensor
    return make_reference(tensor.name, tensor.data_type, tensor.dims, "elsewhere", 0, tensor_size(tensor))


# ----------------------------------------------------------------------------------------------------- parts of tensors


_AXIS, _RANGES, _DIMS = "part.axis", "part.ranges", "part.dims"


def make_tensor_part(tensor: TensorProto, name: str, axis: int, ranges: Sequence[tuple[int, int]]) -> TensorProto:
    """Return some ranges of a tensor with external data along an axis, without reading it.

    The elements of the tensor must not be packed below a byte.
    """
    dims = list(tensor.dims)
    dims[axis] = sum(high - low for low, high in ranges)
    text = ",".join(f"{low}:{high}" for low, high in ranges)
    cut = {_AXIS: axis, _RANGES: text, _DIMS: ",".join(map(str, tensor.dims))}
    return _make_external(name, tensor.data_type, dims, {**_read_entries(tensor), **cut})


def is_tensor_part(tensor: TensorProto) -> bool:
    """Return whether a tensor is a part of a larger one."""
    return tensor.data_location == TensorProto.EXTERNAL and any(entry.key == _AXIS for entry in tensor.external_data)


def _read_part(tensor: TensorProto) -> tuple[TensorProto, int, list[tuple[int, int]]]:
    """Return the whole tensor, the axis and the ranges of a part."""
    entries = _read_entries(tensor)
    dims = [int(size) for size in entries.pop(_DIMS).split(",")]
    axis = int(entries.pop(_AXIS))
    pairs = [item.split(":") for item in entries.pop(_RANGES).split(",")]
    whole = _make_external(tensor.name, tensor.data_type, dims, entries)
    return whole, axis, [(int(low), int(high)) for low, high in pairs]


def describe_part(tensor: TensorProto, folder: Path | None) -> tuple[object, ...]:
    """Return a key of the bytes of a part: file, range and cut."""
    whole, axis, ranges = _read_part(tensor)
    return (*find_external_range(whole, folder), axis, tuple(ranges))


def _read_part_bytes(tensor: TensorProto, folder: Path | None) -> Iterator[bytes]:
    """Yield the bytes of a part; at most some `READ_BYTES` are in memory at a time."""
    whole, axis, ranges = _read_part(tensor)
    file, offset, _ = find_external_range(whole, folder)
    inner = packed_size(whole.data_type, whole.dims[axis + 1 :])
    rows, row_bytes = math.prod(whole.dims[:axis]), whole.dims[axis] * inner
    rows_at_once = max(READ_BYTES // max(row_bytes, 1), 1)
    with file.open("rb") as stream:
        if rows_at_once == 1:
            for row in range(rows):
                for low, high in ranges:
                    stream.seek(offset + row * row_bytes + low * inner)
                    yield stream.read((high - low) * inner)
            return
        stream.seek(offset)
        for first in range(0, rows, rows_at_once):
            count = min(rows_at_once, rows - first)
            block = np.frombuffer(stream.read(count * row_bytes), np.uint8).reshape(count, row_bytes)
            yield np.concatenate([block[:, low * inner : high * inner] for low, high in ranges], axis=1).tobytes()


def embed_part(tensor: TensorProto, folder: Path | None) -> TensorProto:
    """Return a part with its bytes in memory, and any other tensor as it is."""
    return embed_tensor(tensor, folder) if is_tensor_part(tensor) else tensor


# ------------------------------------------------------------------------------------------------------ types of values


def format_type(kind: TypeProto) -> str:
    """Return ONNX Runtime's spelling of a type: `tensor(float)`, `seq(tensor(int64))`.

    >>> from onnx import helper
    >>> format_type(helper.make_tensor_type_proto(TensorProto.FLOAT, [1]))
    'tensor(float)'
    """
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        element = TensorProto.DataType.Name(getattr(kind, which).elem_type).lower()
        return f"{'sparse_' if which.startswith('sparse') else ''}tensor({element})"
    if which == "sequence_type":
        return f"seq({format_type(kind.sequence_type.elem_type)})"
    if which == "optional_type":
        return f"optional({format_type(kind.optional_type.elem_type)})"
    if which == "map_type":
        return (
            f"map({TensorProto.DataType.Name(kind.map_type.key_type).lower()},{format_type(kind.map_type.value_type)})"
        )
    return "unknown"


# No size has more digits.
_SIZE_SYMBOL = re.compile(r"[0-9]{1,9}")


def read_shape_entries(kind: TypeProto) -> tuple[int | str | None, ...] | None:
    """Return the entries of a tensor's shape: sizes, symbols, or None; also of an optional tensor's.

    Returns None for a type without a shape.

    An impossible size, as shape inference computes for nodes that cannot run, counts as unknown. A symbol of digits, as
    some exporters write, is that size.

    >>> from onnx import helper
    >>> read_shape_entries(helper.make_tensor_type_proto(TensorProto.FLOAT, ["batch", 4, None]))
    ('batch', 4, None)
    """
    if kind.HasField("optional_type"):
        kind = kind.optional_type.elem_type
    if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    sizes = kind.tensor_type.shape.dim
    return tuple(
        (size.dim_value if 0 <= size.dim_value <= MAX_DIMENSION else None)
        if size.HasField("dim_value")
        else (int(size.dim_param) if _SIZE_SYMBOL.fullmatch(size.dim_param) else size.dim_param or None)
        for size in sizes
    )


# Names that exporters and shape inference give to sizes that they do not know: marks without a letter, and words.
_UNKNOWN_WORDS = "any|dyn|dynamic|nan|none|null|undefined|unk|unknown|unspecified"
_UNKNOWN_SIZE = re.compile(rf"[\W\d_]*|({_UNKNOWN_WORDS})[\W_]*(dim|dimension|size|axis)?[\W\d_]*", re.IGNORECASE)


def says_unknown(symbol: str) -> bool:
    """Return whether the name of a size only says that it is unknown, so that two axes need not share the size.

    >>> says_unknown("unk__12"), says_unknown("?"), says_unknown("batch")
    (True, True, False)
    """
    return _UNKNOWN_SIZE.fullmatch(symbol) is not None and _SIZE_SYMBOL.fullmatch(symbol) is None


def clear_unknown_sizes(value: ValueInfoProto) -> ValueInfoProto:
    """Return an input or output without negative sizes, and without names that only say that a size is unknown.

    Each of these axes then has its own size.
    """
    result = deepcopy(value)
    for dim in result.type.tensor_type.shape.dim:
        if dim.dim_value < 0 or (dim.HasField("dim_param") and says_unknown(dim.dim_param)):
            dim.ClearField("value")
    return result


def is_known_shape(shape: tuple[int | str | None, ...] | None) -> TypeGuard[tuple[int, ...]]:
    """Return whether entries of a shape are there, and all sizes."""
    return shape is not None and all(isinstance(size, int) for size in shape)


_TYPE = re.compile(r"(?P<outer>tensor|sparse_tensor|seq|optional)\((?P<inner>.*)\)|map\((?P<key>\w+),(?P<value>.*)\)")


def parse_type(text: str, shape: Sequence[int | str | None] | None) -> TypeProto | None:
    """Parse ONNX Runtime's spelling of a type, None if invalid; a shape of None leaves the rank open.

    Examples are `tensor(float)` and `seq(map(int64,tensor(float)))`.

    >>> parse_type("tensor(float)", ("batch", 4)).tensor_type.shape.dim[0].dim_param
    'batch'
    """
    if (match := _TYPE.fullmatch(text)) is None:
        return None
    numbers = dict(TensorProto.DataType.items())
    if match["key"]:
        key, value = numbers.get(match["key"].upper()), parse_type(match["value"], None)
        return None if key is None or value is None else helper.make_map_type_proto(key, value)
    if match["outer"].endswith("tensor"):
        number = numbers.get(match["inner"].upper())
        make = helper.make_tensor_type_proto if match["outer"] == "tensor" else helper.make_sparse_tensor_type_proto
        return None if number is None else make(number, shape)
    if (element := parse_type(match["inner"], None)) is None:
        return None
    make_holder = helper.make_sequence_type_proto if match["outer"] == "seq" else helper.make_optional_type_proto
    return make_holder(element)
