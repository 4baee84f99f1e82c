"""Bring groups together again after a placer has spread their nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Clusters, Groups, Placement, Profile, Schedule
from onnxplace.graph.op_graph import Csr, Floats, Ints, sum_by
from onnxplace.passes.placement.grouping.group_kernels import choose_devices
from onnxplace.passes.placement.grouping.node_groups import group_nodes
from onnxplace.passes.placement.stages.stage_dp import least_held_bytes
from onnxplace.problem import PlacementProblem, commit_placement, placement_problem
from onnxplace.simulation.simulator import device_weights
from onnxplace.state import Pass, State

# The share of a group's values that is counted as if it stayed in memory; the next one is tried when the simulated peak
# exceeds a limit.
STAYING_SHARES = (0.0, 0.0625, 0.125, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Adjust(Pass):
    """Move each group to one device, after a placer that ignored groups.

    This is the post-adjustment of Baechi (SoCC 2020). In `m-etf,adjust{by=compute}` the placer runs without groups, and
    this pass makes them, with the options of `coplace`. `by` ranks the devices for each group: by the seconds that the
    group's nodes compute there (`compute`), by their weights and workspace there (`memory`), or by how many they are
    (`majority`). The first device goes first among equals. A group goes to the first device of its ranking that has
    room for it next to the groups before it. Pinned groups go first, to their pin, the others by falling weights. Each
    device runs its nodes in the order of their former starts. Existing groups are kept together too, and their pins
    hold.

    A group of a (3 ms on device 0), b and c (1 ms each on device 1):

        before   device 0: a      device 1: b c x
        after    device 0: a b c  device 1: x        `compute`; with `majority`, all three would be on device 1

    Raises:
        InfeasibleError: a group fits on no device, or a device lacks memory in the end; the error names which.
    """

    name: ClassVar[str] = "adjust"
    requires: ClassVar[tuple[type, ...]] = (Profile, Placement, Schedule)
    provides: ClassVar[tuple[type, ...]] = (Groups, Placement, Schedule)

    by: Literal["compute", "memory", "majority"] = "compute"
    """How devices are ranked for a group."""
    join: Literal["worth", "always", "never"] = "never"
    """When a node joins its only reader, as in `coplace`."""
    given: bool = True
    """Keep the graph's own groups together."""
    backward: Literal["free", "follow"] = "free"
    """Whether backward nodes join the forward node they belong to, as in `coplace`."""
    parameters: Literal["together", "free"] = "together"
    """Whether the nodes of one parameter of a training step stay together, as in `coplace`."""
    colocate: tuple[str, ...] = ()
    """Regular expressions; the nodes whose whole name, or else module, one matches share a device."""
    device_map: str = ""
    """A JSON file of regular expression -> device; the first that matches a node's name or module decides."""

    def run(self, state: State) -> State:
        options = {name: value for name, value in vars(self).items() if name != "by"}
        groups, notes = group_nodes(state, **options, keep=True)
        before, start_seconds = state[Placement].device, state[Schedule].simulation.start_seconds
        regrouped = state.without(Clusters).with_facts(groups)  # clusters belong to the former groups
        problem = placement_problem(regrouped)
        ranking = np.argsort(-self._attraction(problem, before), axis=1, kind="stable").astype(np.int32)
        after = self._place_groups(regrouped, problem, ranking, start_seconds)
        return state.with_facts(groups, after[Placement], after[Schedule]).with_notes(*notes)

    def _attraction(self, problem: PlacementProblem, device: Ints) -> Floats:
        """Return how strongly each group is drawn to each device: [group, device]."""
        graph, groups, devices = problem.graph, len(problem.pinned), len(problem.target.devices)
        group_on_device = (problem.group.astype(np.int64) * devices + device).astype(np.int32)
        if self.by == "majority":
            attraction = np.bincount(group_on_device, minlength=groups * devices).astype(np.float64)
        elif self.by == "compute":
            attraction = sum_by(group_on_device, problem.seconds[device, np.arange(len(graph))], groups * devices)
        else:
            attraction = sum_by(group_on_device, graph.workspace_bytes, groups * devices)
            attraction += device_weights(graph, group_on_device, groups * devices)
        return np.where(problem.refused_groups.T, -1.0, attraction.reshape(groups, devices))

    def _place_groups(self, state: State, problem: PlacementProblem, ranking: Ints, start_seconds: Floats) -> State:
        """Place each group on the first device of its ranking with room."""
        graph, groups = problem.graph, len(problem.pinned)
        weights = Csr.grouped(problem.group[graph.weights.rows], graph.weights.items, groups)
        weights_bytes = sum_by(weights.rows, graph.weight_bytes[weights.items], groups)
        sequence, step = np.lexsort((-weights_bytes, problem.pinned < 0)), least_held_bytes(problem, problem.group)
        produced = np.flatnonzero((graph.producer >= 0) & (graph.alias < 0))
        values = sum_by(problem.group[graph.producer[produced]], graph.value_bytes[produced], groups)
        first_error: InfeasibleError | None = None
        for divided in problem.divide_pools():
            for share in STAYING_SHARES:
                home, unplaced = choose_devices(
                    sequence, ranking, problem.pinned, *weights.arrays, graph.weight_bytes,
                    (share * values).astype(np.int64), step, divided.limit_bytes,
                )  # fmt: skip
                if unplaced >= 0:
                    break
                try:
                    return commit_placement(state, problem, home[problem.group], start_seconds, self.name)
                except InfeasibleError as error:
                    first_error = first_error or error
        raise first_error or self._no_room_error(problem, unplaced, int(weights_bytes[unplaced]), int(step[unplaced]))

    def _no_room_error(
        self, problem: PlacementProblem, group: int, weights_bytes: int, step_bytes: int
    ) -> InfeasibleError:
        """Return the error for a group that no device has room for."""
        name = problem.graph.names[int(np.argmax(problem.group == group))]
        memories, pin = problem.target.memories, int(problem.pinned[group])
        candidates = memories if pin < 0 else memories[pin : pin + 1]
        ids = ", ".join(f"{memory.id} ({memory.memory_bytes} bytes)" for memory in candidates)
        return InfeasibleError(
            "P001",
            f"the group of {name!r} fits on none of {ids} next to the groups before it: it has {weights_bytes} bytes "
            f"of weights and needs {step_bytes} more in one step",
            where=self.name,
            hint="add devices, raise --max-memory, or place with groups from the start",
        )
