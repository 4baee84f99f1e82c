"""Consecutive layers of a training step on one device each, with micro-batches in turns."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Ge

from onnxplace.errors import Diagnostic
from onnxplace.facts import Clusters, Groups, MicroBatches, Placement, Profile, Schedule
from onnxplace.graph.op_graph import Floats, Ints
from onnxplace.problem import (
    PlacementProblem,
    commit_if_fitting,
    commit_placement,
    out_of_memory_error,
    placement_problem,
)
from onnxplace.state import Pass, State
from onnxplace_training.part_order import Cells, order_parts
from onnxplace_training.step_stages import (
    StepLayers,
    find_backward_nodes,
    find_layers,
    list_stage_cuts,
)

# Cuts that are simulated.
_MAX_CUTS = 12


@dataclass(frozen=True)
class Pipelined(Pass):
    """Placer for training steps: consecutive layers on one device each, with their backward nodes and updates.

    With micro-batches (the pass `microbatch`), devices work on several parts of a batch at a time. Stages get about
    equal times, by the speeds of their devices; of several cuts near that, the one with the shortest simulated step is
    kept. With more stages than devices, stage s is on device s modulo their number (interleaved stages). Each replica
    of `microbatch{replicas=N}` has its share of the devices, and the same stages. One of the devices that share a
    processor has stages.

    Two layers in two micro-batches; F and B are forward and backward nodes of a layer and a part:

        before   F1.0 -> F2.0 -> B2.0 -> B1.0,   F1.1 -> F2.1 -> B2.1 -> B1.1
        after    device 0   F1.0  F1.1              B1.0  B1.1
                 device 1         F2.0  B2.0  F2.1  B2.1

    Linear in the graph but for sorting; deterministic.

    Raises:
        InfeasibleError: no cut fits the memory.
    """

    name: ClassVar[str] = "pipelined"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    stages: Annotated[int, Ge(0)] = 0
    """Number of stages; 0 for one per device of a replica."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """`1f1b`: backward as soon as possible, which keeps fewer activations. `gpipe`: all forward parts first."""

    def run(self, state: State) -> State:
        problem = placement_problem(state.without(Clusters))
        if not len(problem.graph):
            return commit_placement(state, problem, np.zeros(0, np.int32), np.zeros(0), self.name)
        batches = _read_parts(state)
        stages = self.stages or len(state.target.independent_devices) // batches.replicas
        is_backward = find_backward_nodes(state)
        seconds = problem.seconds.min(axis=0)
        layers = find_layers(problem.graph, seconds, problem.group, batches.source, is_backward)
        best: State | None = None
        shares = _shares(problem, stages, batches.replicas)
        for stage in islice(list_stage_cuts(problem.graph, layers, shares), _MAX_CUTS):
            candidate = self._place(state.without(Clusters), problem, layers, stage, batches)
            if candidate is not None and (best is None or _makespan(candidate) < _makespan(best)):
                best = candidate
        if best is None:
            raise out_of_memory_error(problem, self.name)
        # Stages may cut clusters, which are only there for placers that want a coarser graph; groups stay whole.
        kept = best.with_facts(*(state[kind] for kind in (Groups, Clusters) if kind in state))
        return kept.with_notes(self._describe(kept, stages, batches))

    def _place(
        self, state: State, problem: PlacementProblem, layers: StepLayers, stage: Ints, batches: MicroBatches
    ) -> State | None:
        """Return the state with these stages, None if they do not fit."""
        usable = np.array(state.target.independent_devices, dtype=np.int32)
        devices = len(usable) // batches.replicas  # of one replica
        stages = int(stage.max()) + 1
        device = usable[batches.replica * devices + stage % devices]
        pinned = problem.pinned[problem.group]
        device = problem.avoid_refused(np.where(pinned >= 0, pinned, device).astype(np.int32))
        latency, per_byte = state.target.link_arrays()
        cells = Cells(stage, batches.part, layers.is_backward, device, stages, batches.count)
        start = order_parts(problem.graph, cells, problem.seconds, latency, per_byte, self.schedule)
        return commit_if_fitting(state, problem, device, start, self.name)

    def _describe(self, state: State, stages: int, batches: MicroBatches) -> Diagnostic:
        device, profile = state[Placement].device, state[Profile]
        loads = [
            float(profile.seconds[item.cost_class][device == index].sum())
            for index, item in enumerate(state.target.devices)
        ]
        listed = ", ".join(f"{item.id} {load * 1e3:.3g} ms" for item, load in zip(state.target.devices, loads))
        replicas = f"{batches.replicas} replicas of " if batches.replicas > 1 else ""
        message = f"{replicas}{stages} stages, {batches.count} micro-batches, {self.schedule}: {listed}"
        return Diagnostic("P021", message, where=self.name)


def _read_parts(state: State) -> MicroBatches:
    """Return the parts and replicas of nodes; without micro-batches, one of each."""
    if MicroBatches in state:
        return state[MicroBatches]
    nodes = np.arange(len(state[Profile].graph), dtype=np.int32)
    none = np.zeros_like(nodes)
    return MicroBatches(count=1, part=none, source=nodes, replica=none)


def _shares(problem: PlacementProblem, stages: int, replicas: int) -> list[float]:
    """Return the share of the time of each stage, by the speed of its devices in all replicas."""
    totals: Floats = np.where(problem.refused, problem.seconds.min(axis=0), problem.seconds).sum(axis=1)
    totals = totals[list(problem.target.independent_devices)]
    speeds = (1.0 / np.maximum(totals, 1e-30)).reshape(replicas, -1).sum(axis=0)
    return [float(speeds[stage % len(speeds)]) for stage in range(stages)]


def _makespan(state: State) -> float:
    return state[Schedule].simulation.makespan_seconds
