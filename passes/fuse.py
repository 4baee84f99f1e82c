"""Contract groups into single nodes for the placer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from onnxplace.facts import Clusters, Groups, Profile, Recomputation
from onnxplace.graph.op_graph import Ints, OpGraph
from onnxplace.passes.placement.grouping.contraction_kernels import contract, merge_runs
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class Fuse(Pass):
    """Merge neighbours of one group while the graph stays acyclic.

    `edges`: an edge u -> v is contracted when v is the only successor of u or u the only predecessor of v, since then
    no second path leads from u to v (Baechi, SoCC 2020, section 4). Edges are examined again when merges nearby lower
    those degrees. `runs` goes on from there: neighbours of one group that follow each other in a topological order
    become one, whatever else they read and feed. That leaves fewer nodes, as an exact method needs, and less choice
    of when each runs. Inner values stay in the memory account as workspace. O(E log E).

    Nothing merges after `recompute`: its order of single nodes is what keeps the memory low.

    With a, b and c in one group and x in another:

        before   a -> b -> c,  x -> c         after   x -> abc
        before   a -> b -> c,  a -> x -> c    after   a -> bc,  a -> x -> bc    with a, it would be in a cycle with x
    """

    name: ClassVar[str] = "fuse"
    requires: ClassVar[tuple[type, ...]] = (Profile, Groups)
    provides: ClassVar[tuple[type, ...]] = (Clusters,)

    merge: Literal["edges", "runs"] = "edges"
    """Which neighbours merge: those that an only edge joins, or also those that can run without interruption."""

    def run(self, state: State) -> State:
        graph = state[Profile].graph
        if Recomputation in state and state[Recomputation].is_changed:
            return state.with_facts(Clusters(np.arange(len(graph), dtype=np.int32)))
        return state.with_facts(Clusters(contract_groups(graph, state[Groups].group, self.merge == "runs")))


def contract_groups(graph: OpGraph, group: Ints, runs: bool = False) -> Ints:
    """Return a dense cluster id per node, in order of first nodes.

    Clusters are connected parts of groups that form no cycle.
    """
    edges = graph.producer, graph.inputs.starts, graph.inputs.items
    cluster: Ints = contract(group, np.arange(len(graph), dtype=np.int32), *edges)
    return contract(group, merge_runs(group, cluster, *edges), *edges) if runs else cluster
