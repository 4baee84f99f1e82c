"""Weights as bytes in files: how large a tensor is, where its bytes are, and a file that holds each of them once."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from onnxplace.errors import ModelError, UsageError

CHUNK_BYTES = 16 << 20
PAGE_BYTES = 4096
# Below this a tensor stays inside the ONNX file: shapes and axes must be visible to shape inference there.
INLINE_BYTES = 1024

_FOUR_BIT = {TensorProto.INT4, TensorProto.UINT4, *(getattr(TensorProto, name, -1) for name in ("FLOAT4E2M1",))}
_TWO_BIT = {getattr(TensorProto, name, -1) for name in ("INT2", "UINT2")}


def tensor_size(tensor: TensorProto) -> int:
    """Return the bytes a tensor takes in memory; strings count by their characters."""
    if tensor.data_type == TensorProto.STRING:
        return sum(len(item) for item in tensor.string_data)
    return packed_size(tensor.data_type, tensor.dims)


def packed_size(data_type: int, dims: Iterable[int]) -> int:
    """Return the bytes of a tensor of this type, not strings, and shape."""
    count: int = math.prod(dims)
    if data_type in _FOUR_BIT:
        return (count + 1) // 2
    if data_type in _TWO_BIT:
        return (count + 3) // 4
    return count * _width(data_type)


@cache
def _width(data_type: int) -> int:
    return int(np.dtype(helper.tensor_dtype_to_np_dtype(data_type)).itemsize)


def check_tensor(tensor: TensorProto) -> None:
    """Raise ModelError naming a weight whose type is none, whose shape cannot be, or whose bytes are too few."""
    where, hint = f"weight {tensor.name!r}", "the model is damaged; export it again"
    if tensor.data_type not in TensorProto.DataType.values() or tensor.data_type == TensorProto.UNDEFINED:
        raise ModelError("M019", f"its type {tensor.data_type} is unknown", where=where, hint=hint)
    if any(size < 0 for size in tensor.dims):
        raise ModelError("M019", f"its shape {list(tensor.dims)} cannot be", where=where, hint=hint)
    if tensor.HasField("raw_data") and len(tensor.raw_data) != tensor_size(tensor):
        have, need = len(tensor.raw_data), tensor_size(tensor)
        raise ModelError("M019", f"it has {have} bytes of data where {need} are needed", where=where, hint=hint)


def external_range(tensor: TensorProto, folder: Path | None) -> tuple[Path, int, int]:
    """Return (file, offset, length) of a tensor's external data.

    Raises ModelError naming the tensor and the file when the file is missing, too short, or outside the folder.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    where = f"weight {tensor.name!r}"
    if folder is None:
        raise ModelError(
            "M005",
            "external data, but the model was given as an object without a folder",
            where=where,
            hint="pass the path of the model file",
        )
    location = entries.get("location", "")
    file = folder / location
    if "\0" in location or not location or not file.resolve().is_relative_to(folder.resolve()):
        raise ModelError("M006", f"external data outside the model's folder: {location!r}", where=where)
    size = tensor_size(tensor)
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or size)
    except ValueError:
        offset, length = -1, size
    if offset < 0 or length < 0:
        raise ModelError(
            "M007",
            f"its external data has an impossible range: {entries}",
            where=where,
            hint="the model is damaged; export it again",
        )
    if not file.is_file():
        raise ModelError(
            "M005",
            f"its external data file is missing: {file}",
            where=where,
            hint="keep the weights file beside the model",
        )
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


class WeightFile:
    """A file of weights in which equal bytes are stored once; a context manager.

    `place` appends a tensor and returns a small one that refers to it. Small tensors, strings and packed types
    without raw bytes stay as they are. Bytes are read once: they are hashed while they are copied, and what turns out
    to be there already is taken back.

    With `linked_below`, nothing is copied: external data stays where it is, referred to by its path below that
    folder, and what the model holds itself stays in it.
    """

    def __init__(self, path: Path, location: str, linked_below: Path | None = None) -> None:
        self.path = path
        self.location = location
        self.linked: dict[str, Path] = {}
        """Location -> file, of the weight files referred to."""
        self.bytes_written = 0
        self._below = linked_below.resolve() if linked_below else None
        self._known: dict[tuple[object, ...], int] = {}
        self._placed: dict[str, TensorProto] = {}
        self._hash = hashlib.sha256()
        self._stream: BinaryIO = path.open("w+b")

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the file so far."""
        return self._hash.hexdigest()

    def place(self, tensor: TensorProto, folder: Path | None) -> TensorProto:
        """Return a tensor that refers to its bytes in this file, which are written if they are new here."""
        if tensor.name not in self._placed:
            self._placed[tensor.name] = self._place(tensor, folder)
        return self._placed[tensor.name]

    def _place(self, tensor: TensorProto, folder: Path | None) -> TensorProto:
        external = tensor.data_location == TensorProto.EXTERNAL
        packed = tensor.data_type in _FOUR_BIT | _TWO_BIT and not external and not tensor.HasField("raw_data")
        size = tensor_size(tensor)
        if tensor.data_type == TensorProto.STRING or packed or (size < INLINE_BYTES and not external):
            return tensor
        source = external_range(tensor, folder) if external else None
        if self._below is not None:
            return tensor if source is None else _referring(tensor, self._link(source[0]), source[1], size)
        if source not in self._known or source is None:
            offset = self._append(tensor_bytes(tensor, folder), size)
            if source is not None:
                self._known[source] = offset
        else:
            offset = self._known[source]
        return _referring(tensor, self.location, offset, size)

    def _link(self, file: Path) -> str:
        """Return the path of a weight file below the folder; raises UsageError if it is not below it."""
        assert self._below is not None
        file = file.resolve()
        if not file.is_relative_to(self._below):
            raise not_beside(file, self._below)
        location = file.relative_to(self._below).as_posix()
        self.linked[location] = file
        return location

    def _append(self, pieces: Iterable[bytes], size: int) -> int:
        """Write bytes at the next aligned offset, or find them in the file; returns their offset."""
        before, end, checksum = self._hash.copy(), self.bytes_written, 0
        alignment = PAGE_BYTES if size >= 256 * PAGE_BYTES else 64
        offset = -(-end // alignment) * alignment
        self._write(bytes(offset - end))
        for piece in pieces:
            self._write(piece)
            checksum = zlib.crc32(piece, checksum)
        key = size, checksum
        first = self._known.setdefault(key, offset)
        if first == offset or not self._equal(first, offset, size):
            return offset
        self._hash, self.bytes_written = before, end
        self._stream.seek(end)
        self._stream.truncate()
        return first

    def _write(self, data: bytes) -> None:
        self._stream.write(data)
        self._hash.update(data)
        self.bytes_written += len(data)

    def _equal(self, first: int, second: int, size: int) -> bool:
        """Return whether two ranges of the file hold the same bytes; leaves the stream at its end."""
        for start in range(0, size, CHUNK_BYTES):
            length = min(CHUNK_BYTES, size - start)
            pieces = []
            for offset in (first, second):
                self._stream.seek(offset + start)
                pieces.append(self._stream.read(length))
            if pieces[0] != pieces[1]:
                break
        else:
            return True
        self._stream.seek(self.bytes_written)
        return False


def _referring(tensor: TensorProto, location: str, offset: int, length: int) -> TensorProto:
    """Return a tensor whose bytes are at `offset` of a file."""
    placed = TensorProto(
        name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=TensorProto.EXTERNAL
    )
    for name, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        placed.external_data.add(key=name, value=value)
    return placed


def not_beside(what: Path, folder: Path) -> UsageError:
    """Return the error for weights that a bundle in `folder` cannot link to."""
    return UsageError(
        "U033",
        f"the bundle must be beside the weights: {what} is not in {folder} or below it",
        where="--link-weights",
        hint=f"choose an -o in {what.parent}, or copy the weights by leaving the option out",
    )
