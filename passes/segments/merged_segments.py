"""Merge neighbouring segments of a device where no other device has to wait longer for their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxplace.graph import Csr, Floats, Ints, Longs
from onnxplace.passes.segments.memory_limits import SegmentPlan, simulate_segments
from onnxplace.state import State
from onnxplace.target import LINK_MODELS, Target

# Steps of the search; beyond, the segments stay as they are cut.
MAX_WORK = 2_000_000_000


def merge_segments(state: State, nodes: Sequence[Ints]) -> list[Ints]:
    """Return the nodes of each segment, with neighbours merged; in an order in which the segments can run.

    Each call of a segment costs, and so do the fusions and the reuse of memory that its borders break. A segment ends
    where another device reads one of its values, even if that device reads it much later. Neighbours are joined, the
    shortest first, as long as the simulated step is not longer and no device waits forever. Of the plans before and
    after, the one with the shorter step by the simulator is kept. O(S (D S + E)) for S segments on D devices with E
    values between them.
    """
    plan = simulate_segments(state, nodes)
    count = len(plan.nodes)
    by_device = Csr.grouped(plan.device, np.arange(count, dtype=np.int32), len(state.target.devices))
    sends = _list_sends(plan, state.target)
    if count == len(np.unique(plan.device)) or count * (count + len(sends.needs.items)) > MAX_WORK:
        return list(nodes)

    from onnxplace.passes.segments.merge_kernels import merge_neighbours

    simulation = plan.simulation
    seconds = simulation.finish_seconds - simulation.start_seconds
    joined, sequence = merge_neighbours(
        by_device.starts,
        by_device.items,
        plan.device,
        seconds,
        np.array([device.segment_seconds for device in state.target.devices]),
        sends.starts,
        sends.destination,
        sends.seconds,
        sends.needs.starts,
        sends.needs.items,
        LINK_MODELS.index(state.target.link_model),
        _list_attempts(by_device, seconds),
    )
    merged = _join(plan, joined.tolist(), sequence.tolist())
    after = simulate_segments(state, merged).simulation.makespan_seconds
    return merged if after <= simulation.makespan_seconds else list(nodes)


@dataclass(frozen=True)
class _Sends:
    """What segments send to other devices."""

    starts: Longs
    """Where the sends of each segment begin."""
    destination: Ints
    """Device per send."""
    seconds: Floats
    """Per send."""
    needs: Csr
    """Per segment, the sends that it waits for."""


def _list_sends(plan: SegmentPlan, target: Target) -> _Sends:
    """Return each value with each other device that reads it, by producing segment."""
    graph, device = plan.graph, plan.device
    latency, per_byte = target.link_arrays()
    values, readers = graph.readers.rows, graph.readers.items
    made = graph.producer[values] >= 0
    values, readers = values[made], readers[made]
    producers = graph.producer[values]
    crosses = device[producers] != device[readers]
    values, readers, producers = values[crosses], readers[crosses], producers[crosses]
    devices = len(target.devices)
    # By producing segment, then value, then device: one send for all readers there.
    keys = (producers.astype(np.int64) * (len(graph.value_names) + 1) + values) * devices + device[readers]
    unique, send = np.unique(keys, return_inverse=True)
    destination = (unique % devices).astype(np.int32)
    value = (unique // devices) % (len(graph.value_names) + 1)
    source = unique // devices // (len(graph.value_names) + 1)
    home = device[source]
    return _Sends(
        starts=np.searchsorted(source, np.arange(len(graph) + 1)),
        destination=destination,
        seconds=latency[home, destination] + graph.value_bytes[value] * per_byte[home, destination],
        needs=Csr.grouped(readers, send.astype(np.int32), len(graph)),
    )


def _list_attempts(by_device: Csr, seconds: Floats) -> Ints:
    """Return the segments with one before them on their device, first those next to a short one."""
    pairs = [pair for device in range(len(by_device)) for pair in zip(by_device[device][:-1], by_device[device][1:])]
    shorter = np.array([min(seconds[one], seconds[other]) for one, other in pairs])
    behind = np.array([other for _, other in pairs], dtype=np.int32)
    return behind[np.argsort(shorter, kind="stable")]


def _join(plan: SegmentPlan, joined: Sequence[bool], sequence: Sequence[int]) -> list[Ints]:
    """Return the nodes of merged segments, in the sequence."""
    merged: list[list[Ints]] = []
    for segment in sequence:
        if joined[segment]:
            merged[-1].append(plan.nodes[segment])
        else:
            merged.append([plan.nodes[segment]])
    return [np.concatenate(parts) for parts in merged]
