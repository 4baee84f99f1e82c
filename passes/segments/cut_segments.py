"""Cut schedules into segments where values must arrive or leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from onnxplace.facts import Schedule, Segment
from onnxplace.graph import Floats, Ints, Longs, OpGraph
from onnxplace.passes.segments.memory_limits import SegmentPlan


@dataclass(frozen=True)
class _Timeline:
    """When nodes start and when values arrive, by the schedule."""

    device: Ints
    """Per node."""
    rank: Longs
    """Per node, its position in the schedule."""
    start_seconds: Floats
    """Per node."""
    arrival_seconds: Mapping[tuple[int, int], float]
    """By value and receiving device."""


def cut_into_segments(graph: OpGraph, device: Ints, schedule: Schedule, unit: Ints) -> list[Ints]:
    """Return the nodes of each segment in schedule order.

    Segments are in the order of their first nodes. Nodes of one unit (a kernel) that follow each other in the schedule
    wait together, before the first of them. O(N + E).
    """
    timeline = _timeline(device, schedule)
    units = _consecutive_units(schedule.order, unit, device)
    open_segments: dict[int, list[int]] = {}
    segments: list[list[int]] = []
    for node in schedule.order.tolist():
        home = int(device[node])
        segment = open_segments.get(home)
        members = units.get(node, ())
        if segment is None or any(_must_wait(graph, timeline, member, segment[0]) for member in members):
            segment = open_segments[home] = []
            segments.append(segment)
        segment.append(node)
        if any((device[graph.readers[value]] != home).any() for value in graph.outputs[node]):
            del open_segments[home]
    return [np.array(nodes, dtype=np.int32) for nodes in segments]


def _timeline(device: Ints, schedule: Schedule) -> _Timeline:
    rank = np.empty(len(device), dtype=np.int64)
    rank[schedule.order] = np.arange(len(device))
    transfers = schedule.simulation.transfers
    arrivals = zip(transfers.value.tolist(), transfers.destination.tolist(), transfers.finish_seconds.tolist())
    arrival_seconds = {(value, destination): finish for value, destination, finish in arrivals}
    return _Timeline(device, rank, schedule.simulation.start_seconds, arrival_seconds)


def _consecutive_units(order: Ints, unit: Ints, device: Ints) -> dict[int, list[int]]:
    """Return, by first node, consecutive nodes of one unit and device."""
    runs: dict[int, list[int]] = {}
    last = None
    for node in order.tolist():
        key = (unit[node], device[node])
        if key != last:
            run = runs[node] = []
        run.append(node)
        last = key
    return runs


def _must_wait(graph: OpGraph, timeline: _Timeline, node: int, first: int) -> bool:
    """Return whether a node reads something that arrives too late.

    That is after the segment of `first` begins.
    """
    home = int(timeline.device[node])
    for value in graph.inputs[node].tolist():
        producer = int(graph.producer[value])
        if producer < 0 or timeline.device[producer] == home:
            continue
        if timeline.rank[producer] > timeline.rank[first]:
            return True
        if timeline.arrival_seconds[value, home] > timeline.start_seconds[first]:
            return True
    return False


def describe_segments(graph: OpGraph, plan: SegmentPlan) -> tuple[Segment, ...]:
    """Return the segments of a plan with their inputs and outputs."""
    return tuple(
        _describe_segment(graph, int(device), np.sort(nodes), plan.segment_of)
        for nodes, device in zip(plan.nodes, plan.device)
    )


def _describe_segment(graph: OpGraph, device: int, nodes: Ints, segment_of: Ints) -> Segment:
    segment = segment_of[nodes[0]]
    inputs: dict[int, None] = {}
    outputs: list[int] = []
    for node in nodes.tolist():
        for value in graph.inputs[node].tolist():
            producer = int(graph.producer[value])
            if producer < 0 or segment_of[producer] != segment:
                inputs[value] = None
        for value in graph.outputs[node].tolist():
            if graph.is_output[value] or (segment_of[graph.readers[value]] != segment).any():
                outputs.append(value)
    if not outputs:  # no other segment needs these nodes, but a session without outputs cannot be run
        outputs.append(int(graph.outputs[int(nodes[-1])][0]))
    return Segment(
        device=device,
        nodes=nodes,
        inputs=tuple(graph.value_names[value] for value in inputs),
        outputs=tuple(graph.value_names[value] for value in outputs),
    )
