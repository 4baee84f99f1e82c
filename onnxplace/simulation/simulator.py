"""The causal simulator: start and finish of nodes and transfers, and the memory of devices.

Placers, reports and the `simulated` runtime share this model of time; docs/architecture.md states its rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from onnxplace.graph.op_graph import Csr, Floats, Ints, Longs, OpGraph, sum_by
from onnxplace.simulation.channel_kernels import GAP
from onnxplace.simulation.step_kernels import (
    DEVICE,
    BufferUses,
    EventState,
    LiveSpans,
    PlacedGraph,
    compute_live_spans,
    device_peaks,
    run_events,
)
from onnxplace.simulation.weight_streams import SETTLING_STEPS, WeightStream
from onnxplace.target.target import LINK_MODELS, Target


@dataclass(frozen=True)
class Transfers:
    """Transfers between devices as parallel arrays, in the order in which they were booked."""

    value: Ints
    source: Ints
    destination: Ints
    ready_seconds: Floats
    """When the value was produced."""
    start_seconds: Floats
    finish_seconds: Floats

    def __len__(self) -> int:
        return len(self.value)

    def list_arrivals(self) -> dict[tuple[int, int], float]:
        """Return when each value arrives, by value and receiving device."""
        return dict(zip(zip(self.value.tolist(), self.destination.tolist()), self.finish_seconds.tolist()))


@dataclass(frozen=True)
class Simulation:
    """One simulated step of a placed graph."""

    start_seconds: Floats
    """Per node."""
    finish_seconds: Floats
    transfers: Transfers
    makespan_seconds: float
    compute_seconds: Floats
    """Per device: the time that it computes."""
    weights_bytes: Longs
    """Per device: the weights that its nodes read, each once."""
    peak_bytes: Longs
    """Per device: the most bytes at one time, weights included."""
    pool_peak_bytes: Longs
    """Per pool of the target: the most bytes of all its devices at one time. Each device has its own weights."""
    arrival_seconds: Floats
    """Per node: when its weights that stream have arrived; minus infinity where it has none, or they were there."""


def simulate(
    graph: OpGraph,
    seconds: Floats,
    target: Target,
    device: Ints,
    order: Ints,
    earliest_seconds: Floats | None = None,
    stream: WeightStream | None = None,
) -> Simulation:
    """Simulate a step of a placed graph, in which each device runs its nodes in the given order.

    A model's inputs are on the devices that read them from the start; its outputs stay to the end. O((N + E) log N).

    Args:
        graph: The graph.
        seconds: [device, node].
        target: Its devices and links.
        device: Per node, an index into the target.
        order: Each node once.
        earliest_seconds: Per node, the time before which it does not start; 0 by default.
        stream: Weights that nodes wait for; None if all stay on the devices.

    Raises:
        ValueError: A device would wait forever for a node that is later in the order.
    """
    device, order = device.astype(np.int32, copy=False), order.astype(np.int32, copy=False)
    own_seconds = seconds[device, np.arange(len(graph))]
    earliest = np.zeros(len(graph)) if earliest_seconds is None else earliest_seconds.astype(np.float64)
    stream = stream or WeightStream.none()
    start, finish, transfers, arrival = _execute(graph, own_seconds, target, device, order, earliest, stream)
    if len(finish) and finish.min() < 0:
        blocked_node = graph.names[int(order[np.argmax(finish[order] < 0)])]
        raise ValueError(f"the order cannot be run: {blocked_node!r} waits for a node that is behind it")
    end = float(max(finish.max(initial=0.0), transfers.finish_seconds.max(initial=0.0)))
    weights = device_weights(graph, device, len(target.devices))
    changes = list_memory_changes(graph, device, order, start, finish, transfers, end)
    peak_bytes = _find_peaks(changes, np.arange(len(target.devices)), weights)
    pools = len(target.pools)  # devices without a pool count as one more
    pool_peak_bytes = _find_peaks(changes, target.pool_of, weights)[:pools] if pools else weights[:0]
    return Simulation(
        start_seconds=start,
        finish_seconds=finish,
        transfers=transfers,
        makespan_seconds=end,
        compute_seconds=sum_by(device, own_seconds, len(target.devices)),
        weights_bytes=weights,
        peak_bytes=peak_bytes,
        pool_peak_bytes=pool_peak_bytes,
        arrival_seconds=arrival,
    )


def _find_peaks(changes: MemoryChanges, memory: Longs, weights: Longs) -> Longs:
    """Return the most bytes at one time in each memory, given the memory and the weights of each device."""
    held, peaks = np.zeros((2, int(memory.max()) + 1), dtype=np.int64)
    device_peaks(np.arange(len(changes.device)), memory[changes.device], changes.change_bytes, held, peaks)
    np.add.at(peaks, memory, weights)
    return peaks


def simulate_stream(
    graph: OpGraph,
    seconds: Floats,
    target: Target,
    device: Ints,
    order: Ints,
    stream: WeightStream,
    simulate_step: Callable[..., Simulation] = simulate,
) -> Simulation:
    """Return a step with weights that stream, which follows many others: each starts when the one before ends.

    Arguments are those of `simulate`; `stream` is that of the first step. `simulate_step` may be
    `simulate_with_contention`.
    """
    simulation = simulate_step(graph, seconds, target, device, order, stream=stream)
    for _ in range(SETTLING_STEPS if len(stream.blocks) else 0):
        stream = _advance_stream(stream, simulation, device)
        simulation = simulate_step(graph, seconds, target, device, order, stream=stream)
    return simulation


def _advance_stream(stream: WeightStream, simulation: Simulation, device: Ints) -> WeightStream:
    """Return the stream of the step that follows one at once."""
    blocks, loaded = stream.blocks.copy(), stream.loaded_seconds.copy()
    blocks["freed"] = simulation.finish_seconds[stream.earlier_keepers] - simulation.makespan_seconds
    np.maximum.at(loaded, device, simulation.arrival_seconds)
    return WeightStream(blocks, loaded - simulation.makespan_seconds, stream.earlier_keepers)


def _execute(
    graph: OpGraph, own_seconds: Floats, target: Target, device: Ints, order: Ints, begin: Floats, stream: WeightStream
) -> tuple[Floats, Floats, Transfers, Floats]:
    """Return start and finish of nodes, -1 for those that cannot run in this order, all transfers, and arrivals.

    Arrivals are those of each node's weights that stream. `begin` has the earliest start of each node; it is changed.
    """
    latency, per_byte = target.link_arrays()
    outputs, inputs, readers = graph.outputs, graph.inputs, graph.readers
    queue_device = device[order]
    queue_starts = np.concatenate([[0], np.cumsum(np.bincount(queue_device, minlength=len(target.devices)))])
    devices = np.zeros(len(target.devices), DEVICE)
    devices["head"], devices["running"], devices["stamp"], devices["touched"] = queue_starts[:-1], -1, -1, 1
    devices["loaded"], devices["shares"] = stream.loaded_seconds, target.conflicts.sum(axis=0) > 1
    max_transfers = len(readers.items)  # each reader gets a value once
    placed = PlacedGraph(
        queue_starts,
        order[np.argsort(queue_device, kind="stable")],
        device,
        own_seconds,
        graph.value_bytes,
        *outputs.arrays,
        *readers.arrays,
        latency,
        per_byte,
        target.conflicts,
        LINK_MODELS.index(target.link_model),
    )
    state = EventState(
        waiting=np.bincount(inputs.rows[graph.producer[inputs.items] >= 0], minlength=len(graph)),
        available=begin,
        devices=devices,
        gaps=np.empty(len(target.devices) + max_transfers + 1, GAP),
        blocks=stream.blocks.copy(),
        start=np.full(len(graph), -1.0),
        finish=np.full(len(graph), -1.0),
        sent_nodes=np.empty((3, max_transfers), dtype=np.int32),
        sent_times=np.empty((3, max_transfers)),
    )
    sent = run_events(placed, state)
    transfers = Transfers(*state.sent_nodes[:, :sent].copy(), *state.sent_times[:, :sent].copy())
    arrival = state.blocks["arrival"] if len(stream.blocks) else np.full(len(graph), -np.inf)
    return state.start, state.finish, transfers, arrival


def device_weights(graph: OpGraph, device: Ints, device_count: int) -> Longs:
    """Return, per device, the bytes of weights that its nodes read, each once."""
    stored = Csr.grouped(device[graph.weights.rows].astype(np.int32), graph.weights.items, device_count)
    sums = sum_by(stored.rows, graph.weight_bytes[stored.items], device_count)
    return np.rint(sums).astype(np.int64)


@dataclass(frozen=True)
class MemoryChanges:
    """Allocations and releases of values and workspaces as parallel arrays, in the order in which they happen."""

    device: Ints
    seconds: Floats
    change_bytes: Longs
    """Negative where memory is released."""
    value: Longs
    """The value that is held; -1 for workspace."""
    node: Longs
    """The node whose workspace it is; -1 for values."""


def list_memory_changes(
    graph: OpGraph, device: Ints, order: Ints, start: Floats, finish: Floats, transfers: Transfers, end: float
) -> MemoryChanges:
    """Return when devices take and free memory in a simulated step; weights are left out.

    A view belongs to the buffer that it looks at. The arguments are those and the results of `simulate`.
    """
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    uses = _collect_uses(graph, device, transfers)
    buffers = len(graph.producer) + len(uses.copy_value)
    birth_rank, death_rank = np.zeros(buffers, dtype=np.int64), np.full(buffers, -1, dtype=np.int64)
    spans = LiveSpans(np.full(buffers, np.inf), np.full(buffers, -1.0), birth_rank, death_rank, np.arange(buffers))
    compute_live_spans(device, start, finish, rank, uses, end, spans)
    owned = np.flatnonzero((spans.root == np.arange(buffers)) & np.isfinite(spans.birth))
    home = np.concatenate([device[graph.producer], uses.copy_device]) if len(device) else uses.copy_device
    size = np.concatenate([graph.value_bytes, graph.value_bytes[uses.copy_value]])
    work = np.flatnonzero(graph.workspace_bytes > 0)
    event_device = np.concatenate([home[owned], home[owned], device[work], device[work]])
    event_time = np.concatenate([spans.birth[owned], spans.death[owned], start[work], finish[work]])
    event_rank = np.concatenate([birth_rank[owned], death_rank[owned], 2 * rank[work], 2 * rank[work] + 1])
    change = np.concatenate([size[owned], -size[owned], graph.workspace_bytes[work], -graph.workspace_bytes[work]])
    held = np.concatenate([np.arange(len(graph.producer)), uses.copy_value])[owned]
    none = np.full(len(work), -1)
    # At one instant and rank there are only births or only deaths.
    sequence = np.lexsort((event_rank, event_time))
    return MemoryChanges(
        device=event_device[sequence].astype(np.int32),
        seconds=event_time[sequence],
        change_bytes=change[sequence],
        value=np.concatenate([held, held, none, none])[sequence],
        node=np.concatenate([np.full(2 * len(held), -1), work, work])[sequence],
    )


def _collect_uses(graph: OpGraph, device: Ints, transfers: Transfers) -> BufferUses:
    """Return the values of a graph, and their copies on other devices: what is received, and inputs of the model."""
    input_reads = np.flatnonzero(graph.producer[graph.inputs.items] < 0)
    pairs = np.stack([graph.inputs.items[input_reads], device[graph.inputs.rows[input_reads]]])
    inputs = np.unique(pairs, axis=1) if pairs.size else pairs
    value = np.concatenate([transfers.value, inputs[0]]).astype(np.int32)
    destination = np.concatenate([transfers.destination, inputs[1]]).astype(np.int32)
    begin = np.concatenate([transfers.start_seconds, np.zeros(inputs.shape[1])])
    end = np.concatenate([transfers.finish_seconds, np.zeros(inputs.shape[1])])
    order = np.lexsort((destination, value))
    starts = np.zeros(len(graph.value_names) + 1, dtype=np.int64)
    np.cumsum(np.bincount(value, minlength=len(graph.value_names)), out=starts[1:])
    return BufferUses(
        graph.producer,
        graph.alias,
        graph.is_output,
        *graph.readers.arrays,
        copy_value=value[order],
        copy_starts=starts,
        copy_device=destination[order],
        copy_begin=begin[order],
        copy_end=end[order],
    )
