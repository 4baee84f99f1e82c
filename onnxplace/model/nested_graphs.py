"""Subgraphs of If, Loop and Scan nodes.

This module walks their nodes, finds captured names, and lifts their weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path

from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from onnxplace.model.node_metadata import name_with_module
from onnxplace.model.tensors import embed_tensor, tensor_size

# Larger weights of a subgraph become initializers of the model: stored once, counted where they are read. Smaller ones
# may be shapes and axes, which some kernels need as constants of their own graph.
MAX_INNER_WEIGHT_BYTES = 1024


def iterate_subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the graphs that a node holds as attributes."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def has_subgraphs(node: NodeProto) -> bool:
    """Return whether a node holds graphs as attributes."""
    return next(iterate_subgraphs(node), None) is not None


def walk_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield nodes, and after each one the nodes of its subgraphs."""
    for node in nodes:
        yield node
        for graph in iterate_subgraphs(node):
            yield from walk_nodes(graph.node)


def iterate_reads(node: NodeProto) -> Iterator[str]:
    """Yield the names that a node reads; names may repeat.

    Names captured by its subgraphs are included.
    """
    yield from filter(None, node.input)
    for graph in iterate_subgraphs(node):
        yield from captured_names(graph)


def captured_names(graph: GraphProto) -> Iterator[str]:
    """Yield the names that a subgraph reads from outside; names may repeat."""
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    own |= {tensor.values.name for tensor in graph.sparse_initializer}
    for node in graph.node:
        yield from (name for name in iterate_reads(node) if name not in own)
        own.update(node.output)
    yield from (value.name for value in graph.output if value.name not in own)


def assign_unique_names(nodes: list[NodeProto], used: set[str]) -> list[NodeProto]:
    """Return the nodes with unique names, and with the modules that only their metadata has.

    The first of several equal names stays.

    Args:
        nodes: Nodes, which are not altered.
        used: Names that are not available; the new names are added.
    """
    names = [name_with_module(node) for node in nodes]
    taken = set(filter(None, names))
    suffixes: dict[str, int] = {}  # the last one tried: without it, many equal names take quadratic time
    result = []
    for index, (node, name) in enumerate(zip(nodes, names)):
        if not name or name in used:
            base = name = name or f"{node.op_type}_{index}"
            while name in taken or name in used:
                suffixes[base] = suffixes.get(base, 0) + 1
                name = f"{base}_{suffixes[base]}"
        if name != node.name:
            node = deepcopy(node)
            node.name = name
        taken.add(name)
        used.add(name)
        result.append(node)
    return result


def make_self_contained(
    nodes: list[NodeProto], initializers: dict[str, TensorProto], folder: Path | None, used: set[str]
) -> list[NodeProto]:
    """Return the nodes with subgraphs that can move to another model.

    Args:
        nodes: Nodes of the model.
        initializers: Initializers of the model; large weights of subgraphs are added.
        folder: Folder of external data. That of tensors which stay inside is read.
        used: Names of all nodes outside of subgraphs; those inside are added. They are made unique, since ONNX
            Runtime's profile identifies nodes by name.
    """
    result = []
    for node in nodes:
        if has_subgraphs(node) or any(True for _ in _iterate_external_tensors(node)):
            copy = deepcopy(node)
            for graph in iterate_subgraphs(copy):
                _lift_weights(graph, copy.name, initializers)
            for tensor in list(_iterate_external_tensors(copy)):
                tensor.CopyFrom(embed_tensor(tensor, folder))
            for graph in iterate_subgraphs(copy):
                _name_subgraph_nodes(graph, used)
            node = copy
        result.append(node)
    return result


# Attributes of these types hold neither tensors nor graphs. Most nodes have no others, so they are skipped quickly.
_PLAIN_ATTRIBUTES = frozenset(
    (
        *(AttributeProto.INT, AttributeProto.FLOAT, AttributeProto.STRING),
        *(AttributeProto.INTS, AttributeProto.FLOATS, AttributeProto.STRINGS),
    )
)


def iterate_tensors(node: NodeProto) -> Iterator[TensorProto]:
    """Yield all tensors in the attributes and subgraphs of a node.

    The parts of sparse tensors are included.
    """
    holders = [attribute for attribute in node.attribute if attribute.type not in _PLAIN_ATTRIBUTES]
    for attribute in holders:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        if attribute.HasField("sparse_tensor"):
            yield from (attribute.sparse_tensor.values, attribute.sparse_tensor.indices)
        for sparse in attribute.sparse_tensors:
            yield from (sparse.values, sparse.indices)
    for graph in iterate_subgraphs(node) if holders else ():
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        for inner in graph.node:
            yield from iterate_tensors(inner)


def iterate_node_texts(node: NodeProto) -> Iterator[str]:
    """Yield all names in a node, its tensors and its subgraphs."""
    yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
    for attribute in node.attribute:
        yield attribute.name
    for tensor in iterate_tensors(node):
        yield from _iterate_tensor_texts(tensor)
    for graph in iterate_subgraphs(node):
        yield from iterate_graph_texts(graph)
        for inner in graph.node:
            yield from iterate_node_texts(inner)


def iterate_graph_texts(graph: GraphProto) -> Iterator[str]:
    """Yield all names in a graph except those in its nodes."""
    yield graph.name
    for value in (*graph.input, *graph.output):
        yield value.name
        yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    sparse = (tensor for item in graph.sparse_initializer for tensor in (item.values, item.indices))
    for tensor in (*graph.initializer, *sparse):
        yield from _iterate_tensor_texts(tensor)


def _iterate_tensor_texts(tensor: TensorProto) -> Iterator[str]:
    yield tensor.name
    for entry in tensor.external_data:
        yield from (entry.key, entry.value)


def _iterate_external_tensors(node: NodeProto) -> Iterator[TensorProto]:
    return (tensor for tensor in iterate_tensors(node) if tensor.data_location == TensorProto.EXTERNAL)


def _name_subgraph_nodes(graph: GraphProto, used: set[str]) -> None:
    """Give unique names to the nodes of a subgraph, in place.

    Nested subgraphs are included. `used` takes the new names.
    """
    nodes = assign_unique_names(list(graph.node), used)
    del graph.node[:]
    graph.node.extend(nodes)
    for node in graph.node:
        for nested in iterate_subgraphs(node):
            _name_subgraph_nodes(nested, used)


def _lift_weights(graph: GraphProto, owner: str, initializers: dict[str, TensorProto]) -> None:
    """Move the large weights of a subgraph to the model, in place.

    Nested subgraphs are included. The weights get new names.
    """
    fixed = {value.name for value in (*graph.input, *graph.output)}  # a subgraph cannot return a captured value
    # ONNX Runtime fuses a dequantised weight with its product, and fails if the weight is outside of the subgraph.
    fixed |= {name for node in graph.node if node.op_type == "DequantizeLinear" for name in node.input}
    new_names: dict[str, str] = {}

    def lift(name: str, tensor: TensorProto) -> bool:
        if name in fixed or tensor_size(tensor) <= MAX_INNER_WEIGHT_BYTES:
            return False
        new_name = f"{owner}/{name}"
        while new_name in initializers:
            new_name += "_"
        new_names[name] = new_name
        initializers[new_name] = TensorProto()
        initializers[new_name].CopyFrom(tensor)
        initializers[new_name].name = new_name
        return True

    weights = [tensor for tensor in graph.initializer if not lift(tensor.name, tensor)]
    nodes = [
        node for node in graph.node if not (is_tensor_constant(node) and lift(node.output[0], node.attribute[0].t))
    ]
    if new_names:
        del graph.initializer[:], graph.node[:]
        graph.initializer.extend(weights)
        graph.node.extend(nodes)
        for node in graph.node:
            rename_reads(node, new_names)
    for node in graph.node:
        for inner in iterate_subgraphs(node):
            _lift_weights(inner, owner, initializers)


def is_tensor_constant(node: NodeProto) -> bool:
    """Return whether a node is a Constant that holds a tensor."""
    return (
        node.op_type == "Constant"
        and node.domain in ("", "ai.onnx")
        and len(node.attribute) == 1
        and node.attribute[0].name == "value"
    )


def rename_reads(node: NodeProto, new_names: Mapping[str, str]) -> None:
    """Rename the values that a node and its subgraphs read, in place.

    Values of a subgraph hide outer values of the same name.
    """
    node.input[:] = [new_names.get(name, name) for name in node.input]
    for graph in iterate_subgraphs(node):
        own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        own |= {name for inner in graph.node for name in inner.output}
        if visible := {old: new for old, new in new_names.items() if old not in own}:
            for inner in graph.node:
                rename_reads(inner, visible)
            for value in graph.output:
                value.name = visible.get(value.name, value.name)
