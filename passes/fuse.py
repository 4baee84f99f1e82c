"""Contract groups into single nodes for the placer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from onnxplace.facts import Clusters, Groups, Profile
from onnxplace.graph import Ints, OpGraph
from onnxplace.passes.placement.grouping import contract, merge_runs
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class Fuse(Pass):
    """Merge neighbours of one group as long as the graph stays acyclic.

    `edges`: an edge u -> v is contracted when v is the only successor of u or u the only predecessor of v, for then
    no second path leads from u to v (Baechi, SoCC 2020, section 4); edges are looked at again when merges nearby
    lower those degrees. `runs` goes on from there: neighbours of one group that come one after the other in a
    topological order become one, whatever else they read and feed. That leaves fewer nodes, as an exact method
    needs, and less choice of when each runs. Inner values stay in the memory account as workspace. O(E log E).
    """

    name: ClassVar[str] = "fuse"
    requires: ClassVar[tuple[type, ...]] = (Profile, Groups)
    provides: ClassVar[tuple[type, ...]] = (Clusters,)

    merge: Literal["edges", "runs"] = "edges"
    """What becomes one node: what an only edge leads to or from, or also what can run without interruption."""

    def run(self, state: State) -> State:
        return state.having(Clusters(contracted(state[Profile].graph, state[Groups].group, self.merge == "runs")))


def contracted(graph: OpGraph, group: Ints, runs: bool = False) -> Ints:
    """Return a dense cluster id per node, in order of first nodes: linked parts of groups that form no cycle."""
    edges = graph.producer, graph.inputs.starts, graph.inputs.items
    cluster: Ints = contract(group, np.arange(len(graph), dtype=np.int32), *edges)
    return contract(group, merge_runs(group, cluster, *edges), *edges) if runs else cluster
