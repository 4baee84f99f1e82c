"""Files of arrays in the format `safetensors`: a header in JSON, then plain bytes; nothing in them is executed.

Files that are written here have a hash of all their bytes in the metadata, which is checked where they are read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from onnxplace.errors import InputError, UsageError
from onnxplace.utils.files import format_path, open_input, write_file

# Type in the file -> numpy's name; those of ml_dtypes last.
DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "BF16": "bfloat16",
}
METADATA_KEY = "__metadata__"
HASH_KEY = "onnxplace.sha256"
# In place of the hash while it is computed.
_NO_HASH = b"0" * 64
# Of the format's own reader.
MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class ArrayFile:
    """The contents of a file."""

    arrays: Mapping[str, NDArray[Any]]
    """They share the memory of the file, read-only."""
    metadata: Mapping[str, str]
    has_hash: bool
    """Whether a hash in the file has shown that it is as it was written."""


@dataclass(frozen=True)
class _ArrayRange:
    """Where an array is in a file, in bytes after the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int


class _MalformedError(Exception):
    """A file that is not as the format has it, and why."""


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write arrays and texts; the file is replaced at once, when all is on the disk.

    Raises UsageError or ExecutionError, and leaves an older file as it was, if it cannot be written.
    """
    names = {numpy_name: name for name, numpy_name in DTYPES.items()}
    header: dict[str, Any] = {METADATA_KEY: {HASH_KEY: _NO_HASH.decode(), **metadata}}
    offset = 0
    # The largest elements first, so that all are aligned, as the format's own writer does.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    for name, array in ordered:
        if array.dtype.name not in names:
            message = f"{name!r} has the type {array.dtype}, expected one of {', '.join(DTYPES.values())}"
            raise UsageError("U032", message, where=format_path(path), hint="convert it, or leave it out")
        end = offset + array.nbytes
        header[name] = {
            "dtype": names[array.dtype.name], "shape": list(array.shape), "data_offsets": [offset, end]
        }  # fmt: skip
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    text = len(text).to_bytes(_LENGTH_BYTES, "little") + text

    def list_blocks() -> Iterator[memoryview]:
        for _, array in ordered:
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            yield np.ascontiguousarray(little).reshape(-1).view(np.uint8).data

    digest = hashlib.sha256(text)
    for block in list_blocks():
        digest.update(block)

    def fill(stream: BinaryIO) -> None:
        stream.write(text.replace(_NO_HASH, digest.hexdigest().encode(), 1))
        for block in list_blocks():
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())

    write_file(path, fill)


def map_arrays(path: Path, code: str, hint: str) -> ArrayFile:
    """Map a file into memory.

    Args:
        path: The file.
        code: Code of the error for a file that is of another kind, is damaged or cannot be read.
        hint: Hint of that error.

    Raises:
        InputError: there is no such file, or it is not as the format has it.
    """
    with open_input(path, code) as stream:
        size = os.fstat(stream.fileno()).st_size
        try:
            header, start = _read_header(stream, size)
            metadata = _read_metadata(header)
            entries = {name: _read_entry(name, entry, size - start) for name, entry in header.items()}
            _require_whole(entries, size - start)
            whole = np.memmap(stream, np.uint8, "r")
            if (hashed := metadata.pop(HASH_KEY, None)) is not None:
                _require_hash(hashed, whole, start)
        except (_MalformedError, OSError) as problem:
            raise InputError(code, str(problem), where=format_path(path), hint=hint) from None
    arrays = {
        name: np.asarray(whole[start + entry.start : start + entry.end]).view(entry.dtype).reshape(entry.shape)
        for name, entry in entries.items()
    }
    return ArrayFile(arrays, metadata, hashed is not None)


def _read_header(stream: Any, size: int) -> tuple[dict[str, Any], int]:
    """Return the header and where the bytes of arrays begin."""
    first = stream.read(_LENGTH_BYTES)
    length = int.from_bytes(first, "little")
    if len(first) < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, MAX_HEADER_BYTES):
        message = f"not a safetensors file, or cut off: {size} bytes, expected a header of {length} bytes in it"
        raise _MalformedError(message)
    try:
        header = json.loads(stream.read(length))
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise _MalformedError("not a safetensors file: its header is not JSON")
    return header, _LENGTH_BYTES + length


def _read_metadata(header: dict[str, Any]) -> dict[str, str]:
    """Take the texts from a header."""
    metadata = header.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _MalformedError("its metadata is not a mapping of texts")
    return metadata


def _read_entry(name: str, entry: Any, available: int) -> _ArrayRange:
    """Return where an array is; raises _MalformedError if type, shape and range contradict each other or the file."""
    try:
        dtype = _find_type(entry["dtype"])
        shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
        fits = all(type(number) is int and number >= 0 for number in (*shape, start, end))
        fits = fits and start <= end <= available and math.prod(shape) * dtype.itemsize == end - start
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise _MalformedError(f"its entry for {name!r} does not fit the file: {str(entry)[:100]}")
    return _ArrayRange(dtype, shape, start, end)


def _require_whole(entries: Mapping[str, _ArrayRange], available: int) -> None:
    """Raise _MalformedError unless arrays follow each other to the end of the file, as the format demands."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            raise _MalformedError(f"its array {name!r} begins at byte {entry.start}, expected {end}")
        end = entry.end
    if end != available:
        raise _MalformedError(f"it has {available} bytes of arrays, expected {end}")


def _require_hash(hashed: str, whole: NDArray[Any], start: int) -> None:
    """Raise _MalformedError unless a file, whose arrays begin at `start`, has this hash."""
    digest = hashlib.sha256(whole[:start].tobytes().replace(hashed.encode(errors="replace"), _NO_HASH, 1))
    digest.update(whole[start:].data)
    if digest.hexdigest() != hashed:
        raise _MalformedError("its content is not what was written: its hash differs")


def _find_type(name: str) -> np.dtype[Any]:
    if DTYPES[name] == "bfloat16":
        import ml_dtypes

        brain_float: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return brain_float
    return np.dtype(DTYPES[name])
