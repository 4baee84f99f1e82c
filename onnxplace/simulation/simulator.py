"""The causal simulator: when everything runs, what crosses which link, and how much memory it takes.

One model of time for placers, reports and the `simulated` runtime; DESIGN section 4 states its rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxplace.graph import Csr, Floats, Ints, Longs, OpGraph, sum_by
from onnxplace.simulation.kernels import device_peaks, execute, live_spans
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
    latency, per_byte = target.link_arrays()
    outputs, inputs, readers = graph.outputs, graph.inputs, graph.readers
    start, finish, *sent = execute(
        order,
        device,
        own_seconds,
        len(target.devices),
        graph.producer,
        graph.value_bytes,
        outputs.starts,
        outputs.items,
        inputs.starts,
        inputs.items,
        readers.starts,
        readers.items,
        latency,
        per_byte,
        LINK_MODELS.index(target.link_model),
    )
    if len(finish) and finish.min() < 0:
        stuck = graph.names[int(order[np.argmax(finish[order] < 0)])]
        raise ValueError(f"the order cannot be run: {stuck!r} waits for a node that is behind it")
    transfers = Transfers(*sent)
    end = float(max(finish.max(initial=0.0), transfers.finish_seconds.max(initial=0.0)))
    weights = device_weights(graph, device, len(target.devices))
    dynamic = _peak_of_values(graph, device, order, start, finish, transfers, end, len(target.devices))
    return Simulation(
        start, finish, transfers, end, sum_by(device, own_seconds, len(target.devices)), weights, weights + dynamic
    )


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
    birth, death, birth_rank, death_rank, root = live_spans(
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
    peaks: Longs = device_peaks(np.lexsort((at, when)), where, change, device_count)
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
