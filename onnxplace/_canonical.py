"""Put any ONNX model into one shape: functions inlined, constants lifted, names unique, nodes in order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    ValueInfoProto,
    helper,
)
from onnx.inliner import inline_local_functions
from onnx.shape_inference import infer_shapes

from onnxplace._weights import check_tensor, tensor_bytes
from onnxplace.errors import ModelError


@dataclass
class Parts:
    """What `take_apart` finds; `Model` freezes it."""

    nodes: list[NodeProto]
    initializers: dict[str, TensorProto]
    inputs: list[ValueInfoProto]
    outputs: list[ValueInfoProto]
    sources: dict[str, str]
    opsets: list[OperatorSetIdProto]


def take_apart(proto: ModelProto, where: str, folder: Path | None) -> Parts:
    """Return the parts of a model; raises ModelError naming the node or value that is wrong."""
    if proto.graph.sparse_initializer:
        name = proto.graph.sparse_initializer[0].values.name
        raise ModelError(
            "M008", "sparse initializers are not supported", where=f"{where}, weight {name!r}", hint="store it dense"
        )
    if proto.functions:
        proto = _inline_functions(proto, where)
    graph = proto.graph
    if not graph.output:
        raise ModelError("M018", "the model has no outputs, so there is nothing to compute", where=where)
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    nodes = [_settled(node, folder) for node in _lift_constants(graph.node, initializers, where)]
    for tensor in initializers.values():
        check_tensor(tensor)
    made = _producers(nodes, initializers, graph, where)
    inputs = [v for v in graph.input if v.name not in made and not (v.name in initializers and proto.ir_version < 4)]
    nodes = _in_order(_with_unique_names(nodes), made, initializers, inputs, where)
    sources = _return_initializers(graph, nodes, initializers, {v.name for v in inputs}, made, where)
    return Parts(nodes, initializers, inputs, list(graph.output), sources, _opsets(proto))


def _inline_functions(proto: ModelProto, where: str) -> ModelProto:
    try:
        inlined: ModelProto = inline_local_functions(proto)
        if inlined.functions:  # those of another opset stay unless they may be converted
            inlined = inline_local_functions(infer_shapes(proto), convert_version=True)
    except Exception as problem:  # noqa: BLE001 - the inliner raises plain C++ errors
        raise ModelError("M009", f"its local functions cannot be inlined: {problem}", where=where) from None
    if inlined.functions:
        name = inlined.functions[0].name
        hint = "export the model with one opset for all functions"
        raise ModelError("M009", f"its local function {name!r} cannot be inlined", where=where, hint=hint)
    return inlined


def _settled(node: NodeProto, folder: Path | None) -> NodeProto:
    """Return a node whose subgraphs stand on their own: their nodes' names differ, their weights are inside."""
    graphs = list(_subgraphs(node))
    tensors = [a.t for a in node.attribute if a.type == AttributeProto.TENSOR]
    if not graphs and not any(tensor.data_location == TensorProto.EXTERNAL for tensor in tensors):
        return node
    settled = NodeProto()
    settled.CopyFrom(node)
    for attribute in settled.attribute:
        if attribute.type == AttributeProto.TENSOR:
            _take_in(attribute.t, folder)
    for graph in _subgraphs(settled):
        for tensor in graph.initializer:
            _take_in(tensor, folder)
        inner = [_settled(item, folder) for item in _with_unique_names(list(graph.node))]
        del graph.node[:]
        graph.node.extend(inner)
    return settled


def _take_in(tensor: TensorProto, folder: Path | None) -> None:
    """Put the bytes of external data into the tensor itself."""
    if tensor.data_location == TensorProto.EXTERNAL:
        tensor.raw_data = b"".join(tensor_bytes(tensor, folder))
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]


def _subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def _opsets(proto: ModelProto) -> list[OperatorSetIdProto]:
    """Return one entry per domain, "ai.onnx" being the empty one."""
    versions: dict[str, int] = {}
    for entry in proto.opset_import:
        domain = "" if entry.domain == "ai.onnx" else entry.domain
        versions[domain] = max(entry.version, versions.get(domain, 0))
    return [helper.make_opsetid(domain, version) for domain, version in versions.items()]


def _lift_constants(nodes: Iterable[NodeProto], initializers: dict[str, TensorProto], where: str) -> list[NodeProto]:
    """Turn Constant nodes into initializers; return the other nodes."""
    kept = []
    for node in nodes:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and len(node.attribute) == 1:
            initializers[node.output[0]] = _constant(node, where)
        else:
            kept.append(node)
    return kept


def _constant(node: NodeProto, where: str) -> TensorProto:
    attribute = node.attribute[0]
    if attribute.name == "value":
        tensor = TensorProto()
        tensor.CopyFrom(attribute.t)
        tensor.name = node.output[0]
        return tensor
    value = helper.get_attribute_value(attribute)
    kinds = {
        "value_int": TensorProto.INT64,
        "value_ints": TensorProto.INT64,
        "value_float": TensorProto.FLOAT,
        "value_floats": TensorProto.FLOAT,
        "value_string": TensorProto.STRING,
        "value_strings": TensorProto.STRING,
    }
    if attribute.name not in kinds:
        raise ModelError(
            "M008", f"constants given as {attribute.name!r} are not supported", where=f"{where}, node {node.name!r}"
        )
    several = attribute.name.endswith("s")
    return helper.make_tensor(
        node.output[0], kinds[attribute.name], [len(value)] if several else [], list(value) if several else [value]
    )


def _producers(
    nodes: list[NodeProto], initializers: dict[str, TensorProto], graph: GraphProto, where: str
) -> dict[str, int]:
    """Return which node makes each value; a value made twice is an error."""
    made: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name in made or name in initializers:
                raise ModelError(
                    "M013", f"value {name!r} is made twice", where=f"{where}, node {node.name or node.op_type!r}"
                )
            made[name] = index
    return made


def _with_unique_names(nodes: list[NodeProto]) -> list[NodeProto]:
    """Return the nodes with a unique name each; the first of several equal names keeps it."""
    taken = {node.name for node in nodes if node.name}
    seen: set[str] = set()
    result = []
    for index, node in enumerate(nodes):
        if not node.name or node.name in seen:
            base = node.name or f"{node.op_type}_{index}"
            name, suffix = base, 1
            while name in taken:
                name, suffix = f"{base}_{suffix}", suffix + 1
            renamed = NodeProto()
            renamed.CopyFrom(node)
            renamed.name = name
            node = renamed
            taken.add(name)
        seen.add(node.name)
        result.append(node)
    return result


def _in_order(
    nodes: list[NodeProto],
    made: dict[str, int],
    initializers: dict[str, TensorProto],
    inputs: list[ValueInfoProto],
    where: str,
) -> list[NodeProto]:
    """Return the nodes in topological order, the file's order where it is one."""
    known = {value.name for value in inputs} | set(initializers)
    readers: list[list[int]] = [[] for _ in nodes]
    waiting = [0] * len(nodes)
    for index, node in enumerate(nodes):
        for name in set(reads(node)):
            if name in made:
                readers[made[name]].append(index)
                waiting[index] += 1
            elif name not in known:
                raise ModelError(
                    "M014",
                    f"reads {name!r}, which nobody makes",
                    where=f"{where}, node {node.name!r}",
                    hint="the model is incomplete; export it again",
                )
    ready = [index for index, count in enumerate(waiting) if count == 0]
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for reader in readers[index]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        raise ModelError("M015", f"the graph has a cycle: {_cycle(nodes, made, waiting)}", where=where)
    return [nodes[index] for index in order]


def _cycle(nodes: list[NodeProto], made: dict[str, int], waiting: list[int]) -> str:
    """Describe one cycle among the nodes that never became ready."""
    index = next(i for i, count in enumerate(waiting) if count > 0)
    seen: list[int] = []
    while index not in seen:
        seen.append(index)
        index = next(made[name] for name in reads(nodes[index]) if name in made and waiting[made[name]] > 0)
    loop = [*reversed(seen[seen.index(index) :]), seen[-1]]
    return " -> ".join(nodes[i].name for i in loop)


def _return_initializers(
    graph: GraphProto,
    nodes: list[NodeProto],
    initializers: dict[str, TensorProto],
    inputs: set[str],
    made: dict[str, int],
    where: str,
) -> dict[str, str]:
    """Make each output that is a weight the result of an Identity node, so that some segment computes it.

    Returns output name -> name of the value that it returns.
    """
    sources: dict[str, str] = {}
    taken = set(made) | set(initializers) | inputs
    for output in graph.output:
        if output.name in made or (output.name in inputs and output.name not in initializers):
            continue
        if output.name not in initializers:
            raise ModelError(
                "M014",
                f"output {output.name!r} is made by nobody",
                where=where,
                hint="the model is incomplete; export it again",
            )
        value = f"{output.name}/returned"
        while value in taken:
            value += "_"
        taken.add(value)
        sources[output.name] = value
        name, names = value, {node.name for node in nodes}
        while name in names:
            name += "_"
        nodes.append(helper.make_node("Identity", [output.name], [value], name=name))
    return sources


def reads(node: NodeProto) -> Iterator[str]:
    """Yield the names a node reads, including what its subgraphs capture from outside; may repeat."""
    yield from filter(None, node.input)
    for graph in _subgraphs(node):
        yield from captured(graph)


def captured(graph: GraphProto) -> Iterator[str]:
    """Yield the names a subgraph reads from outside of it."""
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    own |= {tensor.values.name for tensor in graph.sparse_initializer}
    for node in graph.node:
        yield from (name for name in reads(node) if name not in own)
        own.update(node.output)
    yield from (value.name for value in graph.output if value.name not in own)


def without_data(tensor: TensorProto) -> TensorProto:
    """Return a tensor of the same type and shape that claims its bytes are elsewhere."""
    result = TensorProto(
        name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=TensorProto.EXTERNAL
    )
    result.external_data.add(key="location", value="elsewhere")
    return result


__all__ = ["Parts", "captured", "reads", "take_apart", "without_data"]
