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

import difflib
import gzip
import io
import math
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

import numpy as np

from onnxplace.cost_graph.data import CostGraph, TimedPlacement
from onnxplace.errors import Diagnostic, InputError, UsageError, format_value
from onnxplace.facts import Profile, Source
from onnxplace.graph.op_graph import Bools, Csr, Floats, Ints, Longs, OpGraph, number_densely
from onnxplace.plugins import blame_plugin, list_entries, load_plugin
from onnxplace.state import State
from onnxplace.target.limits import require_device_limit
from onnxplace.target.target import Device, Link, Target
from onnxplace.utils.files import format_path, parse_json, read_bytes, write_file

DEVICE_MODEL = "cost-graph"
GZIP = b"\x1f\x8b"
# Limit of a decompressed file, which has room for more than a million nodes.
MAX_FILE_BYTES = 1 << 28
# Sums of larger numbers of bytes would not fit into 64 bits.
MAX_COST = 10**18


def read_cost_graph(path: str | Path, graph_format: str | None = None, device_count: int | None = None) -> CostGraph:
    """Read a cost graph from a file of JSON or GraphML, gzipped or not.

    Args:
        path: The file.
        graph_format: "json", "graphml" or that of a plugin; by default from its ending, else JSON.
        device_count: Devices without memory, for a file of GraphML that names none.

    Raises:
        InputError: The file is no cost graph; the error names the file and the entry.

    >>> graph = read_cost_graph("graph.json")  # doctest: +SKIP
    """
    path = Path(path)
    kind, where = graph_format or find_graph_format(path), str(path)
    data = read_bytes(path, "D001")
    data = _decompress(data, where) if data.startswith(GZIP) else data
    if len(data) > MAX_FILE_BYTES:
        raise InputError("D001", f"it holds more than {MAX_FILE_BYTES} bytes", where=where, hint="make it smaller")
    name = path.name.partition(".")[0]
    if kind != "json":
        reader, entry = load_plugin("graph_formats", kind)
        with blame_plugin("graph_formats", entry):
            graph: CostGraph = reader().read(data, name, where, device_count)
            return graph
    if data.lstrip().startswith(b"<"):
        hint = "say what it is with --graph-format graphml, or let its name end so"
        raise InputError("D001", "not a cost graph: expected JSON, found XML", where=where, hint=hint)
    parsed = parse_json(data, "D001", "a cost graph", where)
    if not isinstance(parsed, dict):
        raise InputError("D001", f"not a cost graph: expected an object, got {type(parsed).__name__}", where=where)
    return parse_cost_graph(parsed, name)


def write_cost_graph(path: str | Path, graph: CostGraph | State, placement: TimedPlacement | None = None) -> None:
    """Write a cost graph, or a state with a Profile, as GraphML; `.gz` after `.graphml` compresses it.

    Plugins may add other formats, which names end in.

    `placement` is what `onnxplace.driver.place_cost_graph` returned: nodes get device, colour, start and finish.
    Raises InputError for names that XML cannot hold, UsageError for another ending or place.
    """
    path = Path(path)
    require_graph_format(path)
    writer, entry = load_plugin("graph_formats", find_graph_format(path))
    with blame_plugin("graph_formats", entry):
        data = writer().write(graph, placement, format_path(path))
    is_gzipped = path.name.lower().endswith(".gz")
    write_file(path, lambda file: file.write(gzip.compress(data, mtime=0) if is_gzipped else data))


def find_graph_format(path: Path) -> str:
    """Return the format for the ending of a name, by default JSON.

    >>> find_graph_format(Path("placed.GraphML.gz")), find_graph_format(Path("graph.json"))
    ('graphml', 'json')
    """
    ending = Path(path.name.lower().removesuffix(".gz")).suffix.removeprefix(".")
    return ending if ending not in ("", "json") and ending in list_entries("graph_formats") else "json"


def require_graph_format(path: Path) -> None:
    """Raise UsageError unless a name ends in .graphml or a format of a plugin, perhaps with .gz."""
    if find_graph_format(path) == "json":
        others = [name for name in list_entries("graph_formats") if name != "graphml"]
        further = f" or .{', .'.join(others)}" if others else ""
        hint = f"end it in .graphml (networkx, yEd, Gephi){further}; .gz after it compresses"
        message = f"expected a file of GraphML, got {format_value(path.name)}"
        raise UsageError("U032", message, where=format_path(path), hint=hint)


def _decompress(data: bytes, where: str) -> bytes:
    """Decompress gzip data, up to one byte over the limit; raise InputError if it is damaged."""
    try:
        return gzip.GzipFile(fileobj=io.BytesIO(data)).read(MAX_FILE_BYTES + 1)
    except (EOFError, OSError, zlib.error):
        hint = "copy or make it again"
        raise InputError("D001", "its gzip data is cut off or damaged", where=where, hint=hint) from None


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
    given_group = number_densely([None, *groups])[1:] - 1  # so that None, which comes first, is -1
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
                sizes_by_value.append({"name": f"{source}->{destination}", "bytes": tensor.get("bytes", 0)})
            value_of_read.append(index[key])
            readers.append(position[destination])
    sizes = np.rint(read_costs(sizes_by_value, "bytes", where)).astype(np.int64)
    value, reader = (np.array(numbers, dtype=np.int32) for numbers in (value_of_read, readers))
    return _EdgeValues(names, [producer for producer, _ in index], sizes, value, reader)


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
    weight_owners = np.flatnonzero(persistent > 0).astype(np.int32)
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
        weights=Csr.grouped(weight_owners, np.arange(len(weight_owners), dtype=np.int32), count),
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


def is_real(value: object) -> TypeGuard[float]:
    """Return whether a value is a number of Python or numpy, and no truth value."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def note_missing_costs(items: Sequence[tuple[Any, ...]], key: str, where: str) -> tuple[Diagnostic, ...]:
    """Return a note if nodes or edges lack a cost, which counts as zero."""
    incomplete = [item for item in items if key not in item[-1]]
    if not incomplete:
        return ()
    kind = "node" if len(incomplete[0]) == 2 else "edge"
    similar = difflib.get_close_matches(key, [str(name) for name in incomplete[0][-1]], n=1, cutoff=0.5)
    hint = f"it has {similar[0]!r}; call it {key}" if similar else f"give every {kind} {key}, 0 where there are none"
    label = describe_item(*incomplete[0][:-1])
    message = f"{len(incomplete)} of {len(items)} {kind}s have no {key}, such as {label}: that counts as zero"
    return (Diagnostic("C002", message, where=where, hint=hint),)


def describe_item(*item: Hashable) -> str:
    """Return the name of a node (by its id), an edge (by its ends) or the graph (neither) for messages."""
    if not item:
        return "the graph"
    return f"{'node' if len(item) == 1 else 'edge'} {' -> '.join(map(format_value, item))}"
