"""Bind dimensions and samples to models; infer shapes and sizes of values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from types import MappingProxyType
from typing import TypeGuard

from onnx import TensorProto, ValueInfoProto

from onnxplace.errors import ModelError, suggest_nearest
from onnxplace.feeds import (
    MAX_DIMENSION,
    Array,
    check_feeds,
    complete_dimensions,
    dimension_keys,
    dimensions_of_feeds,
    symbols_of_dimension,
)
from onnxplace.model.model import Model, declaration_of
from onnxplace.model.tensors import find_unknown_element, packed_size
from onnxplace.model.value_types import read_shape_entries

# More than any machine holds; sums of such sizes still fit into 64 bits.
MAX_VALUE_BYTES = 1 << 50


def bind(model: Model, dimensions: Mapping[str, int], samples: Mapping[str, Array]) -> Model:
    """Return `model` with values for symbolic dimensions and sample inputs.

    Sizes that follow from others, or from the samples, join the dimensions.

    Args:
        model: The model.
        dimensions: Symbol, expression or `input.axis` -> size.
        samples: Input -> array to profile with.

    Raises:
        ModelError: The model does not have a dimension, a size is impossible, or a size contradicts the samples.
        FeedError: Samples do not fit the inputs, or sizes contradict each other.
    """
    inputs = [declaration_of(value, model) for value in model.inputs]
    for item in inputs:
        if "map(" in item.dtype:
            message = f"the model takes a map ({item.dtype}), which bundles do not"
            hint = "leave the nodes that read it, such as DictVectorizer, out of the model, and give it their results"
            raise ModelError("M021", message, where=f"input {item.name!r}", hint=hint)
    keys = dict.fromkeys(key for item in inputs for key, size in dimension_keys(item) if size is None)
    _require_dimensions(keys, dimensions)
    if samples:
        samples = check_feeds(samples, inputs)
        sampled = dimensions_of_feeds(samples, inputs)
        for key, size in dimensions.items():
            if sampled.get(key, size) != size:
                message = f"dimension {key!r} is {size} here and {sampled[key]} in the inputs"
                raise ModelError("M022", message, where="--shape", hint="leave it out: the inputs determine it")
        dimensions = {**dimensions, **sampled}
    sizes = {key: int(size) for key, size in complete_dimensions(keys, dimensions).items()}
    return replace(model, dimensions=MappingProxyType(sizes), samples=MappingProxyType(dict(samples)))


def _require_dimensions(keys: Iterable[str], dimensions: Mapping[str, int]) -> None:
    """Raise ModelError for an unknown dimension or an impossible size."""
    known = {name for key in keys for name in (key, *symbols_of_dimension(key))}
    for key, size in dimensions.items():
        if key not in known:
            raise ModelError(
                "M022",
                f"the model has no symbolic dimension {key!r}",
                where="--shape",
                hint=suggest_nearest(key, sorted(known)) if known else "all its dimensions are fixed",
            )
        if not isinstance(size, Integral) or not 0 <= size <= MAX_DIMENSION:
            message = f"dimension {key!r} is {size!r}, expected a whole number from 0 to {MAX_DIMENSION}"
            raise ModelError("M022", message, where="--shape", hint=f"such as --shape {key}=1")


def infer_static_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shapes that shape inference finds for bound dimensions."""
    sizes = model.input_shapes()
    inputs = []
    for value in model.inputs:
        bound = ValueInfoProto()
        bound.CopyFrom(value)
        if value.name in sizes and value.type.HasField("tensor_type"):
            bound.type.tensor_type.ClearField("shape")
            bound.type.tensor_type.shape.SetInParent()
            for size in sizes[value.name]:
                bound.type.tensor_type.shape.dim.add(dim_value=size)
        inputs.append(bound)
    outputs = tuple(_drop_shape(output) for output in model.outputs)
    entries = {
        name: read_shape_entries(kind)
        for name, kind in replace(model, inputs=tuple(inputs), outputs=outputs).types.items()
    }
    return {name: shape for name, shape in entries.items() if shape is not None and _is_known(shape)}


def _is_known(shape: tuple[int | str | None, ...]) -> TypeGuard[tuple[int, ...]]:
    """Return whether all sizes are known.

    Inference computes negative ones where a model cannot run.
    """
    return all(isinstance(size, int) and size >= 0 for size in shape)


def _drop_shape(output: ValueInfoProto) -> ValueInfoProto:
    """Return an output without its declared type and shape.

    These may be wrong or symbolic.
    """
    return ValueInfoProto(name=output.name)


def value_bytes(model: Model, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the bytes of each tensor of known shape and type.

    Strings are left out.

    Raises ModelError for an unknown element type, or a value beyond `MAX_VALUE_BYTES`.
    """
    sizes = {}
    for name, shape in shapes.items():
        kind = model.types.get(name)
        if kind is None or not kind.HasField("tensor_type"):
            continue
        if (number := find_unknown_element(kind)) is not None:
            message = f"its element type would be {number}, which ONNX does not have"
            raise ModelError("M024", message, where=f"value {name!r}", hint="the model is damaged; export it again")
        has_no_size = kind.tensor_type.elem_type in (TensorProto.STRING, TensorProto.UNDEFINED)
        size = math.prod(shape) if has_no_size else packed_size(kind.tensor_type.elem_type, shape)
        if size > MAX_VALUE_BYTES:
            message = f"its shape {list(shape)} would take at least {size} bytes, expected at most {MAX_VALUE_BYTES}"
            raise ModelError("M024", message, where=f"value {name!r}", hint="give smaller sizes with --shape")
        if not has_no_size:
            sizes[name] = size
    return sizes
