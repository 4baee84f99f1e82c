"""Graphs inside nodes: the bodies of If, Loop and Scan, what they capture, and the weights they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from onnxplace.model.tensors import take_in, tensor_size

# A body's weights beyond this become the model's own: stored once, counted where they are read. Smaller ones may be
# shapes and axes, which some kernels want to see beside them.
LIFTED_BEYOND_BYTES = 1024


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the graphs that a node holds as attributes."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def with_inner(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield nodes, and after each those inside of it."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from with_inner(graph.node)


def names_read(node: NodeProto) -> Iterator[str]:
    """Yield the names a node reads, including what its subgraphs capture from outside; may repeat."""
    yield from filter(None, node.input)
    for graph in subgraphs(node):
        yield from captured_names(graph)


def captured_names(graph: GraphProto) -> Iterator[str]:
    """Yield the names a subgraph reads from outside of it."""
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    own |= {tensor.values.name for tensor in graph.sparse_initializer}
    for node in graph.node:
        yield from (name for name in names_read(node) if name not in own)
        own.update(node.output)
    yield from (value.name for value in graph.output if value.name not in own)


def with_unique_names(nodes: list[NodeProto], seen: set[str]) -> list[NodeProto]:
    """Return the nodes with a name each that is not in `seen`, which they join; the first of equals keeps its name."""
    taken = {node.name for node in nodes if node.name}
    suffixes: dict[str, int] = {}  # the last one tried, so that many equal names take no longer than others
    result = []
    for index, node in enumerate(nodes):
        if not node.name or node.name in seen:
            base = node.name or f"{node.op_type}_{index}"
            name = base
            while name in taken or name in seen:
                suffixes[base] = suffixes.get(base, 0) + 1
                name = f"{base}_{suffixes[base]}"
            renamed = NodeProto()
            renamed.CopyFrom(node)
            renamed.name = name
            node = renamed
            taken.add(name)
        seen.add(node.name)
        result.append(node)
    return result


def settled(
    nodes: list[NodeProto], initializers: dict[str, TensorProto], folder: Path | None, seen: set[str]
) -> list[NodeProto]:
    """Return the nodes with bodies that can be cut out with them; their large weights join `initializers`.

    `seen` are the names of all nodes outside, from which those of inner nodes will differ: ONNX Runtime's profile
    tells nodes by name. External data of tensors that stay inside is read.
    """
    result = []
    for node in nodes:
        graphs = any(True for _ in subgraphs(node))
        if graphs or any(True for _ in _stored_outside(node)):
            copy = NodeProto()
            copy.CopyFrom(node)
            for graph in subgraphs(copy):
                _lift_weights(graph, copy.name, initializers)
            for tensor in tensors_of(copy):
                take_in(tensor, folder)
            for graph in subgraphs(copy):
                _name_inner(graph, seen)
            node = copy
        result.append(node)
    return result


# Attributes of these types hold neither tensors nor graphs; most nodes have no others.
_PLAIN = frozenset(
    (
        *(AttributeProto.INT, AttributeProto.FLOAT, AttributeProto.STRING),
        *(AttributeProto.INTS, AttributeProto.FLOATS, AttributeProto.STRINGS),
    )
)


def tensors_of(node: NodeProto) -> Iterator[TensorProto]:
    """Yield every tensor that a node holds: in its attributes and subgraphs, the parts of sparse ones included."""
    holders = [attribute for attribute in node.attribute if attribute.type not in _PLAIN]
    for attribute in holders:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        if attribute.HasField("sparse_tensor"):
            yield from (attribute.sparse_tensor.values, attribute.sparse_tensor.indices)
        for sparse in attribute.sparse_tensors:
            yield from (sparse.values, sparse.indices)
    for graph in subgraphs(node) if holders else ():
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        for inner in graph.node:
            yield from tensors_of(inner)


def texts_of_node(node: NodeProto) -> Iterator[str]:
    """Yield every name in a node, those of its tensors and subgraphs included."""
    yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
    for attribute in node.attribute:
        yield attribute.name
    for tensor in tensors_of(node):
        yield from _texts_of_tensor(tensor)
    for graph in subgraphs(node):
        yield from texts_of_graph(graph)
        for inner in graph.node:
            yield from texts_of_node(inner)


def texts_of_graph(graph: GraphProto) -> Iterator[str]:
    """Yield every name in a graph except those in its nodes."""
    yield graph.name
    for value in (*graph.input, *graph.output):
        yield value.name
        yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    sparse = (tensor for item in graph.sparse_initializer for tensor in (item.values, item.indices))
    for tensor in (*graph.initializer, *sparse):
        yield from _texts_of_tensor(tensor)


def _texts_of_tensor(tensor: TensorProto) -> Iterator[str]:
    yield tensor.name
    for entry in tensor.external_data:
        yield from (entry.key, entry.value)


def _stored_outside(node: NodeProto) -> Iterator[TensorProto]:
    return (tensor for tensor in tensors_of(node) if tensor.data_location == TensorProto.EXTERNAL)


def _name_inner(graph: GraphProto, seen: set[str]) -> None:
    """Give the nodes of a subgraph, and those within them, names that are not in `seen`, which they join."""
    inner = with_unique_names(list(graph.node), seen)
    del graph.node[:]
    graph.node.extend(inner)
    for node in graph.node:
        for deeper in subgraphs(node):
            _name_inner(deeper, seen)


def _lift_weights(graph: GraphProto, owner: str, initializers: dict[str, TensorProto]) -> None:
    """Move the large weights of a body, and of those within it, to the model, under names of their own."""
    fixed = {value.name for value in (*graph.input, *graph.output)}  # a body cannot return what it captures
    # ONNX Runtime fuses a dequantised weight with its product, and fails if the weight is outside of the body.
    fixed |= {name for node in graph.node if node.op_type == "DequantizeLinear" for name in node.input}
    moved: dict[str, str] = {}

    def lift(name: str, tensor: TensorProto) -> bool:
        if name in fixed or tensor_size(tensor) <= LIFTED_BEYOND_BYTES:
            return False
        moved[name] = f"{owner}/{name}"
        while moved[name] in initializers:
            moved[name] += "_"
        initializers[moved[name]] = TensorProto()
        initializers[moved[name]].CopyFrom(tensor)
        initializers[moved[name]].name = moved[name]
        return True

    weights = [tensor for tensor in graph.initializer if not lift(tensor.name, tensor)]
    nodes = [node for node in graph.node if not (is_constant(node) and lift(node.output[0], node.attribute[0].t))]
    if moved:
        del graph.initializer[:], graph.node[:]
        graph.initializer.extend(weights)
        graph.node.extend(nodes)
        for node in graph.node:
            rename(node, moved)
    for node in graph.node:
        for inner in subgraphs(node):
            _lift_weights(inner, owner, initializers)


def is_constant(node: NodeProto) -> bool:
    """Return whether a node is a Constant that holds a tensor."""
    return (
        node.op_type == "Constant"
        and node.domain in ("", "ai.onnx")
        and len(node.attribute) == 1
        and node.attribute[0].name == "value"
    )


def rename(node: NodeProto, new: Mapping[str, str]) -> None:
    """Rename what a node reads, its bodies included, in place; a body's own values hide outer ones of their name."""
    node.input[:] = [new.get(name, name) for name in node.input]
    for graph in subgraphs(node):
        own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        own |= {name for inner in graph.node for name in inner.output}
        if visible := {name: other for name, other in new.items() if name not in own}:
            for inner in graph.node:
                rename(inner, visible)
            for value in graph.output:
                value.name = visible.get(value.name, value.name)
