"""What the list scheduler works on: a few arrays of records, passed from kernel to kernel as one argument.

Records keep what belongs to one node, value, group or device together, in memory too, and few arrays are what numba
compiles fast and calls fast. Time is counted in whole ticks: sums of floats would break ties by their rounding.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph import Bools, Csr, Floats, Ints, Longs, OpGraph
from onnxplace.problem import PlacementProblem
from onnxplace.target import LINK_MODELS

# Ticks that any plan ends within; sums of two such fit into 64 bits.
LATEST = 1 << 61
# A field named as a list (inputs, readers, ...) is where that list starts in `Work.items`; it ends where that of the
# next record starts, which is why there is one record more than there are nodes, values and groups.
NODE = np.dtype(
    [
        ("inputs", np.int64),
        ("outputs", np.int64),
        ("workspace", np.int64),
        ("position", np.int64),  # in topological order
        ("in_order", np.int64),  # not of this node: which node is at this position
        ("group", np.int64),
        ("favourite", np.int64),  # favourite child (m-SCT), or -1
        ("device", np.int64),  # -1 until it is placed
        ("waiting", np.int64),  # inputs that are still to be made
        ("start", np.int64),
        ("finish", np.int64),
        ("parents_done", np.int64),  # when the last of its placed predecessors finishes
    ],
    align=True,
)
VALUE = np.dtype(
    [
        ("readers", np.int64),
        ("bytes", np.int64),
        ("unread", np.int64),  # readers, its own and of its views, that are still to be placed; outputs: one more
        ("producer", np.int64),
        ("root", np.int64),  # the value that owns its memory
    ],
    align=True,
)
GROUP = np.dtype(
    [
        ("members", np.int64),
        ("weights", np.int64),
        ("extra", np.int64),  # bytes it reserves beside its weights until its last node is placed
        ("left", np.int64),  # members that are still to be placed
        ("pinned", np.int64),
        ("home", np.int64),  # device, -1 until its first node is placed
    ],
    align=True,
)
DEVICE = np.dtype(
    [
        ("limit", np.int64),
        ("admit", np.int64),  # bytes up to which it takes on further groups of several nodes
        ("used", np.int64),
        ("free", np.int64),  # when it has computed what it was given
        ("sending", np.int64),  # when its outgoing channel is free
        ("receiving", np.int64),
        ("last", np.int64),  # what it was given last; -1 before that
    ],
    align=True,
)


class Work(NamedTuple):
    """The problem and the plan so far."""

    nodes: NDArray[Any]
    values: NDArray[Any]
    groups: NDArray[Any]
    devices: NDArray[Any]
    items: Longs
    """All lists, one after the other."""
    duration: Longs
    """Ticks [device, node]."""
    arrival: Longs
    """Tick at which a value was sent to a device [value, device]; -1 if it was not."""
    held: Bools
    """[device, weight]."""
    weight_bytes: Longs
    latency: Floats
    """Ticks [source, destination]."""
    per_byte: Floats
    """Ticks per byte [source, destination]."""
    link_model: int
    """Index into LINK_MODELS."""


class Queues(NamedTuple):
    """Binary heaps of nodes, each node by its topological position and at most once in a heap.

    Heaps 0 to D - 1 hold, per device, the nodes whose inputs will be there later (by that time), the next D those
    whose inputs can be there by now, the next D those that do not fit (by the bytes they need). For favourite
    children, D + 1 more hold the nodes by when they become late, and another D + 1 those that are: per device the
    nodes bound to it, then those that are not bound.
    """

    heap: Ints
    """[heap, slot]."""
    slot: Ints
    """[heap, position]: one more than the slot, 0 if it is not in the heap."""
    key: Longs
    """[heap, position]: what the heap is ordered by; ties go to the lower position."""
    size: Longs
    """Per heap."""
    fresh: Ints
    """Nodes in the order in which their last predecessor was placed."""


def nothing_placed(asked: PlacementProblem, limit: Longs, extra: Longs, share: float) -> tuple[Work, float]:
    """Return the empty plan for a problem under these limits (bytes per device), and the seconds of a tick.

    `extra` is what each group reserves beside its weights; of the device's own limit, groups of several nodes are
    taken on until `share` is used.
    """
    graph, devices = asked.graph, len(limit)
    latency, per_byte = asked.target.link_arrays()
    tick = _tick_seconds(asked, latency, per_byte)
    nodes, values = np.zeros(len(graph) + 1, NODE), np.zeros(len(graph.producer) + 1, VALUE)
    groups, device = np.zeros(len(asked.pinned) + 1, GROUP), np.zeros(devices, DEVICE)
    weights = Csr.grouped(asked.group[graph.weights.rows], graph.weights.items, len(asked.pinned))
    size = np.bincount(asked.group, minlength=len(asked.pinned))
    members = Csr(np.concatenate([[0], np.cumsum(size)]), np.argsort(asked.group, kind="stable").astype(np.int32))
    lists = (graph.inputs, graph.outputs, graph.readers, members, weights)
    places = ((nodes, "inputs"), (nodes, "outputs"), (values, "readers"), (groups, "members"), (groups, "weights"))
    begin = 0
    for part, (table, name) in zip(lists, places):
        table[name] = part.starts + begin
        begin += len(part.items)
    _fill_nodes(nodes[:-1], asked)
    _fill_values(values[:-1], graph)
    for name, column in (("extra", extra), ("left", size), ("pinned", asked.pinned), ("home", -1)):
        groups[name][:-1] = column
    device["limit"], device["last"] = limit, -1
    device["admit"] = np.minimum(limit, (asked.limit_bytes * share).astype(np.int64))
    return Work(
        nodes,
        values,
        groups,
        device,
        np.concatenate([part.items for part in lists], dtype=np.int64),
        np.rint(asked.seconds / tick).astype(np.int64),
        np.full((len(graph.producer), devices), -1, dtype=np.int64),
        np.zeros((devices, len(graph.weight_bytes)), dtype=bool),
        graph.weight_bytes,
        latency / tick,
        per_byte / tick,
        LINK_MODELS.index(asked.target.link_model),
    ), tick


def _fill_nodes(nodes: NDArray[Any], asked: PlacementProblem) -> None:
    graph = asked.graph
    made = graph.inputs.rows[graph.producer[graph.inputs.items] >= 0]
    nodes["workspace"], nodes["position"], nodes["in_order"] = graph.workspace_bytes, graph.positions, graph.order
    nodes["group"], nodes["favourite"], nodes["device"] = asked.group, -1, -1
    nodes["waiting"] = np.bincount(made, minlength=len(graph))


def _fill_values(values: NDArray[Any], graph: OpGraph) -> None:
    own = np.diff(graph.readers.starts) + graph.is_output
    views = np.flatnonzero(graph.alias >= 0)
    together = own.copy()
    np.add.at(together, graph.alias_roots[views], own[views])
    values["bytes"], values["unread"] = graph.value_bytes, together
    values["producer"], values["root"] = graph.producer, graph.alias_roots


def _tick_seconds(asked: PlacementProblem, latency: Floats, per_byte: Floats) -> float:
    """Return a picosecond, or the least power of ten of it in which all work and all transfers can be counted."""
    graph, devices = asked.graph, len(latency)
    transfers = len(graph.value_bytes) * latency.max() + graph.value_bytes.sum() * per_byte.max()
    longest = float(asked.seconds.max(axis=0).sum() + devices * transfers)
    return float(10.0 ** max(-12, math.ceil(math.log10(max(longest, 1e-300) / LATEST))))


def empty_queues(nodes: int, devices: int, guided: bool) -> Queues:
    """Return heaps for so many nodes and devices; `guided` if there are favourite children."""
    heaps = 5 * devices + 2 if guided else 3 * devices
    return Queues(
        np.empty((heaps, nodes), dtype=np.int32),
        np.zeros((heaps, nodes), dtype=np.int32),
        np.empty((heaps, nodes), dtype=np.int64),
        np.zeros(heaps, dtype=np.int64),
        np.empty(nodes, dtype=np.int32),
    )
