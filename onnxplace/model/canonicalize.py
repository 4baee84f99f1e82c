"""Put any ONNX model into one shape: functions inlined, constants lifted, names unique, nodes in order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    ValueInfoProto,
    defs,
    helper,
)
from onnx.inliner import inline_local_functions
from onnx.shape_inference import infer_shapes

from onnxplace.errors import MAX_LISTED, ModelError
from onnxplace.feeds import MAX_DIMENSION, MAX_RANK
from onnxplace.model.constants import constant, dense
from onnxplace.model.nested_graphs import (
    names_read,
    settled,
    tensors_of,
    texts_of_graph,
    texts_of_node,
    with_inner,
    with_unique_names,
)
from onnxplace.model.schemas import require_form
from onnxplace.model.tensors import check_tensor, unknown_element

MAX_NESTED_CALLS = 100
"""The inliner of onnx, and this module, follow calls by recursion."""


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
    _require_text(proto, where)
    if proto.functions:
        _require_no_recursion(proto, where)
        proto = _inline_functions(proto, where)
    graph = proto.graph
    if not graph.output:
        raise ModelError("M018", "the model has no outputs, so there is nothing to compute", where=where)
    for tensor in (*graph.initializer, *(tensor for node in graph.node for tensor in tensors_of(node))):
        check_tensor(tensor)
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    initializers |= {sparse.values.name: dense(sparse, where, folder) for sparse in graph.sparse_initializer}
    nodes = _lift_constants(graph.node, initializers, where, folder)
    require_form(with_inner(nodes), {entry.domain: entry.version for entry in _opsets(proto)}, where)
    made = _producers(nodes, initializers, graph, where)
    seen: set[str] = set()
    nodes = with_unique_names(nodes, seen)
    nodes = settled(nodes, initializers, folder, seen)
    fed = [v for v in graph.input if v.name not in made and not (v.name in initializers and proto.ir_version < 4)]
    inputs, outputs = ([_with_possible_shape(value, where) for value in values] for values in (fed, graph.output))
    nodes = _in_order(nodes, made, initializers, inputs, where)
    sources = _return_initializers(graph, nodes, initializers, {v.name for v in inputs}, made, where)
    return Parts(nodes, initializers, inputs, outputs, sources, _opsets(proto))


def _require_text(proto: ModelProto, where: str) -> None:
    """Raise ModelError if a name that we read is not text: protobuf hands those out as bytes."""
    bodies = ((f.node, (f.name, f.domain, *f.input, *f.output)) for f in proto.functions)
    for nodes, names in ((proto.graph.node, texts_of_graph(proto.graph)), *bodies):
        for text in (*names, *(text for node in nodes for text in texts_of_node(node))):
            if not isinstance(text, str):
                hint = "the file is damaged; copy or export it again"
                raise ModelError("M003", f"a name in it is not text: {text[:40]!r}", where=where, hint=hint)
    for entry in proto.opset_import:
        if not isinstance(entry.domain, str):
            raise ModelError("M003", f"the name of an opset is not text: {entry.domain[:40]!r}", where=where)


def _with_possible_shape(value: ValueInfoProto, where: str) -> ValueInfoProto:
    """Return an input or output without sizes of -1, by which some exporters mean unknown ones.

    Raises ModelError for other sizes that cannot be, a rank beyond what arrays have, and a type that ONNX has not.
    """
    dims = value.type.tensor_type.shape.dim
    place, hint = f"{where}, input or output {value.name!r}", "the model is damaged; export it again"
    if (number := unknown_element(value.type)) is not None:
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


def _require_no_recursion(proto: ModelProto, where: str) -> None:
    """Raise ModelError if a local function calls itself, directly or by way of others."""
    bodies = {(f.domain, f.name): f for f in proto.functions}
    done: set[tuple[str, str]] = set()

    def visit(key: tuple[str, str], path: tuple[tuple[str, str], ...]) -> None:
        if len(path) > MAX_NESTED_CALLS and key in bodies:
            message = f"its local functions call each other more than {MAX_NESTED_CALLS} deep"
            raise ModelError("M009", message, where=where, hint="export the model without functions")
        if key in path:
            calls = " -> ".join(f"{domain}.{name}" for domain, name in (*path[path.index(key) :], key))
            raise ModelError("M009", f"a local function calls itself: {calls}", where=where, hint="unroll it")
        if key in bodies and key not in done:
            for node in with_inner(bodies[key].node):
                visit((node.domain, node.op_type), (*path, key))
            done.add(key)

    for key in bodies:
        visit(key, ())


def _with_aligned_functions(proto: ModelProto) -> ModelProto:
    """Return the model with functions that import its own opsets, where their operators are the same in both."""
    versions = {entry.domain: entry.version for entry in _opsets(proto)}
    result = ModelProto()
    result.CopyFrom(proto)
    for function in result.functions:
        for entry in function.opset_import:
            domain = "" if entry.domain == "ai.onnx" else entry.domain
            operators = {n.op_type for n in with_inner(function.node) if n.domain in (domain, entry.domain)}
            new = versions.get(domain, entry.version)
            if all(_since(name, entry.version, domain) == _since(name, new, domain) for name in operators):
                entry.version = new
    return result


def _since(operator: str, version: int, domain: str) -> int:
    """Return the opset that brought the form an operator has in opset `version`; 0 if it is not known there."""
    try:
        return int(defs.get_schema(operator, version, domain).since_version)
    except (defs.SchemaError, TypeError):  # a version that is no 32-bit number is a TypeError
        return 0


def _inline_functions(proto: ModelProto, where: str) -> ModelProto:
    proto = _with_aligned_functions(proto)
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


def _opsets(proto: ModelProto) -> list[OperatorSetIdProto]:
    """Return one entry per domain, "ai.onnx" being the empty one."""
    versions: dict[str, int] = {}
    for entry in proto.opset_import:
        domain = "" if entry.domain == "ai.onnx" else entry.domain
        versions[domain] = max(entry.version, versions.get(domain, 0))
    return [helper.make_opsetid(domain, version) for domain, version in versions.items()]


def _lift_constants(
    nodes: Iterable[NodeProto], initializers: dict[str, TensorProto], where: str, folder: Path | None
) -> list[NodeProto]:
    """Turn Constant nodes into initializers; return the other nodes."""
    kept = []
    for node in nodes:
        one = len(node.attribute) == 1 and len(node.output) == 1 and node.output[0]
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and one:
            initializers[node.output[0]] = constant(node, where, folder)
        else:
            kept.append(node)
    return kept


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
        for name in set(names_read(node)):
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
    seen: dict[int, int] = {}
    while index not in seen:
        seen[index] = len(seen)
        index = next(made[name] for name in names_read(nodes[index]) if name in made and waiting[made[name]] > 0)
    order = list(seen)
    names = [nodes[i].name for i in (*reversed(order[seen[index] :]), order[-1])]
    if len(names) > MAX_LISTED + 1:
        names[MAX_LISTED:-1] = [f"... ({len(names) - 1 - MAX_LISTED} more)"]
    return " -> ".join(names)


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
    inner = (name for node in with_inner(nodes) for name in node.output)  # of subgraphs too: types go by name
    taken = {*made, *initializers, *inputs, *inner}
    names = {node.name for node in nodes}
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
        name = value
        while name in names:
            name += "_"
        names.add(name)
        nodes.append(helper.make_node("Identity", [output.name], [value], name=name))
    return sources


def without_data(tensor: TensorProto) -> TensorProto:
    """Return a tensor of the same type and shape that claims its bytes are elsewhere."""
    result = TensorProto(
        name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=TensorProto.EXTERNAL
    )
    result.external_data.add(key="location", value="elsewhere")
    return result
