"""Lower bounds on the bytes that a device holds while a node runs: values between nodes of one group."""

from __future__ import annotations

import numpy as np

from onnxplace.graph import Bools, Csr, Floats, Ints, OpGraph


def held_bytes(graph: OpGraph, group: Ints, before: Bools) -> Floats:
    """Return [node, group]: bytes on the group's device while the node runs, in any schedule.

    These values are produced by a member of the group that must run before the node, and read by one that must run
    after it. Inputs of the node itself are left out, and so are views. `before` is that of `reachable`. O(N V).
    """
    held = np.zeros((len(graph), int(group.max(initial=-1)) + 1))
    values = np.flatnonzero((graph.producer >= 0) & (graph.alias < 0) & (graph.value_bytes > 0))
    for value in values.tolist():
        producer, readers = int(graph.producer[value]), graph.readers[value]
        group_of_producer = int(group[producer])
        readers_in_group = readers[group[readers] == group_of_producer]
        if len(readers_in_group):
            between = before[:, producer] & before[readers_in_group].any(axis=0)
            between[readers] = False
            held[between, group_of_producer] += graph.value_bytes[value]
    return held


def reachable(order: Ints, predecessors: Csr) -> Bools:
    """Return [node, predecessor]: whether a path leads from the predecessor to the node."""
    before = np.zeros((len(order), len(order)), dtype=bool)
    for node in order.tolist():
        for predecessor in predecessors[node].tolist():
            before[node] |= before[predecessor]
            before[node, predecessor] = True
    return before
