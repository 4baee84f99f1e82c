"""Plan with the list scheduler under memory limits, and plan again with less where the simulated peak exceeds them."""

from __future__ import annotations

import numpy as np

from onnxplace.costs import Problem, decided, order_by_start, shortage
from onnxplace.errors import InfeasibleError
from onnxplace.graph import Csr, Floats, Ints, Longs
from onnxplace.passes._list_scheduling import list_schedule
from onnxplace.state import State
from onnxplace.target import LINK_MODELS

# How often to plan again with tighter limits when the simulated peak exceeds what the plan had counted.
ATTEMPTS = 6
# What part of its memory a device fills before it takes on no further group: the values of a group's first nodes stay
# until its last ones run, on the same device, and those may find it full.
ADMISSION = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25)


def place(state: State, asked: Problem, favourite: Ints, placer: str, reserve_peak: bool) -> State:
    """Return `state` with the placement of the list scheduler; raises InfeasibleError if nothing fits."""
    refused: InfeasibleError | None = None
    several = len(asked.graph) > len(np.unique(asked.group))
    for share in ADMISSION if several else ADMISSION[:1]:
        try:
            return _place(state, asked, favourite, placer, reserve_peak, share)
        except InfeasibleError as problem:
            refused = refused or problem
    assert refused is not None
    raise refused


def _place(state: State, asked: Problem, favourite: Ints, placer: str, reserve_peak: bool, share: float) -> State:
    limit = asked.limit_bytes
    for attempt in range(ATTEMPTS):
        device, start = plan(asked, limit, favourite, reserve_peak, share)
        if len(device) and device.min() < 0:
            raise shortage(asked, placer)
        try:
            return decided(state, asked, device, start, placer)
        except InfeasibleError:
            if attempt == ATTEMPTS - 1:
                raise
        excess = asked.excess_bytes(asked.simulate(device, order_by_start(asked.graph, start)))
        limit = limit - np.maximum((attempt + 1) * excess, asked.limit_bytes // 64)
    raise AssertionError


def plan(asked: Problem, limit: Longs, favourite: Ints, reserve_peak: bool, share: float = 1.0) -> tuple[Ints, Floats]:
    """Return device and planned start of each node under these limits; device -1 where nothing fits."""
    graph, groups = asked.graph, len(asked.pinned)
    latency, per_byte = asked.target.link_arrays()
    weights = Csr.grouped(asked.group[graph.weights.rows].astype(np.int32), graph.weights.items, groups)
    size = np.bincount(asked.group, minlength=groups).astype(np.int64)
    extra = _largest_step(asked, size) if reserve_peak else np.zeros(groups, dtype=np.int64)
    device, start = list_schedule(
        graph.order, asked.group, asked.pinned, asked.seconds, limit,
        np.minimum(limit, asked.limit_bytes * share).astype(np.int64), graph.producer, graph.value_bytes,
        graph.is_output, graph.alias_roots, graph.outputs.starts, graph.outputs.items, graph.inputs.starts,
        graph.inputs.items,
        graph.readers.starts, graph.readers.items, weights.starts, weights.items, graph.weight_bytes,
        graph.workspace_bytes, size, extra, favourite, latency, per_byte, LINK_MODELS.index(asked.target.link_model),
    )  # fmt: skip
    return device, start


def _largest_step(asked: Problem, size: Longs) -> Longs:
    """Return, per group of several nodes, the largest workspace and the largest output of a member together."""
    graph = asked.graph
    made = np.flatnonzero(graph.producer >= 0)
    output = np.bincount(graph.producer[made], graph.value_bytes[made], len(graph)).astype(np.int64)
    largest_output, largest_workspace = np.zeros_like(size), np.zeros_like(size)
    np.maximum.at(largest_output, asked.group, output)
    np.maximum.at(largest_workspace, asked.group, graph.workspace_bytes)
    return np.where(size > 1, largest_output + largest_workspace, 0)
