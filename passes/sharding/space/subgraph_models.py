"""Subgraphs of If, Loop and Scan as models, and what the node around them calls their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from onnx import GraphProto, TensorProto, helper

from onnxplace.model.model import Model
from onnxplace.model.nested_graphs import captured_names, is_tensor_constant, iterate_subgraphs
from onnxplace.passes.sharding.rules.node_views import Shape

# Before this opset, a Scan has one more axis, of a batch.
_MIN_SCAN_OPSET = 9

Place = tuple[int, int]
"""Position among operands or results of a node, and the axis of which a subgraph sees one index at a time, or -1."""


@dataclass(frozen=True)
class Subgraph:
    """A subgraph, with the places of its values."""

    graph: GraphProto
    operands: Mapping[str, Place]
    """Inputs and captured values."""
    results: Mapping[str, Place]
    """Outputs; that at position -1 is the condition of a loop."""
    states: Sequence[tuple[str, str]]
    """Input at the start of a turn, and the output that it becomes."""


def list_subgraphs(model: Model, index: int) -> list[Subgraph]:
    """Return the subgraphs of a node; none for operators and forms that are not followed."""
    node, subgraphs = model.nodes[index], []
    own, attributes = len(node.input), {item.name: helper.get_attribute_value(item) for item in node.attribute}
    for graph in iterate_subgraphs(node):
        inputs, outputs = [value.name for value in graph.input], [value.name for value in graph.output]
        first = kept = states = 0
        scanned: dict[str, Sequence[int]] = {}
        if node.op_type == "Loop":
            # Its first inputs are the number of turns and a condition, which the subgraph also returns.
            first, kept, states = 2, 1, own - 2
        elif node.op_type == "Scan" and model.opset >= _MIN_SCAN_OPSET:
            states = own - attributes["num_scan_inputs"]
            scanned = attributes
        elif node.op_type != "If":
            return []
        entering = [-1] * states + list(scanned.get("scan_input_axes") or [0] * (len(inputs) - first - states))
        leaving = [-1] * states + list(scanned.get("scan_output_axes") or [0] * (len(outputs) - kept - states))
        if node.op_type == "If":
            leaving = [-1] * len(outputs)
        # Exporters neither count these axes from the end nor return a value twice.
        if min((*entering, *leaving), default=0) < -1 or len({*outputs}) < len(outputs) or graph.sparse_initializer:
            return []
        captured = {*captured_names(graph)}
        places = {name: (at, -1) for at, name in enumerate(model.operands[index]) if at >= own and name in captured}
        places |= {name: (first + at, axis) for at, (name, axis) in enumerate(zip(inputs[first:], entering))}
        results = dict.fromkeys(outputs[:kept], (-1, -1))
        results |= {name: (at, axis) for at, (name, axis) in enumerate(zip(outputs[kept:], leaving))}
        subgraphs.append(Subgraph(graph, places, results, [*zip(inputs[first:], outputs[kept:])][:states]))
    return subgraphs


def build_subgraph_model(
    model: Model,
    index: int,
    subgraph: Subgraph,
    types: Mapping[str, int],
    sizes: Mapping[str, Sequence[int | str]],
    dimensions: Mapping[str, int] = MappingProxyType({}),
) -> Model | None:
    """Return a subgraph as a model; None if a shape or type of what it reads is unknown.

    Args:
        model: The model around it.
        index: The node that holds it.
        subgraph: The subgraph.
        types: Element types of the operands.
        sizes: Sizes and symbols of the operands.
        dimensions: Sizes of the symbols.
    """
    # Those inputs of a loop that are no operands are its turn and its condition.
    inputs: dict[str, tuple[int, Sequence[int | str]]] = {
        value.name: (value.type.tensor_type.elem_type, ()) for value in subgraph.graph.input
    }
    weights = {tensor.name: tensor for tensor in subgraph.graph.initializer}
    for inner, (position, axis) in subgraph.operands.items():
        name = model.operands[index][position]
        if name not in sizes or not types.get(name, 0):
            return None
        if inner == name and name in model.constants:
            weights[name] = model.initializers[name]
        else:
            inputs[inner] = types[name], [size for at, size in enumerate(sizes[name]) if at != axis]
    for node in filter(is_tensor_constant, subgraph.graph.node):
        weights[node.output[0]] = TensorProto()
        weights[node.output[0]].CopyFrom(node.attribute[0].t)
        weights[node.output[0]].name = node.output[0]
    return replace(
        model,
        nodes=tuple(node for node in subgraph.graph.node if not is_tensor_constant(node)),
        initializers=MappingProxyType(weights),
        inputs=tuple(helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()),
        outputs=tuple(subgraph.graph.output),
        sources=MappingProxyType({}),
        states=MappingProxyType({}),
        samples=MappingProxyType({}),
        dimensions=MappingProxyType(dict(dimensions)),
    )


def is_steady(subgraph: Subgraph, shapes: Mapping[str, Shape]) -> bool:
    """Return whether each state leaves a turn in the shape in which it entered it."""
    return all(shapes.get(before) == shapes.get(after, ()) for before, after in subgraph.states)
