"""Keep segments within the memory limits of their devices.

A session holds its inputs until its end, and its outputs with them. Node by node a device holds less: a segment of one
node is what the schedule counts. Segments that hold too much are cut at the last node up to which their buffers fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.graph.lifetimes import sum_alive
from onnxplace.graph.op_graph import Bools, Floats, Ints, Longs, OpGraph, sum_by
from onnxplace.passes.segments.streamed_blocks import find_stream
from onnxplace.problem import describe_shortage, device_seconds, find_excess
from onnxplace.simulation.simulated_contention import simulate_with_contention
from onnxplace.simulation.simulator import Simulation, simulate_stream
from onnxplace.state import State

# Each round cuts every segment that holds too much at least in two; single nodes are the last resort.
MAX_ROUNDS = 16


@dataclass(frozen=True)
class BufferLifetimes:
    """The lifetime of each buffer on a device.

    Times are positions in the sequence of its nodes.
    """

    nodes: Ints
    """In the order in which the device runs them."""
    first: Longs
    """Per buffer, the position from which it exists; sorted."""
    last: Longs
    """Per buffer, the last position that needs it."""
    size: Longs
    """Per buffer, in bytes."""
    is_local: Bools
    """Per buffer: neither other devices nor the caller read it, so a segment around it holds it no longer than needed.
    """
    workspace: Longs
    """Per position, in bytes."""

    @staticmethod
    def simulated(graph: OpGraph, simulation: Simulation, order: Ints, device: Ints, index: int) -> BufferLifetimes:
        """Return the buffers on a device in a simulated step.

        `index` is that of the device. O(N + E); weights are left out.
        """
        nodes = order[device[order] == index]
        position = np.full(len(graph) + 1, -1, dtype=np.int64)  # the last entry is for values without a producer (-1)
        position[nodes] = np.arange(len(nodes))
        first = position[graph.producer]
        produced = first >= 0
        last = first.copy()
        np.maximum.at(last, graph.inputs.items, position[graph.inputs.rows])
        is_local = produced & ~graph.is_output
        last[produced & graph.is_output] = len(nodes) - 1
        # A sent buffer lives until its transfer ends; a received one lives from the start of its transfer.
        transfers = simulation.transfers
        outgoing, incoming = transfers.source == index, transfers.destination == index
        start, finish = simulation.start_seconds[nodes], simulation.finish_seconds[nodes]
        last_sending = np.searchsorted(start, transfers.finish_seconds[outgoing], "left") - 1
        np.maximum.at(last, transfers.value[outgoing], last_sending)
        is_local[transfers.value[outgoing]] = False
        first[transfers.value[incoming]] = np.searchsorted(finish, transfers.start_seconds[incoming], "right")
        first[(graph.producer < 0) & (last >= 0)] = 0
        is_buffer = last >= 0
        # A view lives in the buffer that it looks at, which must live as long; from the last view to the first.
        for view in np.flatnonzero((graph.alias >= 0) & produced)[::-1].tolist():
            base = graph.alias[view]
            last[base] = max(last[base], last[view])
            is_local[base] &= is_local[view]
            is_buffer[view] = False
        buffers = np.flatnonzero(is_buffer)
        buffers = buffers[np.argsort(first[buffers], kind="stable")]
        return BufferLifetimes(
            nodes=nodes,
            first=first[buffers],
            last=last[buffers],
            size=graph.value_bytes[buffers],
            is_local=is_local[buffers],
            workspace=graph.workspace_bytes[nodes],
        )

    def bytes_by_position(self) -> Longs:
        """Return the bytes held with each node in its own segment."""
        held = sum_alive(self.first, self.last + 1, self.size, len(self.nodes))
        return held.astype(np.int64) + self.workspace

    def fill_segments(self, begin: int, end: int, free_bytes: int, kernel: Ints) -> list[int]:
        """Cut positions `begin` to `end` (inclusive); return last positions.

        From the front, each segment takes as many nodes as fit into `free_bytes`, but at least one. Nodes of one fused
        kernel are parted only where they do not fit together.
        """
        count = len(self.nodes)
        allocated = np.cumsum(np.bincount(self.first, self.size, count))
        freed = np.cumsum(np.bincount(self.last + 1, self.size, count + 1))

        def fits(start: int, stop: int) -> bool:
            # Local buffers that live inside the segment alone come and go as in the schedule: their peak counts. All
            # others are held from its begin to its end.
            near = slice(*np.searchsorted(self.first, (start, stop + 1)))
            inside = self.is_local[near] & (self.last[near] <= stop)
            first, end, size = self.first[near][inside], self.last[near][inside] + 1, self.size[near][inside]
            held = sum_alive(first - start, end - start, size, stop - start + 1)
            peak = (held + self.workspace[start : stop + 1]).max()
            return bool(allocated[stop] - freed[start] - size.sum() + peak <= free_bytes)

        # Cuts between kernels first; inside one only where it does not fit as a whole.
        kernel_ends = np.append(begin + np.flatnonzero(kernel[begin + 1 : end + 1] != kernel[begin:end]), end)
        ends: list[int] = []
        while begin <= end:
            following = kernel_ends[np.searchsorted(kernel_ends, begin) :]
            stop = _find_furthest(begin, following, fits)
            if stop < begin:
                stop = max(_find_furthest(begin, np.arange(begin, following[0]), fits), begin)
            ends.append(stop)
            begin = stop + 1
        return ends


def _find_furthest(begin: int, ends: Longs, fits: Callable[[int, int], bool]) -> int:
    """Return the furthest of `ends` that fits, -1 if none.

    Gallops forward, then halves the step, so that near ends are tried first; O(log) calls of `fits`.
    """
    index, step = -1, 1
    while index + step < len(ends) and fits(begin, int(ends[index + step])):
        index, step = index + step, 2 * step
    while step > 1:
        step //= 2
        if index + step < len(ends) and fits(begin, int(ends[index + step])):
            index += step
    return int(ends[index]) if index >= 0 else -1


@dataclass(frozen=True)
class SegmentPlan:
    """The nodes of each segment, and the simulated step of all segments."""

    nodes: tuple[Ints, ...]
    """Per segment, in schedule order; segments in an order in which they can run."""
    segment_of: Ints
    """Per node."""
    graph: OpGraph
    """Its nodes are segments."""
    device: Ints
    """Per segment."""
    seconds: Floats
    """[device, segment], with the overhead of calls and without contention."""
    simulation: Simulation
    """The step of `graph`, with contention."""


def simulate_segments(state: State, nodes: Sequence[Ints]) -> SegmentPlan:
    """Simulate the step of segments, given their nodes in schedule order."""
    graph, target, placed = state[Profile].graph, state.target, state[Placement].device
    segment_of = np.zeros(len(graph), dtype=np.int32)
    for index, members in enumerate(nodes):
        segment_of[members] = index
    coarse = graph.contract(segment_of)
    device = np.array([placed[members[0]] for members in nodes], dtype=np.int32)
    order = np.arange(len(nodes), dtype=np.int32)
    seconds = _sum_seconds(state, segment_of, coarse)
    stream = find_stream(state, segment_of, device)
    simulation = simulate_stream(coarse, seconds, target, device, order, stream, simulate_with_contention)
    return SegmentPlan(tuple(nodes), segment_of, coarse, device, seconds, simulation)


def _sum_seconds(state: State, segment_of: Ints, coarse: OpGraph) -> Floats:
    """Return seconds of each segment and call, without contention: [device, segment]."""
    count = len(coarse)
    inputs = np.bincount(coarse.inputs.rows, minlength=count)
    outputs = np.bincount(coarse.outputs.rows, minlength=count)
    return np.stack(
        [
            sum_by(segment_of, node_seconds, count)
            + device.segment_seconds
            + device.input_seconds * inputs
            + device.output_seconds * outputs
            for node_seconds, device in zip(device_seconds(state[Profile], state.target), state.target.devices)
        ]
    )


def cut_within_limits(state: State, nodes: Sequence[Ints]) -> SegmentPlan:
    """Cut segments as needed until no device exceeds its limit.

    A segment that runs while its device holds too much is filled again, node after node, as far as the memory allows;
    segments that still hold too much by the simulation are cut further. About O((N + E) log N).

    Raises:
        InfeasibleError: single nodes do not fit either; the error names a node.
    """
    plan = simulate_segments(state, nodes)
    reserve: dict[int, int] = {}
    for _ in range(MAX_ROUNDS):
        excess = _find_excess(state, plan)
        limits = plan.simulation.peak_bytes - excess
        finer: dict[int, list[Ints]] = {}
        for device in np.flatnonzero(excess > 0).tolist():
            # The account node by node may miss some bytes; they are left free the next time.
            reserve[device] = reserve[device] + int(excess[device]) if device in reserve else 0
            finer |= _refill_segments(state, plan, device, int(limits[device]) - reserve[device])
        if not finer:
            break
        plan = simulate_segments(
            state, [part for index, nodes in enumerate(plan.nodes) for part in finer.get(index, [nodes])]
        )
    return _cut_into_single_nodes(state) if _find_excess(state, plan).any() else plan


def _find_excess(state: State, plan: SegmentPlan) -> Longs:
    """Return, per device, the bytes by which it exceeds its limit, or its part of what its pool lacks."""
    simulation = plan.simulation  # cutting changes no weights
    part_bytes = simulation.peak_bytes - simulation.weights_bytes
    return find_excess(state.target, state.target.limit_bytes, simulation, part_bytes)


def _refill_segments(state: State, plan: SegmentPlan, device: int, limit: int) -> dict[int, list[Ints]]:
    """Return the parts of segments that hold too much.

    Only segments count that run while their device exceeds its limit. Segments of one node are left out: they cannot be
    cut.
    """
    schedule, kernel = state[Schedule], state[Profile].unit
    order = np.arange(len(plan.nodes), dtype=np.int32)
    coarse = BufferLifetimes.simulated(plan.graph, plan.simulation, order, plan.device, device)
    free_bytes = limit - int(plan.simulation.weights_bytes[device])
    needs = coarse.bytes_by_position()
    over = np.flatnonzero(needs > free_bytes)
    # The device exceeds its limit by the simulation alone: take the segment that holds most.
    over = over if len(over) else np.array([needs.argmax()])
    fine = BufferLifetimes.simulated(
        state[Profile].graph, schedule.simulation, schedule.order, state[Placement].device, device
    )
    starts = np.concatenate([[0], np.cumsum([len(plan.nodes[segment]) for segment in coarse.nodes])])
    parts: dict[int, list[Ints]] = {}
    for position in over.tolist():
        first, last = int(starts[position]), int(starts[position + 1]) - 1
        if first < last:
            ends = fine.fill_segments(first, last, free_bytes, kernel[fine.nodes])
            # It fits by this account, but not by the simulation: halve it.
            ends = ends if len(ends) > 1 else [(first + last) // 2, last]
            borders = np.array(ends[:-1]) + 1 - first
            parts[int(coarse.nodes[position])] = np.split(fine.nodes[first : last + 1], borders)
    return parts


def _cut_into_single_nodes(state: State) -> SegmentPlan:
    """Return each node as a segment; raises InfeasibleError if too large."""
    plan = simulate_segments(state, list(state[Schedule].order[:, None]))
    excess, simulation = _find_excess(state, plan), plan.simulation
    if not excess.any():
        return plan
    device, order = int(excess.argmax()), np.arange(len(plan.nodes), dtype=np.int32)
    memory = BufferLifetimes.simulated(plan.graph, plan.simulation, order, plan.device, device)
    largest = int(memory.nodes[memory.bytes_by_position().argmax()]) if len(memory.nodes) else -1
    name = plan.graph.names[largest] if largest >= 0 else ""
    raise InfeasibleError(
        "P001",
        f"{describe_shortage(state.target, simulation.peak_bytes, simulation.pool_peak_bytes)}; "
        f"{state.target.devices[device].id} needs most while it runs node {name!r}, with each node in a segment of its "
        "own",
        where="split",
        hint="add devices, raise --max-memory, or try another --placer",
    )
