"""Cost graphs, profiles and placements as networkx digraphs, and GraphML files of them.

docs/cost-graphs.md lists their attributes.
"""

from __future__ import annotations

import colorsys
import gzip
import io
import json
import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from onnxplace.cost_graph.graph_attributes import KNOWN
from onnxplace.cost_graph.graphml import AttributedGraph, read_graphml
from onnxplace.errors import InputError, UsageError, format_value
from onnxplace.facts import Groups, Placement, Profile, Schedule, is_refused
from onnxplace.graph import Floats, Ints, OpGraph, sum_by
from onnxplace.state import State
from onnxplace.target import Device
from onnxplace.utils import format_path, write_file

if TYPE_CHECKING:
    import networkx

    from onnxplace.cost_graph.data import CostGraph

# The golden section of the color circle: hues of consecutive devices are far apart.
_HUE_STEP = 0.618034


@dataclass(frozen=True)
class _PlacedNodes:
    """Where and when each node runs."""

    device: Ints
    """Index into the devices."""
    start_seconds: Floats
    finish_seconds: Floats


class TimedPlacement(Protocol):
    """A placement of a cost graph with its times, as `onnxplace.driver.place_cost_graph` returns it."""

    @property
    def placer(self) -> str: ...
    @property
    def makespan_seconds(self) -> float: ...
    @property
    def lower_bound_seconds(self) -> float: ...
    @property
    def placement(self) -> Mapping[str, Hashable]:
        """Return the device id of each node id."""
        ...

    @property
    def start_seconds(self) -> Floats:
        """Return when each node starts, in the order of the cost graph."""
        ...

    @property
    def finish_seconds(self) -> Floats: ...


def to_networkx(graph: CostGraph | State, placed: TimedPlacement | None = None) -> networkx.MultiDiGraph[Any]:
    """Return a cost graph, or the profile of a model, as a networkx digraph; with its placement, where there is one.

    A node of a cost graph keeps its id, a node of a model has its name. Edges are parallel where several values go from
    one node to another. The docs list the attributes of nodes, edges and the graph. `from_networkx` turns the
    digraph of a cost graph back into the same cost graph.

    Args:
        graph: a cost graph, or a state with a Profile (and a Placement and a Schedule, if it is placed).
        placed: what `onnxplace.driver.place_cost_graph` returned for this cost graph.

    Raises:
        InputError: `placed` belongs to another graph.

    >>> from onnxplace.cost_graph import parse_cost_graph
    >>> nodes = [{"id": "a", "compute_time_us": 2e6}, {"id": "b", "compute_time_us": 0}]
    >>> edges = [{"src": "a", "dst": "b", "bytes": 64}]
    >>> digraph = to_networkx(parse_cost_graph({"nodes": nodes, "edges": edges, "devices": [{"id": 0}]}))
    >>> digraph.nodes["a"]["seconds"], digraph["a"]["b"][0]["bytes"]
    (2.0, 64)
    """
    import networkx

    profile = graph[Profile] if isinstance(graph, State) else graph.profile
    devices = graph.target.devices
    if isinstance(graph, State):
        ids: Sequence[Hashable] = profile.graph.names
        device_ids: Sequence[Hashable] = [device.id for device in devices]
        placed_nodes, attributes = _index_state_placement(graph), _describe_machine(device_ids, devices)
    else:
        ids, device_ids = graph.ids, graph.device_ids
        placed_nodes = None if placed is None else _index_placement(graph, placed)
        attributes = _graph_attributes(graph, placed)
    columns = _node_columns(profile, devices, placed_nodes) | _placement_columns(placed_nodes, device_ids)
    if isinstance(graph, State):
        columns |= _group_columns(graph)
    result: networkx.MultiDiGraph[Any] = networkx.MultiDiGraph(**attributes)
    for index, node_id in enumerate(ids):
        result.add_node(node_id, **{key: column[index] for key, column in columns.items() if column[index] is not None})
    result.add_edges_from(_generate_edges(profile.graph, ids))
    return result


def _graph_attributes(graph: CostGraph, placed: TimedPlacement | None) -> dict[str, Any]:
    """Return the name of a cost graph, its machine, and how good its placement is."""
    attributes = {"name": graph.name, **_describe_machine(graph.device_ids, graph.target.devices)}
    attributes["latency_seconds"] = float(graph.link.latency_seconds)
    if math.isfinite(graph.link.bytes_per_second):
        attributes["bytes_per_second"] = float(graph.link.bytes_per_second)
    if placed is not None:
        attributes["placer"] = placed.placer
        attributes["makespan_seconds"] = float(placed.makespan_seconds)
        attributes["lower_bound_seconds"] = float(placed.lower_bound_seconds)
    return attributes


def _describe_machine(device_ids: Sequence[Hashable], devices: Sequence[Device]) -> dict[str, Any]:
    return {"devices": [{"id": name, "memory_bytes": device.memory_bytes} for name, device in zip(device_ids, devices)]}


def _index_placement(graph: CostGraph, placed: TimedPlacement) -> _PlacedNodes:
    """Return the placement of a cost graph by device index; raise InputError for that of another graph."""
    index = {device: position for position, device in enumerate(graph.device_ids)}
    try:
        device = [index[placed.placement[str(node)]] for node in graph.ids]
    except KeyError as error:
        hint = "give the cost graph that was placed, after replace_devices"
        message = f"expected a placement of this graph, found none of {format_value(error.args[0])}"
        raise InputError("D007", message, where=graph.name, hint=hint) from None
    return _PlacedNodes(np.array(device, dtype=np.int32), placed.start_seconds, placed.finish_seconds)


def _index_state_placement(state: State) -> _PlacedNodes | None:
    if Placement not in state or Schedule not in state:
        return None
    simulation = state[Schedule].simulation
    return _PlacedNodes(state[Placement].device, simulation.start_seconds, simulation.finish_seconds)


def _node_columns(
    profile: Profile, devices: Sequence[Device], placed_nodes: _PlacedNodes | None
) -> dict[str, Sequence[Any]]:
    """Return the costs of nodes: attribute -> one entry per node, None where a node does not have it."""
    graph, count = profile.graph, len(profile.graph)
    weights = sum_by(graph.weights.rows, graph.weight_bytes[graph.weights.items], count).astype(np.int64)
    columns: dict[str, Sequence[Any]] = {
        "name": graph.names,
        "op": [op or None for op in graph.ops],
        **_time_columns(profile, devices, placed_nodes),
        "weights_bytes": weights.tolist(),
        "workspace_bytes": graph.workspace_bytes.tolist(),
        "output_bytes": _output_bytes(graph),
        "weights": _weight_tables(graph),
    }
    if profile.user_groups is not None:
        columns["group"] = [group if group >= 0 else None for group in profile.user_groups.tolist()]
    if profile.backward is not None and profile.backward.any():
        columns["backward"] = profile.backward.tolist()
    return columns


def _time_columns(
    profile: Profile, devices: Sequence[Device], placed_nodes: _PlacedNodes | None
) -> dict[str, Sequence[Any]]:
    """Return the seconds of each node on its device, or on the first one; on each class, if classes differ.

    They are infinite where a class refuses the node.
    """
    classes = list(dict.fromkeys(device.cost_class for device in devices))
    table = np.array([profile.seconds[name] for name in classes]).reshape(len(classes), -1)
    row = np.array([classes.index(device.cost_class) for device in devices])
    own = row[placed_nodes.device] if placed_nodes is not None else np.full(table.shape[1], row[0])
    own_seconds = table[own, np.arange(table.shape[1])]
    taken_seconds = np.where(is_refused(own_seconds), table.min(axis=0, initial=np.inf), own_seconds)
    columns: dict[str, Sequence[Any]] = {"seconds": taken_seconds.tolist()}
    if (table != table[0]).any():
        table = np.where(is_refused(table), np.inf, table)
        columns |= {f"seconds:{name}": seconds.tolist() for name, seconds in zip(classes, table)}
    return columns


def _output_bytes(graph: OpGraph) -> list[int | None]:
    """Return, per node, the bytes of all its outputs; None if its edges carry all of them."""
    is_unread = (graph.producer >= 0) & (graph.value_bytes > 0)
    is_unread[graph.inputs.items] = False
    producers = set(graph.producer[is_unread].tolist())
    outputs = graph.outputs
    return [int(graph.value_bytes[outputs[n]].sum()) if n in producers else None for n in range(len(graph))]


def _weight_tables(graph: OpGraph) -> list[dict[str, int] | None]:
    """Return, per node, the bytes of its weights by name; None if it has one at most, of its own and with its name."""
    readers = np.bincount(graph.weights.items, minlength=len(graph.weight_names))
    result: list[dict[str, int] | None] = []
    for node, name in enumerate(graph.names):
        weights = graph.weights[node].tolist()
        is_own = [graph.weight_names[w] == name and readers[w] == 1 and graph.weight_bytes[w] > 0 for w in weights]
        plain = not weights or is_own == [True]
        result.append(None if plain else {graph.weight_names[w]: int(graph.weight_bytes[w]) for w in weights})
    return result


def _placement_columns(placed_nodes: _PlacedNodes | None, device_ids: Sequence[Hashable]) -> dict[str, Sequence[Any]]:
    """Return where and when nodes run, and a colour for each device."""
    if placed_nodes is None:
        return {}
    device = placed_nodes.device.tolist()
    colors = [_device_color(index) for index in range(len(device_ids))]
    return {
        "device": [device_ids[index] for index in device],
        "start_seconds": placed_nodes.start_seconds.tolist(),
        "finish_seconds": placed_nodes.finish_seconds.tolist(),
        "color": [colors[index] for index in device],
    }


def _group_columns(state: State) -> dict[str, Sequence[Any]]:
    """Return the groups of nodes that must share a device, and the devices that nodes are pinned to."""
    if Groups not in state:
        return {}
    groups, names = state[Groups], [device.id for device in state.target.devices]
    sizes = np.bincount(groups.group, minlength=len(groups.pinned))
    return {
        "group": [group if sizes[group] > 1 else None for group in groups.group.tolist()],
        "pinned": [names[pin] if pin >= 0 else None for pin in groups.pinned[groups.group].tolist()],
    }


def _generate_edges(
    graph: OpGraph, ids: Sequence[Hashable]
) -> Iterable[tuple[Hashable, Hashable, int, dict[str, Any]]]:
    """Yield an edge for each value between two nodes, in an order that preserves the numbers of values.

    The inputs of a node stay in their order: an edge comes after the last value that precedes it.
    """
    rows, values, count = graph.inputs.rows.astype(np.int64), graph.inputs.items, len(graph.value_names)
    latest = np.maximum.accumulate(rows * count + values) - rows * count
    order = 0
    for edge in np.argsort(latest, kind="stable").tolist():
        value = int(values[edge])
        source = int(graph.producer[value])
        if source >= 0:
            data = {"bytes": int(graph.value_bytes[value]), "tensor": graph.value_names[value], "order": order}
            yield ids[source], ids[int(rows[edge])], order, data
            order += 1


def _device_color(index: int) -> str:
    """Return the colour of a device, `#rrggbb`."""
    channels = colorsys.hsv_to_rgb(index * _HUE_STEP % 1, 0.55, 0.9)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


# GraphML files of such graphs, with ids that are not texts.

GraphFormat = Literal["json", "graphml"]
# Characters that XML 1.0 cannot hold.
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# The type of an id that is not a text is stored in the file.
_ID_TYPES: Mapping[str, type] = {"int": int, "float": float, "bool": bool}


def format_of(path: Path) -> GraphFormat:
    """Return the format for the ending of a name, by default JSON.

    >>> format_of(Path("placed.GraphML.gz")), format_of(Path("graph.json"))
    ('graphml', 'json')
    """
    return "graphml" if Path(path.name.lower().removesuffix(".gz")).suffix == ".graphml" else "json"


def read_graph(data: bytes, where: str) -> AttributedGraph:
    """Read a graph with attributes from GraphML, and restore ids that are not texts."""
    graph = read_graphml(data, KNOWN, where)
    ids = {text: _restored_id(text, attributes, where) for text, attributes in graph.nodes}
    if all(text is node_id for text, node_id in ids.items()):
        return graph
    nodes = [(ids[text], attributes) for text, attributes in graph.nodes]
    edges = [(ids[source], ids[destination], attributes) for source, destination, attributes in graph.edges]
    return AttributedGraph(nodes, edges, graph.attributes)


def _restored_id(text: Any, attributes: Mapping[str, Any], where: str) -> Hashable:
    """Return the id that a text stands for; raise InputError if it does not have the declared type."""
    kind = attributes.get("id_type", "str")
    try:
        if kind == "bool":
            return {"True": True, "False": False}[text]
        restored: Hashable = text if kind == "str" else _ID_TYPES[kind](text)
        return restored
    except (KeyError, ValueError, TypeError):
        kinds = "expected one of str, int, float, bool that fits"
        message = f"node {format_value(text)} has the id_type {format_value(kind)}, {kinds}"
        raise InputError("D002", message, where=where, hint="correct id_type, or remove it") from None


def require_graph_format(path: Path) -> None:
    """Raise UsageError unless a name ends in .graphml, perhaps with .gz."""
    if format_of(path) == "json":
        hint = "end it in .graphml (networkx, yEd, Gephi); .gz after it compresses"
        message = f"expected a file of GraphML, got {format_value(path.name)}"
        raise UsageError("U032", message, where=format_path(path), hint=hint)


def write_graph(path: Path, graph: networkx.MultiDiGraph[Any]) -> None:
    """Write a graph from `to_networkx` as GraphML; `.gz` after `.graphml` compresses it."""
    from networkx.readwrite.graphml import GraphMLWriter

    require_graph_format(path)
    is_gzipped = path.name.lower().endswith(".gz")
    stream = io.BytesIO()
    GraphMLWriter(_convert_to_texts(graph, format_path(path)), prettyprint=True).dump(stream)
    # XML reads a carriage return as a new line, except in attributes, where it is escaped already.
    data = stream.getvalue().replace(b"\r", b"&#13;")
    write_file(path, lambda file: file.write(gzip.compress(data, mtime=0) if is_gzipped else data))


def _convert_to_texts(graph: networkx.MultiDiGraph[Any], where: str) -> networkx.MultiDiGraph[Any]:
    """Convert ids to texts, and attributes to one type each; raise InputError for data that XML cannot hold."""
    import networkx

    texts: dict[str, Hashable] = {}
    result: networkx.MultiDiGraph[Any] = networkx.MultiDiGraph(**_convert_graph_attributes(graph.graph, where))
    for node, attributes in graph.nodes(data=True):
        text = _convert_id(node, where)
        if text in texts:
            message = f"expected ids that differ as texts, found {format_value(texts[text])} and {format_value(node)}"
            raise InputError("U032", message, where=where, hint="rename one of the two nodes")
        texts[text] = node
        own = {"label": attributes["name"]} | {key: value for key, value in attributes.items() if key != "name"}
        if not isinstance(node, str):
            own["id_type"] = type(node).__name__
        result.add_node(text, **_convert_attributes(own, f"node {format_value(node)}", where))
    for source, destination, key, attributes in graph.edges(keys=True, data=True):
        label = f"edge {format_value(source)} -> {format_value(destination)}"
        ends = str(source), str(destination)
        result.add_edges_from([(*ends, key, _convert_attributes(attributes, label, where))])
    return result


def _convert_graph_attributes(attributes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the attributes of the graph, its devices as JSON."""
    try:
        devices = json.dumps(attributes["devices"])
    except TypeError:
        message = f"expected ids of devices that are texts or numbers, found {format_value(attributes['devices'])}"
        raise InputError("U032", message, where=where) from None
    return _convert_attributes({**attributes, "devices": devices}, "the graph", where)


def _convert_id(node: Hashable, where: str) -> str:
    """Return the text of an id; raise InputError if it cannot be read back."""
    if type(node).__name__ not in ("str", *_ID_TYPES):
        hint = "networkx.convert_node_labels_to_integers gives every node a number"
        message = f"expected ids that are texts or numbers, found {format_value(node)}"
        raise InputError("U032", message, where=where, hint=hint)
    return _require_xml(str(node), f"the id of node {format_value(node)}", where)


def _convert_attributes(attributes: Mapping[str, Any], label: str, where: str) -> dict[str, Any]:
    """Convert attributes for a file: numbers stay, all else becomes text."""
    result: dict[str, Any] = {}
    for key, value in attributes.items():
        if key == "device":  # of one type, so that it becomes one column
            value = str(value)
        elif isinstance(value, Mapping):
            value = json.dumps(value)
        if isinstance(value, str):
            _require_xml(value, f"{key} of {label}", where)
        result[key] = value
    return result


def _require_xml(text: str, label: str, where: str) -> str:
    """Return a text; raise InputError for characters that XML cannot hold."""
    if match := _NOT_IN_XML.search(text):
        message = f"{label} has the character U+{ord(match.group()):04X}, which XML cannot hold: {format_value(text)}"
        raise InputError("U032", message, where=where, hint="rename it, or keep the graph in JSON")
    return text
