"""Walk the subgraphs of If, Loop and Scan nodes: their nodes, tensors, and the names that they capture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from onnx import AttributeProto, GraphProto, NodeProto, TensorProto


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


def walk_graphs(nodes: Iterable[NodeProto]) -> Iterator[GraphProto]:
    """Yield the graphs within nodes, each before those within its own nodes."""
    for node in nodes:
        for graph in iterate_subgraphs(node):
            yield graph
            yield from walk_graphs(graph.node)


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


# Attributes of these types hold neither tensors nor graphs. Most nodes have no others, so they are skipped quickly.
_PLAIN_ATTRIBUTES = frozenset(
    (
        *(AttributeProto.INT, AttributeProto.FLOAT, AttributeProto.STRING),
        *(AttributeProto.INTS, AttributeProto.FLOATS, AttributeProto.STRINGS),
    )
)


def iterate_initializers(graph: GraphProto) -> Iterator[TensorProto]:
    """Yield the initializers of a graph, and the parts of sparse ones."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)


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
        yield from iterate_initializers(graph)
        for inner in graph.node:
            yield from iterate_tensors(inner)


def is_tensor_constant(node: NodeProto) -> bool:
    """Return whether a node is a Constant that holds a tensor."""
    return (
        node.op_type == "Constant"
        and node.domain in ("", "ai.onnx")
        and len(node.attribute) == 1
        and node.attribute[0].name == "value"
    )


def refill(field: Any, items: Iterable[Any]) -> None:
    """Replace the items of a repeated field of protobuf, which cannot be assigned."""
    kept = list(items)
    del field[:]
    field.extend(kept)


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
