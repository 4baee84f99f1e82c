"""The data of a report about a placed cost graph."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from onnxplace.cost_graph import CostGraph
from onnxplace.errors import Diagnostic
from onnxplace.facts import Schedule
from onnxplace.graph import Ints
from onnxplace.report.attempts import list_attempts, list_notes
from onnxplace.report.critical_chain import explain_step
from onnxplace.report.crossings import count_bytes, list_crossings
from onnxplace.report.layer_tree import LayerNode, build_layer_tree
from onnxplace.report.memory_curves import draw_memory
from onnxplace.report.page_records import Crossing, DeviceSummary, Entry, PageData
from onnxplace.report.placed_step import PlacedStep
from onnxplace.report.step_timelines import draw_step
from onnxplace.report.text import format_bytes, format_milliseconds


@dataclass(frozen=True)
class PlacedGraph:
    """A cost graph with its placement."""

    graph: CostGraph
    placer: str
    device: Ints
    """Index of the device of each node."""
    schedule: Schedule
    is_feasible: bool
    seconds: float
    """Time to place."""
    diagnostics: tuple[Diagnostic, ...] = ()
    passes: tuple[str, ...] = ()
    """Names of the passes that ran."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options as the user gave them."""


def describe_placement(placed: PlacedGraph) -> PageData:
    """Return what a report says about a placed cost graph."""
    graph, schedule = placed.graph.profile.graph, placed.schedule
    target, profile = placed.graph.target, placed.graph.profile
    seconds = np.stack([profile.seconds[device.cost_class] for device in target.devices])
    own = seconds[placed.device, np.arange(len(graph))].tolist()
    step = PlacedStep(
        graph=graph,
        seconds=seconds,
        target=target,
        device_names=tuple(_name_device(name) for name in placed.graph.device_ids),
        device=placed.device,
        order=schedule.order,
        simulation=schedule.simulation,
        details=graph.ops,
    )
    simulation, crossings = schedule.simulation, list_crossings(step)
    alone = float(seconds.sum(axis=1).min())
    nodes = [LayerNode(*item) for item in zip(graph.names, graph.ops, placed.device.tolist(), own)]
    return PageData(
        title=placed.graph.name,
        source=placed.graph.name,
        kind="placement",
        summary=tuple(_summarise(placed, alone, crossings)),
        devices=_list_devices(placed, step),
        timelines=(draw_step(step, "predicted", "one step, node by node"),),
        memory=draw_memory(step, simulation.weights_bytes.tolist()),
        crossings=crossings,
        bound=explain_step(step, simulation.makespan_seconds, schedule.lower_bound_seconds, alone),
        attempts=list_attempts(placed.diagnostics),
        layers=build_layer_tree(nodes),
        division=(),
        notes=list_notes(placed.diagnostics),
        passes=tuple(Entry(name, "") for name in placed.passes),
        origin=(
            Entry("cost graph", placed.graph.name),
            Entry("placer", placed.placer),
            Entry("link model", target.link_model),
            *(Entry(name, text) for name, text in placed.options.items()),
        ),
        files={},
    )


def _name_device(identifier: Hashable) -> str:
    """Return the id of a device; a bare number would read as an amount."""
    return f"device {identifier}" if str(identifier).isdecimal() else str(identifier)


def _summarise(placed: PlacedGraph, alone: float, crossings: tuple[Crossing, ...]) -> Iterator[Entry]:
    simulation = placed.schedule.simulation
    yield Entry("Predicted step", format_milliseconds(simulation.makespan_seconds))
    yield Entry("Work of a single device", format_milliseconds(alone))
    yield Entry("Lower bound", format_milliseconds(placed.schedule.lower_bound_seconds))
    yield Entry("Devices at work", f"{len(set(placed.device.tolist()))} of {len(placed.graph.device_ids)}")
    yield Entry("Nodes", f"{len(placed.graph.ids)}")
    yield Entry("Transfers in a step", f"{len(simulation.transfers)}, {format_bytes(count_bytes(crossings))}")
    yield Entry("Time to place", format_milliseconds(placed.seconds))
    if not placed.is_feasible:
        yield Entry("Memory", "it does not fit")


def _list_devices(placed: PlacedGraph, step: PlacedStep) -> tuple[DeviceSummary, ...]:
    simulation, counts = step.simulation, np.bincount(step.device, minlength=len(step.device_names))
    return tuple(
        DeviceSummary(
            id=name,
            kind=device.kind,
            nodes=int(counts[index]),
            compute_seconds=float(simulation.compute_seconds[index]),
            idle_seconds=float(simulation.makespan_seconds - simulation.compute_seconds[index]),
            weights_bytes=int(simulation.weights_bytes[index]),
            peak_bytes=int(simulation.peak_bytes[index]),
            limit_bytes=device.memory_bytes,
            process_bytes=0,
        )
        for index, (name, device) in enumerate(zip(step.device_names, step.target.devices))
    )
