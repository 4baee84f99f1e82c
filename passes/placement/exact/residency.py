"""What a device surely holds while a node runs, wherever that runs: values between nodes of one group."""

from __future__ import annotations

import numpy as np

from onnxplace.graph import Bools, Csr, Floats, Ints, OpGraph


def held_bytes(graph: OpGraph, group: Ints, before: Bools) -> Floats:
    """Return [node, group]: bytes of values that lie where the group is while the node runs, in any schedule.

    A member of the group that has to run before the node made them, and one that has to run after it reads them. What
    the node itself reads is left out, and so are views. `before` is that of `reachable`. O(N V).
    """
    held = np.zeros((len(graph), int(group.max(initial=-1)) + 1))
    made = np.flatnonzero((graph.producer >= 0) & (graph.alias < 0) & (graph.value_bytes > 0))
    for value in made.tolist():
        maker, readers = int(graph.producer[value]), graph.readers[value]
        home = int(group[maker])
        own = readers[group[readers] == home]
        if len(own):
            between = before[:, maker] & before[own].any(axis=0)
            between[readers] = False
            held[between, home] += graph.value_bytes[value]
    return held


def reachable(order: Ints, predecessors: Csr) -> Bools:
    """Return [node, earlier]: whether a path leads from `earlier` to `node`."""
    before = np.zeros((len(order), len(order)), dtype=bool)
    for node in order.tolist():
        for earlier in predecessors[node].tolist():
            before[node] |= before[earlier]
            before[node, earlier] = True
    return before
