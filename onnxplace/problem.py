"""What a placer has to decide about: the graph, its costs on each device, limits, groups and pins, in one record."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Clusters, Groups, Placement, Profile, Schedule
from onnxplace.graph import Bools, Floats, Ints, Longs, OpGraph, sum_by
from onnxplace.simulation import Simulation, device_weights, lower_bound_seconds, simulate
from onnxplace.state import State
from onnxplace.target import Target


@dataclass(frozen=True)
class PlacementProblem:
    """A placement problem: which device for each node of `graph`, in which order."""

    graph: OpGraph
    """Contracted, if clusters were made."""
    seconds: Floats
    """[device, node]."""
    target: Target
    limit_bytes: Longs
    """Per device."""
    group: Ints
    """Per node; nodes of one group share a device."""
    pinned: Ints
    """Device per group, -1 where free."""
    members: Ints
    """Per node of the profile's graph, the node of this graph that it is in."""

    def simulate(self, device: Ints, order: Ints) -> Simulation:
        """Return the simulated step of a placement of this graph."""
        return simulate(self.graph, self.seconds, self.target, device, order)

    def contracted(self, cluster: Ints) -> PlacementProblem:
        """Return this problem with each cluster as one node; a dense id per node, each cluster within one group."""
        count = int(cluster.max(initial=-1)) + 1
        group = np.zeros(count, dtype=np.int32)
        group[cluster] = self.group
        seconds = np.stack([sum_by(cluster, row, count) for row in self.seconds])
        members = cluster[self.members].astype(np.int32)
        return replace(self, graph=self.graph.contract(cluster), seconds=seconds, group=group, members=members)

    def alone_bytes(self) -> Longs:
        """Return, per device, what it would hold at most with the whole graph on it."""
        devices = range(len(self.target.devices))
        alone = [np.full(len(self.graph), index, dtype=np.int32) for index in devices]
        return np.array([self.simulate(alone[index], self.graph.order).peak_bytes[index] for index in devices])

    def excess_bytes(self, simulation: Simulation) -> Longs:
        """Return, per device, by how many bytes it exceeds its limit."""
        excess: Longs = np.maximum(simulation.peak_bytes - self.limit_bytes, 0)
        return excess


def single_device_seconds(profile: Profile, target: Target) -> Floats:
    """Return, per device, the seconds of a step that it computes alone, in one segment."""
    calls = np.array([device.segment_seconds for device in target.devices])
    alone: Floats = device_seconds(profile, target).sum(axis=1) + calls
    return alone


def fits_single_device(state: State) -> Bools:
    """Return, per device, whether it could hold the whole model."""
    asked = placement_problem(state)
    fits: Bools = asked.alone_bytes() <= asked.limit_bytes
    return fits


def device_seconds(profile: Profile, target: Target) -> Floats:
    """Return the cost of each node on each device: seconds [device, node]."""
    return np.stack([profile.seconds[device.cost_class] for device in target.devices])


def placement_problem(state: State) -> PlacementProblem:
    """Gather what a placer needs from the facts at hand; without Groups and Clusters each node is on its own."""
    profile = state[Profile]
    graph, seconds = profile.graph, device_seconds(profile, state.target)
    limits = np.array([device.memory_bytes for device in state.target.devices], dtype=np.int64)
    single = np.arange(len(graph), dtype=np.int32)
    group, pinned = single, np.full(len(graph), -1, dtype=np.int32)
    if Groups in state:
        group, pinned = state[Groups].group, state[Groups].pinned
    if Clusters not in state:
        return PlacementProblem(graph, seconds, state.target, limits, group, pinned, single)
    return PlacementProblem(graph, seconds, state.target, limits, group, pinned, single).contracted(
        state[Clusters].cluster
    )


def simulate_plan(
    state: State, asked: PlacementProblem, device: Ints, start_seconds: Floats
) -> tuple[Ints, Ints, Simulation]:
    """Return the device of each node of the profile's graph, their order, and the simulated step, of a decision.

    `device` and `start_seconds` (planned start, for the order) are per node of the problem's graph.
    """
    graph, fine_device = state[Profile].graph, device[asked.members].astype(np.int32)
    order = schedule_order(graph, asked, start_seconds)
    seconds = device_seconds(state[Profile], state.target)
    return fine_device, order, simulate(graph, seconds, state.target, fine_device, order)


def commit_placement(
    state: State, asked: PlacementProblem, device: Ints, start_seconds: Floats, placer: str, bound_seconds: float = 0.0
) -> State:
    """Return `state` with the Placement and Schedule that a placer decided on, as `simulate_plan` has them.

    `bound_seconds` is what the placer proved for the profile's graph: the better bound is kept. Raises
    InfeasibleError, naming what is missing on which device, if the simulated peak exceeds a limit.
    """
    fine_device, order, simulation = simulate_plan(state, asked, device, start_seconds)
    require_memory(state.target, simulation.peak_bytes, placer)
    profile = state[Profile]
    groups = (state[Groups].group, state[Groups].pinned) if Groups in state else (None, None)
    bound = lower_bound_seconds(profile.graph, device_seconds(profile, state.target), state.target, *groups)
    # Sums in another order may round the bound above the very makespan it bounds.
    bound = min(max(bound, bound_seconds), simulation.makespan_seconds)
    return state.having(Placement(fine_device, placer), Schedule(order, simulation, bound))


def schedule_order(graph: OpGraph, asked: PlacementProblem, start_seconds: Floats) -> Ints:
    """Return a topological order of all nodes that follows the planned starts of the (contracted) nodes.

    Members of one contracted node stay together, in topological order.
    """
    coarse_rank = np.empty(len(asked.graph), dtype=np.int64)
    coarse_rank[sort_by_start(asked.graph, start_seconds)] = np.arange(len(asked.graph))
    return np.lexsort((graph.positions, coarse_rank[asked.members])).astype(np.int32)


def sort_by_start(graph: OpGraph, start_seconds: Floats) -> Ints:
    """Return the nodes by planned start, those of one instant in topological order."""
    return np.lexsort((graph.positions, start_seconds)).astype(np.int32)


def require_memory(target: Target, peak_bytes: Longs, placer: str) -> None:
    """Raise InfeasibleError if some device would need more than its limit, saying how much is missing where."""
    short = describe_shortage(target, peak_bytes)
    if short:
        raise InfeasibleError(
            "P001", short, where=placer, hint="add devices, raise --max-memory, or try another --placer"
        )


def out_of_memory_error(asked: PlacementProblem, placer: str, peak_bytes: Longs | None = None) -> InfeasibleError:
    """Return the error for a model that cannot be spread over the devices: how much is missing where.

    `peak_bytes` is what the placer's best attempt needs on each device; without one, each device is held against the
    whole model alone on it.
    """
    if peak_bytes is None:
        peak_bytes = asked.alone_bytes()
    short = describe_shortage(asked.target, peak_bytes)
    room = "there is room on " + ", ".join(f"{d.id} ({d.memory_bytes} bytes)" for d in asked.target.devices)
    needs, have = asked.graph.total_weight_bytes, int(asked.limit_bytes.sum())
    together = (
        f"all together lack {needs - have} bytes for the weights alone"
        if needs > have
        else "this placer found no split that fits"
    )
    return InfeasibleError(
        "P002",
        f"for the whole model {short or room}; {together}; {_largest_group(asked)}",
        where=placer,
        hint="add devices, raise --max-memory, or try another --placer",
    )


def describe_shortage(target: Target, peak_bytes: Longs) -> str:
    """Say which device lacks how many bytes; empty if none does."""
    return "; ".join(
        f"{device.id} lacks {int(peak) - device.memory_bytes} bytes (needs {int(peak)}, may use {device.memory_bytes})"
        for device, peak in zip(target.devices, peak_bytes)
        if peak > device.memory_bytes
    )


def _largest_group(asked: PlacementProblem) -> str:
    """Describe the group of nodes with the most weights, which is what is hardest to place."""
    if not len(asked.group):
        return "there are no nodes"
    held = device_weights(asked.graph, asked.group, int(asked.group.max()) + 1)
    worst = int(held.argmax())
    name = asked.graph.names[int(np.flatnonzero(asked.group == worst)[0])]
    roomiest = max(asked.target.devices, key=lambda device: device.memory_bytes)
    lacking = int(held[worst]) - roomiest.memory_bytes
    return f"the largest group that must stay together, at {name!r}, has {int(held[worst])} bytes of weights" + (
        f", for which {roomiest.id} lacks {lacking} bytes" if lacking > 0 else ""
    )
