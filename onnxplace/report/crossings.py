"""The values that cross between devices, and why each of them pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onnxplace.graph import Ints
from onnxplace.report.page_records import Crossing
from onnxplace.report.placed_step import PlacedStep
from onnxplace.report.text import format_milliseconds

# Nodes to simulate in all, to find what the most expensive crossings gain: about a second.
MAX_SIMULATED_NODES = 1_000_000
MAX_SIMULATED_CROSSINGS = 400
# Smaller differences of steps are no reason for a crossing.
MIN_SHARE = 1e-4


def list_crossings(step: PlacedStep) -> tuple[Crossing, ...]:
    """Return the values that cross between devices, those with the longest transfers first."""
    sent = step.simulation.transfers
    transfers: dict[int, list[int]] = {}
    for index, value in enumerate(sent.value.tolist()):
        transfers.setdefault(value, []).append(index)
    own_seconds = sent.finish_seconds - sent.start_seconds
    ranked = sorted(transfers, key=lambda value: (-float(own_seconds[transfers[value]].sum()), value))
    simulated = min(MAX_SIMULATED_CROSSINGS, MAX_SIMULATED_NODES // max(len(step.graph), 1))
    arrivals = {
        (value, device): seconds
        for value, device, seconds in zip(sent.value.tolist(), sent.destination.tolist(), sent.finish_seconds.tolist())
    }
    before = find_device_predecessors(step)
    return tuple(
        _describe_crossing(step, value, transfers[value], arrivals, before, is_simulated=rank < simulated)
        for rank, value in enumerate(ranked)
    )


def find_device_predecessors(step: PlacedStep) -> list[int]:
    """Return, for each node, the one that its device runs before it, or -1."""
    previous, last = [-1] * len(step.graph), dict[int, int]()
    device = step.device.tolist()
    for node in step.order.tolist():
        previous[node] = last.get(device[node], -1)
        last[device[node]] = node
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
    sent, graph = step.simulation.transfers, step.graph
    source = int(sent.source[transfers[0]])
    readers = graph.readers[value]
    remote = readers[step.device[readers] != source]
    waits, slacks = zip(*(_measure_wait(step, value, int(node), arrivals, before) for node in remote), strict=True)
    gain = _measure_gain(step, remote, source) if is_simulated else None
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


def _measure_gain(step: PlacedStep, readers: Ints, source: int) -> float | None:
    seconds = step.simulate_moved(readers, source)
    if seconds is None:
        return None
    difference = seconds - step.simulation.makespan_seconds
    return difference if abs(difference) > MIN_SHARE * step.simulation.makespan_seconds else 0.0


def _explain(source: str, wait: float, slack: float, gain: float | None) -> str:
    """Return in words why a value crosses."""
    arrival = (
        f"Its readers wait {format_milliseconds(wait)} for it."
        if wait > 0
        else f"It arrives {format_milliseconds(slack)} before it is needed."
        if slack > 0
        else "No reader waits for it alone."
    )
    if gain is None:
        return arrival
    if gain > 0:
        return f"{arrival} With its readers on {source}, the step would take {format_milliseconds(gain)} longer."
    if gain < 0:
        shorter = format_milliseconds(-gain)
        return f"{arrival} With its readers on {source}, this simulation is {shorter} shorter, memory left aside."
    return f"{arrival} With its readers on {source}, the step would take as long."


def count_bytes(crossings: Sequence[Crossing]) -> int:
    """Return the bytes that cross in a step."""
    return int(np.sum([item.bytes * item.times for item in crossings], dtype=np.int64))
