"""Graphs with attributes, of networkx or of a file, checked and converted to cost graphs."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from onnxplace.cost_graph.cost_graphs import describe_item, is_real, note_missing_costs, parse_cost_graph
from onnxplace.cost_graph.data import CostGraph
from onnxplace.errors import Diagnostic, InputError, format_value
from onnxplace.facts import REFUSED_SECONDS, Profile, Source
from onnxplace.graph.op_graph import Csr, Floats, OpGraph
from onnxplace.target.target import Target
from onnxplace.utils.files import parse_json

NODE_NUMBERS = ("weights_bytes", "workspace_bytes", "output_bytes", "topo_order")
KNOWN = frozenset({
    *("name", "label", "op", "seconds", *NODE_NUMBERS, "weights", "group", "backward", "id_type"),
    *("bytes", "tensor", "order"),
    *("devices", "latency_seconds", "bytes_per_second"),
})  # fmt: skip
# As in JSON, where times are in microseconds.
MAX_SECONDS, MAX_NUMBER = 1e12, 10**18
MIN_BYTES_PER_SECOND = 1e-12


@dataclass(frozen=True)
class AttributedGraph:
    """A directed graph with attributes, as networkx or a file has it."""

    nodes: Sequence[tuple[Hashable, Mapping[str, Any]]]
    edges: Sequence[tuple[Hashable, Hashable, Mapping[str, Any]]]
    attributes: Mapping[str, Any]
    """The attributes of the graph as a whole."""


@dataclass(frozen=True)
class GraphDescription:
    """A graph with attributes as a JSON cost graph, with the data that JSON cannot hold."""

    document: dict[str, Any]
    """Without times."""
    seconds: Floats
    class_seconds: Mapping[str, Floats]
    """Cost class -> seconds per node, where nodes give them."""
    weights: Sequence[Mapping[str, int] | None]
    """Per node, bytes by name; None if it has only its own weights."""
    latency_seconds: float
    bytes_per_second: float
    notes: tuple[Diagnostic, ...]


def convert_attributed_graph(
    graph: AttributedGraph, name: str, where: str, target: Target | None = None, device_count: int | None = None
) -> CostGraph:
    """Convert a graph with attributes to a cost graph; times and links stay exact to the last bit."""
    description = describe_graph(graph, where, len(target.devices) if target else device_count)
    cost_graph = parse_cost_graph(description.document, name)
    link, device_ids = cost_graph.link, cost_graph.device_ids
    if target is None:
        link = replace(link, latency_seconds=description.latency_seconds, bytes_per_second=description.bytes_per_second)
        target = cost_graph.target
        links = tuple(replace(link, source=pair.source, destination=pair.destination) for pair in target.links)
        target = replace(target, links=links)
    else:
        device_ids = tuple(device.id for device in target.devices)
    profile = restore_exact_costs(cost_graph.profile, description, target)
    return replace(
        cost_graph, profile=profile, target=target, device_ids=device_ids, link=link, notes=description.notes
    )


def describe_graph(graph: AttributedGraph, where: str, device_count: int | None = None) -> GraphDescription:
    """Describe the cost graph that a graph with attributes stands for.

    `device_count` is the number of devices without memory, for a graph that names none.

    Raises:
        InputError: An attribute is invalid, or there are no devices.
    """
    nodes = sorted(graph.nodes, key=lambda node: _read_number(node[1], "topo_order", where, node[0]))
    edges = sorted(graph.edges, key=lambda edge: _read_number(edge[2], "order", where, *edge[:2]))
    seconds = np.array([_read_number(data, "seconds", where, node) for node, data in nodes], dtype=float)
    if float(seconds.sum()) > MAX_SECONDS:
        message = f"seconds add up to {seconds.sum():.3g}, expected at most {MAX_SECONDS:.0e}"
        raise InputError("D002", message, where=where)
    weights = [_read_weights(data, where, node) for node, data in nodes]
    _require_same_sizes(weights, where)
    document = {
        "name": str(graph.attributes.get("name") or ""),
        "nodes": [_convert_node(node, data, table, where) for (node, data), table in zip(nodes, weights)],
        "edges": [_convert_edge(*edge, where=where) for edge in edges],
        "devices": _read_devices(graph.attributes, where, device_count),
    }
    return GraphDescription(
        document=document,
        seconds=seconds,
        latency_seconds=float(_read_number(graph.attributes, "latency_seconds", where)),
        class_seconds=_read_class_seconds(nodes, seconds, where),
        weights=weights,
        bytes_per_second=_read_bandwidth(graph.attributes, where),
        notes=(*note_missing_costs(nodes, "seconds", where), *note_missing_costs(edges, "bytes", where)),
    )


def restore_exact_costs(profile: Profile, description: GraphDescription, target: Target) -> Profile:
    """Return the profile of a description's document with the times, and the shared weights, that it left out."""
    classes = dict.fromkeys(device.cost_class for device in target.devices)
    seconds = {kind: description.class_seconds.get(kind, description.seconds) for kind in classes}
    given = np.full(len(profile.graph), Source.GIVEN, dtype=np.uint8)
    return replace(
        profile,
        graph=_share_weights(profile.graph, description.weights),
        seconds=MappingProxyType(seconds),
        sources=MappingProxyType(dict.fromkeys(classes, given)),
    )


def _share_weights(graph: OpGraph, tables: Sequence[Mapping[str, int] | None]) -> OpGraph:
    """Return the graph with weights by name, so that nodes may read the same; a node without a table keeps its own."""
    if not any(tables):
        return graph
    index: dict[Hashable, int] = {}
    names: list[str] = []
    sizes: list[int] = []
    lists: list[list[int]] = []
    for node, table in enumerate(tables):
        own = {("own", graph.weight_names[w]): int(graph.weight_bytes[w]) for w in graph.weights[node].tolist()}
        entries: Mapping[Any, int] = own if table is None else table
        for key, size in entries.items():
            if key not in index:
                index[key] = len(names)
                names.append(key if isinstance(key, str) else key[1])
                sizes.append(size)
        lists.append([index[key] for key in entries])
    return replace(
        graph, weight_names=tuple(names), weight_bytes=np.array(sizes, dtype=np.int64), weights=Csr.of(lists)
    )


def _convert_node(
    node: Hashable, data: Mapping[str, Any], weights: Mapping[str, int] | None, where: str
) -> dict[str, Any]:
    """Return a node as in a JSON cost graph; raise InputError for invalid attributes."""
    persistent, temporary, output = (_read_number(data, key, where, node) for key in NODE_NUMBERS[:3])
    if weights is not None:
        total = sum(weights.values())
        if persistent != total and "weights_bytes" in data:
            found = f"weights_bytes of {describe_item(node)} is {format_value(persistent)}"
            message = f"{found}, expected {total}, as its weights add up to"
            raise InputError("D002", message, where=where, hint="correct one of them, or leave weights_bytes out")
        persistent = total
    backward = data.get("backward", False)
    if not isinstance(backward, (bool, np.bool_)) and (isinstance(backward, str) or backward not in (0, 1)):
        message = f"backward of {describe_item(node)} is {format_value(backward)}, expected true or false"
        raise InputError("D002", message, where=where)
    name = next((data[key] for key in ("name", "label") if data.get(key) is not None), node)
    return {
        "id": node,
        "name": str(name),
        "op": str(data.get("op") or ""),
        "compute_time_us": 0,
        "memory_bytes": persistent,
        "temp_bytes": temporary,
        "output_bytes": output,
        # Tables of Gephi have an empty text for a missing entry.
        "group": None if _is_empty(data.get("group")) else data["group"],
        "is_backward": bool(backward),
    }


def _convert_edge(source: Hashable, destination: Hashable, data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return an edge as in a JSON cost graph."""
    size = _read_number(data, "bytes", where, source, destination)
    tensor = None if _is_empty(data.get("tensor")) else data["tensor"]
    return {"src": source, "dst": destination, "bytes": size, "tensor": tensor}


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value)


def _read_number(data: Mapping[str, Any], key: str, where: str, *item: Hashable) -> float:
    """Return a number of a node, an edge or the graph, 0 if it is missing; raise InputError naming it."""
    value = data.get(key, 0)
    max_value = MAX_SECONDS if key.partition(":")[0].endswith("seconds") else MAX_NUMBER
    if not is_real(value) or not 0 <= value <= max_value:
        message = (
            f"{key} of {describe_item(*item)} is {format_value(value)}, expected a number from 0 to {max_value:.0e}"
        )
        hint = f"declare {key} as a number (double or long), not as a text" if isinstance(value, str) else ""
        raise InputError("D002", message, where=where, hint=hint)
    return value


def _read_bandwidth(attributes: Mapping[str, Any], where: str) -> float:
    """Return the bandwidth of a link in bytes per second, by default infinity."""
    value = attributes.get("bytes_per_second", math.inf)
    if not is_real(value) or not (value == math.inf or MIN_BYTES_PER_SECOND <= value <= sys.float_info.max):
        message = f"bytes_per_second of the graph is {format_value(value)}, expected a number above 0"
        raise InputError("D002", message, where=where, hint="leave it out if transfers take no time per byte")
    return float(value)


def _read_devices(attributes: Mapping[str, Any], where: str, device_count: int | None) -> list[dict[str, Any]]:
    """Return the devices as in a JSON cost graph; raise InputError if there are none."""
    example = '[{"id": 0, "memory_bytes": 8000000000}]'
    devices = attributes.get("devices")
    if isinstance(devices, str):
        devices = parse_json(devices, "D002", f"a list of devices such as {example}", where)
    if devices is None and device_count is not None:
        return [{"id": index, "memory_bytes": 0} for index in range(device_count)]
    if not devices:
        hint = f"give --devices N and --max-memory SIZE, or the graph an attribute devices such as {example}"
        raise InputError("D002", "expected a graph that names devices, found none", where=where, hint=hint)
    if not isinstance(devices, (list, tuple)) or not all(isinstance(device, Mapping) for device in devices):
        message = f"the graph's devices are {format_value(devices)}, expected a list such as {example}"
        raise InputError("D002", message, where=where)
    return [{key: device[key] for key in ("id", "memory_bytes") if key in device} for device in devices]


def _read_weights(data: Mapping[str, Any], where: str, node: Hashable) -> dict[str, int] | None:
    """Return the weights of a node by name, None if they have no names; raise InputError for others."""
    table = data.get("weights")
    if _is_empty(table):
        return None
    if isinstance(table, str):
        table = parse_json(table, "D002", f"the weights of {describe_item(node)}, by name", where)
    if not isinstance(table, Mapping) or not all(_is_valid_size(key, size) for key, size in table.items()):
        message = f"weights of {describe_item(node)} are {format_value(table)}, expected bytes by name"
        raise InputError("D002", message, where=where, hint='write them like {"kernel": 4096}')
    return {name: int(size) for name, size in table.items()}


def _is_valid_size(name: object, size: object) -> bool:
    is_integer = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
    return isinstance(name, str) and is_integer and 0 <= size <= MAX_NUMBER  # type: ignore[operator]


def _require_same_sizes(tables: Sequence[Mapping[str, int] | None], where: str) -> None:
    """Raise InputError if one weight has two sizes."""
    sizes: dict[str, int] = {}
    for table in tables:
        for name, size in (table or {}).items():
            if sizes.setdefault(name, size) != size:
                message = f"weight {format_value(name)} has {size} bytes at one node and {sizes[name]} at another"
                raise InputError("D002", message, where=where, hint="give it one size, or two names")


def _read_class_seconds(
    nodes: Sequence[tuple[Hashable, Mapping[str, Any]]], seconds: Floats, where: str
) -> dict[str, Floats]:
    """Return the times that nodes give for classes of devices, `seconds:cpu/1`; others take `seconds` there.

    Infinity says that the class refuses the node.
    """
    keys = dict.fromkeys(key for _, data in nodes for key in data if str(key).startswith("seconds:"))
    classes = {}
    for key in keys:
        refused = np.array([data.get(key) == math.inf for _, data in nodes])
        column = [
            math.nan if key not in data else _read_number({} if is_refused else data, key, where, node)
            for is_refused, (node, data) in zip(refused, nodes)
        ]
        times = np.where(np.isnan(column), seconds, np.array(column, dtype=float))
        classes[key.partition(":")[2]] = np.where(refused, REFUSED_SECONDS, times)
    return classes
