"""One simulated step as reports look at it: the values that cross, and the chain of events that bounds it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from onnxplace.bundle.bundle_simulation import build_segment_graph, build_weight_stream
from onnxplace.bundle.manifest import Manifest
from onnxplace.errors import format_count
from onnxplace.graph.op_graph import Floats, Ints, OpGraph
from onnxplace.simulation.simulator import Simulation, simulate, simulate_stream
from onnxplace.simulation.weight_streams import WeightStream
from onnxplace.target.target import Target
from onnxplace.utils.groups import group_pairs
from onnxplace.utils.quantities import format_time

if TYPE_CHECKING:  # of reports, which few commands write
    from onnxplace.reports.page_records import Bound, ChainPart, Crossing


@dataclass(frozen=True)
class PlacedStep:
    """A graph of segments or nodes with its placement, and the step that follows from it."""

    graph: OpGraph
    seconds: Floats
    """[device, node]; not a number where it is unknown."""
    target: Target
    device_names: tuple[str, ...]
    """As readers know them."""
    device: Ints
    order: Ints
    simulation: Simulation
    details: tuple[str, ...] = ()
    """Per node, what a reader may want to know besides its name."""
    stream: WeightStream = field(default_factory=WeightStream.none)
    """Weights that nodes wait for."""

    def name_link(self, source: int, destination: int) -> str:
        """Return the name of a link, such as `cpu:0 → cpu:1`."""
        return f"{self.device_names[source]} → {self.device_names[destination]}"

    def simulate_moved(self, nodes: Ints, device: int) -> float | None:
        """Return the seconds of the step with some nodes on another device; None if their times there are unknown."""
        if len(self.stream.blocks) or not np.isfinite(self.seconds[device, nodes]).all():
            return None
        moved = self.device.copy()
        moved[nodes] = device
        try:
            return simulate(self.graph, np.nan_to_num(self.seconds), self.target, moved, self.order).makespan_seconds
        except ValueError:  # the order of the bundle is not one of the other placement
            return None


def simulate_segments(manifest: Manifest, *, planned: bool = False) -> PlacedStep:
    """Return the step of a bundle on its first route.

    Args:
        manifest: The bundle's.
        planned: Take the times that follow from the costs of nodes, instead of those of the trial.
    """
    target, graph, segments = manifest.target.target(), build_segment_graph(manifest), manifest.segments
    device = np.array([target.position(segment.device) for segment in segments], dtype=np.int32)
    classes = [item.cost_class for item in target.devices]
    choices = [(item.planned_seconds if planned else None, item.seconds) for item in segments]
    own = np.array([measured if costs is None else costs for costs, measured in choices], dtype=np.float64)
    home = np.array([classes[index] for index in device], dtype=np.str_)
    rows = [np.where(home == name, own, np.nan) for name in classes]
    seconds = np.stack(rows) if rows else np.zeros((0, len(segments)))
    order = np.arange(len(segments), dtype=np.int32)
    times, stream = np.nan_to_num(seconds), build_weight_stream(manifest)
    return PlacedStep(
        graph=graph,
        seconds=seconds,
        target=target,
        device_names=tuple(item.id for item in target.devices),
        device=device,
        order=order,
        simulation=simulate_stream(graph, times, target, device, order, stream),
        details=tuple(format_count(item.nodes, "node") for item in segments),
        stream=stream,
    )


# ---------------------------------------------------------------------------------------------------- values that cross


# Nodes to simulate in all, to find what the most expensive crossings gain: about a second.
MAX_SIMULATED_NODES = 1_000_000
MAX_SIMULATED_CROSSINGS = 400
# Smaller differences of steps are no reason for a crossing.
MIN_SHARE = 1e-4


def list_crossings(step: PlacedStep) -> tuple[Crossing, ...]:
    """Return the values that cross between devices, those with the longest transfers first."""
    sent = step.simulation.transfers
    transfers = group_pairs((value, index) for index, value in enumerate(sent.value.tolist()))
    own_seconds = sent.finish_seconds - sent.start_seconds
    ranked = sorted(transfers, key=lambda value: (-float(own_seconds[transfers[value]].sum()), value))
    simulated = min(MAX_SIMULATED_CROSSINGS, MAX_SIMULATED_NODES // max(len(step.graph), 1))
    arrivals, before = sent.list_arrivals(), find_device_predecessors(step)
    return tuple(
        _describe_crossing(step, value, transfers[value], arrivals, before, is_simulated=rank < simulated)
        for rank, value in enumerate(ranked)
    )


def find_device_predecessors(step: PlacedStep) -> list[int]:
    """Return, for each node, the one that its device, or a processor of it, runs before it, or -1."""
    previous, last = [-1] * len(step.graph), [-1] * len(step.device_names)
    device, start, finish = step.device.tolist(), step.simulation.start_seconds, step.simulation.finish_seconds
    conflicts = [np.flatnonzero(row).tolist() for row in step.target.conflicts]
    for node in step.order[np.lexsort((finish[step.order], start[step.order]))].tolist():
        previous[node] = last[device[node]]
        for other in conflicts[device[node]]:
            if last[other] < 0 or finish[last[other]] <= finish[node]:
                last[other] = node
    return previous


def _describe_crossing(
    step: PlacedStep,
    value: int,
    transfers: Sequence[int],
    arrivals: Mapping[tuple[int, int], float],
    before: Sequence[int],
    *,
    is_simulated: bool,
) -> Crossing:
    from onnxplace.reports.page_records import Crossing

    sent, graph = step.simulation.transfers, step.graph
    source = int(sent.source[transfers[0]])
    readers = graph.readers[value]
    remote = readers[step.device[readers] != source]
    waits, slacks = zip(*(_measure_wait(step, value, int(node), arrivals, before) for node in remote), strict=True)
    kept, gain = step.simulation.makespan_seconds, None
    if is_simulated and (moved := step.simulate_moved(remote, source)) is not None:
        gain = moved - kept if abs(moved - kept) > MIN_SHARE * kept else 0.0
    return Crossing(
        value=graph.value_names[value],
        bytes=int(graph.value_bytes[value]),
        source=step.device_names[source],
        destinations=tuple(step.device_names[int(sent.destination[index])] for index in transfers),
        times=len(transfers),
        transfer_seconds=float((sent.finish_seconds - sent.start_seconds)[list(transfers)].sum()),
        wait_seconds=sum(waits),
        gain_seconds=gain,
        reason=_explain(step.device_names[source], sum(waits), min(slacks), gain),
    )


def _measure_wait(
    step: PlacedStep, value: int, node: int, arrivals: Mapping[tuple[int, int], float], before: Sequence[int]
) -> tuple[float, float]:
    """Return how long a reader waits for this value alone, and how long the value is there before it starts."""
    simulation, device = step.simulation, int(step.device[node])
    others = [float(simulation.finish_seconds[before[node]])] if before[node] >= 0 else [0.0]
    for item in step.graph.inputs[node].tolist():
        producer = int(step.graph.producer[item])
        if item != value and producer >= 0:
            local = float(simulation.finish_seconds[producer])
            others.append(local if int(step.device[producer]) == device else arrivals.get((item, device), local))
    arrival = arrivals.get((value, device), 0.0)
    return max(arrival - max(others), 0.0), max(float(simulation.start_seconds[node]) - arrival, 0.0)


def _explain(source: str, wait: float, slack: float, gain: float | None) -> str:
    """Return in words why a value crosses."""
    arrival = (
        f"Its readers wait {format_time(wait)} for it."
        if wait > 0
        else f"It arrives {format_time(slack)} before it is needed."
        if slack > 0
        else "No reader waits for it alone."
    )
    if gain is None:
        return arrival
    if gain > 0:
        return f"{arrival} With its readers on {source}, the step would take {format_time(gain)} longer."
    if gain < 0:
        shorter = format_time(-gain)
        return f"{arrival} With its readers on {source}, this simulation is {shorter} shorter, memory left aside."
    return f"{arrival} With its readers on {source}, the step would take as long."


def count_bytes(crossings: Sequence[Crossing]) -> int:
    """Return the bytes that cross in a step."""
    return int(np.sum([item.bytes * item.times for item in crossings], dtype=np.int64))


# -------------------------------------------------------------------------------------------------- the chain of events


# Remarks on shares of a step below this are left out.
MIN_REMARKED_SHARE = 0.005


def explain_step(
    step: PlacedStep,
    step_seconds: float,
    lower_bound_seconds: float,
    single_device_seconds: float,
    request_seconds: float = 0.0,
    planned_seconds: float | None = None,
) -> Bound:
    """Return the parts of a step, and what keeps it above its lower bound.

    Args:
        step: The simulated step.
        step_seconds: The predicted step, from the call to the last output.
        lower_bound_seconds: No placement is faster, by the costs of nodes.
        single_device_seconds: The step on the best single device; 0 if that is unknown.
        request_seconds: The part of a step before its first event and after its last one.
        planned_seconds: The step by the costs of nodes, if `step_seconds` is of a trial.
    """
    from onnxplace.reports.page_records import Bound, ChainPart

    parts = group_pairs(((kind, where), seconds) for kind, where, seconds, _ in _walk_back(step))
    chain = [ChainPart(*place, sum(times), len(times)) for place, times in parts.items()]
    if request_seconds > 0:
        chain.append(ChainPart("request", "", request_seconds, 1))
    compute = step.simulation.compute_seconds
    busiest = int(compute.argmax()) if len(compute) else 0
    bound = Bound(
        step_seconds=step_seconds,
        planned_seconds=step_seconds if planned_seconds is None else planned_seconds,
        lower_bound_seconds=lower_bound_seconds,
        single_device_seconds=single_device_seconds,
        even_seconds=float(compute.sum()) / max(len(compute), 1),
        busiest_device=step.device_names[busiest] if len(compute) else "",
        busiest_seconds=float(compute.max(initial=0.0)),
        chain=tuple(sorted(chain, key=lambda part: (-part.seconds, part.where))),
    )
    return replace(bound, remarks=tuple(_list_remarks(bound)))


def divide_chain(step: PlacedStep, node_seconds: Mapping[str, Floats]) -> dict[str, list[float]]:
    """Return the seconds of the events that determine the length of a step: of `copies`, `waits` and parts of nodes.

    `node_seconds`: what the time of each node consists of, by kind.
    """
    parts = defaultdict[str, list[float]](list)
    for event, _, seconds, node in _walk_back(step):
        kinds = node_seconds if event == "compute" else {"copies" if event == "transfer" else "waits": ()}
        for kind, times in kinds.items():
            parts[kind].append(float(times[node]) if len(times) else seconds)
    return parts


def _walk_back(step: PlacedStep) -> Iterator[tuple[str, str, float, int]]:
    """Yield the events from the last one to the start, and pauses: kind, device or link, seconds, node or transfer."""
    simulation, sent = step.simulation, step.simulation.transfers
    start, finish = simulation.start_seconds.tolist(), simulation.finish_seconds.tolist()
    sent_start, sent_finish = sent.start_seconds.tolist(), sent.finish_seconds.tolist()
    before_node, before_transfer = find_device_predecessors(step), _find_channel_predecessors(step)
    transfer_of = {pair: index for index, pair in enumerate(zip(sent.value.tolist(), sent.destination.tolist()))}
    ends = [(seconds, "node", index) for index, seconds in enumerate(finish)]
    ends += [(seconds, "transfer", index) for index, seconds in enumerate(sent_finish)]
    last = max(ends, default=None)
    while last is not None:
        _, kind, index = last
        if kind == "node":
            device, begin = int(step.device[index]), start[index]
            yield "compute", step.device_names[device], finish[index] - begin, index
            # It may have started only after the node before it on its device, and after each value that it reads.
            candidates = [(finish[node], "node", node) for node in (before_node[index],) if node >= 0]
            for value in step.graph.inputs[index].tolist():
                producer = int(step.graph.producer[value])
                if producer >= 0 and int(step.device[producer]) == device:
                    candidates.append((finish[producer], "node", producer))
                elif producer >= 0:
                    transfer = transfer_of[value, device]
                    candidates.append((sent_finish[transfer], "transfer", transfer))
        else:
            begin = sent_start[index]
            name = step.name_link(int(sent.source[index]), int(sent.destination[index]))
            yield "transfer", name, sent_finish[index] - begin, index
            # It may have started only after its value was computed, and after the transfers before it on its channels.
            producer = int(step.graph.producer[int(sent.value[index])])
            candidates = [(finish[producer], "node", producer)]
            candidates += [(sent_finish[item], "transfer", item) for item in before_transfer[index]]
        # What ended last was waited for; what is left before the start is a pause.
        last = max(candidates, default=None)
        pause = begin - (last[0] if last is not None else 0.0)
        if pause > 1e-12 and kind == "node" and begin == simulation.arrival_seconds[index]:
            yield "weights", step.device_names[device], pause, index
        elif pause > 1e-12:
            yield "wait", "", pause, index


def _find_channel_predecessors(step: PlacedStep) -> list[list[int]]:
    """Return, for each transfer, those that held its channels before it."""
    sent, last = step.simulation.transfers, dict[tuple[str, int], int]()
    kinds = {"duplex": ("out", "in"), "sequential": ("one", "one"), "parallel": ()}[step.target.link_model]
    earlier: list[list[int]] = [[] for _ in range(len(sent))]
    # Transfers fill gaps, so that they do not begin in the order in which they are booked.
    for index in np.lexsort((sent.finish_seconds, sent.start_seconds)).tolist():
        channels = list(zip(kinds, (int(sent.source[index]), int(sent.destination[index]))))
        earlier[index] = [last[channel] for channel in channels if channel in last]
        last.update(dict.fromkeys(channels, index))
    return earlier


def _list_remarks(bound: Bound) -> Iterator[str]:
    """Yield sentences about what keeps the step above its bound, with their times."""
    step, gap = bound.step_seconds, bound.planned_seconds - bound.lower_bound_seconds
    name = "The step" if bound.planned_seconds == step else "The step that the costs of nodes plan"
    if bound.above_bound is None or gap <= MIN_REMARKED_SHARE * bound.planned_seconds:
        yield f"{name} is as short as its lower bound, or nearly so."
    else:
        yield f"{name} is {format_time(gap)} ({bound.above_bound:.1%}) longer than its lower bound."
    yield from _remark_on_chain(bound.chain, step)
    spread = bound.busiest_seconds - bound.even_seconds
    if spread > MIN_REMARKED_SHARE * step:
        busiest, even = format_time(bound.busiest_seconds), format_time(bound.even_seconds)
        yield f"{bound.busiest_device} computes {busiest}; evenly spread, each device would compute {even}."


def _remark_on_chain(chain: Sequence[ChainPart], step: float) -> Iterator[str]:
    """Yield sentences about the parts of the chain that do not compute."""
    texts = {
        "transfer": "Transfers that nothing hides take {}.",
        "weights": "Devices wait for weights that stream for {}.",
        "wait": "Nothing happens for {}.",
        "request": "The request itself, before its first and after its last segment, takes {}.",
    }
    for kind, text in texts.items():
        seconds = sum(part.seconds for part in chain if part.kind == kind)
        if seconds > MIN_REMARKED_SHARE * step:
            yield text.format(format_time(seconds))
    devices = [part.where for part in chain if part.kind == "compute"]
    if len(devices) > 1:
        yield f"The chain that determines the step computes on {', '.join(devices)}, one after the other."
