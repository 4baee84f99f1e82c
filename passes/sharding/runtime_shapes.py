"""Shapes and types behind operators that ONNX does not know, such as `com.microsoft.Attention`: from ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from onnx import TensorProto, TypeProto, ValueInfoProto, defs, helper

from onnxplace.errors import OnnxplaceError
from onnxplace.machine import make_session_options, open_session
from onnxplace.model import Model, packed_size
from onnxplace.passes.sharding.node_views import Shape

# Only small weights hold shapes, which the inference reads. Large ones become inputs, so that loading stays fast.
_MAX_WEIGHT_BYTES = 1 << 12
_NUMBERS = {f"tensor({name.lower()})": number for name, number in TensorProto.DataType.items()}


@dataclass(frozen=True)
class RuntimeShapes:
    """What ONNX Runtime infers of the values of a model."""

    shapes: Mapping[str, Shape]
    types: Mapping[str, int]
    """Element types."""


def infer_with_runtime(model: Model, shapes: Mapping[str, Shape]) -> RuntimeShapes:
    """Return what ONNX Runtime infers, for a model with operators that ONNX cannot infer; nothing for others.

    Args:
        model: The model.
        shapes: Of its inputs.
    """
    versions = {item.domain: item.version for item in model.opsets}
    if all(_can_onnx_infer(node.op_type, node.domain, versions.get(node.domain, 1)) for node in model.nodes):
        return RuntimeShapes({}, {})
    inputs = [
        ValueInfoProto(name=value.name, type=_with_shape(value.type, shapes.get(value.name)))
        for value in model.inputs
        if value.name not in model.initializers
    ]
    weights = []
    for name, tensor in model.initializers.items():
        is_small = packed_size(tensor.data_type, tuple(tensor.dims)) <= _MAX_WEIGHT_BYTES
        if is_small and tensor.data_location != TensorProto.EXTERNAL:
            weights.append(tensor)
        else:
            inputs.append(helper.make_tensor_value_info(name, tensor.data_type, tuple(tensor.dims)))
    names = [name for node in model.nodes for name in node.output if name]
    proto = model.proto(model.nodes, weights, inputs, [ValueInfoProto(name=name) for name in names])
    try:
        session = open_session(proto.SerializeToString(), make_session_options([0], "none"), where=model.name)
    except OnnxplaceError:  # without a kernel for an operator, values behind it stay unknown
        return RuntimeShapes({}, {})
    outputs = [value for value in session.get_outputs() if value.type in _NUMBERS]
    return RuntimeShapes(
        shapes={
            value.name: tuple(value.shape)
            for value in outputs
            # No sizes may also mean an unknown rank.
            if value.shape and all(isinstance(size, int) and size >= 0 for size in value.shape)
        },
        types={value.name: _NUMBERS[value.type] for value in outputs},
    )


@cache
def _can_onnx_infer(operator: str, domain: str, version: int) -> bool:
    """Return whether ONNX itself infers the results of an operator; a few standard ones are functions without that."""
    try:
        return bool(defs.get_schema(operator, version, domain).has_type_and_shape_inference_function)
    except defs.SchemaError:
        return False


def _with_shape(kind: TypeProto, shape: Shape | None) -> TypeProto:
    """Return a type with fixed sizes."""
    if shape is None or not kind.HasField("tensor_type"):
        return kind
    return helper.make_tensor_type_proto(kind.tensor_type.elem_type, shape)
