"""Types of the values that cross between segments.

ONNX requires each input and output to be declared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from onnx import TensorProto, TypeProto, ValueInfoProto

from onnxplace.errors import ModelError
from onnxplace.machine import make_session_options, open_session
from onnxplace.model import Model, store_for_session
from onnxplace.utils import temporary_folder


def infer_boundary_types(model: Model, names: Iterable[str]) -> dict[str, TypeProto]:
    """Return the type of each value, from shape inference or ONNX Runtime.

    Raises:
        ModelError: neither knows the type of a value.
    """
    known = model.types
    types = {name: known[name] for name in names if name in known and _is_complete(known[name])}
    unknown = sorted(set(names) - set(types))
    return {**types, **_infer_with_onnxruntime(model, unknown)} if unknown else types


def _is_complete(value_type: TypeProto) -> bool:
    return not value_type.HasField("tensor_type") or value_type.tensor_type.elem_type != TensorProto.UNDEFINED


def _infer_with_onnxruntime(model: Model, names: list[str]) -> dict[str, TypeProto]:
    """Open the model with these values as outputs and read types."""
    with temporary_folder() as folder:
        source, entries = store_for_session(model, folder, [ValueInfoProto(name=name) for name in names])
        session = open_session(source, make_session_options([0], "none", entries), where=model.name)
        unknown = set(names)
        outputs = [output for output in session.get_outputs() if output.name in unknown]
        types = {output.name: parse_type(output.type, output.shape) for output in outputs}
    for name in names:
        if types.get(name) is None:
            raise ModelError(
                "M016",
                "its type is unknown, so the model cannot be cut there",
                where=f"value {name!r}",
                hint="export the model with value_info, or keep its producer and readers together with --colocate",
            )
    return {name: value_type for name, value_type in types.items() if value_type is not None}


_TYPE = re.compile(r"(?P<outer>tensor|sparse_tensor|seq|optional)\((?P<inner>.*)\)|map\((?P<key>\w+),(?P<value>.*)\)")


def parse_type(text: str, shape: list[int | str | None]) -> TypeProto | None:
    """Parse ONNX Runtime's spelling of a type, None if invalid.

    Examples are `tensor(float)` and `seq(map(int64,tensor(float)))`.
    """
    match = _TYPE.fullmatch(text)
    if match is None:
        return None
    result = TypeProto()
    if match["key"]:
        value = parse_type(match["value"], [])
        if value is None or _element_number(match["key"]) is None:
            return None
        result.map_type.key_type = _element_number(match["key"]) or 0
        result.map_type.value_type.CopyFrom(value)
        return result
    if match["outer"].endswith("tensor"):
        return _parse_tensor(match["inner"], match["outer"] == "sparse_tensor", shape)
    element = parse_type(match["inner"], [])
    if element is None:
        return None
    holder = result.sequence_type if match["outer"] == "seq" else result.optional_type
    holder.elem_type.CopyFrom(element)
    return result


def _parse_tensor(element: str, sparse: bool, shape: list[int | str | None]) -> TypeProto | None:
    if (number := _element_number(element)) is None:
        return None
    result = TypeProto()
    tensor = result.sparse_tensor_type if sparse else result.tensor_type
    tensor.elem_type = number
    for size in shape or ():
        known = {"dim_value": size} if isinstance(size, int) else {"dim_param": size} if size else {}
        tensor.shape.dim.add(**known)
    return result


def _element_number(name: str) -> int | None:
    """Return the number of an element type, `float`, if ONNX has it."""
    names = dict(TensorProto.DataType.items())
    return names.get(name.upper())
