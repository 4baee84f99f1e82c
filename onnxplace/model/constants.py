"""Constants in one form: dense tensors, whatever a sparse weight or a Constant node holds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, NodeProto, SparseTensorProto, TensorProto, helper, numpy_helper

from onnxplace.errors import ModelError
from onnxplace.model.tensors import check_tensor, require_shape, take_in, tensor_size

DENSE_LIMIT_BYTES = 1 << 30
"""Sparse weights beyond this size are refused."""
_POINTER_BYTES = 8  # numpy keeps a reference for each string


def dense(sparse: SparseTensorProto, where: str, folder: Path | None) -> TensorProto:
    """Return a sparse weight as a dense one; raises ModelError if it would be huge or its indices make no sense."""
    result = TensorProto(name=sparse.values.name, data_type=sparse.values.data_type, dims=sparse.dims)
    place = f"{where}, weight {result.name!r}"
    require_shape(result)
    strings = result.data_type == TensorProto.STRING
    size = math.prod(result.dims) * _POINTER_BYTES if strings else tensor_size(result)
    if size > DENSE_LIMIT_BYTES:
        message = f"as a dense weight it would take {size} bytes"
        raise ModelError("M008", message, where=place, hint="store it dense, as external data")
    try:
        values, indices = _array(sparse.values, folder), _array(sparse.indices, folder)
        array = np.full(tuple(sparse.dims), "" if strings else 0, dtype=values.dtype)
        array.reshape(-1)[_positions(indices, values.size, array.shape)] = values.reshape(-1)
    except (ValueError, IndexError, TypeError) as problem:
        raise ModelError("M008", f"its sparse form makes no sense: {problem}", where=place) from None
    return numpy_helper.from_array(array, result.name)


def _array(tensor: TensorProto, folder: Path | None) -> NDArray[Any]:
    """Return a tensor's elements, wherever they are; raises ModelError if there are too few or too many."""
    check_tensor(tensor)
    copy = TensorProto()
    copy.CopyFrom(tensor)
    take_in(copy, folder)
    return numpy_helper.to_array(copy)


def _positions(indices: NDArray[Any], count: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return where the values of a sparse tensor go in the flat dense one; raises ValueError where that is nowhere."""
    if indices.dtype != np.int64:
        raise ValueError(f"its indices are {indices.dtype}, expected int64")
    if indices.ndim not in (1, 2) or len(indices) != count or (indices.ndim == 2 and indices.shape[1] != len(shape)):
        expected = f"[{count}] or [{count}, {len(shape)}]"
        raise ValueError(f"its indices have shape {list(indices.shape)}, expected {expected}")
    if indices.ndim == 2:
        return np.asarray(np.ravel_multi_index(tuple(indices.T), shape))
    if count and not 0 <= indices.min() <= indices.max() < math.prod(shape):
        raise ValueError(
            f"its indices go from {indices.min()} to {indices.max()}, expected 0 to {math.prod(shape) - 1}"
        )
    return indices


_CONSTANTS = {
    "value_int": (AttributeProto.INT, TensorProto.INT64),
    "value_ints": (AttributeProto.INTS, TensorProto.INT64),
    "value_float": (AttributeProto.FLOAT, TensorProto.FLOAT),
    "value_floats": (AttributeProto.FLOATS, TensorProto.FLOAT),
    "value_string": (AttributeProto.STRING, TensorProto.STRING),
    "value_strings": (AttributeProto.STRINGS, TensorProto.STRING),
    "value": (AttributeProto.TENSOR, TensorProto.UNDEFINED),
    "sparse_value": (AttributeProto.SPARSE_TENSOR, TensorProto.UNDEFINED),
}
"""Attribute of a Constant -> (its type, the type of the elements unless it says that itself)."""


def constant(node: NodeProto, where: str, folder: Path | None) -> TensorProto:
    """Return what a Constant node holds, under the name of its output; raises ModelError if it makes no sense."""
    attribute, place = node.attribute[0], f"{where}, node {node.name!r}"
    if attribute.name not in _CONSTANTS:
        raise ModelError("M008", f"constants given as {attribute.name!r} are not supported", where=place)
    expected, kind = _CONSTANTS[attribute.name]
    holds = {"value": attribute.HasField("t"), "sparse_value": attribute.HasField("sparse_tensor")}
    if not holds.get(attribute.name, attribute.type == expected):
        message = f"its attribute {attribute.name!r} is of another type than that name says"
        raise ModelError("M008", message, where=place, hint="the model is damaged; export it again")
    if attribute.name == "sparse_value":
        tensor = dense(attribute.sparse_tensor, place, folder)
    elif attribute.name == "value":
        check_tensor(attribute.t)
        tensor = TensorProto()
        tensor.CopyFrom(attribute.t)
    else:
        value = helper.get_attribute_value(attribute)
        several = attribute.name.endswith("s")
        tensor = helper.make_tensor("", kind, [len(value)] if several else [], list(value) if several else [value])
    tensor.name = node.output[0]
    return tensor
