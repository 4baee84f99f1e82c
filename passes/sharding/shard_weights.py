"""Cut weights into the parts that devices hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxplace.model import find_external_range, make_tensor_part, packed_size, read_tensor_bytes

_PACKED_TYPES = frozenset(("INT4", "UINT4", "FLOAT4E2M1", "INT2", "UINT2"))


def shard_weight(
    tensor: TensorProto, name: str, axis: int, ranges: Sequence[tuple[int, int]], folder: Path | None
) -> TensorProto:
    """Return some ranges of a weight along an axis.

    External data stays in its file: a contiguous range is referred to by offset and length, and other parts are read
    when the bundle is written. Parts of weights inside the model are copied.

    Args:
        tensor: The weight.
        name: Of the part.
        axis: The split axis.
        ranges: [low, high) along it.
        folder: Of external data.
    """
    dims = list(tensor.dims)
    dims[axis] = sum(high - low for low, high in ranges)
    rows, size = math.prod(tensor.dims[:axis]), tensor.dims[axis]
    inner = tuple(tensor.dims[axis + 1 :])
    is_external = tensor.data_location == TensorProto.EXTERNAL
    is_packed = TensorProto.DataType.Name(tensor.data_type) in _PACKED_TYPES
    if is_external and not is_packed and rows == 1 and len(ranges) == 1:
        return _refer_to_range(tensor, name, dims, packed_size(tensor.data_type, (ranges[0][0], *inner)), folder)
    if is_external and not is_packed:
        return make_tensor_part(tensor, name, axis, ranges)
    if is_packed or tensor.data_type == TensorProto.STRING:
        array = numpy_helper.to_array(_embedded(tensor, folder))
        pieces = [array.take(range(low, high), axis) for low, high in ranges]
        return numpy_helper.from_array(np.concatenate(pieces, axis), name)
    item = packed_size(tensor.data_type, inner)
    data = np.frombuffer(b"".join(read_tensor_bytes(tensor, folder)), np.uint8).reshape(rows, size * item)
    parts = [data[:, low * item : high * item] for low, high in ranges]
    raw = np.concatenate(parts, axis=1).tobytes()
    return TensorProto(name=name, data_type=tensor.data_type, dims=dims, raw_data=raw)


def _refer_to_range(
    tensor: TensorProto, name: str, dims: Sequence[int], start_bytes: int, folder: Path | None
) -> TensorProto:
    """Return a part of external data that is contiguous in its file."""
    _, offset, _ = find_external_range(tensor, folder)
    location = next(entry.value for entry in tensor.external_data if entry.key == "location")
    part = TensorProto(name=name, data_type=tensor.data_type, dims=dims, data_location=TensorProto.EXTERNAL)
    length = packed_size(tensor.data_type, dims)
    for key, value in (("location", location), ("offset", str(offset + start_bytes)), ("length", str(length))):
        part.external_data.add(key=key, value=value)
    return part


def _embedded(tensor: TensorProto, folder: Path | None) -> TensorProto:
    if tensor.data_location != TensorProto.EXTERNAL:
        return tensor
    raw = b"".join(read_tensor_bytes(tensor, folder))
    return TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=raw)
