"""The types of values at the borders of segments, where ONNX wants each input and output declared."""

from __future__ import annotations

import re
from collections.abc import Iterable

from onnx import TensorProto, TypeProto, ValueInfoProto

from onnxplace.errors import ModelError
from onnxplace.machine import open_session, session_options
from onnxplace.model import Model, store_for_session
from onnxplace.utils import temporary_folder


def infer_boundary_types(model: Model, names: Iterable[str]) -> dict[str, TypeProto]:
    """Return the type of each value, from shape inference or ONNX Runtime; raises ModelError if neither knows."""
    known = model.types
    types = {name: known[name] for name in names if name in known and _is_complete(known[name])}
    unknown = sorted(set(names) - set(types))
    return {**types, **_ask_onnxruntime(model, unknown)} if unknown else types


def _is_complete(kind: TypeProto) -> bool:
    return not kind.HasField("tensor_type") or kind.tensor_type.elem_type != TensorProto.UNDEFINED


def _ask_onnxruntime(model: Model, names: list[str]) -> dict[str, TypeProto]:
    """Open the whole model with these values as outputs and read the types it finds for them."""
    with temporary_folder() as folder:
        source, entries = store_for_session(model, folder, [ValueInfoProto(name=name) for name in names])
        session = open_session(source, session_options([0], "none", entries), where=model.name)
        wanted = set(names)
        found = {
            output.name: _parse(output.type, output.shape) for output in session.get_outputs() if output.name in wanted
        }
    for name in names:
        if found.get(name) is None:
            raise ModelError(
                "M016",
                "its type is unknown, so the model cannot be cut there",
                where=f"value {name!r}",
                hint="export the model with value_info, or keep its producer and readers together with --colocate",
            )
    return {name: kind for name, kind in found.items() if kind is not None}


_TYPE = re.compile(r"(?P<outer>tensor|sparse_tensor|seq|optional)\((?P<inner>.*)\)|map\((?P<key>\w+),(?P<value>.*)\)")


def _parse(text: str, shape: list[int | str | None]) -> TypeProto | None:
    """Read ONNX Runtime's spelling of a type: `tensor(float)`, `seq(map(int64,tensor(float)))`; None if it is none."""
    match = _TYPE.fullmatch(text)
    if match is None:
        return None
    kind = TypeProto()
    if match["key"]:
        value = _parse(match["value"], [])
        if value is None or _element(match["key"]) is None:
            return None
        kind.map_type.key_type = _element(match["key"]) or 0
        kind.map_type.value_type.CopyFrom(value)
        return kind
    if match["outer"].endswith("tensor"):
        return _parse_tensor(match["inner"], match["outer"] == "sparse_tensor", shape)
    element = _parse(match["inner"], [])
    if element is None:
        return None
    holder = kind.sequence_type if match["outer"] == "seq" else kind.optional_type
    holder.elem_type.CopyFrom(element)
    return kind


def _parse_tensor(element: str, sparse: bool, shape: list[int | str | None]) -> TypeProto | None:
    if (number := _element(element)) is None:
        return None
    kind = TypeProto()
    tensor = kind.sparse_tensor_type if sparse else kind.tensor_type
    tensor.elem_type = number
    for size in shape or ():
        known = {"dim_value": size} if isinstance(size, int) else {"dim_param": size} if size else {}
        tensor.shape.dim.add(**known)
    return kind


def _element(name: str) -> int | None:
    """Return the number of an element type, `float`; None for a name that ONNX does not have."""
    names = dict(TensorProto.DataType.items())
    return names.get(name.upper())
