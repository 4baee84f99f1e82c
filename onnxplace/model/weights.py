"""Weights on disk: a file that holds equal bytes once."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from onnx import TensorProto

from onnxplace.errors import UsageError
from onnxplace.model.tensors import CHUNK_BYTES, FOUR_BIT, TWO_BIT, external_range, tensor_bytes, tensor_size

PAGE_BYTES = 4096
# Below this a tensor stays inside the ONNX file: shapes and axes must be visible to shape inference there.
INLINE_BYTES = 1024


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
        packed = tensor.data_type in FOUR_BIT | TWO_BIT and not external and not tensor.HasField("raw_data")
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
