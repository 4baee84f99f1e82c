"""The types of values at the borders of segments, where ONNX wants each input and output declared."""

from __future__ import annotations

import re
from collections.abc import Iterable

from onnx import TensorProto, TypeProto, ValueInfoProto

from onnxplace._leases import temporary_folder
from onnxplace.errors import ModelError
from onnxplace.model import Model
from onnxplace.passes._measure import stored
from onnxplace.sessions import open_session, session_options


def boundary_types(model: Model, names: Iterable[str]) -> dict[str, TypeProto]:
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
        source, entries = stored(model, folder, [ValueInfoProto(name=name) for name in names])
        session = open_session(source, session_options([0], "none", entries), where=model.name)
        found = {output.name: _parse(output.type, output.shape) for output in session.get_outputs()}
    for name in names:
        if found.get(name) is None:
            raise ModelError(
                "M016",
                "its type is unknown, so the model cannot be cut there",
                where=f"value {name!r}",
                hint="export the model with value_info, or keep its producer and readers together with --colocate",
            )
    return {name: found[name] for name in names}


def _parse(text: str, shape: list[int | str | None]) -> TypeProto:
    """Read ONNX Runtime's spelling of a type: `tensor(float)`, `seq(tensor(int64))`, `optional(...)`."""
    outer, inner = re.fullmatch(r"(\w+)\((.*)\)", text).groups()  # type: ignore[union-attr]
    kind = TypeProto()
    if outer == "tensor":
        kind.tensor_type.elem_type = TensorProto.DataType.Value(inner.upper())
        for size in shape or ():
            known = {"dim_value": size} if isinstance(size, int) else {"dim_param": size} if size else {}
            kind.tensor_type.shape.dim.add(**known)
    elif outer == "seq":
        kind.sequence_type.elem_type.CopyFrom(_parse(inner, []))
    elif outer == "optional":
        kind.optional_type.elem_type.CopyFrom(_parse(inner, []))
    else:
        raise ModelError("M016", f"values of type {text} cannot cross between segments", where="split")
    return kind
