"""A placer that learns: GO, with GDP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.problem import placement_problem
from onnxplace.state import Pass, State
from onnxplace_learned.policies.placing import commit_result
from onnxplace_learned.policies.sequence_placing import SequenceOptions, load_policy, place_with_sequence
from onnxplace_learned.policies.sequence_policy import SequenceShape


@dataclass(frozen=True)
class Go(Pass):
    """Let one learned policy choose the devices of all nodes at once, and then their priorities.

    Zhou et al., "Transferable Graph Optimizers for ML Compilers", NeurIPS 2020 (GO). GraphSAGE embeds the graph. A
    transformer over segments of nodes, modulated by the mean embedding (superposition), scores the devices of all
    nodes in parallel; a second pass refines them, given those of the first. Another head gives each node a priority on
    its device. `heads=placement` has devices only: that is GDP (Zhou et al., "GDP: Generalized Device Placement for
    Dataflow Graphs", 2019). Trained by PPO, with the reward minus the square root of the step. Without `episodes`, the
    policy is applied as it was trained (`onnxplace learn go`); with them, it is first trained further on this graph.
    The best placement that was sampled and fits is kept; where none fits, one of m-TOPO, m-ETF, m-SCT or a single
    device.

    GO's third head chooses which operators to fuse. It has no counterpart here, since ONNX Runtime fuses operators
    inside each segment. Unlike in the papers: steps are simulated, relative to one device; a placement that does not
    fit counts as 10 times one device; messages pass in both directions; ratios are clipped for each choice, not for
    their product; the gradient of priorities stays in their head; there are two passes, two layers of attention of
    width 32 and 8 placements in each update, so that an update takes about 0.2 s; of nodes with equal priority, the one
    with the longest path to the end runs first, or with `order=topological` the first in topological order. Needs
    torch.
    """

    name: ClassVar[str] = "go"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    policy: str = ""
    """File of the policy; without one, it is trained from nothing on this graph."""
    episodes: Annotated[int, Ge(0)] = 0
    """How many placements to sample on this graph, and to learn from, before it is placed."""
    heads: Literal["trained", "placement", "placement+schedule"] = "trained"
    """What it decides; by default as in training, and both without a policy."""
    order: Literal["criticality", "topological"] = "criticality"
    """Tie-break between equal priorities, when no policy file is given."""
    samples: Annotated[int, Ge(0)] = 16
    """How many placements to sample without learning, next to the likeliest one."""
    max_nodes: Annotated[int, Ge(1)] = 1_000
    """Graphs with more nodes are coarsened before they are placed."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the samples."""

    def run(self, state: State) -> State:
        variant = "placement+schedule" if self.heads == "trained" else self.heads
        shape = SequenceShape("go", variant, len(state.target.devices), width=32, order=self.order)
        policy = load_policy(self.policy, shape, self.episodes, self.seed, is_any_variant=self.heads == "trained")
        problem = placement_problem(state)
        options = SequenceOptions(self.episodes, self.samples, self.max_nodes, self.seed)
        return commit_result(state, problem, place_with_sequence(problem, policy, options), self.name)
