"""The causal simulator: when everything runs, what crosses which link, and how much memory it takes.

One model of time for placers, reports and the `simulated` runtime; DESIGN section 4 states its rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxplace.graph import Csr, Floats, Ints, Longs, OpGraph, sum_by
from onnxplace.simulation.kernels import DEVICE, device_peaks, execute, live_spans
from onnxplace.target import LINK_MODELS, Target


@dataclass(frozen=True)
class Transfers:
    """What crosses between devices, in the order in which it was booked; parallel arrays."""

    value: Ints
    source: Ints
    destination: Ints
    ready_seconds: Floats
    """When the value was made."""
    start_seconds: Floats
    finish_seconds: Floats

    def __len__(self) -> int:
        return len(self.value)


@dataclass(frozen=True)
class Simulation:
    """One simulated step of a placed graph."""

    start_seconds: Floats
    """Per node."""
    finish_seconds: Floats
    transfers: Transfers
    makespan_seconds: float
    compute_seconds: Floats
    """Per device: time it computes."""
    weights_bytes: Longs
    """Per device: the weights its nodes read, each once."""
    peak_bytes: Longs
    """Per device: the most it holds at one time, weights included."""


def simulate(graph: OpGraph, seconds: Floats, target: Target, device: Ints, order: Ints) -> Simulation:
    """Run `graph` with each node on `device` (index into the target), each device following `order`.

    `seconds` is [device, node]; `order` holds every node once. A model's inputs are on the devices that read them
    from the start, its outputs stay to the end. O((N + E) log N). Raises ValueError if the order cannot be run.
    """
    device, order = device.astype(np.int32, copy=False), order.astype(np.int32, copy=False)
    own_seconds = seconds[device, np.arange(len(graph))]
    start, finish, transfers = _execute(graph, own_seconds, target, device, order)
    if len(finish) and finish.min() < 0:
        stuck = graph.names[int(order[np.argmax(finish[order] < 0)])]
        raise ValueError(f"the order cannot be run: {stuck!r} waits for a node that is behind it")
    end = float(max(finish.max(initial=0.0), transfers.finish_seconds.max(initial=0.0)))
    weights = device_weights(graph, device, len(target.devices))
    dynamic = _peak_of_values(graph, device, order, start, finish, transfers, end, len(target.devices))
    return Simulation(
        start, finish, transfers, end, sum_by(device, own_seconds, len(target.devices)), weights, weights + dynamic
    )


def _execute(
    graph: OpGraph, own_seconds: Floats, target: Target, device: Ints, order: Ints
) -> tuple[Floats, Floats, Transfers]:
    """Return when nodes start and finish, -1 for those that cannot run in this order, and what is sent."""
    latency, per_byte = target.link_arrays()
    outputs, inputs, readers = graph.outputs, graph.inputs, graph.readers
    home = device[order]
    queue_starts = np.concatenate([[0], np.cumsum(np.bincount(home, minlength=len(target.devices)))])
    devices = np.zeros(len(target.devices), DEVICE)
    devices["head"], devices["running"], devices["stamp"], devices["touched"] = queue_starts[:-1], -1, -1, 1
    waiting = np.bincount(inputs.rows[graph.producer[inputs.items] >= 0], minlength=len(graph))
    start, finish, available = np.full(len(graph), -1.0), np.full(len(graph), -1.0), np.zeros(len(graph))
    most = len(readers.items)  # each reader gets a value once
    sent_nodes, sent_times = np.empty((3, most), dtype=np.int32), np.empty((3, most))
    sent = execute(
        queue_starts,
        order[np.argsort(home, kind="stable")],
        device,
        own_seconds,
        graph.producer,
        graph.value_bytes,
        outputs.starts,
        outputs.items,
        readers.starts,
        readers.items,
        latency,
        per_byte,
        LINK_MODELS.index(target.link_model),
        waiting,
        available,
        devices,
        start,
        finish,
        sent_nodes,
        sent_times,
    )
    return start, finish, Transfers(*sent_nodes[:, :sent].copy(), *sent_times[:, :sent].copy())


def device_weights(graph: OpGraph, device: Ints, device_count: int) -> Longs:
    """Return the bytes of weights that the nodes of each device read, each once per device."""
    held = Csr.grouped(device[graph.weights.rows].astype(np.int32), graph.weights.items, device_count)
    sums = sum_by(held.rows, graph.weight_bytes[held.items], device_count)
    return np.rint(sums).astype(np.int64)


def _peak_of_values(
    graph: OpGraph,
    device: Ints,
    order: Ints,
    start: Floats,
    finish: Floats,
    transfers: Transfers,
    end: float,
    device_count: int,
) -> Longs:
    """Return, per device, the most bytes of values and workspace at one time."""
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    copies = _copies(graph, device, transfers)
    buffers = len(graph.producer) + len(copies.device)
    birth, death, root = np.full(buffers, np.inf), np.full(buffers, -1.0), np.arange(buffers)
    birth_rank, death_rank = np.zeros(buffers, dtype=np.int64), np.full(buffers, -1, dtype=np.int64)
    live_spans(
        device,
        start,
        finish,
        rank,
        graph.producer,
        graph.alias,
        graph.is_output,
        graph.readers.starts,
        graph.readers.items,
        copies.starts,
        copies.device,
        copies.begin,
        copies.end,
        end,
        birth,
        death,
        birth_rank,
        death_rank,
        root,
    )
    owned = np.flatnonzero((root == np.arange(len(root))) & np.isfinite(birth))
    home = np.concatenate([device[graph.producer], copies.device]) if len(device) else copies.device
    size = np.concatenate([graph.value_bytes, graph.value_bytes[copies.value]])
    work = np.flatnonzero(graph.workspace_bytes > 0)
    where = np.concatenate([home[owned], home[owned], device[work], device[work]])
    when = np.concatenate([birth[owned], death[owned], start[work], finish[work]])
    at = np.concatenate([birth_rank[owned], death_rank[owned], 2 * rank[work], 2 * rank[work] + 1])
    change = np.concatenate([size[owned], -size[owned], graph.workspace_bytes[work], -graph.workspace_bytes[work]])
    # At one instant and rank there are only births or only deaths.
    live, peaks = np.zeros((2, device_count), dtype=np.int64)
    device_peaks(np.lexsort((at, when)), where, change, live, peaks)
    return peaks


@dataclass(frozen=True)
class _Copies:
    """Values present on a device that did not make them: received, or fed from outside; sorted by value."""

    value: Ints
    starts: Longs
    device: Ints
    begin: Floats
    end: Floats


def _copies(graph: OpGraph, device: Ints, transfers: Transfers) -> _Copies:
    fed_reads = np.flatnonzero(graph.producer[graph.inputs.items] < 0)
    pairs = np.stack([graph.inputs.items[fed_reads], device[graph.inputs.rows[fed_reads]]])
    fed = np.unique(pairs, axis=1) if pairs.size else pairs
    value = np.concatenate([transfers.value, fed[0]]).astype(np.int32)
    there = np.concatenate([transfers.destination, fed[1]]).astype(np.int32)
    begin = np.concatenate([transfers.start_seconds, np.zeros(fed.shape[1])])
    end = np.concatenate([transfers.finish_seconds, np.zeros(fed.shape[1])])
    order = np.lexsort((there, value))
    starts = np.zeros(len(graph.value_names) + 1, dtype=np.int64)
    np.cumsum(np.bincount(value, minlength=len(graph.value_names)), out=starts[1:])
    return _Copies(value[order], starts, there[order], begin[order], end[order])
