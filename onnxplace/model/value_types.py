"""Names of types in ONNX Runtime's spelling, and entries of shapes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from onnx import TensorProto, TypeProto

from onnxplace.feeds import MAX_DIMENSION


def format_type(kind: TypeProto) -> str:
    """Return ONNX Runtime's spelling of a type: `tensor(float)`, `seq(tensor(int64))`.

    >>> from onnx import helper
    >>> format_type(helper.make_tensor_type_proto(TensorProto.FLOAT, [1]))
    'tensor(float)'
    """
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        element = TensorProto.DataType.Name(getattr(kind, which).elem_type).lower()
        return f"{'sparse_' if which.startswith('sparse') else ''}tensor({element})"
    if which == "sequence_type":
        return f"seq({format_type(kind.sequence_type.elem_type)})"
    if which == "optional_type":
        return f"optional({format_type(kind.optional_type.elem_type)})"
    if which == "map_type":
        return (
            f"map({TensorProto.DataType.Name(kind.map_type.key_type).lower()},{format_type(kind.map_type.value_type)})"
        )
    return "unknown"


def read_shape_entries(kind: TypeProto) -> tuple[int | str | None, ...] | None:
    """Return the entries of a tensor's shape: sizes, symbols, or None.

    Returns None for a type without a shape.

    An impossible size, as shape inference computes for nodes that cannot run, counts as unknown.

    >>> from onnx import helper
    >>> read_shape_entries(helper.make_tensor_type_proto(TensorProto.FLOAT, ["batch", 4, None]))
    ('batch', 4, None)
    """
    if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    sizes = kind.tensor_type.shape.dim
    return tuple(
        (size.dim_value if 0 <= size.dim_value <= MAX_DIMENSION else None)
        if size.HasField("dim_value")
        else (size.dim_param or None)
        for size in sizes
    )


_TYPE = re.compile(r"(?P<outer>tensor|sparse_tensor|seq|optional)\((?P<inner>.*)\)|map\((?P<key>\w+),(?P<value>.*)\)")


def parse_type(text: str, shape: Sequence[int | str | None] | None) -> TypeProto | None:
    """Parse ONNX Runtime's spelling of a type, None if invalid; a shape of None leaves the rank open.

    Examples are `tensor(float)` and `seq(map(int64,tensor(float)))`.

    >>> parse_type("tensor(float)", ("batch", 4)).tensor_type.shape.dim[0].dim_param
    'batch'
    """
    match = _TYPE.fullmatch(text)
    if match is None:
        return None
    result = TypeProto()
    if match["key"]:
        value = parse_type(match["value"], None)
        if value is None or _element_number(match["key"]) is None:
            return None
        result.map_type.key_type = _element_number(match["key"]) or 0
        result.map_type.value_type.CopyFrom(value)
        return result
    if match["outer"].endswith("tensor"):
        return _parse_tensor(match["inner"], match["outer"] == "sparse_tensor", shape)
    element = parse_type(match["inner"], None)
    if element is None:
        return None
    holder = result.sequence_type if match["outer"] == "seq" else result.optional_type
    holder.elem_type.CopyFrom(element)
    return result


def _parse_tensor(element: str, sparse: bool, shape: Sequence[int | str | None] | None) -> TypeProto | None:
    if (number := _element_number(element)) is None:
        return None
    result = TypeProto()
    tensor = result.sparse_tensor_type if sparse else result.tensor_type
    tensor.elem_type = number
    if shape is not None:
        tensor.shape.SetInParent()  # a scalar has a shape without dimensions
    for size in shape or ():
        known = {"dim_value": size} if isinstance(size, int) else {"dim_param": size} if size else {}
        tensor.shape.dim.add(**known)
    return result


def _element_number(name: str) -> int | None:
    """Return the number of an element type, `float`, if ONNX has it."""
    names = dict(TensorProto.DataType.items())
    return names.get(name.upper())
