"""Arrays of records that the list scheduler works on, passed between compiled loops as one argument.

A record holds all about one node, value, group or device, next to each other in memory. numba compiles and calls fast
with few arrays. Time is counted in whole ticks: sums of floats would break ties by their rounding.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph.op_graph import Bools, Csr, Floats, Ints, Longs
from onnxplace.problem import PlacementProblem
from onnxplace.target.target import LINK_MODELS

# Upper bound on the ticks of any plan; sums of two such fit into 64 bits.
MAX_TICKS = 1 << 61
# A field named as a list (inputs, readers, ...) is where that list starts in `Work.items`; it ends where that of the
# next record starts, which is why there is one record more than there are nodes, values and groups.
NODE = np.dtype(
    [
        ("inputs", np.int64),
        ("outputs", np.int64),
        ("workspace", np.int64),
        ("position", np.int64),  # in topological order
        ("in_order", np.int64),  # not about this node: the node at this position
        ("group", np.int64),
        ("favourite", np.int64),  # favourite child (m-SCT), or -1
        ("device", np.int64),  # -1 until it is placed
        ("waiting", np.int64),  # inputs that no placed node produces yet
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
        ("unread", np.int64),  # unplaced readers of it and of its views; for outputs one more
        ("producer", np.int64),
        ("root", np.int64),  # the value that owns its memory
    ],
    align=True,
)
GROUP = np.dtype(
    [
        ("members", np.int64),
        ("weights", np.int64),
        ("extra", np.int64),  # bytes reserved next to its weights until its last node is placed
        ("unplaced", np.int64),  # unplaced members
        ("pinned", np.int64),
        ("home", np.int64),  # device, -1 until its first node is placed
    ],
    align=True,
)
DEVICE = np.dtype(
    [
        ("limit", np.int64),
        ("admit", np.int64),  # bytes up to which it accepts further groups of several nodes
        ("used", np.int64),
        ("free", np.int64),  # when its last node, and those on its processors, finish
        ("sending", np.int64),  # when its outgoing channel is free
        ("receiving", np.int64),
        ("last", np.int64),  # the node placed on it last, or -1
    ],
    align=True,
)


class Work(NamedTuple):
    """The problem, and the plan as it grows."""

    nodes: NDArray[Any]
    values: NDArray[Any]
    groups: NDArray[Any]
    devices: NDArray[Any]
    items: Longs
    """All lists, one after the other."""
    duration: Longs
    """Ticks [device, node]; -1 where the device refuses the node."""
    arrival: Longs
    """[value, device]: tick at which the value arrives there; -1 if it is not sent there."""
    stored: Bools
    """[device, weight]: whether the device stores the weight."""
    weight_bytes: Longs
    latency: Floats
    """Ticks [source, destination]."""
    per_byte: Floats
    """Ticks per byte [source, destination]."""
    link_model: int
    """Index into LINK_MODELS."""
    conflicts: Bools
    """[device, device]: whether they share a processor, so that the later one of two nodes waits."""


class Queues(NamedTuple):
    """Binary heaps of nodes, each node by its topological position and at most once in a heap.

    Heaps 0 to D - 1 hold, per device, the nodes whose inputs arrive later, by that time. The next D hold those whose
    inputs can arrive by now, the next D those that do not fit, by the bytes they need. With favourite children, D + 1
    more hold nodes by when they become late, and another D + 1 the late ones: per device the nodes bound to it, then
    those that are not bound.
    """

    heap: Ints
    """[heap, slot]."""
    slot: Ints
    """[heap, position]: the slot plus one, 0 if it is not in the heap."""
    key: Longs
    """[heap, position]: the key that orders the heap; ties go to the lower position."""
    size: Longs
    """Per heap."""
    fresh: Ints
    """Nodes in the order in which their last predecessor was placed."""


def start_plan(problem: PlacementProblem, limit: Longs, extra: Longs, share: float) -> tuple[Work, float]:
    """Return the empty plan for a problem, and the seconds of a tick.

    Args:
        problem: The problem to plan.
        limit: Bytes per device.
        extra: Bytes that each group reserves next to its weights.
        share: Groups of several nodes are accepted until this share of the device's own limit is used.
    """
    graph, devices = problem.graph, len(limit)
    latency, per_byte = problem.target.link_arrays()
    tick = choose_tick_seconds(problem, latency, per_byte)
    nodes, values = np.zeros(len(graph) + 1, NODE), np.zeros(len(graph.producer) + 1, VALUE)
    groups, device = np.zeros(len(problem.pinned) + 1, GROUP), np.zeros(devices, DEVICE)
    weights = Csr.grouped(problem.group[graph.weights.rows], graph.weights.items, len(problem.pinned))
    size = np.bincount(problem.group, minlength=len(problem.pinned))
    members = Csr(np.concatenate([[0], np.cumsum(size)]), np.argsort(problem.group, kind="stable").astype(np.int32))
    lists = (graph.inputs, graph.outputs, graph.readers, members, weights)
    offset = 0
    for part, table, name in zip(
        lists, (nodes, nodes, values, groups, groups), ("inputs", "outputs", "readers", "members", "weights")
    ):
        table[name] = part.starts + offset
        offset += len(part.items)
    read_by_nodes = graph.inputs.rows[graph.producer[graph.inputs.items] >= 0]
    # Readers of views keep the value that owns the memory.
    views, own_readers = np.flatnonzero(graph.alias >= 0), np.diff(graph.readers.starts) + graph.is_output
    unread = own_readers.copy()
    np.add.at(unread, graph.alias_roots[views], own_readers[views])
    waiting = np.bincount(read_by_nodes, minlength=len(graph))
    for table, columns in (
        (nodes, {"workspace": graph.workspace_bytes, "position": graph.positions, "in_order": graph.order}),
        (nodes, {"group": problem.group, "favourite": -1, "device": -1, "waiting": waiting}),
        (values, {"bytes": graph.value_bytes, "unread": unread, "producer": graph.producer, "root": graph.alias_roots}),
        (groups, {"extra": extra, "unplaced": size, "pinned": problem.pinned, "home": -1}),
    ):
        for name, column in columns.items():
            table[name][:-1] = column
    device["limit"], device["last"] = limit, -1
    device["admit"] = np.minimum(limit, (problem.limit_bytes * share).astype(np.int64))
    return Work(
        nodes=nodes,
        values=values,
        groups=groups,
        devices=device,
        items=np.concatenate([part.items for part in lists], dtype=np.int64),
        duration=np.where(problem.refused, -1, np.rint(problem.seconds / tick)).astype(np.int64),
        arrival=np.full((len(graph.producer), devices), -1, dtype=np.int64),
        stored=np.zeros((devices, len(graph.weight_bytes)), dtype=bool),
        weight_bytes=graph.weight_bytes,
        latency=latency / tick,
        per_byte=per_byte / tick,
        link_model=LINK_MODELS.index(problem.target.link_model),
        conflicts=problem.target.conflicts,
    ), tick


def choose_tick_seconds(problem: PlacementProblem, latency: Floats, per_byte: Floats) -> float:
    """Return the seconds of a tick: a picosecond, or the least power of ten of it that avoids overflow."""
    graph, devices = problem.graph, len(latency)
    transfers = len(graph.value_bytes) * latency.max() + graph.value_bytes.sum() * per_byte.max()
    longest = float(problem.seconds.max(axis=0, initial=0.0, where=~problem.refused).sum() + devices * transfers)
    return float(10.0 ** max(-12, math.ceil(math.log10(max(longest, 1e-300) / MAX_TICKS))))


def new_queues(nodes: int, devices: int, has_favourites: bool) -> Queues:
    """Return empty heaps for these numbers of nodes and devices."""
    heaps = 5 * devices + 2 if has_favourites else 3 * devices
    return Queues(
        heap=np.empty((heaps, nodes), dtype=np.int32),
        slot=np.zeros((heaps, nodes), dtype=np.int32),
        key=np.empty((heaps, nodes), dtype=np.int64),
        size=np.zeros(heaps, dtype=np.int64),
        fresh=np.empty(nodes, dtype=np.int32),
    )
