"""Parts of large weights that stay in their file until they are written: ranges along one axis.

A part is a tensor with external data and three entries more than ONNX knows: the axis, the ranges, and the shape of the
whole. Such tensors never leave this program: `WeightFile` copies their bytes, and `embed_part` loads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from onnx import TensorProto

from onnxplace.model.tensors import READ_BYTES, find_external_range, make_raw_tensor, packed_size

_AXIS, _RANGES, _DIMS = "part.axis", "part.ranges", "part.dims"


def make_tensor_part(tensor: TensorProto, name: str, axis: int, ranges: Sequence[tuple[int, int]]) -> TensorProto:
    """Return some ranges of a tensor with external data along an axis, without reading it.

    The elements of the tensor must not be packed below a byte.
    """
    dims = list(tensor.dims)
    dims[axis] = sum(high - low for low, high in ranges)
    part = TensorProto(name=name, data_type=tensor.data_type, dims=dims, data_location=TensorProto.EXTERNAL)
    for entry in tensor.external_data:
        part.external_data.add(key=entry.key, value=entry.value)
    part.external_data.add(key=_AXIS, value=str(axis))
    part.external_data.add(key=_RANGES, value=",".join(f"{low}:{high}" for low, high in ranges))
    part.external_data.add(key=_DIMS, value=",".join(map(str, tensor.dims)))
    return part


def is_tensor_part(tensor: TensorProto) -> bool:
    """Return whether a tensor is a part of a larger one."""
    return tensor.data_location == TensorProto.EXTERNAL and any(entry.key == _AXIS for entry in tensor.external_data)


def _read_entries(tensor: TensorProto) -> tuple[TensorProto, int, list[tuple[int, int]]]:
    """Return the whole tensor, the axis and the ranges of a part."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    dims = [int(size) for size in entries.pop(_DIMS).split(",")]
    axis = int(entries.pop(_AXIS))
    pairs = [item.split(":") for item in entries.pop(_RANGES).split(",")]
    whole = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        whole.external_data.add(key=key, value=value)
    return whole, axis, [(int(low), int(high)) for low, high in pairs]


def describe_part(tensor: TensorProto, folder: Path | None) -> tuple[object, ...]:
    """Return a key of the bytes of a part: file, range and cut."""
    whole, axis, ranges = _read_entries(tensor)
    return (*find_external_range(whole, folder), axis, tuple(ranges))


def read_part_bytes(tensor: TensorProto, folder: Path | None) -> Iterator[bytes]:
    """Yield the bytes of a part; at most some `READ_BYTES` are in memory at a time."""
    whole, axis, ranges = _read_entries(tensor)
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
    if not is_tensor_part(tensor):
        return tensor
    return make_raw_tensor(tensor, read_part_bytes(tensor, folder))
