"""Shape inference of ONNX that cannot end the process."""

from __future__ import annotations

import atexit
from collections.abc import Set
from copy import deepcopy
from functools import cache

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, defs, helper

from onnxplace.model.nested_graphs import iterate_subgraphs, refill
from onnxplace.model.tensors import is_known_shape, read_shape_entries

FRAGILE_INPUTS = {"Slice": 0, "GatherND": 1, "Split": 0}
"""Operator -> input of which negative sizes end the process, as bounds or counts, or become possible ones."""
_DOMAIN, _GUARD = "onnxplace.inference", "ForgetNegativeSizes"


def infer_shapes(model: ModelProto, *, data_prop: bool = False) -> ModelProto:
    """Return a copy of a model with the types and shapes that ONNX infers, those in subgraphs left out.

    At sizes that a model cannot have, such as fewer rows than a kernel, inference computes negative ones, and some
    operators behind them end the process. Their inputs pass a guard first that forgets such sizes, so that what is
    behind stays unknown. Nodes that would end it by themselves, and that no runtime takes, are not inferred.

    Args:
        model: The model.
        data_prop: Whether sizes also follow from values that are computed from shapes, in a model that has been
            inferred without them.

    Raises what `onnx.shape_inference.infer_shapes` does.
    """
    result, guarded = deepcopy(model), deepcopy(model)
    # Values of shapes do not pass a guard: there is none where the sizes are known to be possible.
    values = [*model.graph.input, *(model.graph.value_info if data_prop else ())]
    sure = frozenset(value.name for value in values if is_known_shape(read_shape_entries(value.type)))
    _guard(guarded.graph, sure, _DOMAIN)
    for function in guarded.functions:
        _guard(function, sure, _DOMAIN)
        function.opset_import.append(_register_guard())
    guarded.opset_import.append(_register_guard())
    inferred = onnx.shape_inference.infer_shapes(guarded, data_prop=data_prop).graph
    for field in ("output", "value_info"):
        values = [value for value in getattr(inferred, field) if not value.name.startswith(_DOMAIN)]
        refill(getattr(result.graph, field), values)
    return result


def has_open_sizes(graph: GraphProto) -> bool:
    """Return whether some size is open, which may follow from values that are shapes: those of all others are known."""
    known = {
        value.name for value in (*graph.value_info, *graph.output) if is_known_shape(read_shape_entries(value.type))
    }
    return any(name not in known for node in graph.node for name in node.output if name)


def _guard(graph: GraphProto | FunctionProto, sure: Set[str], prefix: str) -> None:
    """Put guards before the fragile inputs of a graph and its subgraphs, as nodes of a separate domain."""
    for index in reversed(range(len(graph.node))):
        node, place = graph.node[index], f"{prefix}/{index}"
        for inner in iterate_subgraphs(node):
            _guard(inner, sure, place)
        position = FRAGILE_INPUTS.get(node.op_type, len(node.input))
        if position >= len(node.input):
            continue
        # With another number of parts than of outputs, or negative axes of its batch, it is damaged.
        numbers = {attribute.name: attribute.i for attribute in node.attribute}
        if numbers.get("batch_dims", 0) < 0 or numbers.get("num_outputs", len(node.output)) != len(node.output):
            node.domain = _DOMAIN
        elif (name := node.input[position]) not in sure:
            node.input[position] = place
            graph.node.insert(index, NodeProto(op_type=_GUARD, input=[name], output=[place], domain=_DOMAIN))


@cache
def _register_guard() -> OperatorSetIdProto:
    """Define the guard for the inference of this process, and return the opset that has it."""
    schema = defs.OpSchema(
        _GUARD,
        _DOMAIN,
        1,
        inputs=[defs.OpSchema.FormalParameter("value", "T")],
        outputs=[defs.OpSchema.FormalParameter("result", "T")],
        type_constraints=[("T", ["tensor(float)"], "")],  # inference takes other types, too
    )
    schema.set_type_and_shape_inference_function(_forget_negative_sizes)
    if not defs.has(_GUARD, _DOMAIN):  # such as by another thread
        defs.register_schema(schema)
        # The registry outlives the interpreter, its function does not.
        atexit.register(defs.deregister_schema, _GUARD, 1, _DOMAIN)
    return helper.make_opsetid(_DOMAIN, 1)


def _forget_negative_sizes(context: onnx.shape_inference.InferenceContext) -> None:
    """Give the result the type of the value, with sizes that are negative left open."""
    if (kind := context.get_input_type(0)) is not None:
        for dim in kind.tensor_type.shape.dim:
            if dim.dim_value < 0:
                dim.Clear()
        context.set_output_type(0, kind)
