"""Sizes of a model's values: inferred further than ONNX does, and fixed.

Inference of ONNX stops at operators that it does not know, such as `com.microsoft.Attention`, and at targets of Reshape
or Expand that are computed from shapes. ONNX Runtime infers the first. The second are computed for the bound sizes, and
their results take part in the next inference as constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, defs, helper, numpy_helper

from onnxplace.errors import Diagnostic, InfeasibleError, OnnxplaceError
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.model.lowering import infer_static_shapes, with_shape
from onnxplace.model.model import Model, find_misjudged_values
from onnxplace.model.nested_graphs import has_subgraphs, walk_nodes
from onnxplace.model.shape_inference import FRAGILE_INPUTS
from onnxplace.model.tensors import packed_size, read_shape_entries
from onnxplace.passes.sharding.rules.node_views import Shape, split_words
from onnxplace.passes.sharding.space.subgraph_models import build_subgraph_model, is_steady, list_subgraphs

# Only small weights hold shapes, which the inference reads. Large ones become inputs, so that loading stays fast.
_MAX_WEIGHT_BYTES = 1 << 12
_NUMBERS = {f"tensor({name.lower()})": number for name, number in TensorProto.DataType.items()}

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
        shapes: Shapes of its inputs.
    """
    versions = {item.domain: item.version for item in model.opsets}
    if all(_can_onnx_infer(node.op_type, node.domain, versions.get(node.domain, 1)) for node in model.nodes):
        return RuntimeShapes({}, {})
    weights = [tensor for tensor in model.initializers.values() if _is_small_weight(tensor)]
    known = {name: tuple(tensor.dims) for name, tensor in model.initializers.items()}
    known, inferred, nodes = {**known, **infer_static_shapes(model), **shapes}, RuntimeShapes({}, {}), list[NodeProto]()
    # What is behind a fragile node follows when its input is known to have a possible size.
    while len(safe := _list_safe_nodes(model, {**known, **inferred.shapes})) > len(nodes):
        nodes = safe
        try:
            inferred = _read_outputs(_open(model, nodes, weights, _declare_inputs(model, shapes)))
        except OnnxplaceError:  # without a kernel for an operator, values behind it stay unknown
            break
    return inferred


def _list_safe_nodes(model: Model, shapes: Mapping[str, Shape]) -> list[NodeProto]:
    """Return the nodes without those at which inference could end the process, and without what is behind."""
    unsafe, nodes = set[str](), []
    for node, reads in zip(model.nodes, model.reads):
        is_fragile = any(inner.op_type in FRAGILE_INPUTS for inner in walk_nodes([node]))
        position = FRAGILE_INPUTS.get(node.op_type, len(node.input))
        is_sure = position < len(node.input) and node.input[position] in shapes
        if (is_fragile and not is_sure) or not unsafe.isdisjoint(reads):
            unsafe.update(node.output)
        else:
            nodes.append(node)
    return nodes


def _read_outputs(session: Any) -> RuntimeShapes:
    """Return the shapes and types of numbers that a session declares."""
    outputs = [value for value in session.get_outputs() if value.type in _NUMBERS]
    return RuntimeShapes(
        # No sizes may also mean an unknown rank.
        shapes={
            value.name: tuple(value.shape)
            for value in outputs
            if value.shape and all(isinstance(size, int) and size >= 0 for size in value.shape)
        },
        types={value.name: _NUMBERS[value.type] for value in outputs},
    )


def _is_small_weight(tensor: TensorProto) -> bool:
    is_small = packed_size(tensor.data_type, tuple(tensor.dims)) <= _MAX_WEIGHT_BYTES
    return is_small and tensor.data_location != TensorProto.EXTERNAL


def _declare_inputs(model: Model, shapes: Mapping[str, Shape]) -> list[ValueInfoProto]:
    """Return the inputs of a model without large weights, which are inputs, too."""
    given = [value for value in model.inputs if value.name not in model.initializers]
    inputs = [with_shape(value, shapes.get(value.name)) for value in given]
    large = {name: tensor for name, tensor in model.initializers.items() if not _is_small_weight(tensor)}
    return inputs + [
        helper.make_tensor_value_info(name, tensor.data_type, tuple(tensor.dims)) for name, tensor in large.items()
    ]


@cache
def _can_onnx_infer(operator: str, domain: str, version: int) -> bool:
    """Return whether ONNX itself infers the results of an operator; a few standard ones are functions without that."""
    try:
        return bool(defs.get_schema(operator, version, domain).has_type_and_shape_inference_function)
    except defs.SchemaError:
        return False


def infer_all_shapes(model: Model) -> dict[str, Shape]:
    """Return the shapes of all values that only depend on the bound sizes of the inputs."""
    return infer_shapes_and_values(model)[0]


def infer_shapes_and_values(model: Model) -> tuple[dict[str, Shape], dict[str, TensorProto]]:
    """Return the shapes of `infer_all_shapes`, and the small values that follow from them.

    Inference of ONNX stops at targets of Reshape or Expand that are computed from shapes in several steps. Here such
    steps are computed, for the bound sizes, and their results take part in the next inference as constants. It also
    leaves the shapes of loops' states open: where a turn keeps them, they are those of the first turn.
    """
    shapes, known = _infer_and_fold(model)
    steady = _find_steady_loops(model, shapes)
    if not steady:
        return shapes, known
    more, values = infer_shapes_and_values(_bypass_loops(model, steady))
    return {**more, **shapes}, {**values, **known}


def _find_steady_loops(model: Model, shapes: Mapping[str, Shape]) -> dict[int, dict[str, str]]:
    """Return the loops whose states keep their shapes: state after the last turn, of unknown shape -> the first one."""
    weights = {name: tuple(tensor.dims) for name, tensor in model.initializers.items()}
    loops, types = {}, dict[str, int]()
    for index, node in enumerate(model.nodes):
        for subgraph in list_subgraphs(model, index) if node.op_type == "Loop" else ():
            places = [(subgraph.results[last][0], subgraph.operands[first][0]) for first, last in subgraph.states]
            states = {node.output[last]: node.input[first] for last, first in places if node.output[last]}
            if shapes.keys() >= states.keys():
                continue
            types = types or {
                **{n: kind.tensor_type.elem_type for n, kind in model.types.items() if kind.HasField("tensor_type")},
                **{name: tensor.data_type for name, tensor in model.initializers.items()},
            }
            turn = build_subgraph_model(model, index, subgraph, types, {**weights, **shapes})
            if turn is not None and is_steady(subgraph, infer_all_shapes(turn)):
                loops[index] = states
    return loops


def _bypass_loops(model: Model, loops: Mapping[int, Mapping[str, str]]) -> Model:
    """Return a model of the same shapes, in which the first states of some loops are also the last ones."""
    nodes: list[NodeProto] = []
    for index, node in enumerate(model.nodes):
        if (states := loops.get(index)) is None:
            nodes.append(node)
            continue
        rest = deepcopy(node)
        rest.output[:] = ["" if name in states else name for name in node.output]
        nodes += [rest] if any(rest.output) else []
        nodes += [helper.make_node("Identity", [first], [last], name=last) for last, first in states.items()]
    return replace(model, nodes=tuple(nodes))


def _infer_and_fold(model: Model) -> tuple[dict[str, Shape], dict[str, TensorProto]]:
    """Return shapes and small values, where shapes may follow from small values."""
    shapes, known, folded = model.input_shapes(), _small_constants(model), model
    # What follows from the inputs alone is folded before the first inference, which then often gets through at once.
    for turn in range(_MAX_ROUNDS):
        count = len(known)
        while values := _evaluate(model, _computable(model, shapes, known), shapes, known):
            if known.keys() >= values.keys():
                break
            known.update(values)
        if len(known) > count:
            # Known values are initializers in place of the nodes that compute them.
            nodes = [n for n in model.nodes if not (n.output and all(name in known for name in n.output if name))]
            folded = model.replacing(nodes, {**model.initializers, **known})
            shapes = {**{name: tuple(tensor.dims) for name, tensor in known.items()}, **shapes}
        if _is_complete(model, shapes) or (turn and len(known) == count):
            break
        shapes = {**_infer(folded), **shapes}
        # Sizes that are impossible together end inference where it learns of them, which it does not without values.
        if not turn and folded is not model and not _is_complete(model, shapes):
            shapes |= _infer(model)
    return shapes, known


def _is_complete(model: Model, shapes: Mapping[str, Shape]) -> bool:
    return all(name in shapes for node in model.nodes for name in node.output if name)


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
                and not has_subgraphs(node)
            )
        if is_computable:
            nodes.append(node)
            names.update(filter(None, node.output))
    return nodes


def _is_small(node: NodeProto, shapes: Mapping[str, Shape], known: Mapping[str, TensorProto]) -> bool:
    """Return whether the results of a node are small, by their shapes or by what it makes them of.

    A result of unknown shape waits until its inputs are known: they may ask for any size.
    """
    results, inputs = [*filter(None, node.output)], [*filter(None, node.input)]
    if any(math.prod(shapes[name]) > _MAX_ELEMENTS for name in results if name in shapes):
        return False
    if shapes.keys() >= set(results):
        return True
    if not known.keys() >= set(inputs):
        return False
    return _makes_few(node.op_type, [numpy_helper.to_array(known[name]) for name in inputs])


def _makes_few(op: str, arrays: Sequence[NDArray[Any]]) -> bool:
    """Return whether the results that an operator makes of known inputs are small."""
    if op == "Range":
        start, limit, step = (float(array.reshape(-1)[0]) for array in arrays)
        return step != 0 and abs((limit - start) / step) <= _MAX_ELEMENTS
    if op == "OneHot":
        return bool(arrays[0].size * abs(float(arrays[1].reshape(-1)[0])) <= _MAX_ELEMENTS)
    if op in ("ConstantOfShape", "Expand"):
        target = arrays[-1].reshape(-1).astype(np.float64)
        return bool(np.prod(np.maximum(target, 1.0)) * max(arrays[0].size, 1) <= _MAX_ELEMENTS**2)
    return bool(math.prod(max(array.size, 1) for array in arrays[:2]) <= _MAX_ELEMENTS**2)


def _evaluate(
    model: Model, nodes: Sequence[NodeProto], shapes: Mapping[str, Shape], known: Mapping[str, TensorProto]
) -> dict[str, TensorProto]:
    """Return the small values that some nodes compute; shapes alone if ONNX Runtime refuses them."""
    described = [node for node in nodes if node.op_type in ("Shape", "Size")]
    given = {node.output[0]: _describe(node, shapes[node.input[0]]) for node in described}
    computed = [node for node in nodes if node.op_type not in ("Shape", "Size")]
    if not computed:
        return given
    read = {name for node in computed for name in node.input if name}
    weights = [tensor for name, tensor in {**known, **given}.items() if name in read]
    try:
        session = _open(model, computed, weights, [])
        names = [value.name for value in session.get_outputs()]
        arrays = session.run(names, {})
    except (OnnxplaceError, Exception):  # noqa: BLE001 - a value without numpy form, or sizes that do not fit
        return given
    return given | {
        name: numpy_helper.from_array(array, name)
        for name, array in zip(names, arrays)
        if isinstance(array, np.ndarray) and array.size <= _MAX_ELEMENTS and array.dtype.kind in "iubf"
    }


def _open(
    model: Model, nodes: Sequence[NodeProto], weights: Sequence[TensorProto], inputs: Sequence[ValueInfoProto]
) -> Any:
    """Return a session that returns all results of nodes; raises OnnxplaceError."""
    results = [ValueInfoProto(name=name) for node in nodes for name in node.output if name]
    proto = model.proto(nodes, weights, inputs, results)
    return open_session(proto.SerializeToString(), make_session_options([0], "none"), where=model.name)


def _describe(node: NodeProto, shape: Shape) -> TensorProto:
    """Return the result of a Shape or Size."""
    if node.op_type == "Size":
        return numpy_helper.from_array(np.array(math.prod(shape), np.int64), node.output[0])
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    part = shape[slice(attributes.get("start", 0), attributes.get("end", len(shape)))]
    return numpy_helper.from_array(np.array(part, np.int64), node.output[0])


def fix_sizes(model: Model) -> Model:
    """Return the model for its bound sizes alone: inputs and outputs declare them, and all axes can be split.

    Raises InfeasibleError for a carried state of other sizes after the first call, such as a cache that grows.
    """
    shapes, after = model.input_shapes(), infer_all_shapes(model) if model.states else {}
    for name, output in model.states.items():
        before, new = list(shapes.get(name, ())), after.get(model.sources.get(output, output))
        if name in shapes and new is not None and list(new) != before:
            message = f"a call changes state {name!r} from {before} to {list(new)}, but sizes are to be fixed"
            causes = "--fixed-sizes, `fixed` or `microbatch`"
            hint = f"leave out what fixes sizes ({causes}), or the state's --state, to feed it with each call"
            raise InfeasibleError("L060", message, where=f"{model.name}, state {output}={name}", hint=hint)
    inputs = [with_shape(value, shapes.get(value.name)) for value in model.inputs]
    known = {key: size for key, size in model.dimensions.items() if size is not None}
    outputs = [_fill(value, known) for value in model.outputs]
    return replace(model, inputs=tuple(inputs), outputs=tuple(outputs))


def report_fixed_sizes(model: Model, fixed: Model, reason: str) -> list[Diagnostic]:
    """Return a note if a model had symbolic sizes, which are fixed now; `reason` names what needs that."""
    entries = {value.name: read_shape_entries(value.type) or () for value in model.inputs}
    symbolic = [name for name, sizes in entries.items() if not all(isinstance(size, int) for size in sizes)]
    if not symbolic:
        return []
    shapes = fixed.input_shapes()
    listed = ", ".join(f"{name} {list(shapes[name])}" for name in symbolic[:3])
    message = f"{reason} need fixed sizes: the bundle takes these inputs alone: {listed}"
    return [Diagnostic("L065", message, hint="--shape gives the sizes, as in --shape batch=8")]


def _fill(value: ValueInfoProto, known: dict[str, int]) -> ValueInfoProto:
    """Return the declaration of an output, with the sizes of the symbolic dimensions that are known."""
    if not value.type.HasField("tensor_type"):
        return value
    result = deepcopy(value)
    for dim in result.type.tensor_type.shape.dim:
        if dim.WhichOneof("value") == "dim_param" and dim.dim_param in known:
            dim.dim_value = known[dim.dim_param]
    return result
