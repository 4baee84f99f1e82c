"""Cut the placed model into segments, and write each device's program over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxplace.errors import Diagnostic
from onnxplace.facts import Instruction, Placement, Profile, Schedule, Segment, Segments
from onnxplace.graph import Floats, Ints, Longs, OpGraph
from onnxplace.passes.segments import cut_within_limits, report_crossing_states, require_states_together
from onnxplace.simulation import Simulation
from onnxplace.state import Pass, State
from onnxplace.target import Target


@dataclass(frozen=True)
class Split(Pass):
    """Cut each device's sequence where something must arrive or leave; docs/decisions/0004-segments.md proves it safe.

    A segment ends after a node that another device reads, since a session hands out its results at its end only. A
    segment starts before a node that needs a value which, by the schedule, arrives after the segment would have begun.
    Run in schedule order, such segments cannot deadlock, whatever the placement. Where a device would hold more than
    its limit while a segment runs, that segment is cut further.
    """

    name: ClassVar[str] = "split"
    requires: ClassVar[tuple[type, ...]] = (Profile, Placement, Schedule)
    provides: ClassVar[tuple[type, ...]] = (Segments,)

    def run(self, state: State) -> State:
        require_states_together(state)
        graph, target = state[Profile].graph, state.target
        device = state[Placement].device
        nodes = cut(graph, device, state[Schedule], state[Profile].unit)
        pieces = cut_within_limits(state, nodes)
        segments = tuple(
            _segment(graph, int(there), np.sort(part), pieces.segment_of)
            for part, there in zip(pieces.nodes, pieces.device)
        )
        programs = _programs(segments, graph, target, pieces.simulation)
        done = state.having(Segments(segments, programs, pieces.simulation))
        if len(segments) > len(nodes):
            done = done.saying(_cut_further(len(nodes), len(segments)))
        return done.saying(*report_crossing_states(done))


def _cut_further(before: int, after: int) -> Diagnostic:
    message = f"{after} segments instead of {before}, so that devices keep within their memory"
    hint = "each cut costs a call, and fusions that it breaks: a larger --max-memory needs fewer"
    return Diagnostic("P012", message, where="split", hint=hint)


def cut(graph: OpGraph, device: Ints, schedule: Schedule, unit: Ints) -> list[Ints]:
    """Return the nodes of each segment in schedule order; segments in the order of their first nodes.

    Nodes of one unit (a kernel) that follow each other in the schedule wait together, before the first of them.
    """
    rank = np.empty(len(graph), dtype=np.int64)
    rank[schedule.order] = np.arange(len(graph))
    sent = schedule.simulation.transfers
    arrival = {(int(v), int(d)): float(t) for v, d, t in zip(sent.value, sent.destination, sent.finish_seconds)}
    start = schedule.simulation.start_seconds
    open_segment: dict[int, list[int]] = {}
    pieces: list[list[int]] = []
    runs = _runs(schedule.order, unit, device)
    for node in schedule.order.tolist():
        home = int(device[node])
        current = open_segment.get(home)
        together = runs.get(node, ())
        if current is None or any(_must_wait(graph, device, n, current[0], rank, start, arrival) for n in together):
            current = open_segment[home] = []
            pieces.append(current)
        current.append(node)
        if any((device[graph.readers[value]] != home).any() for value in graph.outputs[node]):
            del open_segment[home]
    return [np.array(nodes, dtype=np.int32) for nodes in pieces]


def _runs(order: Ints, unit: Ints, device: Ints) -> dict[int, list[int]]:
    """Return, by their first node, the nodes of one unit and device that follow each other in the schedule."""
    runs: dict[int, list[int]] = {}
    last = None
    for node in order.tolist():
        key = (unit[node], device[node])
        if key != last:
            run = runs[node] = []
        run.append(node)
        last = key
    return runs


def _must_wait(
    graph: OpGraph,
    device: Ints,
    node: int,
    first: int,
    rank: Longs,
    start: Floats,
    arrival: Mapping[tuple[int, int], float],
) -> bool:
    """Return whether `node` needs something that is not there yet when the segment of `first` begins."""
    home = int(device[node])
    for value in graph.inputs[node].tolist():
        source = int(graph.producer[value])
        remote = source >= 0 and device[source] != home
        if remote and (rank[source] > rank[first] or arrival[value, home] > start[first]):
            return True
    return False


def _segment(graph: OpGraph, device: int, nodes: Ints, segment_of: Ints) -> Segment:
    own = segment_of[nodes[0]]
    inputs: dict[int, None] = {}
    outputs: list[int] = []
    for node in nodes.tolist():
        for value in graph.inputs[node].tolist():
            source = int(graph.producer[value])
            if source < 0 or segment_of[source] != own:
                inputs[value] = None
        for value in graph.outputs[node].tolist():
            if graph.is_output[value] or (segment_of[graph.readers[value]] != own).any():
                outputs.append(value)
    if not outputs:  # nobody needs these nodes, but a session without outputs cannot be run
        outputs.append(int(graph.outputs[int(nodes[-1])][0]))
    return Segment(
        device, nodes, tuple(graph.value_names[v] for v in inputs), tuple(graph.value_names[v] for v in outputs)
    )


def _programs(
    segments: tuple[Segment, ...], graph: OpGraph, target: Target, simulation: Simulation
) -> tuple[tuple[Instruction, ...], ...]:
    """Return what each device does, in an order that follows the schedule."""
    producer = {name: index for index, segment in enumerate(segments) for name in segment.outputs}
    # Transfers in booking order, by the segment that makes the value.
    sends: dict[int, list[tuple[str, int]]] = {}
    readers: dict[tuple[str, int], int] = {}
    for index, segment in enumerate(segments):
        for name in segment.inputs:
            if (
                (name, segment.device) not in readers
                and name in producer
                and segments[producer[name]].device != segment.device
            ):
                sends.setdefault(producer[name], []).append((name, segment.device))
            readers[name, segment.device] = index
    returned = {graph.value_names[v] for v in np.flatnonzero(graph.is_output)}
    programs: list[list[Instruction]] = [[] for _ in target.devices]
    here: set[tuple[str, int]] = set()
    for index, segment in enumerate(segments):
        program, home = programs[segment.device], segment.device
        for name in segment.inputs:
            if name in producer and (name, home) not in here and segments[producer[name]].device != home:
                program.append(Instruction("receive", value=name, peer=segments[producer[name]].device))
                here.add((name, home))
        program.append(Instruction("run", segment=index))
        program.extend(Instruction("send", value=name, peer=peer) for name, peer in sends.get(index, ()))
        unread = [name for name in segment.outputs if (name, home) not in readers]
        last = [name for name in segment.inputs if readers[name, home] == index]
        for name in (*last, *unread):
            # A model's output stays with the device that made it; copies of it elsewhere may go.
            if not (name in returned and (name not in producer or segments[producer[name]].device == home)):
                program.append(Instruction("free", value=name))
    return tuple(tuple(program) for program in programs)
