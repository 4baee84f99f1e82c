"""Bring groups together again that a placer has torn apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Clusters, Groups, Placement, Profile, Schedule
from onnxplace.graph import Csr, Floats, Ints, Longs, sum_by
from onnxplace.passes.placement.grouping import choose_devices, group_nodes
from onnxplace.problem import PlacementProblem, commit_placement, placement_problem
from onnxplace.state import Pass, State

# What part of a group's values to count as if they stayed, raised when the simulated peak exceeds a limit.
STAYING = (0.0, 0.0625, 0.125, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Adjust(Pass):
    """Move each group as a whole to one device, after a placer that ignored groups (Baechi's post-adjustment).

    `m-etf,adjust{by=compute}`: the placer runs without groups; this pass makes them, with the options of `coplace`,
    and `by` ranks the devices for each group: by the seconds that the group's nodes compute there (`compute`), by
    their weights and workspace there (`memory`), or by how many they are (`majority`), the first device first among
    equals. A group goes to the first device of its ranking that has room for it beside those before it, pinned
    groups first, then by falling weights; pinned groups go to their pin. Each device runs its nodes in the order in
    which they had started. Groups that are there already are kept together too, and their pins hold.

    Raises InfeasibleError naming the group if one fits on no device, or the device that lacks memory in the end.
    """

    name: ClassVar[str] = "adjust"
    requires: ClassVar[tuple[type, ...]] = (Profile, Placement, Schedule)
    provides: ClassVar[tuple[type, ...]] = (Groups, Placement, Schedule)

    by: Literal["compute", "memory", "majority"] = "compute"
    """What draws a group to a device."""
    join: Literal["worth", "always", "never"] = "never"
    """When a node joins its only reader, as in `coplace`."""
    given: bool = True
    """Keep the graph's own groups together."""
    backward: Literal["free", "follow"] = "free"
    """Whether backward nodes join the forward node they belong to, as in `coplace`."""
    colocate: tuple[str, ...] = ()
    """Regular expressions; the nodes whose whole name one matches share a device."""
    device_map: str = ""
    """A JSON file of regular expression -> device; the first that matches a node's whole name decides."""

    def run(self, state: State) -> State:
        groups, notes = group_nodes(
            state,
            join=self.join,
            given=self.given,
            backward=self.backward,
            colocate=self.colocate,
            device_map=self.device_map,
            keep=True,
        )
        before, start_seconds = state[Placement].device, state[Schedule].simulation.start_seconds
        regrouped = state.without(Clusters).having(groups)  # clusters lie in the groups that were
        asked = placement_problem(regrouped)
        ranking = np.argsort(-self._drawn(asked, before), axis=1, kind="stable").astype(np.int32)
        moved = self._moved(regrouped, asked, ranking, start_seconds)
        return state.having(groups, moved[Placement], moved[Schedule]).saying(*notes)

    def _drawn(self, asked: PlacementProblem, device: Ints) -> Floats:
        """Return how much draws each group to each device: [group, device]."""
        graph, groups, devices = asked.graph, len(asked.pinned), len(asked.target.devices)
        place = (asked.group.astype(np.int64) * devices + device).astype(np.int32)
        if self.by == "majority":
            drawn = np.bincount(place, minlength=groups * devices).astype(np.float64)
        elif self.by == "compute":
            drawn = sum_by(place, asked.seconds[device, np.arange(len(graph))], groups * devices)
        else:
            held = Csr.grouped(place[graph.weights.rows], graph.weights.items, groups * devices)
            drawn = sum_by(place, graph.workspace_bytes, groups * devices)
            drawn += sum_by(held.rows, graph.weight_bytes[held.items], groups * devices)
        return drawn.reshape(groups, devices)

    def _moved(self, state: State, asked: PlacementProblem, ranking: Ints, start_seconds: Floats) -> State:
        """Return the state with each group on the first device of its ranking that has room for it."""
        graph, groups = asked.graph, len(asked.pinned)
        weights = Csr.grouped(asked.group[graph.weights.rows], graph.weights.items, groups)
        held = sum_by(weights.rows, graph.weight_bytes[weights.items], groups)
        sequence, step = np.lexsort((-held, asked.pinned < 0)), _largest_step(asked)
        made = np.flatnonzero((graph.producer >= 0) & (graph.alias < 0))
        values = sum_by(asked.group[graph.producer[made]], graph.value_bytes[made], groups)
        refused: InfeasibleError | None = None
        for share in STAYING:
            home, homeless = choose_devices(
                sequence, ranking, asked.pinned, weights.starts, weights.items, graph.weight_bytes,
                (share * values).astype(np.int64), step, asked.limit_bytes,
            )  # fmt: skip
            if homeless >= 0:
                break
            try:
                return commit_placement(state, asked, home[asked.group], start_seconds, self.name)
            except InfeasibleError as problem:
                refused = refused or problem
        raise refused or self._homeless(asked, homeless, int(held[homeless]), int(step[homeless]))

    def _homeless(self, asked: PlacementProblem, group: int, weights_bytes: int, step_bytes: int) -> InfeasibleError:
        """Return the error for a group that no device has room for, beside those that went before it."""
        name = asked.graph.names[int(np.argmax(asked.group == group))]
        devices, pin = asked.target.devices, int(asked.pinned[group])
        asked_for = devices if pin < 0 else [devices[pin]]
        room = ", ".join(f"{device.id} ({device.memory_bytes} bytes)" for device in asked_for)
        return InfeasibleError(
            "P004",
            f"the group of {name!r} fits on none of {room} beside the groups before it: it has {weights_bytes} bytes "
            f"of weights and needs {step_bytes} more in one step",
            where=self.name,
            hint="add devices, raise --max-memory, or place with groups from the start",
        )


def _largest_step(asked: PlacementProblem) -> Longs:
    """Return, per group, the most bytes that one of its nodes surely needs beside weights: outputs and workspace."""
    graph = asked.graph
    made = np.flatnonzero((graph.producer >= 0) & (graph.alias < 0))
    need = graph.workspace_bytes + sum_by(graph.producer[made], graph.value_bytes[made], len(graph)).astype(np.int64)
    largest = np.zeros(len(asked.pinned), dtype=np.int64)
    np.maximum.at(largest, asked.group, need)
    return largest
