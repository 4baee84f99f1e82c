"""Weights as bytes in files: how large a tensor is, where its bytes are, and a file that holds each of them once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from onnxplace.errors import ModelError

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
    count: int = math.prod(tensor.dims)
    if tensor.data_type in _FOUR_BIT:
        return (count + 1) // 2
    if tensor.data_type in _TWO_BIT:
        return (count + 3) // 4
    return count * np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize


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
    without raw bytes stay as they are.
    """

    def __init__(self, path: Path, location: str) -> None:
        self.path = path
        self.location = location
        self.bytes_written = 0
        self._ranges: dict[bytes, tuple[int, int]] = {}
        self._placed: dict[str, TensorProto] = {}
        self._hash = hashlib.sha256()
        self._stream: BinaryIO = path.open("wb")

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
        key = hashlib.sha256()
        for piece in tensor_bytes(tensor, folder):
            key.update(piece)
        if key.digest() not in self._ranges:
            self._ranges[key.digest()] = self._append(tensor, folder), size
        offset, length = self._ranges[key.digest()]
        placed = TensorProto(
            name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=TensorProto.EXTERNAL
        )
        for name, value in (("location", self.location), ("offset", str(offset)), ("length", str(length))):
            placed.external_data.add(key=name, value=value)
        return placed

    def _append(self, tensor: TensorProto, folder: Path | None) -> int:
        alignment = PAGE_BYTES if tensor_size(tensor) >= 256 * PAGE_BYTES else 64
        offset = -(-self.bytes_written // alignment) * alignment
        self._write(bytes(offset - self.bytes_written))
        for piece in tensor_bytes(tensor, folder):
            self._write(piece)
        return offset

    def _write(self, data: bytes) -> None:
        self._stream.write(data)
        self._hash.update(data)
        self.bytes_written += len(data)
