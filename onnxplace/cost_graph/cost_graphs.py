"""Read and check cost graphs without ONNX, and turn them into the facts that placers need.

    {"devices": [{"id": 0, "memory_bytes": 8000000000}, ...],
     "comm": {"coef_us_per_byte": 0.0001754, "intercept_us": 134},
     "nodes": [{"id": 0, "name": "...", "compute_time_us": 12, "memory_bytes": 0, "temp_bytes": 0, "output_bytes": 64,
                "group": "a", "is_backward": false, "topo_order": 0}, ...],
     "edges": [{"src": 0, "dst": 1, "bytes": 64, "tensor": "a:0"}, ...]}

`memory_bytes` of a node is persistent (weights), `temp_bytes` is needed while it runs. Edges with one source and one
`tensor` are one value; an edge may carry several in `tensors`. Outputs that no edge carries die with their node. Only
ids and the ends of edges are required: a missing number is zero (docs/cost-graphs.md).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxplace.cost_graph.data import CostGraph
from onnxplace.cost_graph.graph_attributes import describe, exact_profile, is_real, note_missing_costs, read_attributes
from onnxplace.cost_graph.networkx_graphs import GraphFormat, format_of, read_graph, to_networkx, write_graph
from onnxplace.errors import InputError, format_value
from onnxplace.facts import Profile, Source
from onnxplace.graph import Bools, Csr, Floats, Ints, Longs, OpGraph
from onnxplace.state import State
from onnxplace.target import Device, Link, Target, require_device_limit
from onnxplace.utils import parse_json, read_bytes

if TYPE_CHECKING:
    import networkx

    from onnxplace.cost_graph.graphml import AttributedGraph
    from onnxplace.cost_graph.networkx_graphs import TimedPlacement

DEVICE_MODEL = "cost-graph"
GZIP = b"\x1f\x8b"
# Limit of a decompressed file, which has room for more than a million nodes.
MAX_FILE_BYTES = 1 << 28
# Sums of larger numbers of bytes would not fit into 64 bits.
MAX_COST = 10**18


def read_cost_graph(
    path: str | Path, graph_format: GraphFormat | None = None, device_count: int | None = None
) -> CostGraph:
    """Read a cost graph from a file of JSON or GraphML, gzipped or not.

    Args:
        path: The file.
        graph_format: Of the file; by default from its ending, else JSON.
        device_count: Devices without memory, for a file of GraphML that names none.

    Raises:
        InputError: The file is no cost graph; the error names the file and the entry.

    >>> graph = read_cost_graph("graph.json")  # doctest: +SKIP
    """
    path = Path(path)
    kind, where = graph_format or format_of(path), str(path)
    data = read_bytes(path, "D001")
    data = _decompress(data, where) if data.startswith(GZIP) else data
    if len(data) > MAX_FILE_BYTES:
        raise InputError("D001", f"it holds more than {MAX_FILE_BYTES} bytes", where=where, hint="make it smaller")
    name = path.name.partition(".")[0]
    if kind != "json":
        return _convert_attributed_graph(read_graph(data, where), name, where, device_count=device_count)
    if data.lstrip().startswith(b"<"):
        hint = "say what it is with --graph-format graphml, or let its name end so"
        raise InputError("D001", "not a cost graph: expected JSON, found XML", where=where, hint=hint)
    parsed = parse_json(data, "D001", "a cost graph", where)
    if not isinstance(parsed, dict):
        raise InputError("D001", f"not a cost graph: expected an object, got {type(parsed).__name__}", where=where)
    return parse_cost_graph(parsed, name)


def write_cost_graph(path: str | Path, graph: CostGraph | State, placement: TimedPlacement | None = None) -> None:
    """Write a cost graph, or a state with a Profile, as GraphML; `.gz` after `.graphml` compresses it.

    `placement` is what `onnxplace.driver.place_cost_graph` returned: nodes get device, colour, start and finish.
    Raises InputError for names that XML cannot hold, UsageError for another ending or place.
    """
    write_graph(Path(path), to_networkx(graph, placement))


def _decompress(data: bytes, where: str) -> bytes:
    """Decompress gzip data, up to one byte over the limit; raise InputError if it is damaged."""
    parts, size = [], 0
    try:
        while data and size <= MAX_FILE_BYTES:  # a gzip file may have several members
            stream = zlib.decompressobj(wbits=31)  # the format of gzip
            parts.append(stream.decompress(data, MAX_FILE_BYTES + 1 - size))
            size += len(parts[-1])
            if not stream.eof and size <= MAX_FILE_BYTES:
                raise EOFError
            data = stream.unused_data.lstrip(b"\0")  # tapes are padded with zeros
    except (EOFError, zlib.error):
        hint = "copy or make it again"
        raise InputError("D001", "its gzip data is cut off or damaged", where=where, hint=hint) from None
    return b"".join(parts)


def parse_cost_graph(data: Mapping[str, Any], name: str = "graph") -> CostGraph:
    """Build the cost graph that `data` describes in the form of a JSON file.

    Raises:
        InputError: An id is missing or not unique, an edge names no node, a cost is not a number from 0, the graph has
            a cycle, or the list of devices is empty.

    >>> nodes = [{"id": "a", "compute_time_us": 5}, {"id": "b", "compute_time_us": 5}]
    >>> edges = [{"src": "a", "dst": "b", "bytes": 64}]
    >>> parse_cost_graph({"nodes": nodes, "edges": edges, "devices": [{"id": 0}]}).ids
    ('a', 'b')
    """
    where = str(data.get("name") or name)
    nodes = require_list(data, "nodes", where)
    topo_orders = [read_cost(node, "topo_order", where, index) for index, node in enumerate(nodes)]
    nodes = [nodes[index] for index in sorted(range(len(nodes)), key=topo_orders.__getitem__)]
    ids = require_ids([node.get("id") for node in nodes], "nodes", where)
    position = {node_id: index for index, node_id in enumerate(ids)}
    values = _collect_values(require_list(data, "edges", where, optional=True), position, where)
    graph = _build_op_graph(nodes, values, where)
    seconds = read_costs(nodes, "compute_time_us", where) * 1e-6
    groups = [node.get("group") for node in nodes]
    if (invalid := next((group for group in groups if not isinstance(group, Hashable)), None)) is not None:
        message = f"expected a group that is a number or a text, got {invalid!r}"
        raise InputError("D002", message, where=where, hint="change the group, or leave it out")
    distinct = dict.fromkeys(group for group in groups if group is not None)
    group_index = {group: index for index, group in enumerate(distinct)}
    given_group = np.array([-1 if group is None else group_index[group] for group in groups], dtype=np.int32)
    backward = np.array([bool(node.get("is_backward")) for node in nodes], dtype=bool)
    try:
        _ = graph.order
    except ValueError as error:
        raise InputError("D002", str(error), where=where) from None
    labelled = [(node.get("name", node.get("id")), node) for node in nodes]
    notes = note_missing_costs(labelled, "compute_time_us", where)
    return replace(assemble_cost_graph(where, ids, graph, seconds, data, given_group, backward), notes=notes)


def assemble_cost_graph(
    name: str,
    ids: Sequence[Hashable],
    graph: OpGraph,
    seconds: Floats,
    machine: Mapping[str, Any],
    given: Ints,
    backward: Bools,
) -> CostGraph:
    """Assemble a cost graph from arrays with one entry per node; the arrays are not checked.

    Args:
        name: Of the graph.
        ids: Of the nodes.
        graph: The operator graph.
        seconds: Per node, on any device.
        machine: `devices` and `comm` as in the JSON file.
        given: Group of each node, -1 for none.
        backward: Whether each node belongs to the backward pass.

    Raises:
        InputError: `machine` does not describe a machine.
    """
    target, device_ids, link = _build_target(machine, name)
    kind = target.devices[0].cost_class
    profile = Profile(
        graph,
        MappingProxyType({kind: seconds}),
        MappingProxyType({kind: np.full(len(graph), Source.GIVEN, dtype=np.uint8)}),
        np.arange(len(graph), dtype=np.int32),
        user_groups=given,
        backward=backward,
    )
    return CostGraph(name, tuple(ids), device_ids, profile, target, link)


@dataclass(frozen=True)
class _EdgeValues:
    """The values that edges carry: producer and bytes of each, and (value, reader) pairs."""

    names: list[str]
    producer: list[int]
    bytes: Longs
    value: Ints
    reader: Ints


def _collect_values(edges: Sequence[Mapping[str, Any]], position: Mapping[Hashable, int], where: str) -> _EdgeValues:
    index: dict[tuple[int, Hashable], int] = {}
    names: list[str] = []
    producer: list[int] = []
    sizes_by_value: list[Mapping[str, Any]] = []
    value_of_read: list[int] = []
    readers: list[int] = []
    for edge in edges:
        source, destination = edge.get("src"), edge.get("dst")
        for end in (source, destination):
            if not isinstance(end, Hashable) or end not in position:
                raise InputError("D002", f"an edge names node {end!r}, expected the id of a node", where=where)
        for tensor in _list_tensors(edge, where):
            label = tensor["name"] if tensor.get("name") is not None else ("edge", destination)
            key = (position[source], label)
            if key not in index:
                index[key] = len(names)
                names.append(str(tensor.get("name") or f"{source}->{destination}"))
                producer.append(position[source])
                sizes_by_value.append({"name": f"{source}->{destination}", "bytes": tensor.get("bytes", 0)})
            value_of_read.append(index[key])
            readers.append(position[destination])
    sizes = np.rint(read_costs(sizes_by_value, "bytes", where)).astype(np.int64)
    value, reader = (np.array(numbers, dtype=np.int32) for numbers in (value_of_read, readers))
    return _EdgeValues(names, producer, sizes, value, reader)


def _list_tensors(edge: Mapping[str, Any], where: str) -> Sequence[Mapping[str, Any]]:
    """Return the values that an edge carries, each with `name` and `bytes`; raise InputError for others."""
    tensors = edge.get("tensors") or [{"name": edge.get("tensor"), "bytes": edge.get("bytes", 0)}]
    if not isinstance(tensors, list) or not all(
        isinstance(tensor, Mapping) and isinstance(tensor.get("name"), Hashable) for tensor in tensors
    ):
        hint = '"tensor" is a text, "tensors" a list like [{"name": "a:0", "bytes": 64}]'
        message = f"edge {edge.get('src')!r} -> {edge.get('dst')!r} does not say what it carries"
        raise InputError("D002", message, where=where, hint=hint)
    return tensors


def _build_op_graph(nodes: Sequence[Mapping[str, Any]], values: _EdgeValues, where: str) -> OpGraph:
    """Build the operator graph; outputs that no edge carries become a value without readers."""
    count = len(nodes)
    producer = np.array(values.producer, dtype=np.int32)
    output = read_costs(nodes, "output_bytes", where).astype(np.int64)
    carried = np.zeros(count, dtype=np.int64)
    np.add.at(carried, producer, values.bytes)
    unread = np.flatnonzero(output > carried).astype(np.int32)
    persistent = read_costs(nodes, "memory_bytes", where).astype(np.int64)
    weight_owners = np.flatnonzero(persistent > 0)
    names = _number_repeated_names([str(node.get("name", node.get("id"))) for node in nodes])
    return OpGraph(
        names=names,
        ops=tuple(str(node.get("op", "")) for node in nodes),
        value_names=_number_repeated_names([*values.names, *[f"{names[n]}:unread" for n in unread]]),
        value_bytes=np.concatenate([values.bytes, output[unread] - carried[unread]]),
        producer=np.concatenate([producer, unread]),
        is_output=np.zeros(len(values.names) + len(unread), dtype=bool),
        alias=np.full(len(values.names) + len(unread), -1, dtype=np.int32),
        inputs=Csr.grouped(values.reader, values.value, count),
        weight_names=tuple(names[n] for n in weight_owners),
        weight_bytes=persistent[weight_owners],
        weights=Csr(
            np.concatenate([[0], np.cumsum(persistent > 0)]).astype(np.int64),
            np.arange(len(weight_owners), dtype=np.int32),
        ),
        workspace_bytes=read_costs(nodes, "temp_bytes", where).astype(np.int64),
    )


def _number_repeated_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, with a number appended to repeated ones."""
    given_names = set(names)
    if len(given_names) == len(names):
        return tuple(names)
    used: set[str] = set()
    result = []
    for name in names:
        candidate, number = name, 1
        while candidate in used or (candidate != name and candidate in given_names):
            candidate, number = f"{name}#{number}", number + 1
        used.add(candidate)
        result.append(candidate)
    return tuple(result)


def _build_target(data: Mapping[str, Any], where: str) -> tuple[Target, tuple[Hashable, ...], Link]:
    entries = require_list(data, "devices", where)
    if not entries:
        hint = "name at least one, or give --devices N"
        raise InputError("D002", "the list of devices is empty", where=where, hint=hint)
    require_device_limit(len(entries), where)
    memory = [read_cost(entry, "memory_bytes", where) for entry in entries]
    ids = require_ids([entry.get("id", index) for index, entry in enumerate(entries)], "devices", where)
    comm = data.get("comm", {})
    if not isinstance(comm, Mapping):
        hint = 'write it like {"coef_us_per_byte": 0.0002, "intercept_us": 100}'
        message = f"not a cost graph: expected comm to be an object, got {format_value(comm)}"
        raise InputError("D001", message, where=where, hint=hint)
    coefficient, intercept = (float(read_costs([comm], key, where)[0]) for key in ("coef_us_per_byte", "intercept_us"))
    devices = tuple(
        Device(f"cuda:{index}", int(size), model=DEVICE_MODEL, segment_seconds=0.0) for index, size in enumerate(memory)
    )
    link = Link("", "", intercept * 1e-6, 1e6 / coefficient if coefficient > 0 else math.inf)
    links = tuple(replace(link, source=a.id, destination=b.id) for a in devices for b in devices if a is not b)
    return Target(devices, links), ids, link


def from_networkx(graph: networkx.DiGraph[Any], target: Target | None = None) -> CostGraph:
    """Return the cost graph of a networkx digraph: on `target`, or on the devices that its attributes name.

    Nodes have `seconds`, and optionally `weights_bytes`, `workspace_bytes`, `output_bytes`, `group`, `backward`; edges
    have `bytes`, and optionally `tensor` (edges from one node with one tensor carry the same value). The order of nodes
    breaks ties. A digraph from `to_networkx` becomes the same cost graph again.

    Raises:
        InputError: The graph is undirected, has a cycle or no devices, or an attribute is invalid.

    >>> import networkx
    >>> digraph = networkx.DiGraph(devices=[{"id": "a", "memory_bytes": 100}, {"id": "b", "memory_bytes": 100}])
    >>> digraph.add_node("x", seconds=0.5, weights_bytes=8)
    >>> graph = from_networkx(digraph)
    >>> graph.ids, graph.device_ids
    (('x',), ('a', 'b'))
    """
    return _convert_attributed_graph(read_attributes(graph), "networkx graph", "networkx graph", target)


def _convert_attributed_graph(
    graph: AttributedGraph, name: str, where: str, target: Target | None = None, device_count: int | None = None
) -> CostGraph:
    """Convert a graph with attributes to a cost graph; times and links stay exact to the last bit."""
    description = describe(graph, where, len(target.devices) if target else device_count)
    cost_graph = parse_cost_graph(description.document, name)
    link, device_ids = cost_graph.link, cost_graph.device_ids
    if target is None:
        link = replace(link, latency_seconds=description.latency_seconds, bytes_per_second=description.bytes_per_second)
        target = cost_graph.target
        links = tuple(replace(link, source=pair.source, destination=pair.destination) for pair in target.links)
        target = replace(target, links=links)
    else:
        device_ids = tuple(device.id for device in target.devices)
    profile = exact_profile(cost_graph.profile, description, target)
    return replace(
        cost_graph, profile=profile, target=target, device_ids=device_ids, link=link, notes=description.notes
    )


# Read and check entries of a JSON cost graph: lists, ids and costs.


def require_ids(ids: Sequence[Any], kind: str, where: str) -> tuple[Hashable, ...]:
    """Return ids; raise InputError for one that is missing, a list or an object, or not unique."""
    seen: set[Hashable] = set()
    for node_id in ids:
        if node_id is None:
            raise InputError("D002", f"one of the {kind} has no id", where=where, hint='give each its own "id"')
        if not isinstance(node_id, Hashable):
            message = f"expected an id that is a number or a text, got {node_id!r}"
            raise InputError("D002", message, where=where, hint="change the id, and the edges that name it")
        if node_id in seen:
            raise InputError("D002", f"two {kind} have the id {node_id!r}", where=where)
        seen.add(node_id)
    return tuple(ids)


def require_list(data: Mapping[str, Any], key: str, where: str, optional: bool = False) -> list[Mapping[str, Any]]:
    """Return a list of entries; raise InputError unless all of them are objects."""
    items = data.get(key, [] if optional else None)
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise InputError("D001", f"not a cost graph: it has no list of {key}", where=where)
    return items


def read_costs(entries: Sequence[Mapping[str, Any]], key: str, where: str) -> Floats:
    """Return one cost of all entries, zero where it is missing; raise InputError if their sum is too large."""
    numbers = np.array([read_cost(entry, key, where) for entry in entries], dtype=np.float64)
    if float(numbers.sum()) > MAX_COST:
        message = f"{key} add up to {numbers.sum():.3g}, expected at most {MAX_COST:.0e}"
        raise InputError("D002", message, where=where, hint="correct the unit of the numbers")
    return numbers


def read_cost(entry: Mapping[str, Any], key: str, where: str, missing: float = 0) -> float:
    """Return one cost of an entry; raise InputError unless it is a number from 0 to the limit."""
    value = entry.get(key, missing)
    if not is_real(value) or not 0 <= value <= MAX_COST:
        name = entry.get("name", entry.get("id", "?"))
        hint = "correct the number, or leave it out for zero"
        message = f"{key} of {format_value(name)} is {format_value(value)}, expected a number from 0 to {MAX_COST:.0e}"
        raise InputError("D002", message, where=where, hint=hint)
    return value
