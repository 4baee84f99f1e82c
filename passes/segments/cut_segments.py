"""Cut schedules into segments where values must arrive or leave, merge neighbours, and write each device's program.

A segment ends where another device reads one of its values, and begins where a value would arrive too late for the
nodes before. Neighbours on a device are then merged where the step does not get longer. A program receives, runs, sends
and frees in the order of the schedule. Carried states stay on one device between calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxplace.bundle.manifest import Step
from onnxplace.errors import Diagnostic, UsageError
from onnxplace.facts import Placement, Profile, Schedule, Segment, Segments
from onnxplace.graph.op_graph import Csr, Floats, Ints, Longs, OpGraph
from onnxplace.model.model import Model
from onnxplace.passes.segments.memory_limits import SegmentPlan, simulate_segments
from onnxplace.simulation.channel_kernels import GAP
from onnxplace.simulation.step_kernels import DEVICE
from onnxplace.state import State
from onnxplace.target.target import LINK_MODELS, Target
from onnxplace.utils.groups import group_pairs

# Steps of the loop that merges, at most; beyond, the segments stay as they are cut.
MAX_WORK = 2_000_000_000
# Relative difference of the times of segments that count as equal parts of operators.
EQUAL_PARTS = 1e-3


def require_states_together(state: State) -> None:
    """Raise UsageError if a state would move between calls."""
    if Model not in state:
        return
    graph, device, model = state[Profile].graph, state[Placement].device, state[Model]
    value_index = {name: value for value, name in enumerate(graph.value_names)}
    for name, output in model.states.items():
        producer = int(graph.producer[value_index[model.sources.get(output, output)]])
        remote = [node for node in graph.readers[value_index[name]].tolist() if device[node] != device[producer]]
        if remote:
            ids = [state.target.devices[int(device[node])].id for node in (producer, remote[0])]
            raise UsageError(
                "U002",
                f"state {output!r} = {name!r} is made on {ids[0]} and read on {ids[1]} by {graph.names[remote[0]]!r}",
                where="split",
                hint="put coplace before the placer: it keeps both ends of a state together",
            )


def report_crossing_states(state: State) -> tuple[Diagnostic, ...]:
    """Return a note for each state with readers on other devices."""
    if Model not in state:
        return ()
    model = state[Model]
    sends = (step for program in state[Segments].programs for step in program if step.op == "send")
    receivers = group_pairs((step.value, step.peer) for step in sends)
    return tuple(
        Diagnostic(
            "S010",
            f"state {output!r} stays on its device, but is read on {', '.join(receivers[value])} too: a copy crosses",
            where="split",
            hint="--colocate its readers, or leave it",
        )
        for output in dict.fromkeys(model.states.values())
        if (value := model.sources.get(output, output)) in receivers
    )


def cut_into_segments(state: State) -> list[Ints]:
    """Return the nodes of each segment in schedule order.

    Segments are in the order of their first nodes. Nodes of one unit (a kernel) that follow each other in the schedule
    wait together, before the first of them. A value leaves at once, except where the next node belongs to the same unit
    and takes less time than a call: the slices that a device sends leave together. O(N + E).
    """
    graph, device, schedule, unit = state[Profile].graph, state[Placement].device, state[Schedule], state[Profile].unit
    rank, start_seconds = np.argsort(schedule.order), schedule.simulation.start_seconds
    last_rank, last_arrival = _find_last_receipts(state, rank)
    seconds = schedule.simulation.finish_seconds - start_seconds
    by_device = schedule.order[np.argsort(device[schedule.order], kind="stable")]
    following, followed = by_device[1:], by_device[:-1]
    call_seconds = np.array([item.segment_seconds for item in state.target.devices])[device]
    stays = np.zeros(len(graph), dtype=bool)
    stays[followed] = (unit[following] == unit[followed]) & (device[following] == device[followed])
    stays[followed] &= seconds[following] < call_seconds[following]
    # One pass over the schedule, with at most one open segment per device. A node joins the open one if all that its
    # kernel reads is there when that begins, and is made before that in the schedule: to wait for it at the begin could
    # take forever. A node whose value leaves closes it, if the value is to leave at once.
    open_segments: dict[int, list[int]] = {}
    segments: list[list[int]] = []
    for node in schedule.order.tolist():
        home = int(device[node])
        segment = open_segments.get(home)
        if segment is None or last_rank[node] > rank[segment[0]] or last_arrival[node] > start_seconds[segment[0]]:
            segment = open_segments[home] = []
            segments.append(segment)
        segment.append(node)
        if not stays[node] and any((device[graph.readers[value]] != home).any() for value in graph.outputs[node]):
            del open_segments[home]
    return [np.array(nodes, dtype=np.int32) for nodes in segments]


def _find_last_receipts(state: State, rank: Longs) -> tuple[Longs, Floats]:
    """Return when the last value from another device is made, as a position in the schedule, and when the last arrives.

    Both are per node, given the position of each. The first of consecutive nodes of one unit and device has those of
    all of them; the others, and nodes that read nothing from elsewhere, have values below all positions and times.
    """
    graph, device, schedule, unit = state[Profile].graph, state[Placement].device, state[Schedule], state[Profile].unit
    keys = np.stack([unit[schedule.order], device[schedule.order]])
    begins = np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0))[: len(graph)]
    first = schedule.order[begins][np.cumsum(begins) - 1][rank]
    producers, readers, values = graph.producer[graph.inputs.items], graph.inputs.rows, graph.inputs.items
    crosses = (producers >= 0) & (device[producers] != device[readers])
    producers, readers, values = producers[crosses], readers[crosses], values[crosses]
    arrivals = schedule.simulation.transfers.list_arrivals()
    last_rank, last_arrival = np.full(len(graph), -1, dtype=np.int64), np.full(len(graph), -np.inf)
    np.maximum.at(last_rank, first[readers], rank[producers])
    pairs = zip(values.tolist(), device[readers].tolist())
    np.maximum.at(last_arrival, first[readers], np.array([arrivals[pair] for pair in pairs], dtype=np.float64))
    return last_rank, last_arrival


def describe_segments(graph: OpGraph, plan: SegmentPlan, target: Target) -> tuple[Segment, ...]:
    """Return the segments of a plan with their inputs and outputs."""
    devices = plan.device.tolist()
    return tuple(
        _describe_segment(graph, name, device, np.sort(nodes), plan.segment_of)
        for name, device, nodes in zip(name_segments(devices, target), devices, plan.nodes)
    )


def name_segments(devices: Sequence[int], target: Target) -> list[str]:
    """Name segments by their devices and positions there: `cpu0-000`."""
    counts, names = Counter[int](), []
    for device in devices:
        # `cuda:0/1` becomes `cuda0p1`, and `node1/qnn/npu:0` becomes `node1-qnn-npu0`, since files have these names.
        kind, _, number = target.devices[device].id.partition(":")
        names.append(f"{kind.replace('/', '-')}{number.replace('/', 'p')}-{counts[device]:03d}")
        counts[device] += 1
    return names


def _describe_segment(graph: OpGraph, name: str, device: int, nodes: Ints, segment_of: Ints) -> Segment:
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
        id=name,
        device=device,
        nodes=nodes,
        inputs=tuple(graph.value_names[value] for value in inputs),
        outputs=tuple(graph.value_names[value] for value in outputs),
    )


def write_programs(segments: Sequence[Segment], graph: OpGraph, target: Target) -> tuple[tuple[Step, ...], ...]:
    """Return the program of each device; linear."""
    producer = {name: index for index, segment in enumerate(segments) for name in segment.outputs}

    def is_remote(name: str, device: int) -> bool:
        return name in producer and segments[producer[name]].device != device

    # By value and device, the last segment that reads the value there. Per segment, its values in the order of their
    # first readers elsewhere, with the devices that they are sent to.
    last_reader, sends = dict[tuple[str, int], int](), [dict[str, list[int]]() for _ in segments]
    for index, segment in enumerate(segments):
        for name in segment.inputs:
            if (name, segment.device) not in last_reader and is_remote(name, segment.device):
                sends[producer[name]].setdefault(name, []).append(segment.device)
            last_reader[name, segment.device] = index
    returned = {graph.value_names[value] for value in np.flatnonzero(graph.is_output)}
    devices, ids = len(target.devices), [device.id for device in target.devices]
    programs: list[list[Step]] = [[] for _ in range(devices)]
    received: set[tuple[str, int]] = set()
    for index, segment in enumerate(segments):
        program, home = programs[segment.device], segment.device
        # Receive right before the first reader, so that the device does not wait for a value any earlier. Where devices
        # send to each other, those with a common distance do so at one time: no two of them to one device.
        missing = [name for name in segment.inputs if is_remote(name, home) and (name, home) not in received]
        peers = {name: segments[producer[name]].device for name in missing}
        for name, peer in sorted(peers.items(), key=lambda item: (home - item[1]) % devices):
            program.append(Step(op="receive", value=name, peer=ids[peer]))
            received.add((name, home))
        program.append(Step(op="run", segment=segment.id))
        for name, readers in sends[index].items():
            next_first = sorted(readers, key=lambda peer: (peer - home) % devices)
            program.extend(Step(op="send", value=name, peer=ids[peer]) for peer in next_first)
        unread = [name for name in segment.outputs if (name, home) not in last_reader]
        last_read = [name for name in segment.inputs if last_reader[name, home] == index]
        for name in (*last_read, *unread):
            # An output of the model stays on the device that made it; copies of it elsewhere may go.
            if name not in returned or is_remote(name, home):
                program.append(Step(op="free", value=name))
    return tuple(map(tuple, programs))


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
    # Nothing to merge with one segment per device.
    if count == len(np.unique(plan.device)) or count * (count + len(sends.needs.items)) > MAX_WORK:
        return list(nodes)

    from onnxplace.passes.segments.merge_kernels import SegmentQueues, merge_neighbours

    simulation = plan.simulation
    seconds = simulation.finish_seconds - simulation.start_seconds
    queues = SegmentQueues(
        *by_device.arrays,
        seconds,
        np.array([device.segment_seconds for device in state.target.devices]),
        sends.starts,
        sends.destination,
        sends.seconds,
        *sends.needs.arrays,
        state.target.conflicts,
        LINK_MODELS.index(state.target.link_model),
    )
    devices = len(state.target.devices)
    records, gaps = np.zeros(devices, DEVICE), np.zeros(devices + len(sends.destination) + 1, GAP)
    records["shares"] = state.target.conflicts.sum(axis=0) > 1
    joined, sequence = merge_neighbours(queues, _list_attempts(by_device, seconds), records, gaps)
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
    # By producing segment, then value, then device, from the next one on: one send for all readers there.
    distance = (device[readers] - device[producers]) % devices
    keys = (producers.astype(np.int64) * (len(graph.value_names) + 1) + values) * devices + distance
    unique, send = np.unique(keys, return_inverse=True)
    value = (unique // devices) % (len(graph.value_names) + 1)
    source = unique // devices // (len(graph.value_names) + 1)
    home = device[source]
    destination = ((unique + home) % devices).astype(np.int32)
    return _Sends(
        starts=np.searchsorted(source, np.arange(len(graph) + 1)),
        destination=destination,
        seconds=latency[home, destination] + graph.value_bytes[value] * per_byte[home, destination],
        needs=Csr.grouped(readers, send.astype(np.int32), len(graph)),
    )


def _list_attempts(by_device: Csr, seconds: Floats) -> Ints:
    """Return segments with one before them on their device, a row per attempt, first those next to a short one.

    Where all devices have equal parts of operators, segments of all of them are merged together: one alone gains
    nothing, because it waits for the others. Otherwise each row has one segment, repeated.
    """
    queues = [by_device[device] for device in range(len(by_device)) if len(by_device[device])]
    # Short segments gain most from a merge: their call is the largest part of them.
    shorter = [np.minimum(seconds[queue[:-1]], seconds[queue[1:]]) for queue in queues]
    common = min(len(queue) for queue in queues)
    parts = [seconds[queue[:common]] for queue in queues]
    if not all(np.allclose(part, parts[0], rtol=EQUAL_PARTS) for part in parts):
        common = 1
    together = np.stack([queue[1:common] for queue in queues], axis=1)[
        np.argsort(shorter[0][: common - 1], kind="stable")
    ]
    # One device returns the results: it may have more segments than the others.
    single = np.concatenate([queue[common:] for queue in queues])
    single = single[np.argsort(np.concatenate([times[common - 1 :] for times in shorter]), kind="stable")]
    return np.concatenate([together, np.repeat(single[:, np.newaxis], len(queues), axis=1)])


def _join(plan: SegmentPlan, joined: Sequence[bool], sequence: Sequence[int]) -> list[Ints]:
    """Return the nodes of merged segments, in the sequence."""
    merged: list[list[Ints]] = []
    for segment in sequence:
        if joined[segment]:
            merged[-1].append(plan.nodes[segment])
        else:
            merged.append([plan.nodes[segment]])
    return [np.concatenate(parts) for parts in merged]
