"""Dense tensors from sparse weights and Constant nodes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, NodeProto, SparseTensorProto, TensorProto, helper, numpy_helper

from onnxplace.errors import ModelError
from onnxplace.model.schemas import name_attribute_type
from onnxplace.model.tensors import check_tensor, embed_tensor, require_shape, tensor_size

# Sparse weights beyond this size are refused: a few bytes in a file could fill the memory.
MAX_DENSE_BYTES = 1 << 30
# numpy keeps a reference for each string.
_POINTER_BYTES = 8
# Attribute of a Constant -> its type, and the type of the elements (UNDEFINED where the tensor declares it).
_VALUE_ATTRIBUTES = {
    "value_int": (AttributeProto.INT, TensorProto.INT64),
    "value_ints": (AttributeProto.INTS, TensorProto.INT64),
    "value_float": (AttributeProto.FLOAT, TensorProto.FLOAT),
    "value_floats": (AttributeProto.FLOATS, TensorProto.FLOAT),
    "value_string": (AttributeProto.STRING, TensorProto.STRING),
    "value_strings": (AttributeProto.STRINGS, TensorProto.STRING),
    "value": (AttributeProto.TENSOR, TensorProto.UNDEFINED),
    "sparse_value": (AttributeProto.SPARSE_TENSOR, TensorProto.UNDEFINED),
}


def make_dense(sparse: SparseTensorProto, where: str, folder: Path | None) -> TensorProto:
    """Return a sparse weight as a dense one.

    Raises ModelError if the dense weight exceeds `MAX_DENSE_BYTES`, or for indices that do not fit the shape.
    """
    result = TensorProto(name=sparse.values.name, data_type=sparse.values.data_type, dims=sparse.dims)
    place = f"{where}, weight {result.name!r}"
    require_shape(result)
    strings = result.data_type == TensorProto.STRING
    size = math.prod(result.dims) * _POINTER_BYTES if strings else tensor_size(result)
    if size > MAX_DENSE_BYTES:
        message = f"as a dense weight it would take {size} bytes, expected at most {MAX_DENSE_BYTES}"
        raise ModelError("M008", message, where=place, hint="store it dense, as external data")
    try:
        values, indices = _read_array(sparse.values, folder), _read_array(sparse.indices, folder)
        array = np.full(tuple(sparse.dims), "" if strings else 0, dtype=values.dtype)
        array.reshape(-1)[_compute_flat_indices(indices, values.size, array.shape)] = values.reshape(-1)
    except (ValueError, IndexError, TypeError) as problem:
        hint = "the model is damaged; export it again"
        raise ModelError("M008", f"its sparse form is invalid: {problem}", where=place, hint=hint) from None
    return numpy_helper.from_array(array, result.name)


def _read_array(tensor: TensorProto, folder: Path | None) -> NDArray[Any]:
    """Return the elements of a tensor, read from its file if necessary.

    Raises ModelError for a wrong number of elements.
    """
    check_tensor(tensor)
    return numpy_helper.to_array(embed_tensor(tensor, folder))


def _compute_flat_indices(indices: NDArray[Any], count: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the positions of sparse values in the flattened dense tensor.

    Raises ValueError for invalid indices.
    """
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


def read_constant(node: NodeProto, where: str, folder: Path | None) -> TensorProto:
    """Return the tensor of a Constant node, named as its output.

    Raises ModelError for an invalid attribute.
    """
    attribute, place = node.attribute[0], f"{where}, node {node.name!r}"
    if attribute.name not in _VALUE_ATTRIBUTES:
        message = f"its attribute is {attribute.name!r}, expected one of {', '.join(_VALUE_ATTRIBUTES)}"
        raise ModelError("M008", message, where=place, hint="export the model with a standard Constant")
    expected, element_type = _VALUE_ATTRIBUTES[attribute.name]
    has_tensor = {"value": attribute.HasField("t"), "sparse_value": attribute.HasField("sparse_tensor")}
    if not has_tensor.get(attribute.name, attribute.type == expected):
        given_type, expected_type = name_attribute_type(attribute.type), name_attribute_type(expected)
        problem = "is empty" if given_type == expected_type else f"has type {given_type}"
        message = f"its attribute {attribute.name!r} {problem}, expected a value of type {expected_type}"
        raise ModelError("M008", message, where=place, hint="the model is damaged; export it again")
    if attribute.name == "sparse_value":
        tensor = make_dense(attribute.sparse_tensor, place, folder)
    elif attribute.name == "value":
        check_tensor(attribute.t)
        tensor = TensorProto()
        tensor.CopyFrom(attribute.t)
    else:
        value = helper.get_attribute_value(attribute)
        is_list = attribute.name.endswith("s")
        dims, elements = ([len(value)], list(value)) if is_list else ([], [value])
        tensor = helper.make_tensor("", element_type, dims, elements)
    tensor.name = node.output[0]
    return tensor
