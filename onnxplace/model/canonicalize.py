"""Put any ONNX model into canonical form.

Functions are inlined, constants lifted, names unique, and nodes in topological order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    SparseTensorProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)
from onnx.inliner import inline_local_functions

from onnxplace.errors import MAX_LISTED, ModelError, format_names
from onnxplace.feeds.dimensions import MAX_DIMENSION, MAX_RANK
from onnxplace.graph.op_graph import order_items
from onnxplace.model.nested_graphs import (
    has_subgraphs,
    is_tensor_constant,
    iterate_initializers,
    iterate_reads,
    iterate_tensors,
    refill,
    rename_reads,
    walk_graphs,
    walk_nodes,
)
from onnxplace.model.node_metadata import name_with_module
from onnxplace.model.operator_checks import keeps_meaning, merge_opsets, name_attribute_type, require_form
from onnxplace.model.shape_inference import infer_shapes
from onnxplace.model.tensors import (
    check_tensor,
    clear_unknown_sizes,
    embed_tensor,
    find_unknown_element,
    require_shape,
    tensor_size,
)
from onnxplace.utils.names import claim_name


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


def canonicalize(proto: ModelProto, where: str, folder: Path | None) -> ModelParts:
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
        proto = _inline_functions(proto, where)
    graph = proto.graph
    if not graph.output:
        raise ModelError("M008", "the model has no outputs, expected at least one", where=where)
    for tensor in (*graph.initializer, *(tensor for node in graph.node for tensor in iterate_tensors(node))):
        check_tensor(tensor)
    opsets = merge_opsets(proto)
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    initializers |= {sparse.values.name: _make_dense(sparse, where, folder) for sparse in graph.sparse_initializer}
    nodes = _lift_constants(graph.node, initializers, where, folder)
    require_form(walk_nodes(nodes), {entry.domain: entry.version for entry in opsets}, where)
    producers = _index_producers(nodes, initializers, where)
    names: set[str] = set()
    nodes = _assign_unique_names(nodes, names)
    nodes = _make_self_contained(nodes, initializers, folder, names)
    # Before IR version 4, all initializers had to be inputs too; they were constants all the same.
    constants = set(initializers) if proto.ir_version < 4 else set()
    fed = [value for value in graph.input if value.name not in producers and value.name not in constants]
    counts = Counter(value.name for value in fed if value.name not in initializers)
    if repeated := [name for name, count in counts.items() if count > 1]:  # ONNX Runtime takes those with a default
        message = f"input {repeated[0]!r} is declared {counts[repeated[0]]} times, expected once"
        raise ModelError("M008", message, where=where, hint="the model is damaged; export it again")
    inputs = [_check_declaration(value, where) for value in {value.name: value for value in fed}.values()]
    outputs = [_check_declaration(value, where) for value in graph.output]
    input_names = {value.name for value in inputs}
    nodes = _sort_topologically(nodes, producers, {*input_names, *initializers}, where)
    sources = _return_initializers(graph, nodes, initializers, input_names, where)
    return ModelParts(
        nodes=nodes, initializers=initializers, inputs=inputs, outputs=outputs, sources=sources, opsets=opsets
    )


def _require_text(proto: ModelProto, where: str) -> None:
    """Raise ModelError for a name that is not text.

    Protobuf returns such names as bytes.
    """
    nodes = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    for text in chain(
        (text for graph in (proto.graph, *walk_graphs(nodes)) for text in _iterate_graph_texts(graph)),
        (text for node in nodes for tensor in iterate_tensors(node) for text in _iterate_tensor_texts(tensor)),
        (text for node in walk_nodes(nodes) for text in (node.name, node.op_type, node.domain)),
        (text for node in walk_nodes(nodes) for text in (*node.input, *node.output)),
        (attribute.name for node in walk_nodes(nodes) for attribute in node.attribute),
        (text for item in proto.functions for text in (item.name, item.domain, *item.input, *item.output)),
        (text for item in proto.configuration for text in (item.name, *item.device)),
    ):
        if not isinstance(text, str):
            hint = "the file is damaged; copy or export it again"
            raise ModelError("M002", f"a name in it is not text: {text[:40]!r}", where=where, hint=hint)
    for entry in proto.opset_import:
        if not isinstance(entry.domain, str):
            raise ModelError("M002", f"the name of an opset is not text: {entry.domain[:40]!r}", where=where)


def _iterate_graph_texts(graph: GraphProto) -> Iterator[str]:
    """Yield all names in a graph except those in its nodes."""
    yield graph.name
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield value.name
        yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    for tensor in iterate_initializers(graph):
        yield from _iterate_tensor_texts(tensor)


def _iterate_tensor_texts(tensor: TensorProto) -> Iterator[str]:
    yield tensor.name
    for entry in tensor.external_data:
        yield from (entry.key, entry.value)


def _check_declaration(value: ValueInfoProto, where: str) -> ValueInfoProto:
    """Return an input or output without sizes that only say that they are unknown.

    Raises ModelError for negative sizes except -1, for sizes and ranks beyond those of arrays, and for unknown types.
    """
    dims = value.type.tensor_type.shape.dim
    place, hint = f"{where}, input or output {value.name!r}", "the model is damaged; export it again"
    if (number := find_unknown_element(value.type)) is not None:
        message = f"it is declared with element type {number}, which ONNX does not have"
        raise ModelError("M008", message, where=place, hint=hint)
    if len(dims) > MAX_RANK:
        message = f"it is declared with {len(dims)} dimensions, expected at most {MAX_RANK}"
        raise ModelError("M008", message, where=place, hint=hint)
    for axis, dim in enumerate(dims):
        if not -1 <= dim.dim_value <= MAX_DIMENSION:
            message = f"it is declared with size {dim.dim_value} on axis {axis}, expected 0 to {MAX_DIMENSION}"
            raise ModelError("M008", message, where=place, hint=hint)
    return clear_unknown_sizes(value)


def _lift_constants(
    nodes: Iterable[NodeProto], initializers: dict[str, TensorProto], where: str, folder: Path | None
) -> list[NodeProto]:
    """Add the values of Constant nodes to `initializers`; return the other nodes."""
    others = []
    for node in nodes:
        is_well_formed = len(node.attribute) == 1 and len(node.output) == 1 and node.output[0]
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and is_well_formed:
            initializers[node.output[0]] = _read_constant(node, where, folder)
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
            raise ModelError("M008", f"output {output.name!r} has no producer", where=where, hint=hint)
        value = claim_name(f"{output.name}/returned", taken_values)
        sources[output.name] = value
        nodes.append(helper.make_node("Identity", [output.name], [value], name=claim_name(value, taken_nodes)))
    return sources


# ------------------------------------------------------------------------------------------------- names and subgraphs


# Larger weights of a subgraph become initializers of the model: stored once, counted where they are read. Smaller ones
# may be shapes and axes, which some kernels need as constants in the same graph.
MAX_INNER_WEIGHT_BYTES = 1024


def _assign_unique_names(nodes: list[NodeProto], used: set[str]) -> list[NodeProto]:
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


def _make_self_contained(
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
        if has_subgraphs(node) or any(_is_external(tensor) for tensor in iterate_tensors(node)):
            node = deepcopy(node)
            for graph in walk_graphs([node]):
                _lift_weights(graph, node.name, initializers)
            for tensor in filter(_is_external, list(iterate_tensors(node))):
                tensor.CopyFrom(embed_tensor(tensor, folder))
            for graph in walk_graphs([node]):
                refill(graph.node, _assign_unique_names(list(graph.node), used))
        result.append(node)
    return result


def _is_external(tensor: TensorProto) -> bool:
    return tensor.data_location == TensorProto.EXTERNAL


def _lift_weights(graph: GraphProto, owner: str, initializers: dict[str, TensorProto]) -> None:
    """Move the large weights of a subgraph to the model, in place, under new names."""
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
        initializers[new_name] = deepcopy(tensor)
        initializers[new_name].name = new_name
        return True

    weights = [tensor for tensor in graph.initializer if not lift(tensor.name, tensor)]
    nodes = [
        node for node in graph.node if not (is_tensor_constant(node) and lift(node.output[0], node.attribute[0].t))
    ]
    if new_names:
        refill(graph.initializer, weights)
        refill(graph.node, nodes)
        for node in graph.node:
            rename_reads(node, new_names)


# ------------------------------------------------------------------------------------------------------ local functions


# Each level of calls is inlined by itself, which takes time for the whole model.
MAX_NESTED_CALLS = 100


def _inline_functions(proto: ModelProto, where: str) -> ModelProto:
    """Return the model without local functions.

    Callers come first: if one passes on an attribute that it was not given, the called function takes its own default.

    Raises ModelError for a function that calls itself, or that cannot be inlined.
    """
    result = _align_function_opsets(proto)
    waiting = {_identify_function(function): function for function in result.functions}
    calls = {key: {_identify_function(node) for node in _walk_function(waiting[key])} for key in waiting}
    for _ in range(MAX_NESTED_CALLS):
        inner = {call for key in waiting for call in calls[key]}
        result = _inline_calls(result, {key: waiting[key] for key in waiting if key not in inner}, where)
        remaining = {key: waiting[key] for key in waiting if key in inner}
        if not remaining:
            return result
        if len(remaining) == len(waiting):
            cycle = " -> ".join(_find_cycle({key: calls[key] for key in remaining}))
            raise ModelError("M008", f"a local function calls itself: {cycle}", where=where, hint="unroll it")
        waiting = remaining
    message = f"its local functions call each other more than {MAX_NESTED_CALLS} deep"
    raise ModelError("M008", message, where=where, hint="export the model without functions")


def _identify_function(item: FunctionProto | NodeProto) -> str:
    """Return domain, name and overload of a function, or of the one that a node may call, as a text."""
    name = item.name if isinstance(item, FunctionProto) else item.op_type
    return f"{item.domain}.{name}" + (f":{item.overload}" if item.overload else "")


def _walk_function(function: FunctionProto) -> Iterator[NodeProto]:
    """Yield the nodes of a function, and those of graphs that are defaults of its attributes."""
    return walk_nodes((*function.node, NodeProto(attribute=function.attribute_proto)))


def _find_cycle(calls: Mapping[str, set[str]]) -> list[str]:
    """Return the calls of a cycle; each function has a caller among these."""
    path = [next(iter(calls))]
    while path[0] not in path[1:]:
        path.insert(0, next(key for key in calls if path[0] in calls[key]))
    return path[: path.index(path[0], 1) + 1]


def _inline_calls(proto: ModelProto, functions: Mapping[str, FunctionProto], where: str) -> ModelProto:
    """Return the model with the bodies of these functions in place of their calls, and without other functions.

    Defaults of attributes are filled in before, as the inliner of onnx ignores them. `proto` is altered.
    """
    called = {}
    for node in walk_nodes(proto.graph.node):
        if function := functions.get(_identify_function(node)):
            called[_identify_function(node)] = function
            given = {attribute.name for attribute in node.attribute}
            node.attribute.extend(item for item in function.attribute_proto if item.name not in given)
    refill(proto.functions, called.values())
    inlined = proto
    with suppress(Exception):  # the inliner raises plain C++ errors, such as assertions
        inlined = inline_local_functions(proto)
        if inlined.functions:  # those of another opset stay unless they may be converted
            inlined = inline_local_functions(infer_shapes(proto), convert_version=True)
    if inlined.functions:
        names = format_names(function.name for function in inlined.functions)
        message = f"local functions cannot be inlined: {names}; operators in them may differ in the model's opset"
        raise ModelError("M008", message, where=where, hint="export the model with one opset for all functions")
    return inlined


def _align_function_opsets(proto: ModelProto) -> ModelProto:
    """Return the model with functions that import its own opsets, where all operators of the function stay the same."""
    result, versions = deepcopy(proto), {entry.domain: entry.version for entry in merge_opsets(proto)}
    for function in result.functions:
        for entry in function.opset_import:
            domains = ("", "ai.onnx") if entry.domain in ("", "ai.onnx") else (entry.domain,)
            new, nodes = versions.get(domains[0], entry.version), _walk_function(function)
            if all(keeps_meaning(node, entry.version, new) for node in nodes if node.domain in domains):
                entry.version = new
    return result


# ------------------------------------------------------------------------------------------------------------ constants


# Sparse weights beyond this size are refused: a few bytes in a file could fill the memory.
MAX_DENSE_BYTES = 1 << 30
# numpy keeps a reference for each string.
_POINTER_BYTES = 8
# Attribute of a Constant -> its type, and the type of the elements (UNDEFINED where the tensor declares it).
_VALUE_ATTRIBUTES = {
    "value_int": (AttributeProto.INT, TensorProto.INT64),
    "value_ints": (AttributeProto.INTS, TensorProto.INT64),
    "value_float": (AttributeProto.FLOAT, TensorProto.FLOAT),
    "value_floats": (AttributeProto.FLOATS, TensorProto.FLOAT),
    "value_string": (AttributeProto.STRING, TensorProto.STRING),
    "value_strings": (AttributeProto.STRINGS, TensorProto.STRING),
    "value": (AttributeProto.TENSOR, TensorProto.UNDEFINED),
    "sparse_value": (AttributeProto.SPARSE_TENSOR, TensorProto.UNDEFINED),
}


def _make_dense(sparse: SparseTensorProto, where: str, folder: Path | None) -> TensorProto:
    """Return a sparse weight as a dense one.

    Raises ModelError if the dense weight exceeds `MAX_DENSE_BYTES`, or for indices that do not fit the shape.
    """
    result = TensorProto(name=sparse.values.name, data_type=sparse.values.data_type, dims=sparse.dims)
    place = f"{where}, weight {result.name!r}"
    require_shape(result)
    strings = result.data_type == TensorProto.STRING
    size = math.prod(result.dims) * _POINTER_BYTES if strings else tensor_size(result)
    if size > MAX_DENSE_BYTES:
        message = f"as a dense weight it would take {size} bytes, expected at most {MAX_DENSE_BYTES}"
        raise ModelError("M008", message, where=place, hint="store it dense, as external data")
    try:
        values, indices = _read_array(sparse.values, folder), _read_array(sparse.indices, folder)
        array = np.full(tuple(sparse.dims), "" if strings else 0, dtype=values.dtype)
        array.reshape(-1)[_compute_flat_indices(indices, values.size, array.shape)] = values.reshape(-1)
    except (ValueError, IndexError, TypeError) as problem:
        hint = "the model is damaged; export it again"
        raise ModelError("M008", f"its sparse form is invalid: {problem}", where=place, hint=hint) from None
    return numpy_helper.from_array(array, result.name)


def _read_array(tensor: TensorProto, folder: Path | None) -> NDArray[Any]:
    """Return the elements of a tensor, read from its file if necessary.

    Raises ModelError for a wrong number of elements.
    """
    check_tensor(tensor)
    return numpy_helper.to_array(embed_tensor(tensor, folder))


def _compute_flat_indices(indices: NDArray[Any], count: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the positions of sparse values in the flattened dense tensor.

    Raises ValueError for invalid indices.
    """
    if indices.dtype != np.int64:
        raise ValueError(f"its indices are {indices.dtype}, expected int64")
    if indices.ndim not in (1, 2) or len(indices) != count or (indices.ndim == 2 and indices.shape[1] != len(shape)):
        expected = f"[{count}] or [{count}, {len(shape)}]"
        raise ValueError(f"its indices have shape {list(indices.shape)}, expected {expected}")
    if indices.ndim == 2:
        return np.asarray(np.ravel_multi_index(tuple(indices.T), shape))
    if count and not 0 <= indices.min() <= indices.max() < math.prod(shape):
        raise ValueError(
            f"its indices go from {indices.min()} to {indices.max()}, expected 0 to {math.prod(shape) - 1}"
        )
    return indices


def _read_constant(node: NodeProto, where: str, folder: Path | None) -> TensorProto:
    """Return the tensor of a Constant node, named as its output.

    Raises ModelError for an invalid attribute.
    """
    attribute, place = node.attribute[0], f"{where}, node {node.name!r}"
    if attribute.name not in _VALUE_ATTRIBUTES:
        message = f"its attribute is {attribute.name!r}, expected one of {', '.join(_VALUE_ATTRIBUTES)}"
        raise ModelError("M008", message, where=place, hint="export the model with a standard Constant")
    expected, element_type = _VALUE_ATTRIBUTES[attribute.name]
    has_tensor = {"value": attribute.HasField("t"), "sparse_value": attribute.HasField("sparse_tensor")}
    if not has_tensor.get(attribute.name, attribute.type == expected):
        given_type, expected_type = name_attribute_type(attribute.type), name_attribute_type(expected)
        problem = "is empty" if given_type == expected_type else f"has type {given_type}"
        message = f"its attribute {attribute.name!r} {problem}, expected a value of type {expected_type}"
        raise ModelError("M008", message, where=place, hint="the model is damaged; export it again")
    if attribute.name == "sparse_value":
        tensor = _make_dense(attribute.sparse_tensor, place, folder)
    elif attribute.name == "value":
        check_tensor(attribute.t)
        tensor = deepcopy(attribute.t)
    else:
        value = helper.get_attribute_value(attribute)
        is_list = attribute.name.endswith("s")
        dims, elements = ([len(value)], list(value)) if is_list else ([], [value])
        tensor = helper.make_tensor("", element_type, dims, elements)
    tensor.name = node.output[0]
    return tensor


# ---------------------------------------------------------------------------------------------------- topological order


def _index_producers(nodes: Sequence[NodeProto], initializers: Collection[str], where: str) -> dict[str, int]:
    """Return the index of each value's producer.

    Raises ModelError for a value with two producers.
    """
    producers: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name in producers or name in initializers:
                place = f"{where}, node {node.name or node.op_type!r}"
                hint = "the model is damaged; export it again"
                raise ModelError("M008", f"value {name!r} has two producers, expected one", where=place, hint=hint)
            producers[name] = index
    return producers


def _sort_topologically(
    nodes: Sequence[NodeProto], producers: Mapping[str, int], known: Collection[str], where: str
) -> list[NodeProto]:
    """Return the nodes in topological order.

    Ties keep the order of the file.

    Args:
        nodes: Nodes with unique names, in any order.
        producers: Value -> index of the node that produces it.
        known: Inputs and initializers, which need no producer.
        where: Place for error messages.

    Raises:
        ModelError: A value has no producer, or the graph has a cycle.
    """
    readers: list[list[int]] = [[] for _ in nodes]
    missing_counts = [0] * len(nodes)
    for index, node in enumerate(nodes):
        for name in set(iterate_reads(node)):
            if name in producers:
                readers[producers[name]].append(index)
                missing_counts[index] += 1
            elif name not in known:
                place, hint = f"{where}, node {node.name!r}", "the model is incomplete; export it again"
                raise ModelError("M008", f"it reads {name!r}, which has no producer", where=place, hint=hint)
    order = order_items(readers, missing_counts)
    if len(order) < len(nodes):
        cycle = _describe_cycle(nodes, producers, missing_counts)
        raise ModelError("M008", f"the graph has a cycle: {cycle}", where=where)
    return [nodes[index] for index in order]


def _describe_cycle(nodes: Sequence[NodeProto], producers: Mapping[str, int], missing_counts: Sequence[int]) -> str:
    """Describe one cycle among the nodes that never became ready."""
    index = next(i for i, count in enumerate(missing_counts) if count > 0)
    positions: dict[int, int] = {}
    while index not in positions:
        positions[index] = len(positions)
        sources = (producers[name] for name in iterate_reads(nodes[index]) if name in producers)
        index = next(producer for producer in sources if missing_counts[producer] > 0)
    visited = list(positions)
    names = [nodes[i].name for i in (*reversed(visited[positions[index] :]), visited[-1])]
    if len(names) > MAX_LISTED + 1:
        names[MAX_LISTED:-1] = [f"... ({len(names) - 1 - MAX_LISTED} more)"]
    return " -> ".join(names)
