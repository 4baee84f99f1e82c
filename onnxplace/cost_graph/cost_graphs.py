"""Cost graphs without ONNX: read from JSON or networkx, checked, and turned into facts that placers take.

    {"devices": [{"id": 0, "memory_bytes": 8000000000}, ...],
     "comm": {"coef_us_per_byte": 0.0001754, "intercept_us": 134},
     "nodes": [{"id": 0, "name": "...", "compute_time_us": 12, "memory_bytes": 0, "temp_bytes": 0, "output_bytes": 64,
                "group": "a", "is_backward": false, "topo_order": 0}, ...],
     "edges": [{"src": 0, "dst": 1, "bytes": 64, "tensor": "a:0"}, ...]}

`memory_bytes` of a node is persistent (weights), `temp_bytes` is needed while it runs. Edges with one source and one
`tensor` are one value; an edge may carry several in `tensors`. Outputs beyond what edges carry die with their node.
Only ids, and the ends of edges, must be there: a number that is missing is zero (docs/cost-graphs.md).
"""

from __future__ import annotations

import difflib
import math
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from onnxplace.cost_graph.data import CostGraph
from onnxplace.cost_graph.graph_attributes import attributed, describe, exact_profile
from onnxplace.cost_graph.graph_files import GraphFormat, format_of, read_graph, write_graph
from onnxplace.cost_graph.networkx_graphs import to_networkx
from onnxplace.errors import Diagnostic, InputError, format_value
from onnxplace.facts import Profile, Source
from onnxplace.graph import Bools, Csr, Floats, Ints, Longs, OpGraph
from onnxplace.state import State
from onnxplace.target import Device, Link, Target, require_device_limit
from onnxplace.utils import parse_json, read_bytes

if TYPE_CHECKING:
    import networkx

    from onnxplace.cost_graph.graph_xml import AttributedGraph
    from onnxplace.cost_graph.networkx_graphs import PlacedGraph

DEVICE_MODEL = "cost-graph"
GZIP = b"\x1f\x8b"
# Beyond this, sums of bytes leave 64 bits.
MOST = 10**18
# Of a file that is decompressed: more than a million nodes.
MAX_FILE_BYTES = 1 << 28


def read_cost_graph(
    path: str | Path, graph_format: GraphFormat | None = None, device_count: int | None = None
) -> CostGraph:
    """Read a cost graph from JSON, GraphML or GEXF, gzipped or not; raises InputError naming the file and the entry.

    `graph_format` defaults to what the file's ending says, or JSON. A file of GraphML or GEXF that names no devices
    gets `device_count` without memory.
    """
    path = Path(path)
    kind, where = graph_format or format_of(path), str(path)
    data = read_bytes(path, "D001")
    data = _decompress(data, where) if data.startswith(GZIP) else data
    if len(data) > MAX_FILE_BYTES:
        raise InputError("D001", f"it holds more than {MAX_FILE_BYTES} bytes", where=where, hint="make it smaller")
    name = path.name.partition(".")[0]
    if kind != "json":
        return _of_attributes(read_graph(data, kind, where), name, where, device_count=device_count)
    if data.lstrip().startswith(b"<"):
        hint = "say what it is with --graph-format graphml or gexf, or let its name end so"
        raise InputError("D001", "not a cost graph: expected JSON, found XML", where=where, hint=hint)
    parsed = parse_json(data, "D001", "a cost graph", where)
    if not isinstance(parsed, dict):
        raise InputError("D001", "not a cost graph: it holds no object", where=where)
    return parse_cost_graph(parsed, name)


def write_cost_graph(path: str | Path, graph: CostGraph | State, placed: PlacedGraph | None = None) -> None:
    """Write a cost graph, or a state with a Profile, as GraphML or GEXF, by the ending of the file's name.

    `placed` is what `onnxplace.driver.place_cost_graph` returned: nodes get their device, its colour, start and finish.
    Raises InputError for names that XML cannot hold, UsageError for another ending or place.
    """
    write_graph(Path(path), to_networkx(graph, placed))


def _decompress(data: bytes, where: str) -> bytes:
    """Return what gzip data holds, up to a byte more than a cost graph may have; raises InputError if it is damaged."""
    parts, size = [], 0
    try:
        while data and size <= MAX_FILE_BYTES:  # one file may be several, one after the other
            stream = zlib.decompressobj(wbits=31)  # the format of gzip
            parts.append(stream.decompress(data, MAX_FILE_BYTES + 1 - size))
            size += len(parts[-1])
            if not stream.eof and size <= MAX_FILE_BYTES:
                raise EOFError
            data = stream.unused_data.lstrip(b"\0")  # as tapes are filled up
    except (EOFError, zlib.error):
        hint = "copy or make it again"
        raise InputError("D001", "its gzip data is cut off or damaged", where=where, hint=hint) from None
    return b"".join(parts)


def parse_cost_graph(data: Mapping[str, Any], name: str = "graph") -> CostGraph:
    """Return the cost graph that `data` describes in the form of its JSON file.

    Raises InputError for duplicate ids, edges to nodes that are not there, costs that are negative or not numbers,
    cycles, and an empty list of devices.
    """
    where = str(data.get("name") or name)
    nodes = _list(data, "nodes", where)
    turns = [_number(node, "topo_order", where, index) for index, node in enumerate(nodes)]
    nodes = [nodes[index] for index in sorted(range(len(nodes)), key=turns.__getitem__)]
    ids = _ids([node.get("id") for node in nodes], "nodes", where)
    position = {node_id: index for index, node_id in enumerate(ids)}
    values = _values(_list(data, "edges", where, optional=True), position, where)
    graph = _op_graph(nodes, values, where)
    seconds = _numbers(nodes, "compute_time_us", where) * 1e-6
    groups = [node.get("group") for node in nodes]
    if (odd := next((group for group in groups if not isinstance(group, Hashable)), None)) is not None:
        raise InputError("D002", f"{odd!r} is no group", where=where, hint="a group is a number or a text")
    dense = {group: index for index, group in enumerate(dict.fromkeys(group for group in groups if group is not None))}
    given = np.array([-1 if group is None else dense[group] for group in groups], dtype=np.int32)
    backward = np.array([bool(node.get("is_backward")) for node in nodes], dtype=bool)
    try:
        _ = graph.order
    except ValueError as problem:
        raise InputError("D005", str(problem), where=where) from None
    return replace(assembled(where, ids, graph, seconds, data, given, backward), notes=_notes(nodes, where))


def _ids(ids: Sequence[Any], what: str, where: str) -> tuple[Hashable, ...]:
    """Return ids; raises InputError for one that is missing, that is a list or an object, or that is there twice."""
    seen: set[Hashable] = set()
    for node_id in ids:
        if node_id is None:
            raise InputError("D002", f"one of the {what} has no id", where=where, hint='give each its own "id"')
        if not isinstance(node_id, Hashable):
            raise InputError("D002", f"{node_id!r} is no id", where=where, hint="an id is a number or a text")
        if node_id in seen:
            raise InputError("D002", f"two {what} have the id {node_id!r}", where=where)
        seen.add(node_id)
    return tuple(ids)


def _notes(nodes: Sequence[Mapping[str, Any]], where: str) -> tuple[Diagnostic, ...]:
    """Return a note if nodes have no compute time, which counts as zero."""
    without = [node for node in nodes if "compute_time_us" not in node]
    if not without:
        return ()
    name = without[0].get("name", without[0].get("id"))
    close = difflib.get_close_matches("compute_time_us", [str(key) for key in without[0]], n=1)
    hint = f"it has {close[0]!r}; write" if close else "give every node"
    message = f"{len(without)} of {len(nodes)} nodes have no compute_time_us, such as {name!r}: that counts as zero"
    return (Diagnostic("D010", message, where=where, hint=f"{hint} compute_time_us, 0 where it takes no time"),)


def assembled(
    name: str,
    ids: Sequence[Hashable],
    graph: OpGraph,
    seconds: Floats,
    machine: Mapping[str, Any],
    given: Ints,
    backward: Bools,
) -> CostGraph:
    """Return the cost graph of these arrays, one entry per node, on the machine that `machine` describes.

    `machine` holds `devices` and `comm` as in the JSON file; `given` is the group of each node, -1 for none. Raises
    InputError for a machine that is none; the arrays are taken as they are.
    """
    target, device_ids, link = _target(machine, name)
    kind = target.devices[0].cost_class
    profile = Profile(
        graph,
        MappingProxyType({kind: seconds}),
        MappingProxyType({kind: np.full(len(graph), Source.GIVEN, dtype=np.uint8)}),
        np.arange(len(graph), dtype=np.int32),
        given=given,
        backward=backward,
    )
    return CostGraph(name, tuple(ids), device_ids, profile, target, link)


def _list(data: Mapping[str, Any], key: str, where: str, optional: bool = False) -> list[Mapping[str, Any]]:
    items = data.get(key, [] if optional else None)
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise InputError("D001", f"not a cost graph: it has no list of {key}", where=where)
    return items


def _numbers(entries: Sequence[Mapping[str, Any]], key: str, where: str) -> Floats:
    """Return a column of costs, zero where there is none; raises InputError as `_number` does, and for their sum."""
    numbers = np.array([_number(entry, key, where) for entry in entries], dtype=np.float64)
    if float(numbers.sum()) > MOST:
        message, hint = f"{key} add up to {numbers.sum():.3g}, which is no cost", f"at most {MOST:.0e}, all together"
        raise InputError("D004", message, where=where, hint=hint)
    return numbers


def _number(entry: Mapping[str, Any], key: str, where: str, missing: float = 0) -> float:
    """Return a number that an entry has; raises InputError naming it for what is negative, too large or no number."""
    value = entry.get(key, missing)
    if not _is_number(value) or not 0 <= value <= MOST:
        name = entry.get("name", entry.get("id", "?"))
        hint = f"a number from 0 to {MOST:.0e}"
        message = f"{key} of {format_value(name)} is {format_value(value)}, which is no cost"
        raise InputError("D004", message, where=where, hint=hint)
    return value


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


@dataclass(frozen=True)
class _Values:
    """The values that edges carry: producer and bytes each, and (value, reader) pairs."""

    names: list[str]
    producer: list[int]
    bytes: Longs
    value: Ints
    reader: Ints


def _values(edges: Sequence[Mapping[str, Any]], position: Mapping[Hashable, int], where: str) -> _Values:
    index: dict[tuple[int, Hashable], int] = {}
    names: list[str] = []
    producer: list[int] = []
    carried: list[Mapping[str, Any]] = []
    value: list[int] = []
    reader: list[int] = []
    for edge in edges:
        source, destination = edge.get("src"), edge.get("dst")
        for end in (source, destination):
            if not isinstance(end, Hashable) or end not in position:
                raise InputError("D003", f"an edge names node {end!r}, which is not there", where=where)
        for tensor in _tensors(edge, where):
            label = tensor["name"] if tensor.get("name") is not None else ("edge", destination)
            key = (position[source], label)
            if key not in index:
                index[key] = len(names)
                names.append(str(tensor.get("name") or f"{source}->{destination}"))
                producer.append(position[source])
                carried.append({"name": f"{source}->{destination}", "bytes": tensor.get("bytes", 0)})
            value.append(index[key])
            reader.append(position[destination])
    sizes = np.rint(_numbers(carried, "bytes", where)).astype(np.int64)
    return _Values(names, producer, sizes, np.array(value, dtype=np.int32), np.array(reader, dtype=np.int32))


def _tensors(edge: Mapping[str, Any], where: str) -> Sequence[Mapping[str, Any]]:
    """Return the values that an edge carries, each with `name` and `bytes`; raises InputError if they are none."""
    found = edge.get("tensors") or [{"name": edge.get("tensor"), "bytes": edge.get("bytes", 0)}]
    if not isinstance(found, list) or not all(
        isinstance(tensor, Mapping) and isinstance(tensor.get("name"), Hashable) for tensor in found
    ):
        hint = '"tensor" is a text, "tensors" a list like [{"name": "a:0", "bytes": 64}]'
        message = f"edge {edge.get('src')!r} -> {edge.get('dst')!r} does not say what it carries"
        raise InputError("D003", message, where=where, hint=hint)
    return found


def _op_graph(nodes: Sequence[Mapping[str, Any]], values: _Values, where: str) -> OpGraph:
    """Return the operator graph; what a node outputs beyond its edges is a value that nobody reads."""
    count = len(nodes)
    producer = np.array(values.producer, dtype=np.int32)
    output = _numbers(nodes, "output_bytes", where).astype(np.int64)
    carried = np.zeros(count, dtype=np.int64)
    np.add.at(carried, producer, values.bytes)
    rest = np.flatnonzero(output > carried).astype(np.int32)
    persistent = _numbers(nodes, "memory_bytes", where).astype(np.int64)
    owners = np.flatnonzero(persistent > 0)
    names = _unique([str(node.get("name", node.get("id"))) for node in nodes])
    return OpGraph(
        names=names,
        ops=tuple(str(node.get("op", "")) for node in nodes),
        value_names=_unique([*values.names, *[f"{names[n]}:unread" for n in rest]]),
        value_bytes=np.concatenate([values.bytes, output[rest] - carried[rest]]),
        producer=np.concatenate([producer, rest]),
        is_output=np.zeros(len(values.names) + len(rest), dtype=bool),
        alias=np.full(len(values.names) + len(rest), -1, dtype=np.int32),
        inputs=Csr.grouped(values.reader, values.value, count),
        weight_names=tuple(names[n] for n in owners),
        weight_bytes=persistent[owners],
        weights=Csr(
            np.concatenate([[0], np.cumsum(persistent > 0)]).astype(np.int64), np.arange(len(owners), dtype=np.int32)
        ),
        workspace_bytes=_numbers(nodes, "temp_bytes", where).astype(np.int64),
    )


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names with a number appended to those that repeat."""
    taken = set(names)
    if len(taken) == len(names):
        return tuple(names)
    seen: set[str] = set()
    result = []
    for name in names:
        candidate, number = name, 1
        while candidate in seen or (candidate != name and candidate in taken):
            candidate, number = f"{name}#{number}", number + 1
        seen.add(candidate)
        result.append(candidate)
    return tuple(result)


def _target(data: Mapping[str, Any], where: str) -> tuple[Target, tuple[Hashable, ...], Link]:
    entries = _list(data, "devices", where)
    if not entries:
        raise InputError(
            "D006", "the list of devices is empty", where=where, hint="name at least one, or give --devices N"
        )
    require_device_limit(len(entries), where)
    memory = [_number(entry, "memory_bytes", where) for entry in entries]
    ids = _ids([entry.get("id", index) for index, entry in enumerate(entries)], "devices", where)
    comm = data.get("comm", {})
    if not isinstance(comm, Mapping):
        hint = 'write it like {"coef_us_per_byte": 0.0002, "intercept_us": 100}'
        raise InputError("D001", "not a cost graph: its comm is no object", where=where, hint=hint)
    coefficient, intercept = (float(_numbers([comm], key, where)[0]) for key in ("coef_us_per_byte", "intercept_us"))
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
    breaks ties. What `to_networkx` made of a cost graph becomes the same one.

    Raises:
        InputError: the graph is undirected, has a cycle or no devices, or an attribute cannot be.

    >>> import networkx
    >>> digraph = networkx.DiGraph(devices=[{"id": "a", "memory_bytes": 100}, {"id": "b", "memory_bytes": 100}])
    >>> digraph.add_node("x", seconds=0.5, weights_bytes=8)
    >>> graph = from_networkx(digraph)
    >>> graph.ids, graph.device_ids
    (('x',), ('a', 'b'))
    """
    return _of_attributes(attributed(graph), "networkx graph", "networkx graph", target)


def _of_attributes(
    graph: AttributedGraph, name: str, where: str, target: Target | None = None, device_count: int | None = None
) -> CostGraph:
    """Return the cost graph of a graph with attributes; times and links are those given, to the last bit."""
    description = describe(graph, where, len(target.devices) if target else device_count)
    made = parse_cost_graph(description.document, name)
    link, device_ids = made.link, made.device_ids
    if target is None:
        link = replace(link, latency_seconds=description.latency_seconds, bytes_per_second=description.bytes_per_second)
        links = tuple(replace(link, source=pair.source, destination=pair.destination) for pair in made.target.links)
        target = replace(made.target, links=links)
    else:
        device_ids = tuple(device.id for device in target.devices)
    profile = exact_profile(made.profile, description, target)
    return replace(made, profile=profile, target=target, device_ids=device_ids, link=link, notes=description.notes)
