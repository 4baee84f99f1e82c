"""Infer shapes further than ONNX does: compute what only depends on shapes, and infer again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto, numpy_helper

from onnxplace.errors import OnnxplaceError
from onnxplace.machine import make_session_options, open_session
from onnxplace.model import Model, find_misjudged_values, infer_static_shapes, iterate_subgraphs
from onnxplace.passes.sharding.node_views import Shape, split_words
from onnxplace.passes.sharding.runtime_shapes import infer_with_runtime

# Larger values are not shapes.
_MAX_ELEMENTS = 256
# Each round finds shapes that depend on those of the round before.
_MAX_ROUNDS = 12
_INTEGERS = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)
# Values of these operators are shapes, or are computed from shapes.
_ARITHMETIC = frozenset(
    split_words(
        """
    Add And Cast Ceil Concat ConstantOfShape Div Equal Expand Flatten Floor Gather Greater GreaterOrEqual Identity
    Less LessOrEqual Max Min Mod Mul Neg Not OneHot Or Range ReduceMax ReduceMin ReduceProd ReduceSum Reshape Slice
    Split Sqrt Squeeze Sub Transpose Unsqueeze Where
"""
    )
)


def infer_all_shapes(model: Model) -> dict[str, Shape]:
    """Return the shapes of all values that only depend on the bound sizes of the inputs."""
    return infer_shapes_and_values(model)[0]


def infer_shapes_and_values(model: Model) -> tuple[dict[str, Shape], dict[str, TensorProto]]:
    """Return the shapes of `infer_all_shapes`, and the small values that follow from them.

    Inference of ONNX stops at targets of Reshape or Expand that are computed from shapes in several steps. Here such
    steps are computed, for the bound sizes, and their results take part in the next inference as constants.
    """
    shapes = _infer(model)
    known = _small_constants(model)
    for _ in range(_MAX_ROUNDS):
        nodes = _computable(model, shapes, known)
        values = _evaluate(model, nodes, shapes, known)
        if not values:
            break
        known.update(values)
        folded = _with_constants(model, known)
        inferred = {**_infer(folded), **{name: tuple(tensor.dims) for name, tensor in known.items()}}
        before = len(shapes)
        shapes = {**inferred, **shapes}
        if len(shapes) == before:
            break
    return shapes, known


def _infer(model: Model) -> dict[str, Shape]:
    given = model.input_shapes()
    shapes = {**infer_with_runtime(model, given).shapes, **infer_static_shapes(model), **given}
    weights = {name: tuple(tensor.dims) for name, tensor in model.initializers.items()}
    misjudged = find_misjudged_values(model.nodes, model.reads, {**shapes, **weights})
    return {name: shape for name, shape in shapes.items() if name not in misjudged}


def _small_constants(model: Model) -> dict[str, TensorProto]:
    return {
        name: tensor
        for name, tensor in model.initializers.items()
        if not model.overridable(name)
        and math.prod(tensor.dims) <= _MAX_ELEMENTS
        and tensor.data_location != TensorProto.EXTERNAL
        and tensor.data_type != TensorProto.STRING
    }


def _computable(model: Model, shapes: Mapping[str, Shape], known: Mapping[str, TensorProto]) -> list[NodeProto]:
    """Return the nodes, in order, whose values follow from known values and shapes, and are not known yet."""
    names = set(known)
    nodes = []
    for node in model.nodes:
        if node.domain not in ("", "ai.onnx") or all(name in names for name in node.output if name):
            continue
        if node.op_type in ("Shape", "Size"):
            is_computable = node.input[0] in shapes
        else:
            is_computable = (
                node.op_type in _ARITHMETIC
                and all(name in names for name in node.input if name)
                and _is_small(node, shapes, known)
                and not any(True for _ in iterate_subgraphs(node))
            )
        if is_computable:
            nodes.append(node)
            names.update(filter(None, node.output))
    return nodes


def _is_small(node: NodeProto, shapes: Mapping[str, Shape], known: Mapping[str, TensorProto]) -> bool:
    """Return whether the results of a node are small, by their shapes or by what it makes them of.

    A result of unknown shape waits until its inputs are known: they may ask for any size.
    """
    unknown = [name for name in node.output if name and name not in shapes]
    if any(math.prod(shapes[name]) > _MAX_ELEMENTS for name in node.output if name in shapes):
        return False
    if not unknown:
        return True
    if not all(name in known for name in node.input if name):
        return False
    arrays = [numpy_helper.to_array(known[name]) for name in node.input if name]
    if node.op_type == "Range":
        start, limit, step = (float(array.reshape(-1)[0]) for array in arrays)
        return step != 0 and abs((limit - start) / step) <= _MAX_ELEMENTS
    if node.op_type == "OneHot":
        return bool(arrays[0].size * abs(float(arrays[1].reshape(-1)[0])) <= _MAX_ELEMENTS)
    if node.op_type in ("ConstantOfShape", "Expand"):
        target = arrays[-1].reshape(-1).astype(np.float64)
        return bool(np.prod(np.maximum(target, 1.0)) * max(arrays[0].size, 1) <= _MAX_ELEMENTS**2)
    return math.prod(max(array.size, 1) for array in arrays[:2]) <= _MAX_ELEMENTS**2


def _evaluate(
    model: Model, nodes: Sequence[NodeProto], shapes: Mapping[str, Shape], known: Mapping[str, TensorProto]
) -> dict[str, TensorProto]:
    """Return the small values that some nodes compute; none if ONNX Runtime refuses them."""
    given: dict[str, TensorProto] = {}
    computed: list[NodeProto] = []
    for node in nodes:
        if node.op_type in ("Shape", "Size"):
            given[node.output[0]] = _describe(node, shapes[node.input[0]])
        else:
            computed.append(node)
    read = {name for node in computed for name in node.input if name}
    weights = [tensor for name, tensor in {**known, **given}.items() if name in read]
    if not computed:
        return given
    names = [name for node in computed for name in node.output if name]
    proto = model.proto(computed, weights, [], [ValueInfoProto(name=name) for name in names])
    try:
        session = open_session(proto.SerializeToString(), make_session_options([0], "none"), where=model.name)
        arrays = session.run(names, {})
    except (OnnxplaceError, Exception):  # noqa: BLE001 - a value without numpy form, or sizes that do not fit
        return given
    values = {name: array for name, array in zip(names, arrays) if isinstance(array, np.ndarray)}
    small = {
        name: array for name, array in values.items() if array.size <= _MAX_ELEMENTS and array.dtype.kind in "iubf"
    }
    return {**given, **{name: numpy_helper.from_array(array, name) for name, array in small.items()}}


def _describe(node: NodeProto, shape: Shape) -> TensorProto:
    """Return the result of a Shape or Size."""
    if node.op_type == "Size":
        return numpy_helper.from_array(np.array(math.prod(shape), np.int64), node.output[0])
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    part = shape[slice(attributes.get("start", 0), attributes.get("end", len(shape)))]
    return numpy_helper.from_array(np.array(part, np.int64), node.output[0])


def _with_constants(model: Model, known: Mapping[str, TensorProto]) -> Model:
    """Return the model with known values as initializers instead of the nodes that compute them."""
    nodes = [node for node in model.nodes if not (node.output and all(name in known for name in node.output if name))]
    return replace(model, nodes=tuple(nodes), initializers=MappingProxyType({**model.initializers, **known}))
