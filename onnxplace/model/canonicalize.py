"""Put any ONNX model into canonical form.

Functions are inlined, constants lifted, names unique, and nodes in topological order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from onnx import GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, ValueInfoProto, helper

from onnxplace.errors import ModelError
from onnxplace.feeds import MAX_DIMENSION, MAX_RANK
from onnxplace.model.constants import make_dense, read_constant
from onnxplace.model.local_functions import inline_functions, require_no_recursion
from onnxplace.model.nested_graphs import (
    assign_unique_names,
    iterate_graph_texts,
    iterate_node_texts,
    iterate_tensors,
    make_self_contained,
    walk_nodes,
)
from onnxplace.model.node_order import index_producers, sort_topologically
from onnxplace.model.schemas import merge_opsets, require_form
from onnxplace.model.tensors import check_tensor, find_unknown_element
from onnxplace.utils import claim_name


@dataclass
class ModelParts:
    """The parts of a model in canonical form; `Model` freezes them."""

    nodes: list[NodeProto]
    initializers: dict[str, TensorProto]
    inputs: list[ValueInfoProto]
    outputs: list[ValueInfoProto]
    sources: dict[str, str]
    """Output name -> name of the value that it returns, where the two differ."""
    opsets: list[OperatorSetIdProto]


def take_apart(proto: ModelProto, where: str, folder: Path | None) -> ModelParts:
    """Return the parts of a model in canonical form.

    Args:
        proto: The model; it is not altered.
        where: Place for error messages.
        folder: Where external data is found; None for a model that was given as an object.

    Raises:
        ModelError: It names the node or value that is wrong.
    """
    _require_text(proto, where)
    if proto.functions:
        require_no_recursion(proto, where)
        proto = inline_functions(proto, where)
    graph = proto.graph
    if not graph.output:
        raise ModelError("M018", "the model has no outputs, expected at least one", where=where)
    for tensor in (*graph.initializer, *(tensor for node in graph.node for tensor in iterate_tensors(node))):
        check_tensor(tensor)
    opsets = merge_opsets(proto)
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    initializers |= {sparse.values.name: make_dense(sparse, where, folder) for sparse in graph.sparse_initializer}
    nodes = _lift_constants(graph.node, initializers, where, folder)
    require_form(walk_nodes(nodes), {entry.domain: entry.version for entry in opsets}, where)
    producers = index_producers(nodes, initializers, where)
    names: set[str] = set()
    nodes = assign_unique_names(nodes, names)
    nodes = make_self_contained(nodes, initializers, folder, names)
    # Before IR version 4, all initializers had to be inputs too; they were constants all the same.
    constants = set(initializers) if proto.ir_version < 4 else set()
    fed = [value for value in graph.input if value.name not in producers and value.name not in constants]
    inputs = [_clear_unknown_sizes(value, where) for value in fed]
    outputs = [_clear_unknown_sizes(value, where) for value in graph.output]
    input_names = {value.name for value in inputs}
    nodes = sort_topologically(nodes, producers, {*input_names, *initializers}, where)
    sources = _return_initializers(graph, nodes, initializers, input_names, where)
    return ModelParts(
        nodes=nodes, initializers=initializers, inputs=inputs, outputs=outputs, sources=sources, opsets=opsets
    )


def _require_text(proto: ModelProto, where: str) -> None:
    """Raise ModelError for a name that is not text.

    Protobuf returns such names as bytes.
    """
    functions = ((f.node, (f.name, f.domain, *f.input, *f.output)) for f in proto.functions)
    for nodes, names in ((proto.graph.node, iterate_graph_texts(proto.graph)), *functions):
        for text in (*names, *(text for node in nodes for text in iterate_node_texts(node))):
            if not isinstance(text, str):
                hint = "the file is damaged; copy or export it again"
                raise ModelError("M003", f"a name in it is not text: {text[:40]!r}", where=where, hint=hint)
    for entry in proto.opset_import:
        if not isinstance(entry.domain, str):
            raise ModelError("M003", f"the name of an opset is not text: {entry.domain[:40]!r}", where=where)


def _clear_unknown_sizes(value: ValueInfoProto, where: str) -> ValueInfoProto:
    """Return an input or output without sizes of -1.

    Some exporters write -1 for unknown sizes.

    Raises ModelError for other negative sizes, for sizes and ranks beyond those of arrays, and for unknown types.
    """
    dims = value.type.tensor_type.shape.dim
    place, hint = f"{where}, input or output {value.name!r}", "the model is damaged; export it again"
    if (number := find_unknown_element(value.type)) is not None:
        message = f"it is declared with element type {number}, which ONNX does not have"
        raise ModelError("M024", message, where=place, hint=hint)
    if len(dims) > MAX_RANK:
        message = f"it is declared with {len(dims)} dimensions, expected at most {MAX_RANK}"
        raise ModelError("M024", message, where=place, hint=hint)
    for axis, dim in enumerate(dims):
        if not -1 <= dim.dim_value <= MAX_DIMENSION:
            message = f"it is declared with size {dim.dim_value} on axis {axis}, expected 0 to {MAX_DIMENSION}"
            raise ModelError("M024", message, where=place, hint=hint)
    if all(dim.dim_value >= 0 for dim in dims):
        return value
    result = ValueInfoProto()
    result.CopyFrom(value)
    for dim in result.type.tensor_type.shape.dim:
        if dim.dim_value < 0:
            dim.ClearField("value")
    return result


def _lift_constants(
    nodes: Iterable[NodeProto], initializers: dict[str, TensorProto], where: str, folder: Path | None
) -> list[NodeProto]:
    """Add the values of Constant nodes to `initializers`; return the other nodes."""
    others = []
    for node in nodes:
        is_well_formed = len(node.attribute) == 1 and len(node.output) == 1 and node.output[0]
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and is_well_formed:
            initializers[node.output[0]] = read_constant(node, where, folder)
        else:
            others.append(node)
    return others


def _return_initializers(
    graph: GraphProto,
    nodes: list[NodeProto],
    initializers: dict[str, TensorProto],
    input_names: set[str],
    where: str,
) -> dict[str, str]:
    """Append an Identity node for each output that is a weight.

    Some segment can then compute it.

    Returns output name -> name of the value that it returns. Raises ModelError for an output without a producer.
    """
    sources: dict[str, str] = {}
    produced = {name for node in nodes for name in node.output if name}
    # Names within subgraphs count as well: shape inference finds types by name.
    inner_names = (name for node in walk_nodes(nodes) for name in node.output)
    taken_values = {*produced, *initializers, *input_names, *inner_names}
    taken_nodes = {node.name for node in nodes}
    for output in graph.output:
        if output.name in produced or (output.name in input_names and output.name not in initializers):
            continue
        if output.name not in initializers:
            hint = "the model is incomplete; export it again"
            raise ModelError("M014", f"output {output.name!r} has no producer", where=where, hint=hint)
        value = claim_name(f"{output.name}/returned", taken_values)
        sources[output.name] = value
        nodes.append(helper.make_node("Identity", [output.name], [value], name=claim_name(value, taken_nodes)))
    return sources
