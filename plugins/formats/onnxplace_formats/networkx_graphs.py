"""Cost graphs, profiles and placements as networkx digraphs.

docs/cost-graphs.md lists their attributes.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxplace.cost_graph.data import CostGraph, TimedPlacement
from onnxplace.errors import InputError, format_value
from onnxplace.facts import Groups, Placement, Profile, Schedule, is_refused
from onnxplace.graph.op_graph import Floats, Ints, OpGraph, sum_by
from onnxplace.state import State
from onnxplace.target.target import Device, Target
from onnxplace_formats.graph_attributes import AttributedGraph, convert_attributed_graph

if TYPE_CHECKING:
    import networkx

# The golden section of the color circle: hues of consecutive devices are far apart.
_HUE_STEP = 0.618034


@dataclass(frozen=True)
class _PlacedNodes:
    """Where and when each node runs."""

    device: Ints
    """Index into the devices."""
    start_seconds: Floats
    finish_seconds: Floats


def from_networkx(graph: networkx.DiGraph[Any], target: Target | None = None) -> CostGraph:
    """Return the cost graph of a networkx digraph, as `onnxplace.cost_graph.from_networkx` says."""
    return convert_attributed_graph(read_attributes(graph), "networkx graph", "networkx graph", target)


def read_attributes(graph: networkx.DiGraph[Any]) -> AttributedGraph:
    """Return the nodes, edges and attributes of a networkx digraph; raise InputError for any other object."""
    if not hasattr(graph, "is_directed"):
        message = f"expected a networkx.DiGraph or MultiDiGraph, got {type(graph).__name__}"
        raise InputError("D002", message, where="from_networkx")
    if not graph.is_directed():
        hint = "make a DiGraph whose edges lead from the node that makes a value to the one that reads it"
        raise InputError("D002", "expected directed edges, found an undirected graph", where="from_networkx", hint=hint)
    return AttributedGraph(list(graph.nodes(data=True)), list(graph.edges(data=True)), graph.graph)


def to_networkx(graph: CostGraph | State, placed: TimedPlacement | None = None) -> networkx.MultiDiGraph[Any]:
    """Return a cost graph or a profile as a networkx digraph, as `onnxplace.cost_graph.to_networkx` says."""
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
        attributes = _describe_cost_graph(graph, placed)
    columns = _build_node_columns(profile, devices, placed_nodes) | _build_placement_columns(placed_nodes, device_ids)
    if isinstance(graph, State):
        columns |= _build_group_columns(graph)
    result: networkx.MultiDiGraph[Any] = networkx.MultiDiGraph(**attributes)
    for index, node_id in enumerate(ids):
        result.add_node(node_id, **{key: column[index] for key, column in columns.items() if column[index] is not None})
    result.add_edges_from(_generate_edges(profile.graph, ids))
    return result


def _describe_cost_graph(graph: CostGraph, placed: TimedPlacement | None) -> dict[str, Any]:
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


def _build_node_columns(
    profile: Profile, devices: Sequence[Device], placed_nodes: _PlacedNodes | None
) -> dict[str, Sequence[Any]]:
    """Return the costs of nodes: attribute -> one entry per node, None where a node does not have it."""
    graph, count = profile.graph, len(profile.graph)
    weights = sum_by(graph.weights.rows, graph.weight_bytes[graph.weights.items], count).astype(np.int64)
    columns: dict[str, Sequence[Any]] = {
        "name": graph.names,
        "op": [op or None for op in graph.ops],
        **_build_time_columns(profile, devices, placed_nodes),
        "weights_bytes": weights.tolist(),
        "workspace_bytes": graph.workspace_bytes.tolist(),
        "output_bytes": _list_output_bytes(graph),
        "weights": _list_weights(graph),
    }
    if profile.user_groups is not None:
        columns["group"] = [group if group >= 0 else None for group in profile.user_groups.tolist()]
    if profile.backward is not None and profile.backward.any():
        columns["backward"] = profile.backward.tolist()
    return columns


def _build_time_columns(
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


def _list_output_bytes(graph: OpGraph) -> list[int | None]:
    """Return, per node, the bytes of all its outputs; None if its edges carry all of them."""
    is_unread = (graph.producer >= 0) & (graph.value_bytes > 0)
    is_unread[graph.inputs.items] = False
    producers = set(graph.producer[is_unread].tolist())
    outputs = graph.outputs
    return [int(graph.value_bytes[outputs[n]].sum()) if n in producers else None for n in range(len(graph))]


def _list_weights(graph: OpGraph) -> list[dict[str, int] | None]:
    """Return, per node, the bytes of its weights by name.

    None if it has at most one weight, which has its name and which no other node reads.
    """
    readers = np.bincount(graph.weights.items, minlength=len(graph.weight_names))
    result: list[dict[str, int] | None] = []
    for node, name in enumerate(graph.names):
        weights = graph.weights[node].tolist()
        is_own = [graph.weight_names[w] == name and readers[w] == 1 and graph.weight_bytes[w] > 0 for w in weights]
        plain = not weights or is_own == [True]
        result.append(None if plain else {graph.weight_names[w]: int(graph.weight_bytes[w]) for w in weights})
    return result


def _build_placement_columns(
    placed_nodes: _PlacedNodes | None, device_ids: Sequence[Hashable]
) -> dict[str, Sequence[Any]]:
    """Return where and when nodes run, and a colour for each device."""
    if placed_nodes is None:
        return {}
    device = placed_nodes.device.tolist()
    colors = [_choose_color(index) for index in range(len(device_ids))]
    return {
        "device": [device_ids[index] for index in device],
        "start_seconds": placed_nodes.start_seconds.tolist(),
        "finish_seconds": placed_nodes.finish_seconds.tolist(),
        "color": [colors[index] for index in device],
    }


def _build_group_columns(state: State) -> dict[str, Sequence[Any]]:
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


def _choose_color(index: int) -> str:
    """Return the colour of a device, `#rrggbb`."""
    channels = colorsys.hsv_to_rgb(index * _HUE_STEP % 1, 0.55, 0.9)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)
