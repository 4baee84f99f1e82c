"""From a model to the graph that placers see: bind dimensions, infer shapes and sizes, and number all values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from numbers import Integral
from types import MappingProxyType

import numpy as np
from onnx import TensorProto, TensorShapeProto, TypeProto, ValueInfoProto

from onnxplace.errors import ModelError, suggest_nearest
from onnxplace.feeds.dimensions import (
    MAX_DIMENSION,
    complete_dimensions,
    dimension_keys,
    dimensions_of_feeds,
    symbols_of_dimension,
)
from onnxplace.feeds.feeds import Array, check_feeds
from onnxplace.graph.op_graph import Csr, OpGraph
from onnxplace.model.model import Model, declaration_of
from onnxplace.model.tensors import find_unknown_element, is_known_shape, packed_size, read_shape_entries, tensor_size

# ----------------------------------------------------------------------------------------- dimensions, shapes and sizes


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
            raise ModelError("M020", message, where=f"input {item.name!r}", hint=hint)
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
            hint = suggest_nearest(key, sorted(known)) if known else "all its dimensions are fixed"
            raise ModelError("M022", f"the model has no symbolic dimension {key!r}", where="--shape", hint=hint)
        if not isinstance(size, Integral) or not 0 <= size <= MAX_DIMENSION:
            message = f"dimension {key!r} is {size!r}, expected a whole number from 0 to {MAX_DIMENSION}"
            raise ModelError("M022", message, where="--shape", hint=f"such as --shape {key}=1")


def infer_static_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shapes that shape inference finds for bound dimensions."""
    sizes = model.input_shapes()
    inputs = tuple(with_shape(value, sizes.get(value.name)) for value in model.inputs)
    outputs = tuple(ValueInfoProto(name=output.name) for output in model.outputs)
    types = replace(model, inputs=inputs, outputs=outputs).types
    entries = {name: read_shape_entries(kind) for name, kind in types.items()}
    return {name: shape for name, shape in entries.items() if is_known_shape(shape)}


def list_declared_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shapes of values that the file has, at the bound sizes.

    They serve where inference finds none, such as for what a loop collects. Nothing checks them: those that contradict
    a rank or size that inference finds are left out, and so are impossibly large ones.
    """

    def read_shape(kind: TypeProto) -> tuple[int | str | None, ...] | None:
        entries = read_shape_entries(kind)
        return entries and tuple(model.dimensions.get(str(entry), entry) for entry in entries)

    shapes = {}
    for value in (*model.value_info, *model.outputs):
        shape, inferred = read_shape(value.type), read_shape(model.types.get(value.name, TypeProto()))
        # No number has more than 16 bytes.
        if is_known_shape(shape) and math.prod(shape) <= MAX_VALUE_BYTES >> 4:
            inferred = shape if inferred is None else inferred
            agrees = all(size == other or not isinstance(other, int) for size, other in zip(shape, inferred))
            if agrees and len(shape) == len(inferred):
                shapes[value.name] = shape
    return shapes


def with_shape(value: ValueInfoProto, shape: Sequence[int] | None) -> ValueInfoProto:
    """Return an input or output of these sizes; as it is without a shape, or if it is no tensor."""
    result = deepcopy(value)
    if shape is not None and value.type.HasField("tensor_type"):
        result.type.tensor_type.shape.CopyFrom(TensorShapeProto(dim=[{"dim_value": size} for size in shape]))
    return result


def value_bytes(model: Model, shapes: Mapping[str, Sequence[int]], types: Mapping[str, int] = {}) -> dict[str, int]:
    """Return the bytes of each tensor of known shape and type.

    Strings are left out. `types`: element types that hold where ONNX knows none.

    Raises ModelError for an unknown element type, or a value beyond `MAX_VALUE_BYTES`.
    """
    sizes = {}
    for name, shape in shapes.items():
        kind = model.types.get(name, TypeProto(tensor_type=TypeProto.Tensor()))
        if not kind.HasField("tensor_type"):
            continue
        if (number := find_unknown_element(kind)) is not None:
            message = f"its element type would be {number}, which ONNX does not have"
            raise ModelError("M008", message, where=f"value {name!r}", hint="the model is damaged; export it again")
        element = kind.tensor_type.elem_type or types.get(name, TensorProto.UNDEFINED)
        has_no_size = element in (TensorProto.STRING, TensorProto.UNDEFINED)
        size = math.prod(shape) if has_no_size else packed_size(element, shape)
        if size > MAX_VALUE_BYTES:
            message = f"its shape {list(shape)} would take at least {size} bytes, expected at most {MAX_VALUE_BYTES}"
            raise ModelError("M008", message, where=f"value {name!r}", hint="give smaller sizes with --shape")
        if not has_no_size:
            sizes[name] = size
    return sizes


# --------------------------------------------------------------------------------------------------- the operator graph


# Operators whose first output shares the memory of the first input.
VIEW_OPERATORS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})


def build_op_graph(model: Model, value_bytes: Mapping[str, int]) -> OpGraph:
    """Return the operator graph of a model.

    An initializer that the caller may override is an input, any other one is a weight. Outputs of a node come after
    its inputs, so a view has a higher index than its source.

    Args:
        model: The model.
        value_bytes: Bytes by value; missing values count zero.
    """
    weight_names = list(model.constants)
    weight_index = {name: index for index, name in enumerate(weight_names)}
    names = [value.name for value in model.inputs]
    producer, value_index = [-1] * len(names), {name: index for index, name in enumerate(names)}
    for node_index, node in enumerate(model.nodes):
        for name in filter(None, node.output):
            value_index[name] = len(names)
            names.append(name)
            producer.append(node_index)
    returned = {model.sources.get(output.name, output.name) for output in model.outputs}
    return OpGraph(
        names=tuple(node.name for node in model.nodes),
        ops=tuple(node.op_type for node in model.nodes),
        value_names=tuple(names),
        value_bytes=np.array([value_bytes.get(name, 0) for name in names], dtype=np.int64),
        producer=np.array(producer, dtype=np.int32),
        is_output=np.array([name in returned for name in names], dtype=bool),
        alias=np.array(_find_aliases(model, value_index), dtype=np.int32),
        inputs=Csr.of([[value_index[name] for name in reads if name in value_index] for reads in model.reads]),
        weight_names=tuple(weight_names),
        weight_bytes=np.array([tensor_size(model.initializers[name]) for name in weight_names], dtype=np.int64),
        weights=Csr.of([[weight_index[name] for name in reads if name in weight_index] for reads in model.reads]),
        workspace_bytes=np.zeros(len(model.nodes), dtype=np.int64),
    )


def _find_aliases(model: Model, value_index: Mapping[str, int]) -> list[int]:
    """Return the index of the value that each value views.

    It is -1 for a value that is no view.
    """
    aliases = [-1] * len(value_index)
    for node in model.nodes:
        is_view = node.op_type in VIEW_OPERATORS and node.domain in ("", "ai.onnx")
        if is_view and node.input and any(node.output[:1]):
            aliases[value_index[node.output[0]]] = value_index.get(node.input[0], -1)
    return aliases
