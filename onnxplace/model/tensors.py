"""Tensors as a model holds them: how large each is, whether it is consistent, and where its bytes are."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
from onnx import TensorProto, TypeProto, helper, numpy_helper

from onnxplace.errors import ModelError, one_line
from onnxplace.feeds import MAX_RANK

CHUNK_BYTES = 16 << 20
# Elements are counted with 64 bits everywhere below us.
_MAX_ELEMENTS = (1 << 63) - 1
_LONGEST_SHOWN = 500  # characters of a path in a message
_DAMAGED = "the model is damaged; export it again"
_DATA_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")

_TYPES = frozenset(TensorProto.DataType.values())
FOUR_BIT = {TensorProto.INT4, TensorProto.UINT4, *(getattr(TensorProto, name, -1) for name in ("FLOAT4E2M1",))}
TWO_BIT = {getattr(TensorProto, name, -1) for name in ("INT2", "UINT2")}


def tensor_size(tensor: TensorProto) -> int:
    """Return the bytes a tensor takes in memory; strings count by their characters."""
    if tensor.data_type == TensorProto.STRING:
        return sum(len(item) for item in tensor.string_data)
    return packed_size(tensor.data_type, tensor.dims)


def packed_size(data_type: int, dims: Iterable[int]) -> int:
    """Return the bytes of a tensor of this type, not strings, and shape."""
    count: int = math.prod(dims)
    if data_type in FOUR_BIT:
        return (count + 1) // 2
    if data_type in TWO_BIT:
        return (count + 3) // 4
    return count * _width(data_type)


@cache
def _width(data_type: int) -> int:
    return int(np.dtype(helper.tensor_dtype_to_np_dtype(data_type)).itemsize)


def check_tensor(tensor: TensorProto) -> None:
    """Raise ModelError naming a weight whose type is none, whose shape cannot be, or whose data does not fill it."""
    require_shape(tensor)
    external = tensor.data_location == TensorProto.EXTERNAL
    if external and tensor.data_type == TensorProto.STRING:
        raise _contradiction(tensor, "its strings are external data, which can only hold numbers")
    filled = [field for field in _DATA_FIELDS if len(getattr(tensor, field))]
    filled += ["raw_data"] * tensor.HasField("raw_data")
    if len(filled) + external > 1:
        places = " and ".join([*filled, *["external data"] * external])
        raise _contradiction(tensor, f"its data is given twice, in {places}")
    if external:
        return
    field, need = _data_field(tensor, "raw_data" in filled)
    have = len(getattr(tensor, field))
    if have != need or (filled and filled != [field]):
        unit = "bytes" if field == "raw_data" else f"entries of {field}"
        other = f", and data in {filled[0]}" if filled and filled != [field] else ""
        raise _contradiction(tensor, f"it has {have} {unit} where {need} are needed{other}")


def require_shape(tensor: TensorProto) -> None:
    """Raise ModelError naming a tensor whose type is none, or whose shape cannot be."""
    if tensor.data_type not in _TYPES or tensor.data_type == TensorProto.UNDEFINED:
        raise _contradiction(tensor, f"its type {tensor.data_type} is unknown")
    if len(tensor.dims) > MAX_RANK:
        raise _contradiction(tensor, f"it has {len(tensor.dims)} dimensions, expected at most {MAX_RANK}")
    if any(size < 0 for size in tensor.dims) or math.prod(filter(None, tensor.dims)) > _MAX_ELEMENTS:
        raise _contradiction(tensor, f"its shape {list(tensor.dims)} cannot be")


def unknown_element(kind: TypeProto) -> int | None:
    """Return the number of an element type, anywhere in a type, that ONNX does not have; None if it has all."""
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        return _unknown(getattr(kind, which).elem_type)
    if which in ("sequence_type", "optional_type"):
        return unknown_element(getattr(kind, which).elem_type)
    if which == "map_type":
        key = _unknown(kind.map_type.key_type)
        return unknown_element(kind.map_type.value_type) if key is None else key
    return None


def _unknown(number: int) -> int | None:
    return None if number in _TYPES else number


def _data_field(tensor: TensorProto, raw: bool) -> tuple[str, int]:
    """Return the field that holds the data of a tensor, and how many entries it needs there."""
    count = math.prod(tensor.dims)
    if tensor.data_type == TensorProto.STRING:
        return "string_data", count
    if raw:
        return "raw_data", packed_size(tensor.data_type, tensor.dims)
    if tensor.data_type in FOUR_BIT | TWO_BIT:
        count = packed_size(tensor.data_type, tensor.dims)
    elif tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        count *= 2
    return helper.tensor_dtype_to_field(tensor.data_type), count


def _contradiction(tensor: TensorProto, message: str) -> ModelError:
    return ModelError("M019", message, where=f"weight {tensor.name!r}", hint=_DAMAGED)


def external_file(tensor: TensorProto, folder: Path | None) -> Path:
    """Return the file of a tensor's external data; raises ModelError unless it exists in the model's folder."""
    where = f"weight {tensor.name!r}"
    if folder is None:
        raise ModelError(
            "M005",
            "external data, but the model was given as an object without a folder",
            where=where,
            hint="pass the path of the model file",
        )
    location = {entry.key: entry.value for entry in tensor.external_data}.get("location", "")
    file = folder / location
    shown = str(file) if len(str(file)) < _LONGEST_SHOWN else f"{str(file)[:_LONGEST_SHOWN]}..."
    try:
        inside = "\0" not in location and bool(location) and file.resolve().is_relative_to(folder.resolve())
        exists = inside and file.is_file()
    except (OSError, RuntimeError, ValueError) as problem:  # a name that is too long, links that go in a circle
        message = f"its external data file cannot be opened: {one_line(problem)[:_LONGEST_SHOWN]}"
        raise ModelError("M005", message, where=where, hint=_DAMAGED) from None
    if not inside:
        raise ModelError(
            "M006", f"external data outside the model's folder: {location[:_LONGEST_SHOWN]!r}", where=where
        )
    if not exists:
        raise ModelError(
            "M005",
            f"its external data file is missing: {shown}",
            where=where,
            hint="keep the weights file beside the model",
        )
    if not os.access(file, os.R_OK):
        raise ModelError("M005", f"its external data file cannot be read: {file}", where=where, hint="chmod +r")
    return file


def external_range(tensor: TensorProto, folder: Path | None) -> tuple[Path, int, int]:
    """Return (file, offset, length) of a tensor's external data.

    Raises ModelError naming the tensor and the file when the file is missing, too short, or outside the folder.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    where = f"weight {tensor.name!r}"
    file, size = external_file(tensor, folder), tensor_size(tensor)
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or size)
    except ValueError:
        offset, length = -1, size
    if offset < 0 or length < 0:
        raise ModelError("M007", f"its external data has an impossible range: {entries}", where=where, hint=_DAMAGED)
    have = file.stat().st_size
    if length != size or offset + length > have:
        raise ModelError(
            "M007",
            f"its external data is too short: needs {size} bytes at {offset} of {file}, which has {have}",
            where=where,
            hint="the file was cut or belongs to another model; copy it again",
        )
    return file, offset, length


def tensor_bytes(tensor: TensorProto, folder: Path | None) -> Iterator[bytes]:
    """Yield a tensor's bytes, little-endian, in pieces; external data is read piece by piece."""
    if tensor.data_location == TensorProto.EXTERNAL:
        file, offset, length = external_range(tensor, folder)
        with file.open("rb") as stream:
            stream.seek(offset)
            for start in range(0, length, CHUNK_BYTES):
                yield stream.read(min(CHUNK_BYTES, length - start))
    elif tensor.HasField("raw_data"):
        yield tensor.raw_data
    else:
        yield numpy_helper.to_array(tensor).tobytes()


def take_in(tensor: TensorProto, folder: Path | None) -> None:
    """Put the bytes of external data into the tensor itself; raises ModelError as `external_range` does."""
    if tensor.data_location == TensorProto.EXTERNAL:
        tensor.raw_data = b"".join(tensor_bytes(tensor, folder))
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]


Fingerprint = tuple[int, int, int]
"""Size in bytes, time of the last change in nanoseconds, and number (inode) of a file."""


def fingerprint(file: Path) -> Fingerprint:
    """Return what changes when a file is written or replaced; raises OSError if it is gone."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino
