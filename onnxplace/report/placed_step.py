"""One simulated step of a placed graph, as reports look at it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxplace.bundle import Manifest, SegmentRecord, build_segment_graph
from onnxplace.errors import format_count
from onnxplace.graph import Floats, Ints, OpGraph
from onnxplace.simulation import Simulation, simulate
from onnxplace.target import Target


@dataclass(frozen=True)
class PlacedStep:
    """A graph of segments or nodes with its placement, and the step that follows from it."""

    graph: OpGraph
    seconds: Floats
    """[device, node]; not a number where it is unknown."""
    target: Target
    device_names: tuple[str, ...]
    """Names of the devices as readers know them."""
    device: Ints
    order: Ints
    simulation: Simulation
    details: tuple[str, ...]
    """Facts about each node that a reader may want to know besides its name."""

    def name_link(self, source: int, destination: int) -> str:
        """Return the name of a link, such as `cpu:0 → cpu:1`."""
        return f"{self.device_names[source]} → {self.device_names[destination]}"

    def simulate_moved(self, nodes: Ints, device: int) -> float | None:
        """Return the seconds of the step with some nodes on another device; None if their times there are unknown."""
        if not np.isfinite(self.seconds[device, nodes]).all():
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
    own = np.array([_choose_seconds(item, planned) for item in segments], dtype=np.float64).reshape(len(segments))
    home = np.array([classes[index] for index in device], dtype=np.str_)
    rows = [np.where(home == name, own, np.nan) for name in classes]
    seconds = np.stack(rows) if rows else np.zeros((0, len(segments)))
    order = np.arange(len(segments), dtype=np.int32)
    return PlacedStep(
        graph=graph,
        seconds=seconds,
        target=target,
        device_names=tuple(item.id for item in target.devices),
        device=device,
        order=order,
        simulation=simulate(graph, np.nan_to_num(seconds), target, device, order),
        details=tuple(format_count(item.nodes, "node") for item in segments),
    )


def _choose_seconds(segment: SegmentRecord, planned: bool) -> float:
    return segment.planned_seconds if planned and segment.planned_seconds is not None else segment.seconds
