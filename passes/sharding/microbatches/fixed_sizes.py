"""Give symbolic dimensions of a model the sizes that it is compiled for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnx import ValueInfoProto

from onnxplace.errors import Diagnostic, InfeasibleError
from onnxplace.model import Model, infer_static_shapes, read_shape_entries


def fix_sizes(model: Model) -> Model:
    """Return the model for its bound sizes alone: inputs and outputs declare them, and all axes can be split.

    Raises InfeasibleError for a carried state of other sizes after the first call, such as a cache that grows.
    """
    shapes = model.input_shapes()
    _require_constant_states(model, shapes)
    inputs = [_declare(value, shapes[value.name]) if value.name in shapes else value for value in model.inputs]
    known = {key: size for key, size in model.dimensions.items() if size is not None}
    outputs = [_fill(value, known) for value in model.outputs]
    return replace(model, inputs=tuple(inputs), outputs=tuple(outputs))


def report_fixed_sizes(model: Model, fixed: Model, reason: str) -> list[Diagnostic]:
    """Return a note if a model had symbolic sizes, which are fixed now; `reason` names what needs that."""
    symbolic = [value.name for value in model.inputs if not _is_fixed(value)]
    if not symbolic:
        return []
    shapes = fixed.input_shapes()
    listed = ", ".join(f"{name} {list(shapes[name])}" for name in symbolic[:3])
    message = f"{reason} need fixed sizes: the bundle takes these inputs alone: {listed}"
    return [Diagnostic("L065", message, hint="--shape gives the sizes, as in --shape batch=8")]


def _require_constant_states(model: Model, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise InfeasibleError if a call changes the shape of a state."""
    after = infer_static_shapes(model) if model.states else {}
    for name, output in model.states.items():
        before, new = list(shapes.get(name, ())), after.get(model.sources.get(output, output))
        if name in shapes and new is not None and list(new) != before:
            message = f"a call changes state {name!r} from {before} to {list(new)}, but sizes are to be fixed"
            hint = (
                "leave out what fixes sizes, `fixed` or `microbatch`, or the state's --state, to feed it with each call"
            )
            raise InfeasibleError("P065", message, where=f"{model.name}, state {output}={name}", hint=hint)


def _is_fixed(value: ValueInfoProto) -> bool:
    shape = read_shape_entries(value.type)
    return shape is None or all(isinstance(size, int) for size in shape)


def _declare(value: ValueInfoProto, shape: Sequence[int]) -> ValueInfoProto:
    """Return the declaration of a value of a known shape."""
    result = ValueInfoProto()
    result.CopyFrom(value)
    if not result.type.HasField("tensor_type"):
        return value
    kind = result.type.tensor_type
    kind.shape.Clear()
    kind.shape.SetInParent()
    for size in shape:
        kind.shape.dim.add().dim_value = int(size)
    return result


def _fill(value: ValueInfoProto, known: dict[str, int]) -> ValueInfoProto:
    """Return the declaration of an output, with the sizes of the symbolic dimensions that are known."""
    if not value.type.HasField("tensor_type"):
        return value
    result = ValueInfoProto()
    result.CopyFrom(value)
    for dim in result.type.tensor_type.shape.dim:
        if dim.WhichOneof("value") == "dim_param" and dim.dim_param in known:
            dim.dim_value = known[dim.dim_param]
    return result
