"""Groups of nodes, their devices and their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from onnxplace.facts.conditions import require, require_memory
from onnxplace.facts.costs import Profile
from onnxplace.graph import Ints, is_acyclic
from onnxplace.simulation import Simulation

if TYPE_CHECKING:
    from onnxplace.state import State


@dataclass(frozen=True)
class Groups:
    """Nodes that must share a device, and groups that are pinned to one."""

    derived_from: ClassVar[tuple[type, ...]] = (Profile,)

    group: Ints
    """Dense id per node."""
    pinned: Ints
    """Device index per group, -1 where the placer is free."""
    reasons: tuple[str, ...]
    """Per group, the reason why its nodes belong together; an empty text for a single node."""

    def check(self, state: State) -> None:
        """Raise ValueError unless groups cover the nodes and pins name devices."""
        nodes, groups = len(state[Profile].graph), int(self.group.max(initial=-1)) + 1
        require(len(self.group) == nodes, f"expected {nodes} groups, one per node, got {len(self.group)}")
        require(bool((np.bincount(self.group, minlength=len(self.pinned)) > 0).all()), "group ids are not dense")
        require(len(self.pinned) == len(self.reasons) == groups, "expected a pin and a reason per group")
        require(
            bool((self.pinned < len(state.target.devices)).all()), "a group is pinned to a device that does not exist"
        )


@dataclass(frozen=True)
class Clusters:
    """Nodes contracted into one for the placer; each cluster lies in one group."""

    derived_from: ClassVar[tuple[type, ...]] = (Groups,)

    cluster: Ints
    """Dense id per node."""

    def check(self, state: State) -> None:
        """Raise ValueError unless clusters respect groups and their graph is acyclic."""
        group = state[Groups].group
        require(len(self.cluster) == len(group), f"expected a cluster per node, got {len(self.cluster)}")
        cluster_group = np.zeros(int(self.cluster.max(initial=-1)) + 1, dtype=np.int64)
        cluster_group[self.cluster] = group
        require(bool((cluster_group[self.cluster] == group).all()), "a cluster spans two groups")
        graph = state[Profile].graph
        edges = graph.producer, graph.inputs.starts, graph.inputs.items
        require(is_acyclic(self.cluster, len(cluster_group), *edges), "clusters form a cycle")


@dataclass(frozen=True)
class Placement:
    """The device of each node."""

    derived_from: ClassVar[tuple[type, ...]] = (Profile, Groups, Clusters)

    device: Ints
    """Index into the target's devices, per node of the profile's graph."""
    placer: str
    """Name of the pass that made the placement."""

    def check(self, state: State) -> None:
        """Raise ValueError unless every node has a device, groups stay together and pins hold."""
        graph = state[Profile].graph
        require(len(self.device) == len(graph), f"expected {len(graph)} devices, one per node, got {len(self.device)}")
        require(bool(((self.device >= 0) & (self.device < len(state.target.devices))).all()), "a node is on no device")
        if Groups in state:
            groups = state[Groups]
            group_device = np.zeros(len(groups.pinned), dtype=np.int64)
            group_device[groups.group] = self.device
            split = np.flatnonzero(group_device[groups.group] != self.device)
            require(len(split) == 0, f"the group of {graph.names[split[0]] if len(split) else ''!r} is split")
            misplaced = (groups.pinned >= 0) & (groups.pinned != group_device)
            require(not bool(misplaced.any()), "a pinned group is on another device")


@dataclass(frozen=True)
class Schedule:
    """The order of all nodes, and the simulated step that follows from it."""

    derived_from: ClassVar[tuple[type, ...]] = (Placement,)

    order: Ints
    """Every node once, topological; each device runs its nodes in this order."""
    simulation: Simulation
    """The step node by node, without the overhead of segments."""
    lower_bound_seconds: float
    """No placement has a shorter makespan."""

    def check(self, state: State) -> None:
        """Raise ValueError unless the order is topological and every device keeps within its memory."""
        graph = state[Profile].graph
        rank = np.full(len(graph), -1, dtype=np.int64)
        rank[self.order] = np.arange(len(self.order))
        require(len(self.order) == len(graph) and bool((rank >= 0).all()), "expected every node once")
        inputs = graph.predecessors
        early = np.flatnonzero(rank[inputs.items] > rank[inputs.rows])
        node = graph.names[inputs.rows[early[0]]] if len(early) else ""
        require(len(early) == 0, f"node {node!r} is before its input")
        require_memory(state, self.simulation)
