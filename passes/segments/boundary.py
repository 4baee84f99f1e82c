"""Types of the values that cross between segments.

ONNX requires each input and output to be declared.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnx import TensorProto, TypeProto, ValueInfoProto

from onnxplace.errors import ModelError
from onnxplace.machine import make_session_options, open_session
from onnxplace.model import Model, parse_type, store_for_session
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
        types = {output.name: parse_type(output.type, output.shape or None) for output in outputs}
    for name in names:
        if types.get(name) is None:
            raise ModelError(
                "M016",
                "its type is unknown, so the model cannot be cut there",
                where=f"value {name!r}",
                hint="export the model with value_info, or keep its producer and readers together with --colocate",
            )
    return {name: value_type for name, value_type in types.items() if value_type is not None}
