"""Weights on disk: a file that stores equal bytes once, and the ranges of files that a model refers to."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from onnx import TensorProto

from onnxplace.errors import UsageError
from onnxplace.model.tensors import (
    FOUR_BIT_TYPES,
    READ_BYTES,
    TWO_BIT_TYPES,
    describe_part,
    embed_part,
    find_external_range,
    is_tensor_part,
    make_reference,
    read_tensor_bytes,
    tensor_size,
)

# ONNX asks for external data to begin at a page, so that it can be mapped into memory.
PAGE_BYTES = 4096
# Small weights are aligned to a cache line.
LINE_BYTES = 64
# Tensors of at least this size are aligned to pages: the gaps are then a small share of the file.
MIN_PAGE_ALIGNED_BYTES = 256 * PAGE_BYTES
# Below this size a tensor stays inside the ONNX file: shapes and axes must be visible to shape inference there.
MIN_PLACED_BYTES = 1024
# Fewer bytes are hashed sooner than another thread begins.
MIN_HASHED_BESIDE_BYTES = 1 << 20


@dataclass(frozen=True)
class StoredTensor:
    """Where the bytes of a tensor are."""

    location: str
    """Path of the file, as models refer to it."""
    is_linked: bool
    """Whether that is a file of the model, rather than the file of weights that is written."""
    offset: int
    size: int
    """Bytes."""


class WeightFile:
    """A file of weights that stores equal bytes once; a context manager.

    `place` appends a tensor and returns a small one that refers to it. Small tensors, strings, and packed types
    without raw bytes stay as they are. Bytes are read once: they are hashed while they are copied. Bytes that the file
    already has are then truncated again.

    With `linked_below`, external data stays in its file, referred to by its path below that folder. Only parts of
    weights that are not contiguous there are copied, into the model. Data inside the model stays in the model.

    Args:
        path: The file, which is created or emptied.
        location: The path by which models refer to it.
        linked_below: A folder that has all weight files of the model below it.
    """

    def __init__(self, path: Path, location: str, linked_below: Path | None = None) -> None:
        self.path = path
        self.location = location
        self.linked: dict[str, Path] = {}
        """Location -> file, for each weight file that is linked to."""
        self.copied: list[str] = []
        """Parts of weights that could not be linked to: they are not contiguous in their file."""
        self.bytes_written = 0
        self._linked_below = linked_below.resolve() if linked_below else None
        self._offsets: dict[tuple[object, ...], int] = {}
        """(size, checksum), or external range -> offset of these bytes."""
        self._placed: dict[tuple[str, str], TensorProto] = {}
        self._hash = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1, "onnxplace hashing")  # a file's own: a forked process has no threads
        self._stream: BinaryIO = path.open("w+b")

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._hasher.shutdown()
        self._stream.close()

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the file so far."""
        return self._hash.hexdigest()

    def flush(self) -> None:
        """Let others read what was written."""
        self._stream.flush()

    def place(self, tensor: TensorProto, folder: Path | None, model: str = "") -> TensorProto:
        """Return a tensor that refers to its bytes in this file.

        New bytes are written. Tensors of one name are equal within one `model`.
        """
        key = model, tensor.name
        if key not in self._placed:
            self._placed[key] = self._place(tensor, folder)
        return self._placed[key]

    def store(self, tensor: TensorProto, folder: Path | None) -> StoredTensor | None:
        """Return where the bytes of a tensor are, in this file or a linked one; small ones are written too.

        Returns None for types without plain bytes: strings, and several elements in a byte.
        """
        if tensor.data_type in FOUR_BIT_TYPES | TWO_BIT_TYPES | {TensorProto.STRING}:
            return None
        placed, size = self.place(tensor, folder), tensor_size(tensor)
        if placed.data_location == TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in placed.external_data}
            is_linked = self._linked_below is not None
            return StoredTensor(entries["location"], is_linked, int(entries["offset"]), size)
        return StoredTensor(self.location, False, self._append(read_tensor_bytes(placed, folder), size), size)

    def _place(self, tensor: TensorProto, folder: Path | None) -> TensorProto:
        """Return the reference for a tensor that is new."""
        external = tensor.data_location == TensorProto.EXTERNAL
        packed = tensor.data_type in FOUR_BIT_TYPES | TWO_BIT_TYPES and not external and not tensor.HasField("raw_data")
        size = tensor_size(tensor)
        if tensor.data_type == TensorProto.STRING or packed or (size < MIN_PLACED_BYTES and not external):
            return tensor
        source: tuple[object, ...] | None = None
        if is_tensor_part(tensor):
            if self._linked_below is not None:
                self.copied.append(tensor.name)
                return embed_part(tensor, folder)
            source = describe_part(tensor, folder)
        elif external:
            file, start, _ = source = find_external_range(tensor, folder)
            if self._linked_below is not None:
                return make_reference(tensor.name, tensor.data_type, tensor.dims, self._link(file), start, size)
        elif self._linked_below is not None:
            return tensor
        offset = None if source is None else self._offsets.get(source)
        if offset is None:
            offset = self._append(read_tensor_bytes(tensor, folder), size)
            if source is not None:
                self._offsets[source] = offset
        return make_reference(tensor.name, tensor.data_type, tensor.dims, self.location, offset, size)

    def _link(self, file: Path) -> str:
        """Return the path of a weight file below the folder.

        Raises UsageError for a file elsewhere.
        """
        assert self._linked_below is not None
        file = file.resolve()
        if not file.is_relative_to(self._linked_below):
            raise build_link_error(file, self._linked_below)
        location = file.relative_to(self._linked_below).as_posix()
        self.linked[location] = file
        return location

    def _append(self, pieces: Iterable[bytes], size: int) -> int:
        """Append bytes, unless the file has them; return their offset.

        The offset is aligned.
        """
        hash_before, end, checksum = self._hash.copy(), self.bytes_written, 0
        alignment = PAGE_BYTES if size >= MIN_PAGE_ALIGNED_BYTES else LINE_BYTES
        offset = -(-end // alignment) * alignment
        self._write(bytes(offset - end))
        for piece in pieces:
            checksum = self._write(piece, checksum)
        key = size, checksum
        first = self._offsets.setdefault(key, offset)
        if first == offset or not self._equal(first, offset, size):
            return offset
        self._hash, self.bytes_written = hash_before, end
        self._stream.seek(end)
        self._stream.truncate()
        return first

    def _write(self, data: bytes, checksum: int = 0) -> int:
        """Write and hash bytes at the same time; return their checksum after that of others."""
        hashing = self._hasher.submit(self._hash.update, data) if len(data) >= MIN_HASHED_BESIDE_BYTES else None
        self._stream.write(data)
        self.bytes_written += len(data)
        checksum = zlib.crc32(data, checksum)
        if hashing is None:
            self._hash.update(data)
        else:
            hashing.result()
        return checksum

    def _equal(self, first: int, second: int, size: int) -> bool:
        """Return whether two ranges of the file hold equal bytes.

        The stream ends up at its end.
        """
        places = ((start, min(READ_BYTES, size - start)) for start in range(0, size, READ_BYTES))
        is_equal = all(
            self._read(first + start, length) == self._read(second + start, length) for start, length in places
        )
        self._stream.seek(self.bytes_written)
        return is_equal

    def _read(self, offset: int, length: int) -> bytes:
        self._stream.seek(offset)
        return self._stream.read(length)


def build_link_error(file: Path, folder: Path) -> UsageError:
    """Return the error for a weight file that cannot be linked.

    A bundle in `folder` can link to files in and below it only.
    """
    return UsageError(
        "U042",
        f"the bundle must be next to the weights: {file} is not in {folder} or below it",
        where="--link-weights",
        hint=f"choose an -o in {file.parent}, or copy the weights by leaving the option out",
    )


def has_external_file(tensor: TensorProto, folder: Path | None) -> bool:
    """Return whether the file of a tensor's external data may be there; files that are not must not be read."""
    location = {entry.key: entry.value for entry in tensor.external_data}.get("location", "")
    return folder is None or os.path.exists(folder / location)
